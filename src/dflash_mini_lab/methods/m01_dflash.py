"""01 DFlash: the drafter's first choice in every slot, the whole block verified (arXiv 2602.06036)."""
from __future__ import annotations

from collections.abc import Mapping

from dflash_mini_lab.types import Draft, Method, Proposal


def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
    ids, _ = draft.top(1)
    return Proposal(tuple(ids[:, 0].tolist()))


DFLASH = Method("01", "dflash", "DFlash", "the drafter's first choice in every slot", select)
