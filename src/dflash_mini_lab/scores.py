"""Scores over draft candidates: margins, the two best, stateless noise, pair scores, residual steps. NumPy only."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from dflash_mini_lab.types import Draft, PairHead

FINGERPRINT_TOKENS = 32
"""The fingerprint reads this many of the last tokens, with their positions, so that it costs the same in a long context."""

LARGEST = 1e4
"""Logits and margins are clipped to this before arithmetic on them, so that an infinite one leaves no NaN behind."""

_INCREMENT, _FIRST, _SECOND = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_11, _27, _30, _31 = (np.uint64(bits) for bits in (11, 27, 30, 31))


def margins(scores: np.ndarray) -> np.ndarray:
    """`scores [S, ≥ 2]`, best first → `m[i] = z[i,0] - z[i,1]` in logits, `[S]`; 0 for equal scores, infinite ones too."""
    best, second = scores[:, 0], scores[:, 1]
    return np.subtract(best, second, out=np.zeros_like(best), where=best != second)


def top_two(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`logits [S, V]` → the columns `[S, 2]` of the two best and their scores, best first; of equal ones the lower column."""
    rows = np.arange(len(logits))
    first = logits.argmax(axis=1)
    best = logits[rows, first]
    logits[rows, first] = -np.inf  # hidden and put back: a copy of the logits would cost more than both searches
    second = logits.argmax(axis=1)
    scores = np.stack([best, logits[rows, second]], axis=1)
    logits[rows, first] = best
    return np.stack([first, second], axis=1), scores


def splitmix64(values: np.ndarray) -> np.ndarray:
    """The SplitMix64 output for every state in `values` (uint64, at least one dimension: NumPy's scalars warn when they wrap)."""
    z = values + _INCREMENT
    z = (z ^ (z >> _30)) * _FIRST
    z = (z ^ (z >> _27)) * _SECOND
    return z ^ (z >> _31)


def hashed(*parts: ArrayLike) -> np.ndarray:
    """One 64-bit hash of non-negative integers, in their order; parts broadcast against each other. uint64."""
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        state = splitmix64(state ^ np.asarray(part, dtype=np.uint64))
    return state


def fingerprint(committed: Sequence[int]) -> int:
    """64 bits from committed token ids and their positions, never from floats: every device and dtype draws the same noise."""
    tail = committed[-FINGERPRINT_TOKENS:]
    positions = np.arange(len(committed) - len(tail), len(committed))
    return int(np.bitwise_xor.reduce(hashed(positions, tail)))


def uniform(*parts: ArrayLike) -> np.ndarray:
    """Stateless noise: for every hash of `parts` a multiple of 2⁻⁵³ in the open interval (0, 1)."""
    return np.maximum(hashed(*parts) >> _11, 1) * 2.0**-53  # the one value in 2⁵³ that would be 0 is the next one


def gumbel(uniforms: np.ndarray) -> np.ndarray:
    """Standard Gumbel values: the argmax of `z/T + gumbel` is a draw from `softmax(z/T)`."""
    return -np.log(-np.log(uniforms))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """`1 / (1 + exp(-x))`, without an overflow at either end."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def centred(scores: np.ndarray) -> np.ndarray:
    """`scores [S, K]` less each slot's mean over its candidates."""
    return scores - scores.mean(axis=1, keepdims=True)


def low_rank(rows: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """`rows [n, K, r]`, `vectors [n, r]` → their products `[n, K]`."""
    return (rows @ vectors[:, :, None])[:, :, 0]


class PairScores:
    """`pair(u, v) = r^-1/2 · Σ_j A[u,j] · tanh(W C + b)_j · Bt[v,j]` between the candidates `ids [S, K]` of neighbouring slots.

    Nothing is multiplied out before it is asked for. Slot 0's left neighbour is the anchor, whatever index is given for it.
    """

    def __init__(self, head: PairHead, context: np.ndarray, anchor: int, ids: np.ndarray) -> None:
        """`context [H]`: C."""
        gate = np.tanh(head.gate_weight @ context + head.gate_bias) / np.sqrt(len(head.gate_bias), dtype=np.float32)
        earlier = np.concatenate([np.full_like(ids[:1], anchor), ids])  # row i: the candidates for slot i's left neighbour
        self._left, self._right = head.previous[earlier] * gate, head.next[ids]

    def after_anchor(self, slot: int) -> np.ndarray:
        """`[K]`: the candidates of `slot`, as if the anchor stood right before it."""
        return self._right[slot] @ self._left[0, 0]

    def forward(self, slots: np.ndarray, left: np.ndarray) -> np.ndarray:
        """`[n, K]`: the candidates of each slot after candidate `left[n]` of the slot before it."""
        return low_rank(self._right[slots], self._left[slots, left])

    def backward(self, slots: np.ndarray, right: np.ndarray) -> np.ndarray:
        """`[n, K]`: the candidates of each slot before candidate `right[n]` of the slot after it."""
        return low_rank(self._left[slots + 1], self._right[slots + 1, right])

    def edges(self) -> np.ndarray:
        """`[S - 1, K, K]`: every candidate of slot i (rows) before every one of slot i + 1 (columns)."""
        return self._left[1:-1] @ self._right[1:].swapaxes(1, 2)


def pair_scores(draft: Draft, ids: np.ndarray) -> PairScores:
    """Between a draft's candidates `ids [S, K]`, for a method that needs `pair`."""
    head = draft.heads.pair
    assert head is not None
    return PairScores(head, draft.context(), draft.anchor, ids)
