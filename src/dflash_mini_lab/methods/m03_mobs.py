"""03 DFlash3-MOBS (middle-out bidirectional selection): one middle slot first, then outwards, each slot beside a chosen one."""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dflash_mini_lab.paths import fill_gaps, repick, unchosen
from dflash_mini_lab.scores import PairScores, fingerprint, hashed, pair_scores
from dflash_mini_lab.types import Draft, Method, Proposal


def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
    """`candidates` K; `passes`: refinements after the fill, each re-picks even slots, then odd ones. O(S·K) pair scores."""
    ids, scores = draft.top(int(settings["candidates"]))
    pairs = pair_scores(draft, ids)
    choice, work = middle_out(draft, scores, pairs)
    for _ in range(int(settings["passes"])):
        for first in range(min(2, draft.slots)):
            work += repick(scores, choice, np.arange(first, draft.slots, 2), pairs.forward, pairs.backward)
    return Proposal.along(ids, choice, work)


def middle_out(draft: Draft, scores: np.ndarray, pairs: PairScores) -> tuple[np.ndarray, int]:
    """The whole path from one middle slot, and its work: also what 04 and 05 do without an anchor of their own."""
    choice = unchosen(draft.slots)
    middle = draft.slots // 2
    if draft.slots % 2 == 0:
        middle -= 1 - hashed(fingerprint(draft.committed), draft.anchor) % 2
    choice[middle] = (scores[middle] + pairs.after_anchor(middle)).argmax()
    return choice, scores.shape[1] + fill_gaps(scores, choice, pairs.forward, pairs.backward)


MOBS = Method(
    "03",
    "mobs",
    "DFlash3-MOBS",
    "a middle slot first, then outwards, each slot by its logits and the pair scores with chosen neighbours",
    select,
    settings={"candidates": 8, "passes": 0},
    needs=("pair",),
)
