"""The screened LM head: the full head's own token, whatever bfloat16 loses."""
from __future__ import annotations

import pytest
import torch

from dflash_mini_lab.packed_linear import ONEDNN, PLAIN, SCREENED, LinearPlan, PackedLinear, screen_plan
from dflash_mini_lab.targets.lm_head import FullHead, ScreenedHead

VOCABULARY, HIDDEN = 300, 64


def heads(weight: torch.Tensor) -> tuple[FullHead, ScreenedHead]:
    plain = LinearPlan(*weight.shape, PLAIN)
    return FullHead(PackedLinear(weight, None, plain)), ScreenedHead(weight, PackedLinear(weight.bfloat16(), None, plain))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_greedy_tokens_are_the_full_head_s(scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        full, screened = heads(torch.randn(VOCABULARY, HIDDEN, generator=generator) * scale)
        hidden = torch.randn(6, HIDDEN, generator=generator) * scale
        assert torch.equal(screened.greedy(hidden, VOCABULARY), full.greedy(hidden, VOCABULARY))


def test_rows_that_bfloat16_cannot_tell_apart_are_told_apart() -> None:
    generator = torch.Generator().manual_seed(2)
    row = torch.randn(HIDDEN, generator=generator)
    weight = row + torch.randn(VOCABULARY, HIDDEN, generator=generator) * 1e-5
    full, screened = heads(weight)
    hidden = torch.randn(8, HIDDEN, generator=generator)
    coarse = screened.screen(hidden.bfloat16()).argmax(-1)
    assert not torch.equal(coarse, full.greedy(hidden, VOCABULARY)), "the case must be one that the screen alone gets wrong"
    assert torch.equal(screened.greedy(hidden, VOCABULARY), full.greedy(hidden, VOCABULARY))


def test_few_rows_are_computed_in_full_where_one_token_is_clear() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    _, screened = heads(weight)
    assert screened.candidates(weight[7:8] * 3, VOCABULARY).tolist() == [7]


def test_equal_logits_go_to_the_lowest_id_and_padded_rows_to_none() -> None:
    weight = torch.zeros(5, 4)
    weight[1] = weight[3] = 1.0
    weight[4] = 9.0
    full, screened = heads(weight)
    hidden = torch.ones(1, 4)
    assert full.greedy(hidden, 4).tolist() == screened.greedy(hidden, 4).tolist() == [1]


def test_a_screen_is_planned_only_where_it_was_measured_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(8, 4)
    plan = LinearPlan(8, 4, ONEDNN, {1: 10.0, 2: 10.0}, {1: 5.0, 2: 5.0})

    def measured(rate: float) -> None:
        found = LinearPlan(8, 4, ONEDNN, {1: rate, 2: rate}, {1: 1.0, 2: 1.0})
        monkeypatch.setattr("dflash_mini_lab.packed_linear.measure_plan", lambda weights: found)

    measured(4.0)
    assert screen_plan(weight, plan) is plan
    measured(8.0)
    assert screen_plan(weight, plan) == LinearPlan(8, 4, SCREENED, {1: 16.0, 2: 16.0}, {1: 5.0, 2: 5.0})
    assert screen_plan(weight.double(), plan) is plan
    unmeasured = LinearPlan(8, 4, PLAIN)
    assert screen_plan(weight, unmeasured) is unmeasured
