"""Successive halving: trials run side by side, and after each cell of their schedule the slower half is out."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

FINALISTS = 2
"""Trials that see every cell."""


class Trial(Protocol):
    exact: bool
    """Whether every answer so far was the reference's."""

    @property
    def speed(self) -> float | None:
        """Decoded tokens a second."""
        ...


T = TypeVar("T", bound=Trial)


def faster_half(trials: Sequence[T]) -> list[T]:
    """The better half of `trials`, rounded up, and at least FINALISTS; the best first. Exact ones are better than others, then
    fast ones, then earlier ones."""
    ranked = sorted(trials, key=lambda trial: (not trial.exact, -(trial.speed or 0.0)))
    return ranked[: max(FINALISTS, math.ceil(len(ranked) / 2))]
