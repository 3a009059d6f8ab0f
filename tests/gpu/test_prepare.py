"""A preparation on a real GPU: the same answers, features and steps as on a CPU, and a whole one of a tiny model in seconds."""
from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from tests.test_training import TINY, training_arguments
from tests.tiny_folder import save_tiny_model
from tests.tiny_models import FAMILIES, POSITIONS, TAPS, plain_greedy, random_ids, tiny_model

from dflash_mini_lab import artifacts, cli
from dflash_mini_lab.catalog import resolve
from dflash_mini_lab.settings import GPU
from dflash_mini_lab.targets.lean_build import build_lean_decoder
from dflash_mini_lab.training import train
from dflash_mini_lab.training.blocks import cut_blocks
from dflash_mini_lab.training.features import ComputedFeatures
from dflash_mini_lab.training.heads import TRAINED_FILES
from dflash_mini_lab.training.model import TrainableDrafter
from dflash_mini_lab.training.prepare import ANSWERS
from dflash_mini_lab.training.shards import have_features, read_sequences, write_shard
from dflash_mini_lab.training.teacher import continue_batch


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_answers_and_features_are_those_of_a_cpu(family: str, tmp_path: Path) -> None:
    decoder = build_lean_decoder(copy.deepcopy(tiny_model(family)).cuda(), POSITIONS)
    prompts = [random_ids(3, 0) + random_ids(4, seed) for seed in range(6)]
    write_shard(tmp_path / "0.safetensors", continue_batch(decoder, torch.tensor(prompts), 12, ()))
    sequences = read_sequences(tmp_path, "cuda", ComputedFeatures(decoder, TAPS))
    answers = {tuple(s.tokens[:7].tolist()): s.tokens[7:].tolist() for s in sequences}
    assert answers == {tuple(prompt): plain_greedy(family, prompt, 12) for prompt in prompts}
    found = cut_blocks(sequences, 4, 5, torch.Generator().manual_seed(0)).features.cpu()
    for sequence, features in zip(sequences, found, strict=True):
        hidden = tiny_model(family)(sequence.tokens[None, :-1].cpu(), output_hidden_states=True).hidden_states
        expected = torch.cat([hidden[tap + 1][0] for tap in TAPS], dim=-1)
        torch.testing.assert_close(features, expected, rtol=0, atol=1e-9)


def test_steps_are_those_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "bfloat16_is_faster", lambda device: False)
    losses = []
    for device in ("cpu", "cuda"):
        given = training_arguments(tmp_path / device, device)
        torch.manual_seed(0)
        model = TrainableDrafter(given["config"]).to(device)
        trainer = train.DrafterTrainer(model, TINY, given["target_tensors"], given["draft_to_target"])
        generator = torch.Generator().manual_seed(0)
        blocks = [cut_blocks(given["training"][:4], 6, 4, generator) for _ in range(5)]
        losses.append([trainer.step(block, 1.0)["loss"].item() for block in blocks])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_training_begun_on_the_gpu_goes_on_on_a_cpu(tmp_path: Path) -> None:
    _, first = train.train_drafter(**training_arguments(tmp_path, "cuda"))
    again = training_arguments(tmp_path) | {"seconds": first["training_seconds"] + 0.2}  # a look rounds its seconds
    _, second = train.train_drafter(**again)
    assert second["step"] > first["step"] > 0


def test_a_tiny_model_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_LAB_CACHE", str(tmp_path / "cache"))
    folder = save_tiny_model(tmp_path / "model")
    assert cli.main(["--target", str(folder), "--prepare", "--prepare-minutes", "0.1", "--no-bootstrap"], GPU) == 0
    name = resolve(str(folder)).name
    prepared = artifacts.prepared_folder(tmp_path / "cache", name)
    manifest = artifacts.read_manifest(prepared / artifacts.MANIFEST)
    assert artifacts.verify(prepared, manifest) == {}
    assert {file.name for file in manifest.files} >= {"model.safetensors", *TRAINED_FILES}
    provenance = json.loads((prepared / "provenance.json").read_text())
    assert provenance["device"] == torch.cuda.get_device_name()
    assert provenance["last_look"]["step"] > 0
    assert not have_features(tmp_path / "cache" / "prepare" / name / ANSWERS)
