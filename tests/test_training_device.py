"""Training on another device than the CPU, without having one: on PyTorch's `meta` device an operation that mixes two devices
raises, as on CUDA. Nothing is computed there; that the numbers are right is tests/gpu's."""
from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.test_training import TINY, training_arguments
from tests.tiny_models import FAMILIES, POSITIONS, TAPS, tiny_config
from transformers import AutoModelForCausalLM

from dflash_mini_lab.drafters.checkpoint import DRAFT_TO_TARGET
from dflash_mini_lab.targets.lean_build import build_lean_decoder
from dflash_mini_lab.training import heads, train
from dflash_mini_lab.training.blocks import Blocks, cut_blocks
from dflash_mini_lab.training.features import ComputedFeatures
from dflash_mini_lab.training.heads import HeadRecipe, HeadTrainer
from dflash_mini_lab.training.model import TrainableDrafter
from dflash_mini_lab.training.shards import Corpus
from dflash_mini_lab.training.train import DrafterTrainer

ELSEWHERE = torch.device("meta")


@pytest.fixture(autouse=True)
def what_meta_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast, the fused optimiser, and every number."""
    adamw = torch.optim.AdamW
    monkeypatch.setattr(torch, "autocast", lambda *words, **options: nullcontext())
    monkeypatch.setattr(torch.optim, "AdamW", lambda *words, **options: adamw(*words, **options | {"fused": False}))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, largest: None)
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: 1.0)
    monkeypatch.setattr(heads, "_digest", lambda tensors, facts: "")
    for module in (train, heads):
        monkeypatch.setattr(module, "bfloat16_is_faster", lambda device: False)


def blocks_elsewhere(folder: Path, family: str) -> tuple[dict, Blocks]:
    """A step's blocks with features of a target on `meta`, and what trains on them."""
    given = training_arguments(folder)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).to(ELSEWHERE)
    features = ComputedFeatures(build_lean_decoder(model, POSITIONS), TAPS)
    flat = given["training"][0].corpus
    corpus = Corpus(*(tensor.to(ELSEWHERE) for tensor in (flat.tokens, flat.likely_ids, flat.likely)), features)
    sequences = [replace(sequence, corpus=corpus) for sequence in given["training"]]
    given["target_tensors"] = {name: tensor.to(ELSEWHERE) for name, tensor in given["target_tensors"].items()}
    return given, cut_blocks(sequences[:4], 6, TINY.block_size, torch.Generator().manual_seed(0))


def drafter_elsewhere(given: dict) -> TrainableDrafter:
    with ELSEWHERE:
        model = TrainableDrafter(given["config"])
        train.warm_start(model, given["target_tensors"])
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_the_drafter_mixes_no_devices(family: str, tmp_path: Path) -> None:
    given, blocks = blocks_elsewhere(tmp_path, family)
    assert {tensor.device for tensor in vars(blocks).values()} == {ELSEWHERE}
    model = drafter_elsewhere(given)
    trainer = DrafterTrainer(model, TINY, given["target_tensors"], torch.arange(61))
    assert trainer.step(blocks, 1.0)["loss"].device == ELSEWHERE


def test_a_step_of_the_heads_mixes_no_devices(tmp_path: Path) -> None:
    given, blocks = blocks_elsewhere(tmp_path, "llama")
    shapes = {name: tensor.shape for name, tensor in drafter_elsewhere(given).state_dict().items()}
    checkpoint = {name: torch.ones(shape) for name, shape in shapes.items()} | {DRAFT_TO_TARGET: torch.arange(40)}
    trainer = HeadTrainer(given["config"], TINY, HeadRecipe(rank=8, jump_inner=24), checkpoint, given["target_tensors"])
    assert {tensor.device for tensor in trainer.module.state_dict().values()} == {ELSEWHERE}
    assert {loss.device for loss in trainer.step(blocks, 1.0).values()} == {ELSEWHERE}
