"""Losses over the slots of a block. Targets are the target model's own tokens; slot weights are detached."""
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

UNTRAINED = -100
"""Label of a slot that is past the end of its sequence or whose token is outside the draft vocabulary."""


def slot_cross_entropy(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """`log_probabilities [..., S, V]`, `labels [..., S]` (UNTRAINED allowed) → cross-entropy `[..., S]`, 0 where untrained."""
    flat = F.nll_loss(log_probabilities.flatten(0, -2), labels.flatten(), ignore_index=UNTRAINED, reduction="none")
    return flat.view(labels.shape)


def teacher_cross_entropy(log_probabilities: Tensor, rows: Tensor, likely: Tensor) -> Tensor:
    """Cross-entropy `[..., S]` to the target's own distribution, `-Σ_k p_k log q_k` over its likeliest tokens.

    `log_probabilities [..., S, V]` of the drafter; `rows [..., S, candidates]` of those tokens in the draft vocabulary
    (UNTRAINED: not in it, left out); `likely [..., S, candidates]` their probabilities.
    """
    known = log_probabilities.gather(-1, rows.clamp(min=0))
    return -(likely * (rows >= 0) * known).sum(-1)


def dpace_weights(probability: Tensor, alpha: float = 0.5) -> Tensor:
    """D-PACE: w_j = Σ_{m ≥ j} Π_{i ≤ m} ((1 - α) q_i + α), `probability [..., S]` of the true token in each slot, detached."""
    reach = ((1 - alpha) * probability.detach() + alpha).cumprod(dim=-1)
    return reach.flip(-1).cumsum(-1).flip(-1)


def expected_accepted(hits: Tensor) -> Tensor:
    """`hits [..., S]` bool → drafts accepted, `Σ_j Π_{i ≤ j} hit_i`, `[...]`."""
    return hits.long().cumprod(dim=-1).sum(dim=-1)
