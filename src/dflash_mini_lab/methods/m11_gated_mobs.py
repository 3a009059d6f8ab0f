"""11 V11 Boltzmann-gated MOBS: DFlash's tokens, and pair scores only in the few slots that the drafter is unsure of.

The Boltzmann factor routes work here; nothing is drawn.
"""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dflash_mini_lab.paths import repick
from dflash_mini_lab.scores import margins, pair_scores, sigmoid
from dflash_mini_lab.types import Draft, Method, Proposal

LATER_SLOT = 0.15
"""A slot's uncertainty counts less by this much for every slot before it."""


def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
    """`temperature` T > 0 in logits, `floor` of the uncertainty, `budget` of slots, `candidates` K.

    Slots with `u_i = 1/(1 + exp(m[i]/T)) ≥ floor`, the largest `u_i/(1 + 0.15 i)` first, at most `budget`, are re-picked from the
    centre outwards by `z + forward(left) + backward(right)`. O(budget·K).
    """
    ids, scores = draft.top(int(settings["candidates"]))
    choice = np.zeros(draft.slots, dtype=np.int64)
    work = 0
    doubtful = routed(scores, settings["temperature"], settings["floor"], int(settings["budget"]))
    if doubtful.size:
        pairs = pair_scores(draft, ids)
        distance = np.abs(doubtful - (draft.slots - 1) / 2)
        for slot in doubtful[np.lexsort((doubtful, distance))]:
            work += repick(scores, choice, np.array([slot]), pairs.forward, pairs.backward)
    return Proposal.along(ids, choice, work)


def routed(scores: np.ndarray, temperature: float, floor: float, budget: int) -> np.ndarray:
    """The slots to look at again, most urgent first; `scores [S, K]`."""
    uncertainty = sigmoid(-np.array(margins(scores)) / temperature)
    slots = np.flatnonzero(uncertainty >= floor)
    urgency = uncertainty[slots] / (1 + LATER_SLOT * slots)
    return slots[np.argsort(-urgency, kind="stable")[:budget]]


GATED_MOBS = Method(
    "11",
    "gated-mobs",
    "V11 Boltzmann-gated MOBS",
    "DFlash's tokens, but the few slots of least margin are picked again with the pair scores of their neighbours",
    select,
    settings={"temperature": 0.08, "floor": 0.08, "budget": 2, "candidates": 8},
    grid={"temperature": (0.04, 0.08), "floor": (0.08, 0.16), "budget": (1, 2, 3), "candidates": (4, 8)},
    needs=("pair",),
)
