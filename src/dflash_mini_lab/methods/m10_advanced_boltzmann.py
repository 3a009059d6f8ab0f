"""10 V10 Advanced Boltzmann: DFlash's tokens, with a two-way draw in the few slots where two candidates are close.

It finds the two best candidates on the host, in the drafter's full logits. Method 13 is the same policy without that cost.
"""
from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from dflash_mini_lab.scores import best, fingerprint, margins, uniform
from dflash_mini_lab.types import Draft, Method, Proposal

SALT = 10
LATER_SLOT = 0.2
"""A slot's margin counts this much more for every slot before it: a token matters less where fewer survive to it."""
SHARPENING = 1.5
"""How much a margin lowers its own slot's temperature, per logit."""


def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
    """`temperature` T > 0 and `cutoff` in logits; `budget`: draws in a round, at most."""
    logits, ids = draft.logits()
    columns, scores = best(logits, 2)
    return propose(draft, ids[columns], scores, settings["temperature"], settings["cutoff"], int(settings["budget"]))


def propose(
    draft: Draft, ids: np.ndarray, scores: np.ndarray, temperature: float, cutoff: float, budget: int
) -> Proposal:
    """The policy, from the two best candidates of every slot: `ids`, `scores [S, 2]`.

    Up to `budget` slots with `m[i] < cutoff`, by `m[i]·(1 + 0.2 i)`, take their second candidate with probability
    `1 / (1 + exp(m/T'))`, `T' = T/(1 + 1.5 m)`. Work: two scores a draw.
    """
    tokens = ids[:, 0].tolist()
    margin = margins(scores)
    unsure = [slot for slot, m in enumerate(margin) if m < cutoff]
    drawn = sorted(unsure, key=lambda slot: margin[slot] * (1 + LATER_SLOT * slot))[:budget]
    context = fingerprint(draft.committed) if drawn else 0
    for slot in drawn:
        m, (first, second) = margin[slot], ids[slot].tolist()
        odds = math.exp(-m * (1 + SHARPENING * m) / temperature)
        if uniform(context, draft.anchor, SALT, slot, first, second) < odds / (1 + odds):
            tokens[slot] = second
    return Proposal(tuple(tokens), work=2 * len(drawn))


ADVANCED_BOLTZMANN = Method(
    "10",
    "advanced-boltzmann",
    "V10 Advanced Boltzmann",
    "DFlash's tokens, but a draw between the two best where they are close; the full logits come to the host",
    select,
    settings={"temperature": 0.06, "cutoff": 0.15, "budget": 1},
    grid={"temperature": (0.03, 0.06, 0.1, 0.16), "cutoff": (0.05, 0.15, 0.35), "budget": (1, 2)},
)
