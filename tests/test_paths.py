"""Viterbi against every path there is, the order in which gaps are filled, and where a proposal ends."""
from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from dflash_mini_lab.paths import fill_gaps, horizon, repick, unchosen, viterbi


def test_viterbi_finds_the_best_of_all_paths() -> None:
    order = np.random.default_rng(0)
    for _ in range(60):
        slots, k = int(order.integers(1, 6)), int(order.integers(1, 5))
        nodes, first, edges = order.normal(size=(slots, k)), order.normal(size=k), order.normal(size=(slots - 1, k, k))

        def total(path: tuple[int, ...], nodes=nodes, first=first, edges=edges) -> float:
            links = sum(edges[i, a, b] for i, (a, b) in enumerate(pairwise(path)))
            return first[path[0]] + links + sum(nodes[i, c] for i, c in enumerate(path))

        best = max(product(range(k), repeat=slots), key=total)
        assert tuple(viterbi(nodes, first, edges).tolist()) == best


def test_viterbi_takes_the_lower_index_of_equal_paths() -> None:
    assert viterbi(np.zeros((4, 3)), np.zeros(3), np.zeros((3, 3, 3))).tolist() == [0, 0, 0, 0]
    assert viterbi(np.full((2, 2), -np.inf), np.zeros(2), np.zeros((1, 2, 2))).tolist() == [0, 0]


class Asked:
    """Pair scores that write down what was asked for: `(slot, candidate beside it)`."""

    def __init__(self, candidates: int = 2) -> None:
        self.candidates = candidates
        self.steps: list[tuple[str, list[tuple[int, int]]]] = []

    def side(self, name: str):
        def scores(slots: np.ndarray, beside: np.ndarray) -> np.ndarray:
            self.steps.append((name, list(zip(slots.tolist(), beside.tolist(), strict=True))))
            return np.zeros((len(slots), self.candidates))

        return scores

    def fill(self, *choice: int) -> tuple[list[int], int]:
        filled = np.array(choice)
        work = fill_gaps(np.tile([1.0, 0.0], (len(choice), 1)), filled, self.side("forward"), self.side("backward"))
        return filled.tolist(), work


NONE = -1


def test_a_gap_is_filled_from_snapshots_outwards_and_from_the_anchor() -> None:
    """Slot 2 of five: first 0 (after the anchor), 1 (before 2) and 3 (after 2), none of which sees another; then 4."""
    asked = Asked()
    choice, work = asked.fill(NONE, NONE, 1, NONE, NONE)
    assert [(name, [slot for slot, _ in pairs]) for name, pairs in asked.steps] == [
        ("forward", [0, 3]),
        ("backward", [1]),
        ("forward", [4]),
    ]
    assert asked.steps[0][1][1] == (3, 1)
    assert asked.steps[1][1] == [(1, 1)], "before the candidate of slot 2, not after that of slot 0"
    assert asked.steps[2][1] == [(4, 0)], "after the candidate that slot 3 took"
    assert (choice, work) == ([0, 0, 1, 0, 0], 4 * 2)


def test_a_slot_between_two_chosen_ones_hears_both() -> None:
    """Slots 1 and 3 of five: everything else in one step; 0 hears the anchor and 1, 2 hears 1 and 3, 4 hears 3."""
    asked = Asked()
    choice, work = asked.fill(NONE, 1, NONE, 0, NONE)
    (first, forward), (second, backward) = asked.steps
    assert (first, second) == ("forward", "backward")
    assert [slot for slot, _ in forward] == [0, 2, 4]
    assert forward[1:] == [(2, 1), (4, 0)]
    assert backward == [(0, 1), (2, 0)]
    assert (choice, work) == ([0, 1, 0, 0, 0], 5 * 2)


def test_without_anything_chosen_the_fill_runs_left_to_right() -> None:
    asked = Asked()
    _, work = asked.fill(NONE, NONE, NONE)
    assert [[slot for slot, _ in pairs] for _, pairs in asked.steps] == [[0], [1], [2]]
    assert work == 3 * 2


def test_a_full_path_is_left_as_it_is_and_one_slot_is_a_gap_too() -> None:
    asked = Asked()
    assert asked.fill(1, 1) == ([1, 1], 0)
    assert asked.fill(NONE) == ([0], 2)


def test_neighbours_decide_where_the_scores_are_close() -> None:
    """Slot 1: 0.0 + 3 (left) + 0 (right) against 1.0 + 0 + 1."""
    scores, choice = np.array([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), np.array([0, -1, 1])
    forward = lambda slots, left: np.array([[3.0, 0.0]])  # noqa: E731
    backward = lambda slots, right: np.array([[0.0, 1.0]])  # noqa: E731
    assert repick(scores, choice, np.array([1]), forward, backward) == 4
    assert choice.tolist() == [0, 0, 1]
    assert scores.tolist() == [[0.0, 0.0], [0.0, 1.0], [0.0, 0.0]], "the scores are left as they were"


@pytest.mark.parametrize(
    ("marks", "least", "expected"),
    [("..x.x", 0, 2), ("x...", 0, 0), ("x...", 1, 1), (".x", 1, 1), ("...", 0, 3), ("...", 1, 3), ("x", 1, 1)],
)
def test_a_proposal_ends_before_its_first_mark(marks: str, least: int, expected: int) -> None:
    assert horizon(np.array([mark == "x" for mark in marks]), least) == expected


def test_nothing_is_chosen_at_first() -> None:
    assert unchosen(3).tolist() == [-1, -1, -1]
