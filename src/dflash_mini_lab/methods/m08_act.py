"""08 DFlash7-ACT (adaptive cost-aware token speculation): DFlash's tokens, cut before the first slot it is unsure of."""
from __future__ import annotations

from collections.abc import Mapping

from dflash_mini_lab.paths import horizon
from dflash_mini_lab.scores import margins
from dflash_mini_lab.types import Draft, Method, Proposal


def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
    """`threshold` θ is a margin in logits; θ = 0 is method 01."""
    ids, scores = draft.top(2)
    return Proposal(tuple(ids[: horizon(margins(scores) < settings["threshold"]), 0].tolist()))


ACT = Method(
    "08",
    "act",
    "DFlash7-ACT",
    "DFlash's tokens, cut before the first slot whose margin is under a threshold",
    select,
    settings={"threshold": 0.5},
    grid={"threshold": (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)},
)
