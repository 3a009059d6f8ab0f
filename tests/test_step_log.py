"""Every figure of a hand-written log, worked out by hand."""
from __future__ import annotations

import pytest

from dflash_mini_lab.measurement import step_log
from dflash_mini_lab.types import Decoded, Step

# Two requests, block size 4 (three slots). Request one: 4 rounds, request two: 1 round whose stop token cut the commit.
ONE = {
    "rows": [4, 4, 2, 1], "proposed": [3, 3, 1, 0], "accepted": [3, 0, 1, 0], "committed": [4, 1, 2, 1], "work": [3, 3, 1, 0],
    "draft": [1.0, 1.0, 1.0, 0.0], "select": [0.5, 0.5, 0.5, 0.0], "verify": [4.0, 4.0, 3.0, 2.0], "rest": [0.5, 0.5, 0.5, 0.0],
}  # fmt: skip
TWO = {
    "rows": [4], "proposed": [3], "accepted": [2], "committed": [2], "work": [3],
    "draft": [1.0], "select": [0.5], "verify": [4.0], "rest": [0.5],
}  # fmt: skip
NONE: dict[str, list[float]] = {name: [] for name in ONE}


def test_tau_macro_is_the_mean_of_requests_and_micro_the_ratio_of_sums() -> None:
    assert step_log.request_tau(ONE) == 8 / 4
    assert step_log.request_tau(TWO) == 2 / 1
    assert step_log.tau([ONE, {**TWO, "committed": [3]}]) == ((2 + 3) / 2, 11 / 5)


def test_a_request_that_ended_with_its_prefill_counts_in_no_tau() -> None:
    assert step_log.tau([ONE, NONE]) == (2.0, 2.0)
    assert step_log.tau([NONE]) == (None, None)


def test_method_00_has_tau_one_exactly() -> None:
    normal = {**NONE, "rows": [1] * 63, "committed": [1] * 63}
    assert step_log.tau([normal]) == (1.0, 1.0)


def test_slots_conditional_and_joint() -> None:
    # proposed 3 3 1 0 3, accepted 3 0 1 0 2 → slot 0: 3 right of 4 proposed; slot 1: 2 of the 2 that reached it; slot 2: 1 of 2
    conditional, joint = step_log.slot_acceptance([ONE, TWO])
    assert conditional == [3 / 4, 2 / 2, 1 / 2]
    assert joint == [3 / 5, 2 / 5, 1 / 5]


def test_joint_acceptance_sums_to_the_accepted_drafts_per_round() -> None:
    _, joint = step_log.slot_acceptance([ONE, TWO])
    assert sum(joint) == pytest.approx(step_log.total([ONE, TWO], "accepted") / step_log.rounds([ONE, TWO]))


def test_a_slot_that_no_round_reached_has_no_conditional_rate() -> None:
    log = {**NONE, "rows": [3], "proposed": [2], "accepted": [0], "committed": [1]}
    assert step_log.slot_acceptance([log]) == ([0.0, None], [0.0, 0.0])


# A tree method's log of a block of 4. Rows 1 … 3; accepted: rows 2 and 3; row 3 alone; none; then a round that had no room.
GROWN = {
    **NONE, "rows": [4, 4, 4, 1], "proposed": [3, 3, 3, 0], "accepted": [2, 1, 0, 0], "committed": [3, 2, 1, 1],
    "depth": [2, 1, 3, 0], "path": [[2, 3], [3], [], []],
}  # fmt: skip


def test_of_a_tree_a_slot_is_a_depth_not_a_place() -> None:
    # depth 2 1 3 0, accepted 2 1 0 0 → slot 0: 2 of 3 rounds that had it; slot 1: 1 of the 1 that went so deep; slot 2: none
    assert step_log.slot_acceptance([GROWN]) == ([2 / 3, 1 / 1, None], [2 / 4, 1 / 4, 0 / 4])
    conditional, joint = step_log.slot_acceptance([GROWN, ONE])
    assert conditional == [(2 + 2) / (3 + 3), (1 + 1) / (1 + 1), 1 / 1]
    assert sum(joint) == pytest.approx(step_log.total([GROWN, ONE], "accepted") / step_log.rounds([GROWN, ONE]))


def test_what_narrower_calls_would_have_accepted_is_counted_by_rows() -> None:
    assert [step_log.accepted_within([GROWN], width).tolist() for width in (1, 2, 3, 4)] == [
        [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [2, 1, 0, 0]
    ]
    assert [step_log.accepted_within([ONE], width).tolist() for width in (1, 2, 3, 4)] == [
        [0, 0, 0, 0], [1, 0, 1, 0], [2, 0, 1, 0], [3, 0, 1, 0]
    ]
    assert step_log.accepted_within([], 3).tolist() == []


def test_depth_and_path_are_kept_where_trees_were_proposed_and_nowhere_else() -> None:
    chain = Step(2, 1, 1, 2, 0, 0.5, 0.5, 0.5, 0.5)
    tree = Step(4, 3, 2, 3, 0, 0.5, 0.5, 0.5, 0.5, depth=2, path=(1, 3))
    assert set(step_log.columns(Decoded((1, 2, 3), "budget", 0.1, (chain,)))) == set(ONE)
    log = step_log.columns(Decoded((1, 2, 3), "budget", 0.1, (tree, chain)))
    assert (log["depth"], log["path"]) == ([2, 1], [[1, 3], []])


def test_histogram_of_accepted_lengths() -> None:
    assert step_log.accepted_histogram([ONE, TWO]) == [2, 1, 1, 1]
    assert step_log.accepted_histogram([NONE]) == []


def test_phases_sum_to_the_decode_time() -> None:
    phases = step_log.phase_seconds([ONE, TWO])
    assert phases == {"draft": 4.0, "select": 2.0, "verify": 17.0, "rest": 2.0}


def test_economics_use_the_rounds_own_widths() -> None:
    # single-row decode 2 s; v(1), v(2), v(4) = 1, 1.5, 2; rounds of 4 4 2 1 4 rows → mean v = (2+2+1.5+1+2)/5 = 1.7
    found = step_log.economics([ONE, TWO], [1, 2, 4], [2.0, 3.0, 4.0])
    assert found is not None
    assert found["draft_cost"] == pytest.approx((4.0 + 2.0 + 2.0) / 5 / 2.0)
    assert found["break_even_tau"] == pytest.approx(0.8 + 1.7)
    assert found["expected_speedup"] == pytest.approx((10 / 5) / 2.5)


def test_no_rounds_have_no_economics() -> None:
    assert step_log.economics([NONE], [1], [2.0]) is None
