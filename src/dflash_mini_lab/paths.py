"""From scores to a path through the candidates: Viterbi, anchored gap fill, and where a proposal ends. NumPy only.

A path is one candidate index a slot, `choice [S]`; a slot that has none yet holds -1.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

Neighbour = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""`(slots [n], candidate of the slot beside each [n]) → pair scores [n, K]` of the slots' own candidates."""


def viterbi(nodes: np.ndarray, first: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The path of the greatest sum `nodes[i, k]` + `first[k]` (slot 0) + `edges[i - 1, j, k]`; of equal ones the lower indices.

    nodes `[S, K]`, first `[K]`, edges `[S - 1, K, K]`.
    """
    best = nodes[0] + first
    came_from = []
    for node, edge in zip(nodes[1:], edges, strict=True):
        totals = best[:, None] + edge
        came_from.append(totals.argmax(axis=0))
        best = totals.max(axis=0) + node
    path = [int(best.argmax())]
    for before in reversed(came_from):
        path.append(int(before[path[-1]]))
    return np.array(path[::-1])


def unchosen(slots: int) -> np.ndarray:
    return np.full(slots, -1)


def repick(scores: np.ndarray, choice: np.ndarray, slots: np.ndarray, forward: Neighbour, backward: Neighbour) -> int:
    """Choose in `slots`, all from the same snapshot of `choice`, by `scores + forward(left) + backward(right)`.

    A neighbour counts only where it is chosen; slot 0's left one, the anchor, always is. Returns how many pair scores that took.
    """
    totals = scores[slots]  # a copy
    wanted, chosen, last = slots.tolist(), choice.tolist(), len(choice) - 1
    left = [place for place, slot in enumerate(wanted) if slot == 0 or chosen[slot - 1] >= 0]
    right = [place for place, slot in enumerate(wanted) if slot < last and chosen[slot + 1] >= 0]
    if left:
        after = slots[left]
        totals[left] += forward(after, choice[after - 1])
    if right:
        before = slots[right]
        totals[right] += backward(before, choice[before + 1])
    choice[slots] = totals.argmax(axis=1)
    return (len(left) + len(right)) * scores.shape[1]


def fill_gaps(scores: np.ndarray, choice: np.ndarray, forward: Neighbour, backward: Neighbour) -> int:
    """Anchored gap fill: until none is left, every open slot that is slot 0 or has a chosen neighbour is chosen.

    `choice` is completed in place. Returns how many pair scores that took.
    """
    work = 0
    while min(chosen := choice.tolist(), default=0) < 0:
        known = [0, *chosen, -1]  # the anchor, the slots, and nothing: slot i's neighbours are known[i] and known[i + 2]
        ready = [slot for slot, own in enumerate(chosen) if own < 0 <= max(known[slot], known[slot + 2])]
        work += repick(scores, choice, np.array(ready), forward, backward)
    return work


def horizon(ends: np.ndarray, least: int = 0) -> int:
    """Slots before the first that `ends [S]` (bool) marks, all without a mark; at least `least`."""
    first = int(ends.argmax())
    return max(first if ends[first] else len(ends), least)
