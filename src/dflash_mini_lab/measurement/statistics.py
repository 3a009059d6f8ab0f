"""From times to statements: speed-ups with intervals, the noise floor, verdicts. Pure NumPy; knows no file, arm or model.

A speed-up is a ratio of decode times inside one (prompt, repeat) cell. Ratios multiply, so their mean is geometric and all
arithmetic is on logarithms.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95
WIDE_FLOOR = 0.05
"""A noise floor that reaches further than this from 1 is announced at the top of a report."""

Verdict = Literal["faster", "slower", "no difference", "inexact"]


@dataclass(frozen=True)
class Ratio:
    """A geometric mean with its 95% interval; `low` and `high` are None where a single measurement gives none."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Floor:
    """What this run cannot tell from 1.000×; None without an interval."""

    low: float | None
    high: float | None

    @property
    def wide(self) -> bool:
        """Whether it was measured to reach past ±5%; an unknown floor is not wide."""
        return self.low is not None and self.high is not None and (self.low < 1 - WIDE_FLOOR or self.high > 1 + WIDE_FLOOR)


def geometric_mean_ratio(ratios: Mapping[str, Sequence[float]], seed: int = 0) -> Ratio:
    """The geometric mean of `ratios` (prompt → one ratio per repeat) and its 95% bootstrap interval.

    Prompts are resampled, each with all of its repeats: repeats of one prompt are the same text and tell little about another.
    With one prompt only, its repeats are resampled, and the interval speaks about that prompt alone. One ratio has no interval.
    Deterministic for a seed. Raises ValueError without any ratio.
    """
    logs = [np.log(np.asarray(values, dtype=np.float64)) for values in ratios.values() if len(values)]
    if not logs:
        raise ValueError("no ratios")
    pooled = np.concatenate(logs)
    mean = float(np.exp(pooled.mean()))
    if len(pooled) == 1:
        return Ratio(mean, None, None)
    units = logs if len(logs) > 1 else [pooled[i : i + 1] for i in range(len(pooled))]
    sums = np.array([unit.sum() for unit in units])
    sizes = np.array([len(unit) for unit in units])
    drawn = np.random.default_rng(seed).integers(len(units), size=(RESAMPLES, len(units)))
    means = np.exp(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(means, [tail, 100 - tail])
    return Ratio(mean, float(low), float(high))


def ratio_of_runs(one: Mapping[str, Sequence[float]], other: Mapping[str, Sequence[float]], seed: int = 0) -> Ratio:
    """The ratio of two separate runs' times (each: prompt → one time per repeat) over the prompts of both, with its interval.

    The repeats of two runs are no pairs, so a prompt's ratio is that of its two geometric means, and prompts are resampled.
    With one prompt, the repeats of each run are resampled; a run with a single one then gives no interval.
    Raises ValueError without a common prompt.
    """
    logs = {
        prompt: (np.log(np.asarray(one[prompt])), np.log(np.asarray(other[prompt])))
        for prompt in one
        if len(one[prompt]) and len(other.get(prompt, ()))
    }
    if len(logs) != 1:
        return geometric_mean_ratio({prompt: [float(np.exp(a.mean() - b.mean()))] for prompt, (a, b) in logs.items()}, seed)
    ((a, b),) = logs.values()
    mean = float(np.exp(a.mean() - b.mean()))
    if min(len(a), len(b)) < 2:
        return Ratio(mean, None, None)
    random = np.random.default_rng(seed)
    drawn = [run[random.integers(len(run), size=(RESAMPLES, len(run)))].mean(axis=1) for run in (a, b)]
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(np.exp(drawn[0] - drawn[1]), [tail, 100 - tail])
    return Ratio(mean, float(low), float(high))


def noise_floor(again: Ratio) -> Floor:
    """The floor from A/A′, the ratio of method 00 to itself: its interval, made symmetric about 1.

    Which of the two is called A is arbitrary, so the floor must not change when they are swapped; it always contains 1.
    """
    if again.low is None or again.high is None:
        return Floor(None, None)
    reach = max(again.high, 1 / again.high, again.low, 1 / again.low)
    return Floor(1 / reach, reach)


def joint_floor(one: Floor, other: Floor) -> Floor:
    """What a ratio of two runs cannot be told from 1: the noise of both is in it. Unknown where either floor is."""
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return Floor(None, None)
    return Floor(one.low * other.low, one.high * other.high)


def verdict(speedup: Ratio, floor: Floor, exact: bool = True) -> Verdict:
    """What may be said of an arm. A speed-up without an interval, or one that overlaps the floor, is no difference."""
    if not exact:
        return "inexact"
    if speedup.low is None or speedup.high is None or floor.low is None or floor.high is None:
        return "no difference"
    if speedup.low > floor.high:
        return "faster"
    if speedup.high < floor.low:
        return "slower"
    return "no difference"


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower quartile and upper quartile."""
    median, low, high = np.percentile(np.asarray(values, dtype=np.float64), [50, 25, 75])
    return float(median), float(low), float(high)
