"""12 V12 PARAREAL: a few rounds of a learned correction of all scores at once, a coarse solver's answer made finer.

The correction is a ridge regression of what the target's logits would add, on eight features. Training fits it on the same
`features`, so that both mean the same.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dflash_mini_lab.scores import LARGEST, centred, margins
from dflash_mini_lab.types import Draft, Method, PararealFit, Proposal

FEATURES = (
    "current centred score",
    "coarse centred score",
    "rank / (K-1)",
    "slot / (S-1)",
    "coarse margin",
    "candidate · last token, embeddings, / √H",
    "candidate · mean of the prefix, embeddings, / √H",
    "current score × slot position",
)


def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
    """No settings: K, ω, the rounds R and the clip are the fit's own. R·S·K scores."""
    fit = draft.heads.parareal
    assert fit is not None
    ids, scores = draft.top(fit.candidates)
    coarse = coarse_scores(scores)
    slope, offset = correction(fit, coarse, margins(scores), similarity(draft, ids))
    refined = coarse
    for _ in range(fit.rounds):
        refined = refine(fit, refined, slope, offset)
    return Proposal.along(ids, refined.argmax(axis=1), work=fit.rounds * ids.size)


def correction(
    fit: PararealFit, coarse: np.ndarray, margin: Sequence[float], similar: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`L·features(q)`, standardised features, as `slope · q + offset`, `[S, 1]` and `[S, K]`: only the first feature and the last
    know the current score. coarse `[S, K]`, margin of each slot's draft logits, similar `[S, K, 2]`."""
    weights = fit.weights / fit.scale
    w = weights.tolist()
    constant, last = fit.intercept - float(fit.mean @ weights), max(len(margin) - 1, 1)
    slope = np.array([[w[0] + w[7] * slot / last] for slot in range(len(margin))])
    of_slot = np.array([[constant + w[3] * slot / last + w[4] * min(m, LARGEST)] for slot, m in enumerate(margin)])
    of_rank = np.array([w[2] * rank / max(coarse.shape[1] - 1, 1) for rank in range(coarse.shape[1])])
    return slope, w[1] * coarse + of_slot + of_rank + similar @ weights[5:7]


def refine(fit: PararealFit, current: np.ndarray, slope: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """One round, `q ← centre(q + ω·clip(slope · q + offset))`: `[S, K]` → `[S, K]`."""
    return centred(current + fit.omega * np.clip(slope * current + offset, -fit.clip, fit.clip))


def coarse_scores(scores: np.ndarray) -> np.ndarray:
    """`q_0 [S, K]`: the draft logits centred per slot, as float64."""
    return centred(np.clip(scores, -LARGEST, LARGEST).astype(np.float64))


def similarity(draft: Draft, ids: np.ndarray) -> np.ndarray:
    """`[S, K, 2]`: embedding products over √H of each candidate with the anchor, and with the mean of the committed tokens."""
    candidates = draft.embeddings(ids)
    others = np.stack([draft.embeddings(np.array(draft.anchor)), draft.prefix_embedding()], axis=1)
    return candidates @ others / np.sqrt(candidates.shape[-1])


def fixed_features(scores: np.ndarray, similar: np.ndarray) -> np.ndarray:
    """Features 3 to 7, the same in every round, `[S, K, 5]`. scores `[S, K]`: draft logits, best first."""
    slots, candidates = scores.shape
    parts = (
        (np.arange(candidates) / max(candidates - 1, 1))[None, :, None],
        slot_positions(slots)[:, None, None],
        np.array([min(m, LARGEST) for m in margins(scores)])[:, None, None],
        similar,
    )
    return np.concatenate([np.broadcast_to(part, (slots, candidates, part.shape[-1])) for part in parts], axis=-1)


def features(current: np.ndarray, coarse: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """`[S, K, 8]` in the order of FEATURES. current, coarse `[S, K]`; fixed `[S, K, 5]`."""
    times_position = current * slot_positions(len(current))[:, None]
    return np.concatenate([current[..., None], coarse[..., None], fixed, times_position[..., None]], axis=-1)


def slot_positions(slots: int) -> np.ndarray:
    return np.arange(slots) / max(slots - 1, 1)


PARAREAL = Method(
    "12",
    "parareal",
    "V12 PARAREAL",
    "all scores corrected at once, two rounds of a ridge regression towards the target's, then the first choice",
    select,
    needs=("parareal",),
)
