"""Scores over draft candidates: the best of them, margins, stateless noise, pair scores, residual steps. NumPy only.

A round reads every weight of a model, so what a selection needs is never in cache, code included: a NumPy routine costs about
10 µs at its first call in a round and 1 µs at the next. Few different ones are worth more than few calls (docs/lab-log.md).
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dflash_mini_lab.types import Draft, PairHead

FINGERPRINT_TOKENS = 32
"""The fingerprint reads this many of the last tokens, and how many there are, so that it costs the same in a long context."""

LARGEST = 1e4
"""Logits and margins are clipped to this before arithmetic on them, so that an infinite one leaves no NaN behind."""

_64_BITS = 2**64 - 1
POLYNOMIAL = 0x9E3779B97F4A7C15
"""The fingerprint is a polynomial in this odd number, its coefficients the tokens, finished by SplitMix."""

WIDEST_NOISE = 41.0
"""No two Gumbel values lie further apart: that of the uniform 2⁻⁵³ is -3.6, that of 1 - 2⁻⁵³ is 36.7."""


def margins(scores: np.ndarray) -> list[float]:
    """`scores [S, ≥ 2]`, best first → `m[i] = z[i,0] - z[i,1]` in logits, S of them; 0 for equal scores, infinite ones too."""
    return [first - second if first != second else 0.0 for first, second in scores[:, :2].tolist()]


def best(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """`logits [S, V]`, V ≥ k → the columns `[S, k]` of the k best (int64) and their scores, best first; of equal ones the lower
    column. Every row needs k finite logits; a column of -inf may come twice."""
    slots = np.arange(len(logits))
    columns, scores = np.empty((len(logits), k), np.int64), np.empty((len(logits), k), logits.dtype)
    for place in range(k):
        found = logits.argmax(axis=1)
        columns[:, place], scores[:, place] = found, logits[slots, found]
        if place < k - 1:
            logits[slots, found] = -np.inf  # hidden and put back: a copy of the logits would cost more than all searches
    for place in range(k - 1):
        logits[slots, columns[:, place]] = scores[:, place]
    return columns, scores


def splitmix64(state: int) -> int:
    """The SplitMix64 output for a 64-bit state."""
    z = (state + 0x9E3779B97F4A7C15) & _64_BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return z ^ (z >> 31)


def hashed(seed: int, *parts: int) -> int:
    """One 64-bit hash of `seed`, itself a hash, and of non-negative integers below 2⁶⁴, in their order. Plain integers: a handful
    of hashes costs less than NumPy's first operation."""
    state = seed
    for part in parts:
        state = splitmix64(state ^ part)
    return state


def fingerprint(committed: Sequence[int]) -> int:
    """64 bits from committed token ids and their number, never from floats: every device and dtype draws the same noise."""
    state = len(committed)
    for token in committed[-FINGERPRINT_TOKENS:]:
        state = (state * POLYNOMIAL + int(token)) & _64_BITS
    return splitmix64(state)


def uniform(seed: int, *parts: int) -> float:
    """Stateless noise: for `hashed(seed, *parts)` a multiple of 2⁻⁵³ in the open interval (0, 1)."""
    return max(hashed(seed, *parts) >> 11, 1) * 2.0**-53  # the one value in 2⁵³ that would be 0 is the next one


def gumbel(uniform: float) -> float:
    """A standard Gumbel value: the argmax of `z/T + gumbel` is a draw from `softmax(z/T)`."""
    return -math.log(-math.log(uniform))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """`1 / (1 + exp(-x))`, without an overflow at either end."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def log_softmax(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    """`log softmax(z/T)` of one slot's logits, the largest first. Plain numbers: a handful costs less than NumPy's first call."""
    largest = min(logits[0], LARGEST)
    scaled = [(max(min(z, LARGEST), -LARGEST) - largest) / temperature for z in logits]
    normaliser = math.log(sum(map(math.exp, scaled)))
    return [z - normaliser for z in scaled]


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
