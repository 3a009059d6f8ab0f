"""08 DFlash7-ACT (adaptive cost-aware token speculation): DFlash's tokens, cut before the first slot it is unsure of."""
from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from dflash_mini_lab.scores import margins
from dflash_mini_lab.types import Draft, Method, Proposal


def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
    """`threshold` θ is a margin in logits; θ = 0 is method 01."""
    ids, scores = draft.top(2)
    sure = takewhile(lambda pair: pair[1] >= settings["threshold"], zip(ids[:, 0].tolist(), margins(scores), strict=True))
    return Proposal(tuple(token for token, _ in sure))


ACT = Method(
    "08",
    "act",
    "DFlash7-ACT",
    "DFlash's tokens, cut before the first slot whose margin is under a threshold",
    select,
    settings={"threshold": 0.5},
    grid={"threshold": (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)},
)
