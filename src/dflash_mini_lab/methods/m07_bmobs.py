"""07 DFlash6-BMOBS: 06's draw in one middle slot, then 03's expansion outwards."""
from __future__ import annotations

from collections.abc import Mapping

from dflash_mini_lab.methods.m06_boltzmann import BOLTZMANN, draw
from dflash_mini_lab.paths import fill_gaps, unchosen
from dflash_mini_lab.scores import margins, pair_scores
from dflash_mini_lab.types import Draft, Method, Proposal

SALT = 7


def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
    """`temperature` T > 0 in logits, `candidates` K ≥ 2, as in 06. Of two centres, the one of smaller margin. O(S·K)."""
    ids, scores = draft.top(int(settings["candidates"]))
    pairs = pair_scores(draft, ids)
    first = (draft.slots - 1) // 2
    between = margins(scores[first : draft.slots // 2 + 1])
    middle = first + between.index(min(between))
    here = slice(middle, middle + 1)
    choice = unchosen(draft.slots)
    choice[here] = draw(draft, [middle], ids[here], scores[here], settings["temperature"], SALT)
    return Proposal.along(ids, choice, scores.shape[1] + fill_gaps(scores, choice, pairs.forward, pairs.backward))


BMOBS = Method(
    "07",
    "bmobs",
    "DFlash6-BMOBS",
    "06's draw in one middle slot, then outwards by logits and pair scores",
    select,
    settings={"temperature": 0.1, "candidates": 8},
    grid=BOLTZMANN.grid,
    needs=("pair",),
)
