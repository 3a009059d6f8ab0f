"""06 DFlash6-Boltzmann: one Gumbel-max draw a slot, at a temperature that falls where the drafter is sure."""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dflash_mini_lab.scores import fingerprint, gumbel, margins, uniform
from dflash_mini_lab.types import Draft, Method, Proposal

SALT = 6
COLDEST = 0.02
"""Share of the temperature that the surest slot keeps."""


def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
    """`temperature` T > 0 in logits; `candidates` K ≥ 2. Slot i draws at `max(T·exp(-m[i]), 0.02·T)`: S·K scores."""
    ids, scores = draft.top(int(settings["candidates"]))
    choice = draw(draft, np.arange(draft.slots), ids, scores, settings["temperature"], SALT)
    return Proposal.along(ids, choice, work=ids.size)


def draw(
    draft: Draft, slots: np.ndarray, ids: np.ndarray, scores: np.ndarray, warmest: float, salt: int
) -> np.ndarray:
    """The draw in each of `slots [n]` → candidate indices `[n]`; ids, scores `[n, K]`: theirs."""
    scores = scores.astype(np.float64)
    temperature = np.maximum(warmest * np.exp(-margins(scores)), COLDEST * warmest)
    noise = gumbel(uniform(fingerprint(draft.committed), draft.anchor, salt, slots[:, None], ids))
    return (scores / temperature[:, None] + noise).argmax(axis=1)


BOLTZMANN = Method(
    "06",
    "boltzmann",
    "DFlash6-Boltzmann",
    "one draw in every slot, at a temperature that falls where the drafter is sure",
    select,
    settings={"temperature": 0.1, "candidates": 8},
    grid={"temperature": (0.02, 0.05, 0.1, 0.2, 0.35)},
)
