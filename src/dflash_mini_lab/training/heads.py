"""Training of the extra heads beside a frozen drafter: all at once on the same drafted blocks, each by its own loss.

The losses share no parameter, so training together costs one drafter pass a step and changes nothing. Then the ridge fits of
methods 12 and 14. The time given is kept across interruptions (loop.py).
"""
from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_mini_lab import artifacts
from dflash_mini_lab.drafters.checkpoint import DrafterConfig, load_checkpoint, save_tensors
from dflash_mini_lab.drafters.heads import GAP_FILE, HEAD_FILES, HEADS_FILE, PARAREAL_FILE
from dflash_mini_lab.files import replace_file, replacing
from dflash_mini_lab.packed_linear import bfloat16_is_faster
from dflash_mini_lab.training.blocks import Blocks, held_out_blocks
from dflash_mini_lab.training.frozen import FrozenDrafter
from dflash_mini_lab.training.head_looks import look_at
from dflash_mini_lab.training.head_model import Heads
from dflash_mini_lab.training.loop import Progress, train_for
from dflash_mini_lab.training.recipe import Recipe
from dflash_mini_lab.training.ridge import Samples, collect_samples, fit_parareal, fit_simple_parareal
from dflash_mini_lab.training.shards import Sequence
from dflash_mini_lab.types import UserError

HEADS_LOG_FILE, HEADS_STATE_FILE = "heads-log.jsonl", "heads-state.safetensors"
TRAINED_FILES = (*HEAD_FILES, HEADS_LOG_FILE)
"""What training heads adds to an artifact folder; names for a manifest's `only`."""
TABLES = ("pair.previous", "pair.next", "fused.token", "markov.previous", "markov.next")


@dataclass(frozen=True)
class HeadRecipe:
    """What a drafter's Recipe does not say. Slots and offsets are 1-based; candidates are counted a slot."""

    rank: int = 16
    jump_offsets: tuple[int, ...] | None = None
    """None: every second slot from the second, or the only slot."""
    jump_inner: int | None = None
    """None: as wide as the hidden states."""
    candidates: int = 64
    """The losses choose among this many of the drafter's best."""
    kept: int = 8
    """Methods choose among this many: what held-out figures count, and what the confidence's prefixes are chosen from."""
    parareal_candidates: int = 8
    table_rate: float = 1e-2
    """Learning rate of the token tables, whose rows are seldom met; the other parameters have the drafter's rate."""
    ridge_sequences: int = 400
    ridge_anchors: int = 12


@dataclass(frozen=True)
class TrainedHeads:
    """`tensors`: heads.safetensors in float16; `parareal`, `gap`: the files of methods 12, 14; `look`: the last log line."""

    tensors: dict[str, Tensor]
    parareal: dict[str, Any]
    gap: dict[str, Any]
    look: dict[str, Any]


def train_heads(
    config: DrafterConfig,
    recipe: Recipe,
    checkpoint: dict[str, Tensor],
    target_tensors: dict[str, Tensor],
    training: list[Sequence],
    held_out: list[Sequence],
    seconds: float,
    folder: Path,
    settings: HeadRecipe | None = None,
    now: Callable[[], float] = time.monotonic,
) -> TrainedHeads:
    """Train until `seconds` of training time are used up (time of earlier, interrupted runs in `folder` counts), then fit.

    `checkpoint`: the drafter's tensors as on disk; the draft vocabulary is its `draft_to_target`, all ids without one.
    `target_tensors`: `embedding`, `head [vocabulary, hidden]`. Of `recipe`, this reads rates, seed, sequences and anchors.
    Raises UserError where no sequence has two answer tokens.
    """
    settings = settings or HeadRecipe()
    training, held_out = (
        [s for s in side if s.answer_tokens > 1 and s.prompt_length > 0] for side in (training, held_out)
    )
    if not training:
        raise UserError("No answer is long enough to train heads on: each needs two tokens.")
    torch.manual_seed(recipe.seed)
    trainer = HeadTrainer(config, recipe, settings, checkpoint, target_tensors)
    look = train_for(seconds, trainer, training, held_out, folder, now)
    parareal, gap = trainer.fit(training, held_out)
    return TrainedHeads(trainer.tensors(), parareal, gap, look)


def add_heads(
    folder: Path,
    training: list[Sequence],
    held_out: list[Sequence],
    target_tensors: dict[str, Tensor],
    recipe: Recipe,
    seconds: float,
    work: Path,
    settings: HeadRecipe | None = None,
) -> TrainedHeads:
    """Train heads for the drafter in `folder` on the answers it was trained on, and write TRAINED_FILES and the manifest there.

    `folder` has a manifest; what it names beside the heads stays as it is. `work` keeps the state of an interrupted training.
    Raises UserError where there is no drafter or no manifest in `folder`, or where the answers cannot be used.
    """
    path = folder / artifacts.MANIFEST
    manifest = artifacts.read_manifest(path)
    config, checkpoint = load_checkpoint(folder)
    work.mkdir(parents=True, exist_ok=True)
    trained = train_heads(config, recipe, checkpoint, target_tensors, training, held_out, seconds, work, settings)
    write_heads(folder, trained, work / HEADS_LOG_FILE)
    facts = json.loads(path.read_text(encoding="utf-8")).get("facts")
    artifacts.write_manifest(folder, manifest.target, facts, only=[*(file.name for file in manifest.files), *TRAINED_FILES])
    return trained


def write_heads(folder: Path, trained: TrainedHeads, log: Path | None = None) -> None:
    """TRAINED_FILES in `folder`, each whole or not at all; the log if there is one. A manifest must be written after them."""
    with replacing(folder / HEADS_FILE) as part:
        save_tensors(trained.tensors, part)
    for name, content in ((PARAREAL_FILE, trained.parareal), (GAP_FILE, trained.gap)):
        replace_file(folder / name, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode("utf-8"))
    if log and log.exists():
        replace_file(folder / HEADS_LOG_FILE, log.read_bytes())


def jump_offsets(slots: int) -> tuple[int, ...]:
    """Every second slot (2, 4, …, 1-based); a block of one slot has only that."""
    return tuple(range(2, slots + 1, 2)) or (1,)


class HeadTrainer:
    """Heads in float32 and their optimiser (see loop.Trainer). The frozen pass of a step is in bfloat16 where that is faster;
    what is measured or fitted comes from a float32 one, as at run time."""

    name, state_file, log_file = "heads", HEADS_STATE_FILE, HEADS_LOG_FILE

    def __init__(
        self,
        config: DrafterConfig,
        recipe: Recipe,
        settings: HeadRecipe,
        checkpoint: dict[str, Tensor],
        target: dict[str, Tensor],
    ) -> None:
        self.config, self.recipe, self.settings = config, recipe, settings
        self.exact = FrozenDrafter(config, checkpoint, target, torch.float32)
        faster = not recipe.float32 and bfloat16_is_faster(self.exact.device)
        self.fast = FrozenDrafter(config, checkpoint, target, torch.bfloat16) if faster else self.exact
        offsets = settings.jump_offsets or jump_offsets(config.block_size - 1)
        with self.exact.device:
            self.module = Heads(self.exact, settings.rank, offsets, settings.jump_inner or config.hidden_size)
        named = dict(self.module.named_parameters())
        self.rates = (settings.table_rate, recipe.learning_rate)
        groups = [[named.pop(name) for name in TABLES], list(named.values())]
        self.optimiser = torch.optim.AdamW(
            [{"params": group} for group in groups], betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.made_for = _digest(checkpoint, {"config": config.as_json(), "heads": asdict(settings)})

    def step(self, blocks: Blocks, rate_share: float) -> dict[str, Tensor]:
        drafted = self.fast.draft(blocks, self.settings.candidates)
        losses = self.module.losses(drafted, self.fast, self.settings.kept)
        torch.stack(list(losses.values())).sum().backward()
        for group, rate in zip(self.optimiser.param_groups, self.rates, strict=True):
            group["lr"] = rate * rate_share
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return {name: loss.detach() for name, loss in losses.items()}

    def look(self, progress: Progress, losses: Mapping[str, float], held_out: list[Sequence]) -> dict[str, Any]:
        parts = [self.exact.draft(blocks, self.settings.kept) for blocks in held_out_blocks(held_out, self.config.block_size)]
        return {
            "step": progress.step,
            "training_seconds": round(progress.seconds, 1),
            "losses": {name: round(loss, 4) for name, loss in losses.items()},
            **look_at(self.module, self.exact, parts),
        }

    def fit(self, training: list[Sequence], held_out: list[Sequence]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The files of methods 12 and 14."""
        settings, generator = self.settings, torch.Generator().manual_seed(self.recipe.seed)
        chosen = torch.randperm(len(training), generator=generator)[: settings.ridge_sequences].tolist()

        def samples(sequences: list[Sequence]) -> Samples:
            return collect_samples(self.exact, sequences, settings.ridge_anchors, settings.parareal_candidates, generator)

        taught = samples([training[index] for index in chosen])
        judged = samples(held_out[: settings.ridge_sequences]) if held_out else None
        return fit_parareal(taught, judged), fit_simple_parareal(taught, judged)

    def tensors(self) -> dict[str, Tensor]:
        """float16, and offsets as they are."""
        state = {name: tensor.detach().cpu() for name, tensor in self.module.state_dict().items()}
        return {name: t.to(torch.float16) if t.is_floating_point() else t.clone() for name, t in state.items()}


def _digest(tensors: dict[str, Tensor], facts: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
