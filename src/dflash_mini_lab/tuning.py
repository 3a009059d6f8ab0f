"""Which verify width a method runs with: tried on calibration prompts only, and beside it the width that the cost model names.

The measured choice is the one used. The analytic one is recorded next to it, to show how far the model can be trusted. Knows
neither methods nor models: a width goes in, an answer comes out.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from dflash_mini_lab.measurement import step_log
from dflash_mini_lab.measurement.halving import faster_half
from dflash_mini_lab.measurement.schedule import plan
from dflash_mini_lab.types import Decoded

EVERY_WIDTH_UP_TO = 8
"""Blocks larger than this are tried at powers of two, and whole."""

Answer = Callable[[int, str], Decoded]
"""Decode one calibration prompt, named by its id, with a verify width."""


@dataclass
class Trial:
    width: int
    logs: list[step_log.StepLog] = field(default_factory=list)
    cells: list[dict[str, Any]] = field(default_factory=list)
    """Which answer each log is of, and its decode seconds."""
    exact: bool = True

    def add(self, prompt: str, repeat: int, decoded: Decoded) -> None:
        self.logs.append(step_log.columns(decoded))
        self.cells.append({"prompt": prompt, "repeat": repeat, "seconds": decoded.decode_seconds})

    @property
    def speed(self) -> float | None:
        """Decoded tokens a second."""
        seconds = sum(step_log.phase_seconds(self.logs).values())
        return step_log.total(self.logs, "committed") / seconds if seconds > 0 else None

    def as_json(self) -> dict[str, Any]:
        _, micro = step_log.tau(self.logs)
        return {
            "width": self.width, "tokens_per_second": self.speed, "tau": micro, "exact": self.exact, "cells": self.cells
        }


def widths(block_size: int) -> list[int]:
    """The widths to try, the whole block last: 2, 3, … B, or 2, 4, 8, … B for a large block."""
    if block_size <= EVERY_WIDTH_UP_TO:
        return list(range(2, block_size + 1))
    doubled = [2**power for power in range(1, block_size.bit_length()) if 2**power < block_size]
    return [*doubled, block_size]


def tune(
    answer: Answer,
    block_size: int,
    references: Mapping[str, Sequence[int]],
    curve: Mapping[str, Any],
    repeats: int,
    seed: int,
    bonus: bool = True,
) -> dict[str, Any]:
    """The `tuning.methods` entry of one method: all trials, the width chosen, the cost model's, and whether the two agree.

    `references`: calibration prompt → the tokens every answer must give. `curve`: the run's `verify_cost`. Scheduled as the
    benchmark is, in (prompt, repeat) cells whose order rotates, after one answer whose time does not count; its text does. By
    successive halving, of equal widths the narrower; the whole block answers every prompt once even if it is out, for the cost
    model needs its acceptance. `chosen` is None without an exact
    trial; `agree` where either choice is missing.
    """
    trials = {width: Trial(width) for width in widths(block_size)}
    whole, left = trials[block_size], list(trials.values())
    first = next(iter(references))
    whole.exact = list(answer(block_size, first).tokens) == list(references[first])
    for cell in plan(list(references), repeats, [str(width) for width in trials], 0, seed):
        for trial in (trials[int(width)] for width in cell.order):
            if trial in left or (trial is whole and cell.repeat == 0):
                decoded = answer(trial.width, cell.prompt)
                trial.exact &= list(decoded.tokens) == list(references[cell.prompt])
                trial.add(cell.prompt, cell.repeat, decoded)
        left = faster_half(left)
    chosen = fastest(left)
    analytic = predict(whole.logs, list(trials), curve, bonus) if whole.exact else None  # a wrong text says nothing of acceptance
    return {
        "trials": [trial.as_json() for trial in trials.values()],
        "chosen": chosen,
        "analytic": analytic,
        "agree": chosen == analytic["chosen"] if chosen and analytic else None,
    }


def fastest(trials: Sequence[Trial]) -> int | None:
    """The width of the fastest exact trial, the narrowest of equals; None where there is none."""
    candidates = [trial for trial in trials if trial.exact and trial.speed]
    return min(candidates, key=lambda trial: (-(trial.speed or 0.0), trial.width)).width if candidates else None


def agreement(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The `tuning.agreement` entry: how the two choices of every method compare. `methods`: the `tuning.methods` entries.

    noise: relative standard deviation of one answer's time, from answers of one width to one prompt in different repeats, all
    methods together; None with one repeat. A verdict is `same` width, `within noise` or `differ`, by the decode seconds of the
    cells that both widths answered: the model's choice over the measured one, less 1, against 95% of the noise of so many;
    `unknown` without a choice, a common cell or the noise.
    """
    noise = answer_noise(trial for entry in methods.values() for trial in entry["trials"])
    return {"noise": noise, "methods": {key: _compared(entry, noise) for key, entry in methods.items()}}


def answer_noise(trials: Iterable[Mapping[str, Any]]) -> float | None:
    squares, freedom = 0.0, 0
    for trial in trials:
        answers = sorted(trial.get("cells", ()), key=lambda cell: cell["prompt"])  # files of before halving have none
        for _, cells in groupby(answers, key=lambda cell: cell["prompt"]):
            logs = [math.log(cell["seconds"]) for cell in cells if cell["seconds"] > 0]
            mean = sum(logs) / max(len(logs), 1)
            squares += sum((value - mean) ** 2 for value in logs)
            freedom += max(len(logs) - 1, 0)
    return math.sqrt(squares / freedom) if freedom else None


def _compared(entry: Mapping[str, Any], noise: float | None) -> dict[str, Any]:
    unknown = {"verdict": "unknown", "cells": 0, "difference": None, "noise": None}
    if not entry["chosen"] or not entry["analytic"]:
        return unknown
    if entry["agree"]:
        return {**unknown, "verdict": "same", "difference": 0.0}
    seconds = [
        {(cell["prompt"], cell["repeat"]): cell["seconds"] for cell in trial.get("cells", ())}
        for width in (entry["chosen"], entry["analytic"]["chosen"])
        for trial in entry["trials"]
        if trial["width"] == width
    ]
    both = seconds[0].keys() & seconds[1].keys()
    mine = sum(seconds[0][cell] for cell in both)
    if noise is None or not mine:
        return {**unknown, "cells": len(both)}
    difference = sum(seconds[1][cell] for cell in both) / mine - 1
    allowed = 1.96 * noise * math.sqrt(2 / len(both))
    verdict = "within noise" if abs(difference) <= allowed else "differ"
    return {"verdict": verdict, "cells": len(both), "difference": difference, "noise": allowed}


def predict(
    logs: Sequence[step_log.StepLog], tried: Sequence[int], curve: Mapping[str, Any], bonus: bool = True
) -> dict[str, Any] | None:
    """The cost model's choice among `tried`, from step logs at the whole block's width; None without rounds.

    Speed-up(W) = E(W) / (c + v(W)): E(W) is 1 and the mean of what was accepted in the first W rows, c and v(W) are in single-row
    decodes. A method that often proposes fewer than W - 1 tokens pays less than v(W): the model does not know. Equal ones: the
    narrowest. Without the bonus token a round commits max(1, accepted).
    """
    costs = step_log.economics(logs, curve["rows"], curve["median_seconds"])
    if costs is None:
        return None
    _, joint = step_log.slot_acceptance(logs)
    verify = dict(zip(curve["rows"], curve["ratio"], strict=True))
    table = []
    for width in tried:
        accepted = step_log.accepted_within(logs, width)
        tokens = float((accepted + 1 if bonus else np.maximum(accepted, 1)).mean())
        speedup = tokens / (costs["draft_cost"] + verify[width])
        table.append({"width": width, "tokens_per_round": tokens, "verify_cost": verify[width], "speedup": speedup})
    best = max(table, key=lambda line: line["speedup"])
    return {"chosen": best["width"], "slot_joint": joint, "draft_cost": costs["draft_cost"], "widths": table}
