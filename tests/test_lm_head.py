"""The screened LM head: the full head's own token, whatever 8 bits lose."""
from __future__ import annotations

import pytest
import torch

from dflash_mini_lab.calls import MOST_ROWS
from dflash_mini_lab.compiled import ROWS_AT_ONCE, compiled_head
from dflash_mini_lab.packed_linear import ONEDNN, PLAIN, PREFETCHED, ROUNDED, SCREENED, LinearPlan, PackedLinear, rounded_plan
from dflash_mini_lab.prefetched_ir import LEAST_TOP
from dflash_mini_lab.prefetched_linear import in_bytes, kernel
from dflash_mini_lab.targets.lm_head import FullHead, ScreenedHead

VOCABULARY, HIDDEN = 300, 64
pytestmark = pytest.mark.skipif(kernel() is None, reason="no LLVM, fused multiply-add or OpenMP here")


def heads(weight: torch.Tensor) -> tuple[FullHead, ScreenedHead]:
    screened = compiled_head(weight)
    assert screened is not None
    return FullHead(PackedLinear(weight, None, LinearPlan(*weight.shape, PLAIN))), ScreenedHead(weight, screened)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 300.0, 1e5])
@pytest.mark.parametrize("rows", [1, 6, MOST_ROWS + 3])
def test_greedy_tokens_are_the_full_head_s(rows: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        full, screened = heads(torch.randn(VOCABULARY, HIDDEN, generator=generator) * scale)
        hidden = torch.randn(rows, HIDDEN, generator=generator)
        assert torch.equal(screened.greedy(hidden, VOCABULARY), full.greedy(hidden, VOCABULARY))
        assert torch.equal(screened.greedy(hidden, 77), full.greedy(hidden, 77)), "padded rows of the head are never chosen"


def test_rows_that_8_bits_cannot_tell_apart_are_told_apart() -> None:
    generator = torch.Generator().manual_seed(2)
    row = torch.randn(HIDDEN, generator=generator)
    weight = row + torch.randn(VOCABULARY, HIDDEN, generator=generator) * 1e-5
    full, screened = heads(weight)
    hidden = torch.randn(8, HIDDEN, generator=generator)
    whole, scales = in_bytes(weight)
    coarse = (hidden @ whole.float().T * scales).argmax(-1)
    assert not torch.equal(coarse, full.greedy(hidden, VOCABULARY)), "the case must be one that the screen alone gets wrong"
    assert torch.equal(screened.greedy(hidden, VOCABULARY), full.greedy(hidden, VOCABULARY))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_equal_logits_go_to_the_lowest_id_in_any_number_of_threads(threads: int) -> None:
    weight = torch.zeros(200, 4)
    weight[[70, 71, 199]] = 1.0
    weight[199] = 9.0
    full, screened = heads(weight)
    hidden, before = torch.ones(1, 4), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert full.greedy(hidden, 199).tolist() == screened.greedy(hidden, 199).tolist() == [70]
        assert screened.greedy(hidden, 200).tolist() == [199]
        assert screened.greedy(torch.zeros(1, 4), 200).tolist() == [0]
    finally:
        torch.set_num_threads(before)


def test_a_head_that_is_not_float32_or_not_finite_has_no_screen() -> None:
    assert compiled_head(torch.zeros(8, 4)) is not None
    assert compiled_head(torch.zeros(8, 4, dtype=torch.float64)) is None
    assert compiled_head(torch.zeros(8, 5)) is None, "two inputs are one step"
    assert compiled_head(torch.tensor([[1.0, float("nan")]])) is None


def test_what_rounding_may_have_changed_is_bounded_for_every_row_and_every_state() -> None:
    """One large number coarsens its own row and no other; a state with one large number is rounded coarsely itself."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(2 * ROWS_AT_ONCE, HIDDEN, generator=generator)
    weight[-1, 0] = -1e4
    hidden = torch.randn(40, HIDDEN, generator=generator)
    hidden[:8, 3] = 1e4
    full, screened = heads(weight)
    assert torch.equal(screened.greedy(hidden, len(weight)), full.greedy(hidden, len(weight)))
    job, kept = screened._screened.job[0], screened._screened._kept
    lost, x = kept["lost_at"][: len(weight)], hidden[:MOST_ROWS].contiguous()
    assert lost[-1] > 50 * lost[:-1].max()
    coarse = kernel().product(x, screened._screened._screen, None).double()  # type: ignore[union-attr]
    exact = x.double() @ weight.double().T
    bound = lost.double() * x.double().norm(dim=1, keepdim=True) + job["lost_by_inputs"] * x.double().abs().amax(1, keepdim=True)
    assert ((coarse - exact).abs() <= bound).all()
    tight = (coarse - exact).abs().amax(1) / bound.amax(1)
    assert float(tight.max()) > 0.02, "a bound that nothing comes near finds no token faster"


@pytest.mark.parametrize("large", [1e4, 1e-33])
def test_the_rounding_of_the_state_is_part_of_the_bound(large: float) -> None:
    """Of a head that 8 bits hold, nothing else is lost."""
    generator = torch.Generator().manual_seed(5)
    whole, scales = in_bytes(torch.randn(4 * VOCABULARY, HIDDEN, generator=generator))
    whole[:, 0] = 127  # so that it is its own rounding
    weight = whole * scales[:, None]
    hidden = torch.randn(MOST_ROWS, HIDDEN, generator=generator) * min(large, 1.0)
    hidden[:, 3] = large
    full, screened = heads(weight)
    assert torch.equal(screened.greedy(hidden, len(weight)), full.greedy(hidden, len(weight)))
    compiled = screened._screened
    coarse = kernel().product(hidden, compiled._screen, None).double()  # type: ignore[union-attr]
    off = (coarse - hidden.double() @ weight.double().T).abs().amax(1)
    top = hidden.double().abs().amax(1).clamp_min(LEAST_TOP)
    by_weights = float(compiled._kept["lost_at"].max()) * hidden.double().norm(dim=1)
    assert (off <= by_weights + float(compiled.job[0]["lost_by_inputs"]) * top).all()
    assert (off > by_weights).any()


def test_a_screen_is_planned_only_where_it_was_measured_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(8, 4)
    slow, fast = dict.fromkeys(range(1, 9), 10.0), dict.fromkeys(range(1, 9), 16.0)
    plan = LinearPlan(8, 4, PREFETCHED, slow, {1: 5.0})

    def measured(rates: dict[int, float]) -> None:
        monkeypatch.setattr("dflash_mini_lab.packed_linear._rates", lambda *_: rates)

    measured(dict.fromkeys(range(1, 9), 9.0))
    assert rounded_plan([weight], plan, SCREENED) is plan
    measured(fast)
    assert rounded_plan([weight], plan, SCREENED) == LinearPlan(8, 4, SCREENED, fast, {1: 5.0})
    assert rounded_plan([weight], plan) == LinearPlan(8, 4, ROUNDED, fast, {1: 5.0})
    assert rounded_plan([weight], LinearPlan(8, 4, ONEDNN, slow, slow)).storage == ROUNDED
    assert rounded_plan([weight], LinearPlan(8, 4, ONEDNN, slow, slow), SCREENED).storage == ONEDNN
    for other in (LinearPlan(8, 5, PREFETCHED, slow, slow), LinearPlan(8, 4, PLAIN)):
        assert rounded_plan([weight], other) is other
