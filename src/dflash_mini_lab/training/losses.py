"""Losses over the slots of a block. Targets are the target model's own tokens; slot weights are detached."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

UNTRAINED = -100
"""Label of a slot that is past the end of its sequence or whose token is outside the draft vocabulary."""


def slot_cross_entropy(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """`log_probabilities [..., S, V]`, `labels [..., S]` (UNTRAINED allowed) → cross-entropy `[..., S]`, 0 where untrained."""
    flat = F.nll_loss(log_probabilities.flatten(0, -2), labels.flatten(), ignore_index=UNTRAINED, reduction="none")
    return flat.view(labels.shape)


def teacher_loss(logits: Tensor, labels: Tensor, rows: Tensor, likely: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The drafter's loss and its gradient `[..., S, V]` by its `logits [..., S, V]`.

    `labels [..., S]` (UNTRAINED allowed) are the target's choices; `rows [..., S, candidates]` its likeliest tokens in the draft
    vocabulary (UNTRAINED: not in it, left out), `likely` their probabilities. `share` of a slot's loss is the cross-entropy to
    those, the rest that to the choice; slots weigh as dpace_weights says, relative to their sum. By hand, since the vocabulary is
    passed over four times where automatic differentiation does it ten times.
    """
    logits, trained = logits.detach().float(), labels >= 0
    total = logits.logsumexp(-1, keepdim=True)
    choice, rows, likely = labels.clamp(min=0)[..., None], rows.clamp(min=0), likely * (rows >= 0)
    hard = (total - logits.gather(-1, choice))[..., 0] * trained
    soft = (likely * (total - logits.gather(-1, rows))).sum(-1)
    weights = dpace_weights(torch.exp(-hard)) * trained
    weights = weights / weights.sum().clamp(min=1e-6)
    loss = (weights * torch.lerp(hard, soft, share)).sum()
    to_choice, to_likely = (weights * (1 - share))[..., None], weights[..., None] * share * likely
    gradient = (logits - total).exp_().mul_(to_choice + to_likely.sum(-1, keepdim=True))
    return loss, gradient.scatter_add_(-1, choice, -to_choice).scatter_add_(-1, rows, -to_likely)


def dpace_weights(probability: Tensor, alpha: float = 0.5) -> Tensor:
    """D-PACE: w_j = Σ_{m ≥ j} Π_{i ≤ m} ((1 - α) q_i + α), `probability [..., S]` of the true token in each slot, detached."""
    reach = ((1 - alpha) * probability.detach() + alpha).cumprod(dim=-1)
    return reach.flip(-1).cumsum(-1).flip(-1)


def expected_accepted(hits: Tensor) -> Tensor:
    """`hits [..., S]` bool → drafts accepted, `Σ_j Π_{i ≤ j} hit_i`, `[...]`."""
    return hits.long().cumprod(dim=-1).sum(dim=-1)
