"""09 V9 DSpark-Lite: left to right with a low-rank bias from the token before, cut where survival becomes unlikely.

After DSpark (arXiv 2607.05147), whose drafter has both heads built in.
"""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dflash_mini_lab.paths import horizon
from dflash_mini_lab.scores import sigmoid
from dflash_mini_lab.types import Draft, Method, Proposal


def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
    """`candidates` K. `floor` in 0 … 1: the proposal ends before the first slot where the product of confidences is under it,
    after one token at the earliest. O(S·K·r)."""
    ids, scores = draft.top(int(settings["candidates"]))
    head = draft.heads.markov
    assert head is not None
    rank = head.previous.shape[1]
    scale = head.scale[: draft.slots] / np.sqrt(rank, dtype=np.float32)
    after = head.next[ids] * scale[:, None, None]
    tokens = [draft.anchor]
    before = np.empty((draft.slots, rank), dtype=np.float32)
    for slot in range(draft.slots):  # each slot waits for the one before it
        before[slot] = head.previous[tokens[-1]]
        tokens.append(int(ids[slot, (scores[slot] + after[slot] @ before[slot]).argmax()]))
    hidden = len(head.confidence_weight) - rank
    confidence = draft.states() @ head.confidence_weight[:hidden] + before @ head.confidence_weight[hidden:]
    survival = np.cumprod(sigmoid(confidence + head.confidence_bias))
    end = horizon(survival < settings["floor"], least=1)
    return Proposal(tuple(tokens[1 : end + 1]), work=ids.size * rank)


DSPARK_LITE = Method(
    "09",
    "dspark-lite",
    "V9 DSpark-Lite",
    "left to right with a learned bias from the token before, cut where a learned confidence says that drafts rarely survive",
    select,
    settings={"candidates": 8, "floor": 0.2},
    grid={"floor": (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7)},
    needs=("markov",),
)
