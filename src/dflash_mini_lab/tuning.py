"""Which verify width a method runs with: tried on calibration prompts only, and beside it the width that the cost model names.

The measured choice is the one used. The analytic one is recorded next to it, to show how far the model can be trusted. Knows
neither methods nor models: a width goes in, an answer comes out.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_mini_lab.measurement import step_log
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
    exact: bool = True

    @property
    def speed(self) -> float | None:
        """Decoded tokens a second."""
        seconds = sum(step_log.phase_seconds(self.logs).values())
        return step_log.total(self.logs, "committed") / seconds if seconds > 0 else None

    def as_json(self) -> dict[str, Any]:
        _, micro = step_log.tau(self.logs)
        return {"width": self.width, "tokens_per_second": self.speed, "tau": micro, "exact": self.exact}


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
    benchmark is: every (prompt, repeat) cell asks every width once, in rotated order, after a warm-up cell whose times do not
    count; its texts do. `chosen` is None without an exact trial; `agree` where either choice is missing.
    """
    trials = {width: Trial(width) for width in widths(block_size)}
    for cell in plan(list(references), repeats, [str(width) for width in trials], 1, seed):
        for width in map(int, cell.order):
            decoded = answer(width, cell.prompt)
            trials[width].exact &= list(decoded.tokens) == list(references[cell.prompt])
            if not cell.warmup:
                trials[width].logs.append(step_log.columns(decoded))
    chosen = fastest(list(trials.values()))
    whole = trials[block_size]
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
    return max(candidates, key=lambda trial: trial.speed or 0.0).width if candidates else None


def predict(
    logs: Sequence[step_log.StepLog], tried: Sequence[int], curve: Mapping[str, Any], bonus: bool = True
) -> dict[str, Any] | None:
    """The cost model's choice among `tried`, from step logs at the whole block's width; None without rounds.

    Speed-up(W) = E(W) / (c + v(W)), E(W) = Σ_{j<W} a_j: a_0 = 1, a_j the share of rounds whose first j drafts were accepted, c
    and v(W) in single-row decodes. A method that often proposes fewer than W - 1 tokens pays less than v(W): the model does not
    know. Equal ones: the narrowest. Without the bonus token a round commits max(1, accepted): E(W) = 1 + Σ_{1<j<W} a_j.
    """
    costs = step_log.economics(logs, curve["rows"], curve["median_seconds"])
    if costs is None:
        return None
    _, joint = step_log.slot_acceptance(logs)
    verify = dict(zip(curve["rows"], curve["ratio"], strict=True))
    table = []
    for width in tried:
        tokens = sum([1.0, *joint][:width]) if bonus else sum([1.0, *joint[1:]][: width - 1])
        speedup = tokens / (costs["draft_cost"] + verify[width])
        table.append({"width": width, "tokens_per_round": tokens, "verify_cost": verify[width], "speedup": speedup})
    best = max(table, key=lambda line: line["speedup"])
    return {"chosen": best["width"], "slot_joint": joint, "draft_cost": costs["draft_cost"], "widths": table}
