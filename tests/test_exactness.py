from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tiny_lab import POSITIONS, VOCABULARY, encode, stock_model
from tiny_models import FAMILIES, WINDOWED, tiny_model

from dflash_mini_lab.exactness import (
    Reference,
    Top2,
    first_divergence,
    judge,
    reference_greedy,
    stock_block_logits,
    stock_logits,
)

# Reference 5, 1: at position 1 the stock model preferred token 1 to token 2 by 0.10, and to token 3 by 5.
ROWS = np.array([[0, 0, 0, 0, 0, 9.0], [0, 3.0, 2.9, -2.0, 0, 0]])
REFERENCE = Reference((5, 1), "budget", (Top2((5, 0), (9.0, 0.0)), Top2((1, 2), (3.0, 2.9))))


def constructed(difference: float):
    """Two paths whose logits differ by `difference` at most."""

    def stock(tokens: Sequence[int]) -> np.ndarray:
        return ROWS[: len(tokens) + 1]

    def path(tokens: Sequence[int]) -> np.ndarray:
        other = stock(tokens).copy()
        other[0, 4] -= difference
        return other

    return stock, path


def never(tokens: Sequence[int]) -> np.ndarray:
    raise AssertionError("an exact answer needs no logits")


def test_equal_tokens_are_exact_and_no_logits_are_asked() -> None:
    assert judge(REFERENCE, (5, 1), never, never) is None


@pytest.mark.parametrize(("difference", "expected"), [(0.2, "tie"), (0.06, "tie"), (0.04, "violation"), (0.0, "violation")])
def test_a_gap_within_twice_the_difference_of_the_paths_is_a_tie(difference: float, expected: str) -> None:
    mismatch = judge(REFERENCE, (5, 2), *constructed(difference))
    assert mismatch is not None
    assert mismatch.verdict == expected
    assert mismatch.position == 1
    assert mismatch.gap == pytest.approx(0.1)
    assert mismatch.largest_logit_difference == pytest.approx(difference)


def test_a_token_that_the_reference_did_not_nearly_choose_is_a_violation() -> None:
    mismatch = judge(REFERENCE, (5, 3), *constructed(0.2))
    assert mismatch is not None
    assert mismatch.verdict == "violation"
    assert mismatch.gap == pytest.approx(5.0)


@pytest.mark.parametrize("tokens", [(5,), (5, 1, 1), ()])
def test_a_wrong_length_is_a_violation(tokens: tuple[int, ...]) -> None:
    mismatch = judge(REFERENCE, tokens, never, never)
    assert mismatch is not None
    assert mismatch.verdict == "violation"
    assert mismatch.position == min(len(tokens), 2)


def test_logits_that_are_no_numbers_are_a_violation_that_can_still_be_written() -> None:
    stock, _ = constructed(0.0)
    mismatch = judge(REFERENCE, (5, 2), stock, lambda tokens: stock(tokens) * np.nan)
    assert mismatch is not None
    assert mismatch.verdict == "violation"
    json.dumps(mismatch.as_json(str), allow_nan=False)


def test_a_padded_row_of_the_head_is_a_violation_however_the_reference_likes_it() -> None:
    """Token 2 is within a tie of the reference's own, but the target's vocabulary ends before it."""
    stock, path = constructed(0.2)
    assert (mismatch := judge(REFERENCE, (5, 2), stock, path)) is not None
    assert mismatch.verdict == "tie"
    assert (mismatch := judge(REFERENCE, (5, 2), stock, lambda tokens: path(tokens)[:, :2])) is not None
    assert mismatch.verdict == "violation"


def test_the_record_names_the_reference_top_two() -> None:
    mismatch = judge(REFERENCE, (5, 2), *constructed(0.2))
    assert mismatch is not None
    record = mismatch.as_json(lambda ids: f"<{ids[0]}>")
    assert record["reference_top2"] == [{"token": 1, "text": "<1>", "logit": 3.0}, {"token": 2, "text": "<2>", "logit": 2.9}]


@pytest.mark.parametrize(
    ("reference", "tokens", "position"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [2, 2], 0), ([1, 2], [1], 1), ([1], [1, 2], 1), ([], [], None)],
)
def test_first_divergence(reference: list[int], tokens: list[int], position: int | None) -> None:
    assert first_divergence(reference, tokens) == position


@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
def test_the_reference_is_what_the_library_generates(family: str) -> None:
    model, prompt = tiny_model(family), [5, 9, 12, 40]
    ids = torch.tensor([prompt])
    ones = torch.ones_like(ids)
    generated = model.generate(ids, attention_mask=ones, do_sample=False, max_new_tokens=20, eos_token_id=None, pad_token_id=0)
    reference = reference_greedy(model, prompt, 20, frozenset(), POSITIONS)
    assert list(reference.tokens) == generated[0, len(prompt) :].tolist()
    assert reference.finish == "budget"
    assert [top.tokens[0] for top in reference.top2] == list(reference.tokens)
    assert all(top.gap >= 0 for top in reference.top2)


def test_the_reference_keeps_the_stop_token_and_nothing_after_it() -> None:
    tokens = reference_greedy(stock_model(), encode("hello"), 20, frozenset(), POSITIONS).tokens
    stop = tokens[4]
    stopped = reference_greedy(stock_model(), encode("hello"), 20, frozenset({stop}), POSITIONS)
    assert stopped.tokens == tokens[: tokens.index(stop) + 1]
    assert stopped.finish == "stop"


def test_the_reference_chooses_among_the_vocabulary_alone() -> None:
    prompt, whole = encode("hello"), reference_greedy(stock_model(), encode("hello"), 12, frozenset(), POSITIONS)
    limit = max(whole.tokens)
    narrowed = reference_greedy(stock_model(), prompt, 12, frozenset(), POSITIONS, limit)
    assert max(token for top in narrowed.top2 for token in top.tokens) < limit
    first = whole.tokens.index(limit)
    assert narrowed.tokens[:first] == whole.tokens[:first]


def test_the_reference_ends_with_the_context() -> None:
    prompt = [1] * (POSITIONS - 3)
    reference = reference_greedy(stock_model(), prompt, 20, frozenset(), POSITIONS)
    assert reference.finish == "context"
    assert len(prompt) + len(reference.tokens) == POSITIONS + 1  # the last token is emitted and never enters the cache


def test_replayed_logits_choose_the_reference_again_row_by_row_and_in_one_block() -> None:
    model, prompt = stock_model(), encode("hello")
    reference = reference_greedy(model, prompt, 9, frozenset(), POSITIONS)
    single = stock_logits(model, prompt, reference.tokens[:-1])
    block = stock_block_logits(model, prompt, reference.tokens[:-1])
    assert single.shape == block.shape == (9, VOCABULARY)
    assert single.argmax(axis=1).tolist() == list(reference.tokens)
    np.testing.assert_allclose(single, block, atol=1e-4)


def test_asking_for_logits_leaves_no_inference_mode_behind() -> None:
    stock_logits(stock_model(), [1, 2], [3])
    reference_greedy(stock_model(), [1, 2], 2, frozenset(), POSITIONS)
    assert not torch.is_inference_mode_enabled()
