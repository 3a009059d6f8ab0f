"""Which settings a method runs with: tried on calibration prompts only, and never on one that is measured.

Every trial's text is compared with the reference; one that is not exact cannot win. The winner is the fastest, by measurement in
this process. Knows methods by their grids alone; what a setting means is the method's affair.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from dflash_mini_lab.measurement.halving import faster_half
from dflash_mini_lab.measurement.schedule import rotated_orders
from dflash_mini_lab.types import Decoded, Method

Values = dict[str, float]
"""Settings of one trial."""
Answer = Callable[[Method, Values, str], Decoded]
"""Decode one calibration prompt, named by its id, with a trial's settings."""


@dataclass(eq=False)
class Trial:
    values: Values
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    exact: bool = True
    prompts: int = 0

    def add(self, decoded: Decoded, expected: Sequence[int]) -> None:
        self.prompts += 1
        self.exact = self.exact and list(decoded.tokens) == list(expected)
        self.tokens += sum(step.committed for step in decoded.steps)
        self.rounds += len(decoded.steps)
        self.seconds += decoded.decode_seconds

    @property
    def speed(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None

    def as_json(self) -> dict[str, Any]:
        tau = self.tokens / self.rounds if self.rounds else None
        return {
            "settings": self.values,
            "tokens_per_second": self.speed,
            "tau": tau,
            "exact": self.exact,
            "prompts": self.prompts,
        }


def calibrate(method: Method, answer: Answer, references: Mapping[str, Sequence[int]], seed: int) -> dict[str, Any] | None:
    """The `calibration.methods` entry of a method: all trials of its grid, and the values chosen.

    `references`: calibration prompt → the tokens every trial must give. None where there is nothing to choose. Prompt by prompt,
    in rotated order as the benchmark itself is run, by successive halving.
    """
    if not references or not method.grid:
        return None
    default = dict(method.settings)
    answer(method, default, next(iter(references)))  # a first call pays for what later ones find warm
    points = [dict(zip(method.grid, values, strict=True)) for values in product(*method.grid.values())]
    trials = [Trial({**default, **point}) for point in points]
    left, names = trials, [str(index) for index in range(len(trials))]
    for (prompt, expected), order in zip(references.items(), rotated_orders(names, len(references), seed), strict=True):
        for trial in (trials[int(name)] for name in order):
            if trial in left:
                trial.add(answer(method, trial.values, prompt), expected)
        left = faster_half(left)
    return {"trials": [trial.as_json() for trial in trials], "chosen": _best(left, default)}


def _best(trials: Sequence[Trial], default: Values) -> Values:
    """The values of the fastest exact trial; the default where there is none (every text wrong, or only prefills measured)."""
    candidates = [trial for trial in trials if trial.exact and trial.speed]
    return max(candidates, key=lambda trial: trial.speed or 0.0).values if candidates else default
