"""Draft trees: the best one by the drafter's scores, the path that a target accepts, and which row sees which. Plain integers.

A tree is given by its parents, which come before their children: `parents[i]` is the place of node i's parent, and -1 stands for
what is there already: the anchor of a proposal, the cache of a verify call, whose row 0 is the anchor itself.
"""
from __future__ import annotations

import heapq
from collections.abc import Sequence


def best_first(scores: Sequence[Sequence[float]], nodes: int) -> tuple[list[tuple[int, int]], list[int]]:
    """The tree of the `nodes` best prefixes, the best first: (slot, candidate) of every node, and the parents.

    `scores [S][K]`: log-probabilities, best first in every slot; a prefix's score is the sum along it (arXiv 2406.17276). None
    is above its parent's, so the first n nodes are the best tree of n for every n. Of equal ones, the one that goes on deeper
    along what was taken last. Fewer nodes where there are no more.
    """
    chosen: list[tuple[int, int]] = []
    parents: list[int] = []
    found = 0  # counts down, so that of equal scores the newest comes first
    waiting = [(-scores[0][0], found, 0, 0, -1, 0.0)] if scores else []
    while waiting and len(chosen) < nodes:
        loss, _, slot, candidate, parent, above = heapq.heappop(waiting)
        if candidate + 1 < len(scores[slot]):
            found -= 1
            heapq.heappush(waiting, (above - scores[slot][candidate + 1], found, slot, candidate + 1, parent, above))
        if slot + 1 < len(scores):
            found -= 1
            heapq.heappush(waiting, (loss - scores[slot + 1][0], found, slot + 1, 0, len(chosen), loss))
        chosen.append((slot, candidate))
        parents.append(parent)
    return chosen, parents


def accepted_rows(tokens: Sequence[int], parents: Sequence[int], greedy: Sequence[int]) -> list[int]:
    """The rows of a verify call along the target's own choices: the anchor's, 0, then those of the accepted `tokens`.

    `greedy`: the target's token after every row. Children stand behind their parent, so one look at each is enough.
    """
    rows = [0]
    for row, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
        if parent + 1 == rows[-1] and token == greedy[parent + 1]:
            rows.append(row)
    return rows


def depths(parents: Sequence[int]) -> list[int]:
    """Nodes above each node."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def depth(parents: Sequence[int]) -> int:
    """Nodes of the longest path."""
    return 1 + max(depths(parents), default=-1)


def row_table(parents: Sequence[int], history: int) -> list[list[int]]:
    """What a target must know of a call's rows, `[rows, 1 + history + rows]`: a row's depth; where the inputs of the
    `history` tokens before it stand, oldest first, in the `history` inputs before the call followed by the call's own; and 1
    for every row that it sees, itself included."""
    windows: list[list[int]] = []
    seen: list[list[int]] = []
    for row, parent in enumerate(parents):
        windows.append([*windows[parent], history + parent][1:] if parent >= 0 else list(range(history)))
        seen.append([*seen[parent]] if parent >= 0 else [0] * len(parents))
        seen[row][row] = 1
    return [[deep, *window, *sees] for deep, window, sees in zip(depths(parents), windows, seen, strict=True)]
