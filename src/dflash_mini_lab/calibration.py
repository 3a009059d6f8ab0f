"""Which settings a method runs with: tried on calibration prompts only, and never on one that is measured.

Every trial's text is compared with the reference; one that is not exact cannot win. The winner is the fastest, by measurement in
this process. Knows methods by their grids alone; what a setting means is the method's affair.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from dflash_mini_lab.measurement.schedule import rotated_orders
from dflash_mini_lab.types import Decoded, Method

WIDTH_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Verify widths that are tried, as shares of the block size."""
FULL_GRID = 12
"""Larger grids are halved first: every setting on a few prompts, the best few on all."""
FIRST_PROMPTS, SURVIVORS = 2, 4

Values = dict[str, float]
"""Settings of one trial, `verify_width` among them."""
Answer = Callable[[Method, Values, str], Decoded]
"""Decode one calibration prompt, named by its id, with a trial's settings."""


@dataclass
class Trial:
    values: Values
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    exact: bool = True
    seen: set[str] = field(default_factory=set)

    def add(self, prompt: str, decoded: Decoded, expected: Sequence[int]) -> None:
        self.seen.add(prompt)
        self.exact = self.exact and list(decoded.tokens) == list(expected)
        self.tokens += sum(step.committed for step in decoded.steps)
        self.rounds += len(decoded.steps)
        self.seconds += decoded.decode_seconds

    @property
    def speed(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None

    def as_json(self) -> dict[str, Any]:
        tau = self.tokens / self.rounds if self.rounds else None
        return {"settings": self.values, "tokens_per_second": self.speed, "tau": tau, "exact": self.exact}


def calibrate(
    method: Method, answer: Answer, references: Mapping[str, Sequence[int]], block_size: int, verify_width: int | None, seed: int
) -> dict[str, Any] | None:
    """The `calibration.methods` entry of a method: all trials, and the values chosen.

    First the verify width with the method's default settings (not when `verify_width` gives it), then the method's grid at that
    width. `references`: calibration prompt → the tokens every trial must give. None where there is nothing to choose.
    At most len(WIDTH_SHARES) + FULL_GRID trials see every prompt.
    """
    widths = [min(verify_width, block_size)] if verify_width else trial_widths(block_size)
    points = [dict(zip(method.grid, values, strict=True)) for values in product(*method.grid.values())]
    if not references or method.select is None or (len(widths) == 1 and len(points) == 1):
        return None
    default = {**method.settings, "verify_width": block_size if verify_width is None else widths[0]}
    answer(method, default, next(iter(references)))  # a first call pays for what later ones find warm
    trials = [Trial({**default, "verify_width": width}) for width in widths]
    if len(widths) > 1:
        _run(method, trials, list(references), answer, references, seed)
    width = _best(trials, default)["verify_width"] if len(widths) > 1 else widths[0]
    grid = [Trial({**default, **point, "verify_width": width}) for point in points]
    known = [trial.values for trial in trials if trial.seen]
    grid = [trial for trial in grid if trial.values not in known]
    if len(grid) > FULL_GRID:
        _run(method, grid, list(references)[:FIRST_PROMPTS], answer, references, seed)
        finalists = sorted(grid, key=lambda trial: (trial.exact, trial.speed or 0.0), reverse=True)[:SURVIVORS]
    else:
        finalists = grid
    _run(method, finalists, list(references), answer, references, seed + 1)
    tried = [trial for trial in trials if trial.seen] + grid
    complete = [trial for trial in tried if trial.seen == set(references)]
    return {"trials": [trial.as_json() for trial in tried], "chosen": _best(complete, {**default, "verify_width": width})}


def trial_widths(block_size: int) -> list[int]:
    """Rows of a verifier call that are worth trying: a few from 2 to the whole block."""
    return sorted({max(2, round(block_size * share)) for share in WIDTH_SHARES if block_size > 1})


def _run(
    method: Method,
    trials: Sequence[Trial],
    prompts: Sequence[str],
    answer: Answer,
    references: Mapping[str, Sequence[int]],
    seed: int,
) -> None:
    """Every trial on every prompt it has not seen, prompt by prompt in rotated order, as the benchmark itself is run."""
    names = [str(index) for index in range(len(trials))]
    for prompt, order in zip(prompts, rotated_orders(names, len(prompts), seed), strict=True):
        for index in map(int, order):
            if prompt not in trials[index].seen:
                trials[index].add(prompt, answer(method, trials[index].values, prompt), references[prompt])


def _best(trials: Sequence[Trial], default: Values) -> Values:
    """The values of the fastest exact trial; the default where there is none (every text wrong, or only prefills measured)."""
    candidates = [trial for trial in trials if trial.exact and trial.speed]
    return max(candidates, key=lambda trial: trial.speed or 0.0).values if candidates else default
