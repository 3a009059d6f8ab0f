"""Ridge fits of methods 12 and 14: the verifier's scores on the drafter's candidates, estimated from what a round knows.

The verifier's scores F are its log-probabilities where it chose the slot's true token, so each is conditioned on the true
prefix. Logits and log-probabilities differ by a constant in a slot, which centring (12) and differences (14) remove.
The answers on disk hold its likeliest tokens only (TEACHER_CANDIDATES). A candidate that is not among them gets a floor,
FLOOR_BELOW under the least likely of them: all that is known is that it lies under that one, and how many candidates are
floored stands in the diagnostics. A slot where no candidate is known teaches and judges nothing.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_mini_lab.methods.m12_parareal import (
    FEATURES,
    coarse_scores,
    correction,
    features,
    fixed_features,
    refine,
    slot_positions,
)
from dflash_mini_lab.methods.m14_simple_parareal import target_gap
from dflash_mini_lab.scores import centred, margins
from dflash_mini_lab.training.blocks import Blocks, cut_blocks
from dflash_mini_lab.training.frozen import Drafted, FrozenDrafter
from dflash_mini_lab.training.shards import Sequence
from dflash_mini_lab.types import GapFit, PararealFit

PENALTY = 1e-3
STATES = (0.0, 0.5, 0.75)
"""τ of the states q_τ = (1 - τ) G + τ F that the correction of method 12 is trained at."""
OMEGA, ROUNDS, CLIP = 0.75, 2, 6.0
FLOOR_BELOW = 1.0
"""Nats under the verifier's least likely kept token at which a candidate outside them is put."""


@dataclass(frozen=True)
class Samples:
    """n blocks, S slots, K candidates by drafted score, best first; float64.

    `scores` drafted logits, `fine` the verifier's log-probabilities, `known` where those are measured, `[n, S, K]`;
    `similar [n, S, K, 2]` embedding products as method 12 has them; `inside [n, S]` slots inside their answer.
    """

    scores: np.ndarray
    fine: np.ndarray
    known: np.ndarray
    similar: np.ndarray
    inside: np.ndarray


def collect_samples(
    frozen: FrozenDrafter, sequences: list[Sequence], anchors: int, candidates: int, generator: torch.Generator, group: int = 8
) -> Samples:
    """`anchors` random blocks of each sequence."""
    parts = []
    for start in range(0, len(sequences), group):
        part = sequences[start : start + group]
        blocks = cut_blocks(part, anchors, frozen.config.block_size, generator)
        drafted = frozen.draft(blocks, candidates)
        for row, sequence in enumerate(part):
            parts.append(_sample(frozen.embedding, sequence, blocks, drafted, row))
    return Samples(*(np.concatenate([part[index] for part in parts]) for index in range(len(parts[0]))))


def _sample(embedding: Tensor, sequence: Sequence, blocks: Blocks, drafted: Drafted, row: int) -> list[np.ndarray]:
    """The fields of Samples for one sequence's blocks."""
    ids, anchors, inside = drafted.ids[row], blocks.anchors[row], drafted.labels[row] >= 0
    fine, known = fine_scores(ids, blocks.likely_ids[row], blocks.likely[row])
    last = embedding[drafted.anchor_ids[row]].float()
    prefix = embedding[sequence.tokens].float().cumsum(0)[anchors] / (anchors[:, None] + 1)
    others = torch.stack([last, prefix], dim=-1)[:, None]
    similar = embedding[ids].float() @ others / embedding.shape[1] ** 0.5
    return [t.cpu().numpy() for t in (drafted.scores[row].double(), fine.double(), known, similar.double(), inside)]


def fine_scores(ids: Tensor, likely_ids: Tensor, likely: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of candidates `ids [..., K]` under the verifier's kept tokens `likely_ids`, `likely [..., T]`, the least
    likely last; and where they are measured, `[..., K]` both."""
    log_likely = likely.clamp(min=torch.finfo(torch.float32).tiny).log()
    same = ids[..., None] == likely_ids[..., None, :]
    known = same.any(-1)
    measured = log_likely.gather(-1, same.long().argmax(-1))
    return torch.where(known, measured, log_likely[..., -1:] - FLOOR_BELOW), known


def ridge(features: np.ndarray, wanted: np.ndarray, penalty: float = PENALTY) -> tuple[np.ndarray, float]:
    """`features [n, f]`, `wanted [n]` → weights `[f]` and intercept that minimise `Σ (wanted - X w - b)² + penalty · ‖w‖²`.

    The intercept is free of the penalty, so it is what centring leaves. Without a row nothing is corrected: zeros.
    """
    if not len(features):
        return np.zeros(features.shape[1]), 0.0
    mean, wanted_mean = features.mean(0), wanted.mean()
    x = features - mean
    weights = np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ (wanted - wanted_mean))
    return weights, float(wanted_mean - mean @ weights)


def fit_parareal(training: Samples, held_out: Samples | None) -> dict[str, Any]:
    """Method 12's file: standardised ridge of `centre(F) - q_τ` on the eight features, and how it does on held-out blocks."""
    taught = _taught(training)
    coarse, fine = _each(coarse_scores, training.scores), _each(centred, training.fine)
    fixed = _each(fixed_features, training.scores, training.similar)
    found, wanted = [], []
    for share in STATES:
        state = (1 - share) * coarse + share * fine
        found.append(_each(features, state, coarse, fixed)[taught].reshape(-1, len(FEATURES)))
        wanted.append((fine - state)[taught].reshape(-1))
    x = np.concatenate(found)
    mean, scale = (x.mean(0), x.std(0)) if len(x) else (np.zeros(len(FEATURES)), np.ones(len(FEATURES)))
    scale[scale == 0] = 1.0
    weights, intercept = ridge((x - mean) / scale, np.concatenate(wanted))
    fit = PararealFit(mean, scale, weights, intercept, OMEGA, ROUNDS, CLIP, training.scores.shape[-1], {})
    if held_out is not None:
        fit = replace(fit, diagnostics=judge_parareal(fit, held_out))
    return asdict(fit) | {"mean": mean.tolist(), "scale": scale.tolist(), "weights": weights.tolist()}


def judge_parareal(fit: PararealFit, samples: Samples) -> dict[str, Any]:
    """Over slots with a known candidate, before the first round and after each: mean squared distance to the verifier's centred
    scores, its ratio to the round before, and how often both prefer the same candidate."""
    taught = _taught(samples)
    if not taught.any():
        return {"held_out_slots": 0}
    coarse, fine = _each(coarse_scores, samples.scores), _each(centred, samples.fine)
    solved = [correction(fit, *block) for block in zip(coarse, map(margins, samples.scores), samples.similar, strict=True)]
    rounds = [coarse]
    for _ in range(fit.rounds):
        rounds.append(np.array([refine(fit, q, *block) for q, block in zip(rounds[-1], solved, strict=True)]))
    errors = [float(np.square(current - fine)[taught].mean()) for current in rounds]
    return {
        "held_out_slots": int(taught.sum()),
        "mse": errors,
        "contraction": [after / before if before else None for before, after in pairwise(errors)],
        "top1_agreement": [float((current.argmax(-1) == fine.argmax(-1))[taught].mean()) for current in rounds],
        "floored_candidates": float(1 - samples.known[taught].mean()),
    }


def fit_simple_parareal(training: Samples, held_out: Samples | None) -> dict[str, Any]:
    """Method 14's file: `F̂ = intercept + margin · G + slot · i/(S-1)`, G the drafted margin of the two best candidates."""
    margin, gap, known = _gaps(training)
    place = np.broadcast_to(slot_positions(margin.shape[1]), margin.shape)
    weights, intercept = ridge(np.stack([margin[known], place[known]], axis=-1), gap[known])
    fit = GapFit(intercept, float(weights[0]), float(weights[1]), {})
    if held_out is not None:
        fit = replace(fit, diagnostics=judge_simple_parareal(fit, held_out))
    return asdict(fit)


def judge_simple_parareal(fit: GapFit, samples: Samples) -> dict[str, Any]:
    """The estimate's error against the drafted margin's own (`before`), and what the policy's switches are worth.

    A switch is right where the verifier prefers the second candidate. `precision`: right switches of all; `recall`: of the
    slots where the verifier prefers the second. None where there is nothing to divide by.
    """
    margin, gap, known = _gaps(samples)
    if not known.any():
        return {"held_out_slots": 0}
    estimate = _each(lambda block: np.array(target_gap(fit, block)), margin)
    worst = np.where(samples.inside, estimate, np.inf).argmin(1)[:, None]
    switched = np.take_along_axis(estimate, worst, 1)[:, 0] < 0
    second = known & (gap < 0)
    right = switched & np.take_along_axis(second, worst, 1)[:, 0]
    before, after = (margin - gap)[known], (estimate - gap)[known]
    return {
        "held_out_slots": int(known.sum()),
        "gap_mse": {"before": float(np.square(before).mean()), "after": float(np.square(after).mean())},
        "gap_mae": {"before": float(np.abs(before).mean()), "after": float(np.abs(after).mean())},
        "sign_accuracy": {
            "before": float(((margin >= 0) == (gap >= 0))[known].mean()),
            "after": float(((estimate >= 0) == (gap >= 0))[known].mean()),
        },
        "switch_rate": float(switched.mean()),
        "precision": float(right.sum() / switched.sum()) if switched.any() else None,
        "recall": float(right.sum() / second.sum()) if second.any() else None,
    }


def _each(block: Callable[..., np.ndarray], *arrays: np.ndarray) -> np.ndarray:
    """What a method computes for one draft, for every block: `[n, …]`."""
    return np.stack([block(*parts) for parts in zip(*arrays, strict=True)])


def _taught(samples: Samples) -> np.ndarray:
    return samples.inside & samples.known.any(-1)


def _gaps(samples: Samples) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drafted margin, the verifier's signed gap on the same two tokens, and where that is known; `[n, S]` each."""
    margin, gap = (values[..., 0] - values[..., 1] for values in (samples.scores, samples.fine))
    return margin, gap, samples.inside & samples.known[..., :2].any(-1)
