"""The drafter's training: warm start from the target's own layers, decayed loss, and how far it has come on held-out answers."""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_mini_lab.drafters.checkpoint import DRAFT_TO_TARGET, DrafterConfig
from dflash_mini_lab.packed_linear import bfloat16_is_faster
from dflash_mini_lab.training.blocks import Blocks, block_embeddings, draft_labels, held_out_blocks, target_to_draft
from dflash_mini_lab.training.loop import Progress, finite, train_for
from dflash_mini_lab.training.losses import expected_accepted, teacher_loss
from dflash_mini_lab.training.model import TrainableDrafter
from dflash_mini_lab.training.recipe import Recipe
from dflash_mini_lab.training.shards import Sequence

STATE_FILE, LOG_FILE = "training-state.safetensors", "training-log.jsonl"

RealLoop = Callable[[DrafterConfig, dict[str, Tensor]], float]
"""Acceptance length τ of a checkpoint in the real decode loop on held-out prompts."""


def train_drafter(
    config: DrafterConfig,
    recipe: Recipe,
    target_tensors: dict[str, Tensor],
    draft_to_target: Tensor,
    training: list[Sequence],
    held_out: list[Sequence],
    seconds: float,
    folder: Path,
    real_loop: RealLoop | None = None,
    start: dict[str, Tensor] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train until `seconds` of training time are used up (time of earlier, interrupted runs in `folder` counts), on the device
    of `target_tensors` and of the sequences.

    `target_tensors`: `embedding`, `head` `[vocabulary, hidden]` and, for the warm start, `warm.` and the drafter's own tensor
    names. `start`: tensors of an earlier drafter of the same shape, to go on from on other data. Returns the checkpoint's tensors
    and the last look (held-out τ over anchors, per-slot accuracy, real-loop τ).
    """
    torch.manual_seed(recipe.seed)
    with target_tensors["embedding"].device:
        model = TrainableDrafter(config)
        if start:
            model.load_state_dict({name: tensor.float() for name, tensor in start.items() if name != DRAFT_TO_TARGET})
        else:
            warm_start(model, target_tensors)
    trainer = DrafterTrainer(model, recipe, target_tensors, draft_to_target, real_loop)
    look = train_for(seconds, trainer, training, held_out, folder, now)
    return trainer.checkpoint(), look


def warm_start(model: TrainableDrafter, target_tensors: dict[str, Tensor]) -> None:
    """Begin with what the target already knows: its last layers' weights, and a fusion that starts as its deepest tap.

    The drafter's block input is the same embedding and its output goes through the same head, so the last layers are close to
    what it must learn. In a 100-second probe this took the loss from 6.4 to 4.6. A layer whose shapes differ starts at random,
    and so does all of a drafter with a width of its own: starting that as the target's readout gained nothing (docs/lab-log.md).
    """
    state = model.state_dict()
    for name, tensor in state.items():
        source = target_tensors.get(f"warm.{name}")
        if source is not None and source.shape == tensor.shape:
            tensor.copy_(source)
    hidden = model.config.hidden_size
    if not model.config.target_hidden_size:
        state["fc.weight"].mul_(0.2)
        state["fc.weight"][:, -hidden:] += torch.eye(hidden)
    for name, tensor in state.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensor.fill_(2.0)


class DrafterTrainer:
    """Model, optimiser and frozen target parts (see loop.Trainer). bfloat16 autocast where it is faster: twice float32's rate
    here."""

    name, state_file, log_file, made_for = "training", STATE_FILE, LOG_FILE, ""

    def __init__(
        self,
        model: TrainableDrafter,
        recipe: Recipe,
        target: dict[str, Tensor],
        d2t: Tensor,
        real_loop: RealLoop | None = None,
    ) -> None:
        self.module, self.config, self.recipe, self.real_loop = model, model.config, recipe, real_loop
        self.device = target["embedding"].device
        self.draft_to_target = d2t.to(self.device)
        self.dtype = torch.bfloat16 if not recipe.float32 and bfloat16_is_faster(self.device) else torch.float32
        self.embedding = target["embedding"].to(self.dtype)
        self.head = target["head"][self.draft_to_target].to(self.dtype).contiguous()
        self.to_draft = target_to_draft(self.draft_to_target, self.config.vocabulary)
        parameters, rate = model.parameters(), recipe.learning_rate
        self.optimiser = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def logits(self, blocks: Blocks) -> Tensor:
        """`[N, A, S, draft vocabulary]`."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            features = blocks.features.to(self.dtype)
            hidden = self.module(features, block_embeddings(blocks, self.embedding, self.config), blocks.anchors)
            return F.linear(hidden.to(self.dtype), self.module.scoring_rows(self.head))

    def step(self, blocks: Blocks, rate_share: float) -> dict[str, Tensor]:
        logits = self.logits(blocks)
        labels, rows = draft_labels(blocks, self.to_draft), self.to_draft[blocks.likely_ids]
        loss, gradient = teacher_loss(logits, labels, rows, blocks.likely, self.recipe.teacher_share)
        logits.backward(gradient.to(logits.dtype))
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.learning_rate * rate_share
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return {"loss": loss}

    @torch.no_grad()
    def look(self, progress: Progress, losses: Mapping[str, float], held_out: list[Sequence]) -> dict[str, Any]:
        """Held-out τ as the mean over anchors whose whole block lies in the answer, per-slot accuracy, and the real loop's τ."""
        hits = []
        for blocks in held_out_blocks(held_out, self.config.block_size):
            proposed = self.draft_to_target[self.logits(blocks).argmax(-1)]
            whole = (blocks.labels >= 0).all(-1)
            hits.append((proposed == blocks.labels)[whole])
        hit = torch.cat(hits).cpu() if hits else torch.zeros(0, self.config.block_size - 1, dtype=torch.bool)
        return {
            "step": progress.step,
            "training_seconds": round(progress.seconds, 1),
            "answer_tokens_seen": progress.tokens_seen,
            "loss": finite(losses.get("loss", float("nan"))),
            "held_out_anchors": len(hit),
            "held_out_tau": round(1 + expected_accepted(hit).float().mean().item(), 4) if len(hit) else None,
            "slot_accuracy": [round(value, 4) for value in hit.float().mean(0).tolist()] if len(hit) else [],
            "real_loop_tau": None if self.real_loop is None else finite(self.real_loop(self.config, self.checkpoint())),
        }

    def checkpoint(self) -> dict[str, Tensor]:
        """float16 tensors: half the size on disk, and bfloat16 activations trained them."""
        tensors = {name: tensor.detach().to("cpu", torch.float16) for name, tensor in self.module.state_dict().items()}
        return tensors | {DRAFT_TO_TARGET: self.draft_to_target.to("cpu", torch.int32)}
