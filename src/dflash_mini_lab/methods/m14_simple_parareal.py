"""14 V14 Simple PARAREAL: the one slot whose second candidate the target probably prefers, by a three-number estimate."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_mini_lab.scores import LARGEST, margins
from dflash_mini_lab.types import Draft, GapFit, Method, Proposal


def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
    """`gap = G + ω (F̂ - G)` with `omega` ω; the slot of the most negative gap under `threshold` (logits), if there is one, takes
    its second candidate. S gaps."""
    fit = draft.heads.gap
    assert fit is not None
    ids, scores = draft.top(2)
    margin = [min(m, LARGEST) for m in margins(scores)]
    gap = [m + settings["omega"] * (f - m) for m, f in zip(margin, target_gap(fit, margin), strict=True)]
    tokens = ids[:, 0].tolist()
    worst = gap.index(min(gap))
    if gap[worst] < settings["threshold"]:
        tokens[worst] = int(ids[worst, 1])
    return Proposal(tuple(tokens), work=len(gap))


def target_gap(fit: GapFit, margin: Sequence[float]) -> list[float]:
    """`F̂ = a + b·G + c·i/(S-1)`: the target's gap between the draft's two best tokens, from the draft's, S of them."""
    last = max(len(margin) - 1, 1)
    return [fit.intercept + fit.margin * m + fit.slot * slot / last for slot, m in enumerate(margin)]


SIMPLE_PARAREAL = Method(
    "14",
    "simple-parareal",
    "V14 Simple PARAREAL",
    "DFlash's tokens, but one slot takes its second candidate where a fitted estimate says that the target prefers it",
    select,
    settings={"omega": 1.0, "threshold": 0.0},
    needs=("gap",),
)
