"""The timed loop that trains a drafter, and afterwards its heads: a bar, a look now and then, and a state that resumes.

The schedule is a fraction of the training time, so that it fits whatever time is given and goes on after an interruption. A look
costs no training time. On a GPU the host only launches a step; it waits where a loss is shown and at a look.
"""
from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dflash_mini_lab.drafters.checkpoint import DrafterConfig
from dflash_mini_lab.training.blocks import Blocks, cut_blocks
from dflash_mini_lab.training.recipe import Recipe
from dflash_mini_lab.training.shards import Sequence
from dflash_mini_lab.training.state import load_state, read_facts, save_state

SHOW_EVERY_S = 0.5


@dataclass
class Progress:
    step: int = 0
    seconds: float = 0.0
    tokens_seen: int = 0


class Trainer(Protocol):
    """What is trained. `state_file` and `log_file`: names in the work folder; `made_for`: what a saved state belongs to."""

    name: str
    state_file: str
    log_file: str
    made_for: str
    config: DrafterConfig
    recipe: Recipe

    @property
    def module(self) -> nn.Module: ...

    @property
    def optimiser(self) -> torch.optim.Optimizer: ...

    def step(self, blocks: Blocks, rate_share: float) -> dict[str, Tensor]:
        """One step of the optimiser at this share of the learning rate; its losses, which may still be on their way."""
        ...

    def look(self, progress: Progress, losses: Mapping[str, float], held_out: list[Sequence]) -> dict[str, Any]:
        """A line of the log."""
        ...


def train_for(
    seconds: float,
    trainer: Trainer,
    training: list[Sequence],
    held_out: list[Sequence],
    folder: Path,
    now: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Train until `seconds` of training time are used up (time of earlier, interrupted runs in `folder` counts). Returns the last
    look. Whatever the state there was made for, another drafter's or other settings' is not gone on with."""
    recipe, log = trainer.recipe, folder / trainer.log_file
    progress = resume(trainer, folder)
    if progress is None:
        progress = Progress()
        log.unlink(missing_ok=True)
    generator = torch.Generator().manual_seed(recipe.seed + progress.step)
    order: list[int] = []
    look: dict[str, Any] = {}
    losses: dict[str, Tensor] = {}
    next_look, next_show = progress.seconds + recipe.look_every_s, 0.0
    done = min(round(progress.seconds), round(seconds))
    bar = tqdm(total=round(seconds), initial=done, unit="s", disable=None, desc=trainer.name)
    began = now() - progress.seconds
    try:
        while progress.seconds < seconds:
            if len(order) < recipe.sequences:
                order = torch.randperm(len(training), generator=generator).tolist()
            group = [training[order.pop()] for _ in range(min(recipe.sequences, len(order)))]
            blocks = cut_blocks(group, recipe.anchors, trainer.config.block_size, generator)
            losses = trainer.step(blocks, learning_rate_share(progress.seconds / seconds, recipe))
            progress.step += 1
            progress.tokens_seen += sum(sequence.answer_tokens for sequence in group)
            progress.seconds = now() - began
            if not bar.disable and progress.seconds >= next_show:
                bar.n = min(round(progress.seconds), bar.total)
                tau = {"tau": f"{look['held_out_tau']:.2f}"} if look.get("held_out_tau") else {}
                bar.set_postfix({name: f"{loss:.2f}" for name, loss in _numbers(losses).items()} | tau)
                next_show = progress.seconds + SHOW_EVERY_S
            if progress.seconds >= next_look or progress.seconds >= seconds:
                look = trainer.look(progress, _numbers(losses), held_out)
                save(trainer, folder, progress)
                line = json.dumps(look, allow_nan=False)
                with log.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
                if bar.disable:  # no terminal: a line for the log instead
                    print(f"{trainer.name} {progress.seconds:.0f} of {seconds:.0f} s: {line}", flush=True)
                next_look = progress.seconds + recipe.look_every_s
                began = now() - progress.seconds
    except KeyboardInterrupt:
        save(trainer, folder, progress)
        raise
    finally:
        bar.close()
    return look or trainer.look(progress, _numbers(losses), held_out)


def learning_rate_share(done: float, recipe: Recipe) -> float:
    """Linear warm-up, then cosine to `final_rate`. `done` 0 … 1 of the training time."""
    if done < recipe.warm_up:
        return max(done / recipe.warm_up, 1e-2)
    rest = min((done - recipe.warm_up) / (1 - recipe.warm_up), 1.0)
    return recipe.final_rate + (1 - recipe.final_rate) * 0.5 * (1 + math.cos(math.pi * rest))


def save(trainer: Trainer, folder: Path, progress: Progress) -> None:
    facts = {**vars(progress), "made_for": trainer.made_for}
    save_state(folder / trainer.state_file, trainer.module, trainer.optimiser, facts)


def resume(trainer: Trainer, folder: Path) -> Progress | None:
    """None: nothing was begun, or it was for another drafter or other settings, and is trained anew."""
    facts = read_facts(folder / trainer.state_file)
    if facts is None or facts.get("made_for", "") != trainer.made_for:
        return None
    load_state(folder / trainer.state_file, trainer.module, trainer.optimiser)
    return Progress(int(facts["step"]), float(facts["seconds"]), int(facts.get("tokens_seen", 0)))


def finite(value: float) -> float | None:
    """For a log: None where nothing was measured. JSON has no NaN."""
    return round(value, 4) if math.isfinite(value) else None


def _numbers(losses: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: loss.item() for name, loss in losses.items()}
