"""05 DFlash5-FUSED-JUMP: 04's anchors without its extra pass, by a low-rank residual on the drafter's own slot states."""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dflash_mini_lab.methods.m03_mobs import middle_out
from dflash_mini_lab.methods.m04_jump_mobs import usable_slots
from dflash_mini_lab.paths import fill_gaps, unchosen
from dflash_mini_lab.scores import low_rank, margins, pair_scores
from dflash_mini_lab.types import Draft, FusedHead, Method, Proposal


def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
    """`candidates` K; `omega` ω: anchors by `z + ω R`; one whose corrected margin is under `min_margin` (logits) is left to gap
    fill, and where none is left the rest is 03. O(S·K + J·K·r)."""
    ids, scores = draft.top(int(settings["candidates"]))
    pairs = pair_scores(draft, ids)
    head = draft.heads.fused
    assert head is not None
    slots = usable_slots(head.offsets, draft.slots)
    corrected = scores[slots] + settings["omega"] * residual(head, draft.states()[slots], ids[slots])
    work = corrected.size * head.slot.shape[0]
    sure = np.array(margins(-np.sort(-corrected, axis=1))) >= settings["min_margin"]
    if sure.any():
        choice = unchosen(draft.slots)
        choice[slots[sure]] = corrected[sure].argmax(axis=1)
        filled = fill_gaps(scores, choice, pairs.forward, pairs.backward)
    else:
        choice, filled = middle_out(draft, scores, pairs)
    return Proposal.along(ids, choice, work + filled)


def residual(head: FusedHead, states: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """`R[j,k] = r^-1/2 · tanh(Q h_j + e_j) · D[id[j,k]]` of the first offsets: states `[J, H]`, ids `[J, K]` → `[J, K]`."""
    gate = np.tanh(states @ head.slot.T + head.offset_embedding[: len(states)])
    return low_rank(head.token[ids], gate) / np.sqrt(head.slot.shape[0], dtype=np.float32)


FUSED_JUMP = Method(
    "05",
    "fused-jump",
    "DFlash5-FUSED-JUMP",
    "as 04, but the jumps are a low-rank residual on the drafter's own slot states: no extra pass",
    select,
    settings={"candidates": 8, "omega": 1.0, "min_margin": 0.1},
    needs=("pair", "fused"),
)
