"""Draft trees by themselves: the best against all there are, the accepted path, and what a call's rows know of each other."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from math import exp

import numpy as np
import pytest
from tests.tables import propose, table

from dflash_mini_lab.methods import by_key
from dflash_mini_lab.scores import log_softmax
from dflash_mini_lab.trees import accepted_rows, best_first, depth, depths, row_table

TREE, DFLASH = by_key("15"), by_key("01")
Prefix = tuple[int, ...]


def prefixes(nodes: Sequence[tuple[int, int]], parents: Sequence[int]) -> list[Prefix]:
    """Each node by its choices from slot 0 on."""
    found: list[Prefix] = []
    for (slot, candidate), parent in zip(nodes, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), candidate))
        assert len(found[-1]) == slot + 1, "a child is one slot behind its parent"
    return found


def log_tables(order: np.random.Generator, slots: int, candidates: int) -> list[list[float]]:
    return [log_softmax(sorted(row, reverse=True)) for row in order.normal(0, 2, (slots, candidates)).tolist()]


def worth(prefix: Prefix, scores: list[list[float]]) -> float:
    return exp(sum(scores[slot][candidate] for slot, candidate in enumerate(prefix)))


def every_prefix(slots: int, candidates: int) -> list[Prefix]:
    return [prefix for length in range(1, slots + 1) for prefix in product(range(candidates), repeat=length)]


@pytest.mark.parametrize(("slots", "candidates"), [(1, 4), (2, 3), (3, 2)])
def test_no_tree_of_as_many_nodes_expects_more_accepted_tokens(slots: int, candidates: int) -> None:
    order = np.random.default_rng(slots)
    known = every_prefix(slots, candidates)
    for _ in range(6):
        scores = log_tables(order, slots, candidates)
        for nodes in range(1, min(5, len(known)) + 1):
            closed = (set(some) for some in combinations(known, nodes))
            expected = max(
                sum(worth(prefix, scores) for prefix in some)
                for some in closed
                if all(len(prefix) == 1 or prefix[:-1] in some for prefix in some)
            )
            found = prefixes(*best_first(scores, nodes))
            assert len(set(found)) == nodes
            assert sum(worth(prefix, scores) for prefix in found) == pytest.approx(expected)


def test_the_nodes_are_the_best_prefixes_in_their_order_and_parents_come_first() -> None:
    order = np.random.default_rng(9)
    for slots, candidates in ((1, 5), (4, 4), (5, 3), (7, 2)):
        for _ in range(20):
            scores = log_tables(order, slots, candidates)
            nodes, parents = best_first(scores, 7)
            found = [worth(prefix, scores) for prefix in prefixes(nodes, parents)]
            best = sorted((worth(prefix, scores) for prefix in every_prefix(slots, candidates)), reverse=True)[:7]
            assert found == pytest.approx(best)
            assert all(parent < place for place, parent in enumerate(parents))
            for fewer in range(1, 7):
                assert best_first(scores, fewer) == (nodes[:fewer], parents[:fewer])


def test_where_there_are_no_more_prefixes_the_tree_is_smaller_and_equal_ones_go_deeper_first() -> None:
    assert best_first([[0.0], [0.0]], 5) == ([(0, 0), (1, 0)], [-1, 0])
    assert best_first([[-1.0, -1.0]], 5) == ([(0, 0), (0, 1)], [-1, -1])
    assert best_first([], 5) == ([], [])
    nodes, parents = best_first([[0.0, 0.0]] * 3, 4)
    assert nodes == [(0, 0), (1, 0), (2, 0), (2, 1)]
    assert parents == [-1, 0, 1, 1]


#     anchor (row 0)
#     ├── 10 (1) ── 20 (3) ── 30 (4)
#     │         └── 21 (5)
#     └── 11 (2) ── 20 (6)
TOKENS, PARENTS = (10, 11, 20, 30, 21, 20), (-1, -1, 0, 2, 0, 1)


@pytest.mark.parametrize(
    ("greedy", "rows"),
    [
        ([9, 9, 9, 9, 9, 9, 9], [0]),
        ([10, 9, 20, 9, 9, 9, 9], [0, 1]),
        ([10, 21, 9, 9, 9, 9, 9], [0, 1, 5]),
        ([10, 20, 9, 30, 9, 9, 9], [0, 1, 3, 4]),
        ([11, 20, 9, 9, 9, 9, 9], [0, 2]),
        ([11, 9, 20, 9, 9, 9, 9], [0, 2, 6]),
        ([20, 20, 20, 30, 9, 9, 9], [0]),
    ],
)
def test_the_path_follows_the_targets_own_token_of_every_row(greedy: list[int], rows: list[int]) -> None:
    assert accepted_rows(TOKENS, PARENTS, greedy) == rows


def test_a_chain_is_accepted_up_to_its_first_wrong_token() -> None:
    order = np.random.default_rng(0)
    for _ in range(50):
        tokens, greedy = order.integers(0, 2, 5).tolist(), order.integers(0, 2, 6).tolist()
        right = next((place for place in range(5) if tokens[place] != greedy[place]), 5)
        assert accepted_rows(tokens, range(-1, 4), greedy) == list(range(right + 1))


def test_depths_count_the_nodes_above() -> None:
    assert depths(PARENTS) == [0, 0, 1, 2, 1, 1]
    assert (depth(PARENTS), depth([-1, -1]), depth([])) == (3, 1, 0)


def test_a_row_knows_its_depth_its_ancestors_and_where_the_inputs_before_it_stand() -> None:
    """Rows 0 … 6 as above; two earlier inputs, at places 0 and 1, so that row r's own is at place 2 + r."""
    table = np.array(row_table([-1, *(parent + 1 for parent in PARENTS)], history=2))
    assert table[:, 0].tolist() == [0, 1, 1, 2, 3, 2, 2]
    assert table[:, 1:3].tolist() == [[0, 1], [1, 2], [1, 2], [2, 3], [3, 5], [2, 3], [2, 4]]
    seen = [set(np.flatnonzero(row).tolist()) for row in table[:, 3:]]
    assert seen == [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 3, 4}, {0, 1, 5}, {0, 2, 6}]
    assert row_table([-1, 0], history=0) == [[0, 1, 0], [1, 1, 1]]


# The method.


def test_15_spends_its_tokens_on_alternatives_where_the_first_slot_is_unsure() -> None:
    """log q: slot 0 -0.64 and -0.74; slot 1 -0.05 and -3.05; slot 2 -0.31 and -1.31. So 100 at -0.64, 100 100 at -0.69, 110 at
    -0.74, 110 100 at -0.79, and 100 100 100 at -1.00, before 110 100 100."""
    first = [[0.1, 0.0, -30.0], [3.0, 0.0, -30.0], [0.0, -1.0, -30.0]]
    drafts = table(first), table([*first, [9.0, 0.0, 0.0], [9.0, 0.0, 0.0]])
    narrow, wide = (propose(TREE, draft, temperature=1.0) for draft in drafts)
    assert (narrow.tokens, narrow.parents) == ((100, 100, 110), (-1, 0, -1))
    assert (wide.tokens, wide.parents) == ((100, 100, 110, 100, 100), (-1, 0, -1, 2, 1))
    assert (narrow.work, wide.work) == (9, 15)


def test_15_of_one_candidate_or_of_a_sure_drafter_is_01() -> None:
    order = np.random.default_rng(1)
    for _ in range(20):
        draft = table(order.normal(0, 3, (6, 8)))
        sure = table(20 * np.eye(8)[order.integers(0, 8, 6)])
        for proposal, same in ((propose(TREE, draft, candidates=1), draft), (propose(TREE, sure), sure)):
            assert proposal.tokens == propose(DFLASH, same).tokens
            assert proposal.parents == (-1, 0, 1, 2, 3, 4)


def test_15_goes_wider_at_a_higher_temperature() -> None:
    draft = table([[2.0, 0.0, -1.0]] * 6)
    deep = [depth(propose(TREE, draft, temperature=t).parents) for t in (0.2, 1.0, 5.0)]
    assert deep == sorted(deep, reverse=True)
    assert deep[0] > deep[-1]
