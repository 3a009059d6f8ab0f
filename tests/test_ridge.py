"""The fits of methods 12 and 14 on hand-made scores: exact ridge, known candidates, and figures that can be checked by hand."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dflash_mini_lab.methods.m12_parareal import coarse_scores, correction, features, fixed_features
from dflash_mini_lab.methods.m14_simple_parareal import target_gap
from dflash_mini_lab.scores import centred, margins
from dflash_mini_lab.training import ridge as fits
from dflash_mini_lab.training.ridge import Samples, fine_scores, fit_parareal, fit_simple_parareal, ridge
from dflash_mini_lab.types import GapFit, PararealFit


def samples(blocks: int = 60, slots: int = 4, candidates: int = 5, seed: int = 0) -> Samples:
    """The verifier agrees with the draft up to noise; a fifth of its scores is unknown; a block in three ends early."""
    draw = np.random.default_rng(seed)
    scores = -np.sort(-draw.normal(0, 2, (blocks, slots, candidates)), axis=-1)
    similar = draw.normal(0, 1, (blocks, slots, candidates, 2))
    fine = 0.6 * scores + 0.8 * similar[..., 0] + draw.normal(0, 0.5, scores.shape) - 3.0
    inside = np.ones((blocks, slots), dtype=bool)
    inside[::3, -1] = False
    return Samples(scores, fine, draw.random(scores.shape) < 0.8, similar, inside)


def least_squares(x: np.ndarray, y: np.ndarray, penalty: float) -> tuple[np.ndarray, float]:
    """Ridge as ordinary least squares: the penalty is one more row for each weight, none for the intercept's column."""
    rows = np.concatenate([np.column_stack([x, np.ones(len(x))]), np.column_stack([np.eye(x.shape[1]) * penalty**0.5, 0 * x[0]])])
    solution, *_ = np.linalg.lstsq(rows, np.concatenate([y, 0 * x[0]]), rcond=None)
    return solution[:-1], solution[-1]


@pytest.mark.parametrize("penalty", [1e-3, 10.0])
def test_ridge_is_least_squares_on_the_augmented_system(penalty: float) -> None:
    draw = np.random.default_rng(1)
    x, y = draw.normal(3, 2, (50, 4)), draw.normal(5, 1, 50)
    weights, intercept = ridge(x, y, penalty)
    expected, free = least_squares(x, y, penalty)
    np.testing.assert_allclose(weights, expected, rtol=1e-9)
    assert intercept == pytest.approx(free, rel=1e-9)


def test_method_12_is_fitted_at_its_three_states_on_standardised_features() -> None:
    s = samples()
    fit = fit_parareal(s, None)
    rows, wanted = [], []
    for share in (0.0, 0.5, 0.75):
        for block in range(len(s.scores)):
            g, f = coarse_scores(s.scores[block]), centred(s.fine[block])
            state = (1 - share) * g + share * f
            found = features(state, g, fixed_features(s.scores[block], s.similar[block]))
            there = s.inside[block] & s.known[block].any(-1)
            rows.append(found[there].reshape(-1, 8))
            wanted.append((f - state)[there].reshape(-1))
    x, y = np.concatenate(rows), np.concatenate(wanted)
    mean, scale = x.mean(0), x.std(0)
    weights, intercept = least_squares((x - mean) / scale, y, 1e-3)
    np.testing.assert_allclose(fit["mean"], mean)
    np.testing.assert_allclose(fit["scale"], scale)
    np.testing.assert_allclose(fit["weights"], weights, rtol=1e-7, atol=1e-9)
    assert fit["intercept"] == pytest.approx(intercept, abs=1e-9)
    assert (fit["omega"], fit["rounds"], fit["clip"], fit["candidates"]) == (0.75, 2, 6.0, 5)


def test_method_14_is_ridge_on_margin_and_slot() -> None:
    s = samples()
    fit = fit_simple_parareal(s, None)
    margin, gap = s.scores[..., 0] - s.scores[..., 1], s.fine[..., 0] - s.fine[..., 1]
    there = s.inside & s.known[..., :2].any(-1)
    x = np.stack([margin, np.broadcast_to(np.arange(4) / 3, margin.shape)], axis=-1)[there]
    weights, intercept = least_squares(x, gap[there], 1e-3)
    assert [fit["margin"], fit["slot"], fit["intercept"]] == pytest.approx([*weights, intercept], rel=1e-9)


def test_the_correction_comes_closer_to_the_verifier_on_blocks_it_never_saw() -> None:
    figures = fit_parareal(samples(seed=0), samples(seed=1))["diagnostics"]
    assert len(figures["mse"]) == len(figures["top1_agreement"]) == 3
    assert figures["mse"][2] < figures["mse"][1] < figures["mse"][0]
    assert figures["contraction"] == pytest.approx([figures["mse"][1] / figures["mse"][0], figures["mse"][2] / figures["mse"][1]])
    assert figures["top1_agreement"][2] > figures["top1_agreement"][0]
    assert figures["floored_candidates"] == pytest.approx(0.2, abs=0.05)


def test_slots_past_the_end_or_without_a_known_candidate_teach_nothing() -> None:
    s = samples()
    spoilt = s.fine.copy()
    spoilt[~s.inside] = 1e3
    unknown = s.known.copy()
    unknown[5] = False
    spoilt[5] = -1e3
    expected = fit_parareal(replace(s, known=unknown), None)
    assert fit_parareal(replace(s, known=unknown, fine=spoilt), None) == expected
    expected = fit_simple_parareal(replace(s, known=unknown), None)
    assert fit_simple_parareal(replace(s, known=unknown, fine=spoilt), None) == expected


def test_the_correction_that_a_method_computes_is_the_fit_s_on_all_features() -> None:
    s = samples(blocks=5)
    draw = np.random.default_rng(4)
    fit = PararealFit(*(draw.normal(0, 1, 8) for _ in range(3)), 0.3, 0.75, 2, 6.0, 5, {})
    for scores, similar in zip(s.scores, s.similar, strict=True):
        coarse = coarse_scores(scores)
        current = coarse + draw.normal(0, 1, coarse.shape)
        slope, offset = correction(fit, coarse, margins(scores), similar)
        found = (features(current, coarse, fixed_features(scores, similar)) - fit.mean) / fit.scale @ fit.weights + fit.intercept
        np.testing.assert_allclose(slope * current + offset, found, rtol=0, atol=1e-12)


def test_where_no_candidate_is_known_nothing_is_corrected_and_nothing_switched() -> None:
    """What a preparation of seconds leaves: a drafter whose candidates are none of the verifier's likeliest tokens."""
    s = samples()
    s = replace(s, known=np.zeros_like(s.known))
    fit = fit_parareal(s, s)
    assert not np.any(fit["weights"])
    assert (fit["intercept"], fit["diagnostics"]) == (0.0, {"held_out_slots": 0})
    assert np.isfinite([*fit["mean"], *fit["scale"]]).all()
    gap = fit_simple_parareal(s, s)
    estimate = target_gap(GapFit(**{**gap, "diagnostics": {}}), s.scores[0, :, 0] - s.scores[0, :, 1])
    assert min(estimate) >= 0


def test_a_switch_is_judged_by_what_the_verifier_prefers() -> None:
    scores = np.array([[[1.0, 0.0], [3.0, 0.0]], [[0.5, 0.0], [3.0, 0.0]], [[4.0, 0.0], [4.0, 0.0]]])
    fine = np.array([[[0.0, 2.0], [5.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]], [[3.0, 0.0], [0.0, 1.0]]])
    s = Samples(scores, fine, np.ones_like(scores, dtype=bool), np.zeros((3, 2, 2, 2)), np.ones((3, 2), dtype=bool))
    figures = fits.judge_simple_parareal(fits.GapFit(-2.0, 1.0, 0.0, {}), s)  # estimates -1, 1 | -1.5, 1 | 2, 2
    assert figures["switch_rate"] == pytest.approx(2 / 3)
    assert figures["precision"] == pytest.approx(1 / 2), "the first block's switch is right, the second's is not"
    assert figures["recall"] == pytest.approx(1 / 3)
    assert figures["sign_accuracy"] == {"before": pytest.approx(3 / 6), "after": pytest.approx(3 / 6)}
    gaps, margins, estimates = np.array([-2.0, 5, 1, -1, 3, -1]), np.array([1, 3, 0.5, 3, 4, 4]), np.array([-1, 1, -1.5, 1, 2, 2])
    assert figures["gap_mae"]["before"] == pytest.approx(np.abs(margins - gaps).mean())
    assert figures["gap_mse"]["after"] == pytest.approx(((estimates - gaps) ** 2).mean())
    never = fits.judge_simple_parareal(fits.GapFit(9.0, 1.0, 0.0, {}), s)
    assert (never["switch_rate"], never["precision"], never["recall"]) == (0, None, 0)


def test_the_verifier_s_scores_are_its_log_probabilities_and_a_floor() -> None:
    likely_ids, likely = torch.tensor([[7, 3, 9]]), torch.tensor([[0.5, 0.25, 0.125]])
    fine, known = fine_scores(torch.tensor([[9, 4, 7]]), likely_ids, likely)
    assert known.tolist() == [[True, False, True]]
    np.testing.assert_allclose(fine.numpy(), np.log([[0.125, 0.125 / np.e, 0.5]]), rtol=1e-6)
    fine, _ = fine_scores(torch.tensor([[3, 4]]), likely_ids, torch.tensor([[1.0, 0.0, 0.0]]))
    assert torch.isfinite(fine).all()
