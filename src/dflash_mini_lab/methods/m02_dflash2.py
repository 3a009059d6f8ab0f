"""02 DFlash2: the best path through the candidates of all slots, by draft logits and pair scores (Viterbi)."""
from __future__ import annotations

from collections.abc import Mapping

from dflash_mini_lab.paths import viterbi
from dflash_mini_lab.scores import pair_scores
from dflash_mini_lab.types import Draft, Method, Proposal


def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
    """`candidates` K. K + (S-1)·K² pair scores."""
    ids, scores = draft.top(int(settings["candidates"]))
    pairs = pair_scores(draft, ids)
    first, edges = pairs.after_anchor(0), pairs.edges()
    choice = viterbi(scores, first, edges)
    return Proposal.along(ids, choice, work=first.size + edges.size)


DFLASH2 = Method(
    "02",
    "dflash2",
    "DFlash2",
    "the best path through the candidates of all slots, by logits and learned pair scores (Viterbi)",
    select,
    settings={"candidates": 8},
    needs=("pair",),
)
