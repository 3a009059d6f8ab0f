"""Margins, the two best, and noise that is a function of token ids alone: the same in every process, on every device."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dflash_mini_lab.scores import (
    FINGERPRINT_TOKENS,
    POLYNOMIAL,
    WIDEST_NOISE,
    best,
    fingerprint,
    gumbel,
    hashed,
    margins,
    splitmix64,
    uniform,
)

INF = np.inf
MASK = 2**64 - 1
CONTEXT = [464, 2068, 7586, 21831, 11687]


def test_margins_are_differences_and_equal_infinities_have_none() -> None:
    scores = np.array([[3.0, 1.0, 0.5], [2.0, 2.0, 1.0], [1.0, -INF, -INF], [-INF, -INF, -INF], [INF, INF, 0.0], [INF, 5.0, 0.0]])
    assert margins(scores) == [2.0, 0.0, INF, 0.0, 0.0, INF]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ([1.0, 5.0, 3.0], [1, 2]),
        ([5.0, 1.0, 3.0], [0, 2]),
        ([2.0, 7.0, 7.0], [1, 2]),
        ([4.0, 4.0, 4.0], [0, 1]),
        ([4.0, 9.0, 4.0], [1, 0]),
        ([-INF, 1.0, -INF], [1, 0]),
        ([INF, 1.0, INF], [0, 2]),
    ],
)
def test_the_best_come_best_first_and_the_lower_of_equal_columns_first(row: list[float], columns: list[int]) -> None:
    logits = np.array([row, row[::-1]], dtype=np.float32)
    before = logits.copy()
    found, scores = best(logits, 2)
    assert found[0].tolist() == columns
    assert scores[0].tolist() == [row[column] for column in columns]
    assert np.array_equal(logits, before), "the draft's logits are left as they were"


def test_the_best_equal_a_stable_sort_on_random_logits_with_ties() -> None:
    order = np.random.default_rng(0)
    for _ in range(200):
        logits = order.integers(-3, 4, (order.integers(1, 6), order.integers(2, 40))).astype(np.float32)
        k = int(order.integers(1, logits.shape[1] + 1))
        found, scores = best(logits, k)
        expected = np.argsort(-logits, axis=1, kind="stable")[:, :k]
        assert np.array_equal(found, expected)
        assert np.array_equal(scores, np.take_along_axis(logits, expected, 1))


def test_splitmix64_gives_the_published_sequence() -> None:
    """Seed 1234567, the reference implementation's first three outputs."""
    states = [(1234567 + step * 0x9E3779B97F4A7C15) & MASK for step in range(3)]
    assert [splitmix64(state) for state in states] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_hash_folds_its_parts_in_order() -> None:
    assert hashed(2**64 - 1, 7, 6) == splitmix64(splitmix64((2**64 - 1) ^ 7) ^ 6)
    assert hashed(9, 1, 2) != hashed(9, 2, 1)


def test_noise_is_the_same_in_every_process_and_for_every_integer_type() -> None:
    expected = [uniform(fingerprint(CONTEXT), 9, slot, 6) for slot in range(4)]
    program = (
        "from dflash_mini_lab.scores import fingerprint, uniform\n"
        f"print([uniform(fingerprint({CONTEXT}), 9, slot, 6) for slot in range(4)])"
    )
    source = Path(__file__).resolve().parents[1] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONHASHSEED": "5"}
    printed = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == str(expected)
    polynomial = 5 * POLYNOMIAL**5 + sum(token * POLYNOMIAL ** (4 - place) for place, token in enumerate(CONTEXT))
    assert fingerprint(CONTEXT) == fingerprint(tuple(CONTEXT)) == splitmix64(polynomial & MASK)
    assert expected == [(hashed(fingerprint(CONTEXT), 9, slot, 6) >> 11) / 2**53 for slot in range(4)]
    for kind in (np.int32, np.int64, np.uint64):
        assert fingerprint(np.array(CONTEXT, kind)) == fingerprint(CONTEXT)


def test_a_fingerprint_knows_tokens_order_and_position() -> None:
    long = list(range(100, 100 + 3 * FINGERPRINT_TOKENS))
    changed = [*long[:-FINGERPRINT_TOKENS], 5, *long[-FINGERPRINT_TOKENS + 1 :]]
    assert fingerprint(long) != fingerprint(changed), "the oldest token that it reads"
    assert fingerprint([1, 2, 3]) != fingerprint([2, 1, 3])
    assert fingerprint([5, 5]) != fingerprint([5])
    assert fingerprint(long) != fingerprint(long[1:]), "the same last tokens one position earlier"


def test_uniforms_stay_inside_the_open_interval_and_no_noise_is_wider_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import dflash_mini_lab.scores as scores

    found = []
    for extreme in (0, MASK):
        monkeypatch.setattr(scores, "hashed", lambda *parts, extreme=extreme: extreme)
        found.append(uniform(1))
    assert found == [2.0**-53, 1 - 2.0**-53]
    assert 40 < gumbel(found[1]) - gumbel(found[0]) < WIDEST_NOISE


def test_uniforms_are_uniform_and_neighbours_are_independent() -> None:
    """100 000 draws; the bounds are four standard deviations of a perfect generator."""
    contexts = [fingerprint(np.random.default_rng(seed).integers(0, 50_000, 40).tolist()) for seed in range(200)]
    seeds = [[hashed(context, 11, 6, slot) for slot in range(5)] for context in contexts]
    draws = np.array([[[uniform(seed, token) for token in range(100)] for seed in slots] for slots in seeds])
    assert abs(draws.mean() - 0.5) < 4 * np.sqrt(1 / 12 / draws.size)
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    chi_square = ((counts - draws.size / 20) ** 2 / (draws.size / 20)).sum()
    assert chi_square < 19 + 4 * np.sqrt(2 * 19)
    centred = (draws - 0.5) * np.sqrt(12)
    for one, other in (
        (centred[:-1], centred[1:]),  # contexts
        (centred[:, :-1], centred[:, 1:]),  # slots
        (centred[..., :-1], centred[..., 1:]),  # token ids
    ):
        assert abs((one * other).mean()) < 4 / np.sqrt(one.size)
