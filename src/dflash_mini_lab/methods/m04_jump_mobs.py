"""04 DFlash4-JUMP-MOBS: a jump head anchors every second slot from the context alone, gap fill does the rest."""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dflash_mini_lab.methods.m03_mobs import middle_out
from dflash_mini_lab.paths import fill_gaps, unchosen
from dflash_mini_lab.scores import pair_scores
from dflash_mini_lab.types import Draft, Method, Proposal


def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
    """`candidates` K; `weight` λ of the jump scores J: anchors by `z + λ (J - max J)`. O(S·K + J·K); without an offset, 03."""
    ids, scores = draft.top(int(settings["candidates"]))
    pairs = pair_scores(draft, ids)
    head = draft.heads.jump
    assert head is not None
    slots = usable_slots(head.offsets, draft.slots)
    if not slots.size:
        return Proposal.along(ids, *middle_out(draft, scores, pairs))
    jump = draft.jump(ids[slots])
    choice = unchosen(draft.slots)
    choice[slots] = (scores[slots] + settings["weight"] * (jump - jump.max(axis=1, keepdims=True))).argmax(axis=1)
    return Proposal.along(ids, choice, jump.size + fill_gaps(scores, choice, pairs.forward, pairs.backward))


def usable_slots(offsets: np.ndarray, slots: int) -> np.ndarray:
    """Offsets (from 1) → indices (from 0) of those that this draft has."""
    return offsets[offsets <= slots] - 1


JUMP_MOBS = Method(
    "04",
    "jump-mobs",
    "DFlash4-JUMP-MOBS",
    "every second slot first, by a jump head's own pass from the context; then the slots between",
    select,
    settings={"candidates": 8, "weight": 0.5},
    needs=("pair", "jump"),
)
