"""Held-out figures of the heads: what each adds to the drafter's own scores, over anchors whose whole block lies in its answer.

Accepted drafts are those of choosing left to right. With the true previous token in every slot the figure is the same as with
the chosen one: they differ only after the first miss, where nothing counts any more.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_mini_lab.training.frozen import Drafted, FrozenDrafter
from dflash_mini_lab.training.head_model import JUMP_WEIGHT, Heads, prefix_survival
from dflash_mini_lab.training.losses import expected_accepted


@torch.no_grad()
def look_at(heads: Heads, frozen: FrozenDrafter, parts: list[Drafted]) -> dict[str, Any]:
    """Every head's figures beside those without it (`base`). `parts`: held-out blocks, cut to the candidates that methods see.

    `accuracy` is a list by slot (pair, markov) or by offset (jump, fused; `alone` is the jump head without the drafter).
    """
    found = [_hits(heads, frozen, part.whole_blocks()) for part in parts]
    blocks = sum(int(part["base"].shape[1]) for part in found)
    if not blocks:
        return {"held_out_anchors": 0}
    joined = {name: torch.cat([part[name] for part in found], dim=1)[0] for name in found[0]}
    base, at = joined["base"], heads.jump.places
    at_offsets = {"offsets": heads.jump.offsets.tolist(), "base_accuracy": _by_slot(base[:, at])}
    return {
        "held_out_anchors": blocks,
        "base": _left_to_right(base),
        "pair": _left_to_right(joined["pair"]),
        "markov": _left_to_right(joined["markov"]),
        "jump": {**at_offsets, "accuracy": _by_slot(joined["jump"]), "alone": _by_slot(joined["alone"])},
        "fused": {**at_offsets, "accuracy": _by_slot(joined["fused"])},
        "confidence": judge_confidence(joined["confidence"].flatten(), joined["survival"].flatten()),
    }


def judge_confidence(confidence: Tensor, survival: Tensor) -> dict[str, Any]:
    """Brier score and area under the ROC curve of probabilities `[n]` for outcomes `[n]` (bool).

    `brier_of_the_rate`: the score of always saying how often prefixes survive. `auc` is None where only one outcome occurs.
    """
    rate = survival.float().mean()
    lost, kept = confidence[~survival].sort().values, confidence[survival]
    below = torch.searchsorted(lost, kept).double()
    not_above = torch.searchsorted(lost, kept, right=True).double()
    return {
        "survival_rate": _rounded(rate),
        "brier": _rounded((confidence - survival.float()).square().mean()),
        "brier_of_the_rate": _rounded(rate * (1 - rate)),
        "auc": _rounded(((below + not_above) / (2 * len(lost))).mean()) if len(lost) and len(kept) else None,
    }


def _hits(heads: Heads, frozen: FrozenDrafter, drafted: Drafted) -> dict[str, Tensor]:
    """What `look_at` averages: bool `[1, blocks, S or J]` by name, and the confidences."""
    at = heads.jump.places
    ids, scores, labels = drafted.ids, drafted.scores, drafted.labels
    chosen, before = heads.markov.choose(drafted)
    jump = frozen.head(frozen.model.norm(heads.jump(drafted.context)))
    lookahead = scores[..., at, :] + JUMP_WEIGHT * jump.gather(-1, drafted.columns[..., at, :])
    fused = scores[..., at, :] + heads.fused(drafted.hidden, ids)

    def hits(scores: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        return ids.gather(-1, scores.argmax(-1, keepdim=True))[..., 0] == labels

    return {
        "base": hits(scores, ids, labels),
        "pair": hits(scores + heads.pair(drafted.previous, drafted.context, ids), ids, labels),
        "markov": hits(scores + heads.markov(drafted.previous, ids), ids, labels),
        "jump": hits(lookahead, ids[..., at, :], labels[..., at]),
        "alone": frozen.draft_to_target[jump.argmax(-1)] == labels[..., at],
        "fused": hits(fused, ids[..., at, :], labels[..., at]),
        "confidence": torch.sigmoid(heads.confidence(drafted.hidden, heads.markov.previous[before])),
        "survival": prefix_survival(chosen, labels),
    }


def _left_to_right(hits: Tensor) -> dict[str, Any]:
    return {"accuracy": _by_slot(hits), "accepted": _rounded(expected_accepted(hits).float().mean())}


def _by_slot(hits: Tensor) -> list[float]:
    return [_rounded(value) for value in hits.float().mean(0)]


def _rounded(value: Tensor) -> float:
    return round(value.item(), 4)
