"""06 DFlash6-Boltzmann: one Gumbel-max draw a slot, at a temperature that falls where the drafter is sure."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from dflash_mini_lab.scores import WIDEST_NOISE, fingerprint, gumbel, hashed, margins, uniform
from dflash_mini_lab.types import Draft, Method, Proposal

SALT = 6
COLDEST = 0.02
"""Share of the temperature that the surest slot keeps."""


def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
    """`temperature` T > 0 in logits; `candidates` K ≥ 2. Slot i draws at `max(T·exp(-m[i]), 0.02·T)`: S·K scores."""
    ids, scores = draft.top(int(settings["candidates"]))
    choice = draw(draft, range(draft.slots), ids, scores, settings["temperature"], SALT)
    return Proposal.along(ids, np.array(choice), work=ids.size)


def draw(
    draft: Draft, slots: Sequence[int], ids: np.ndarray, scores: np.ndarray, warmest: float, salt: int
) -> list[int]:
    """The draw in each of `slots [n]` → candidate indices `[n]`; ids, scores `[n, K]`: theirs, best first.

    Candidates so far below the best that no noise can lift them over it are passed over: the draw is the same.
    """
    context = hashed(fingerprint(draft.committed), draft.anchor, salt)
    choice = []
    for slot, tokens, logits, margin in zip(slots, ids.tolist(), scores.tolist(), margins(scores), strict=True):
        temperature = max(warmest * math.exp(-margin), COLDEST * warmest)
        possible = [0, *(k for k in range(1, len(logits)) if logits[0] - logits[k] <= WIDEST_NOISE * temperature)]
        if len(possible) > 1:
            seed = hashed(context, slot)
            noisy = {k: logits[k] / temperature + gumbel(uniform(seed, tokens[k])) for k in possible}
            choice.append(max(noisy, key=noisy.__getitem__))
        else:
            choice.append(0)
    return choice


BOLTZMANN = Method(
    "06",
    "boltzmann",
    "DFlash6-Boltzmann",
    "one draw in every slot, at a temperature that falls where the drafter is sure",
    select,
    settings={"temperature": 0.1, "candidates": 4},
    grid={"temperature": (0.02, 0.05, 0.1, 0.2, 0.35)},
)
