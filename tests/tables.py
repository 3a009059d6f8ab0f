"""Drafts from tables of logits, hand-written or random, random heads beside them, and random trees: for tests without a model."""
from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_mini_lab.trees import depths
from dflash_mini_lab.types import FusedHead, GapFit, Heads, JumpHead, MarkovHead, PairHead, PararealFit, Proposal

NEVER = -30.0
"""A logit that no draw at the temperatures of these tests can reach."""


@dataclass
class Table:
    """A draft from its logits `[S, V]`; `ids [V]` as a reduced draft vocabulary has them. What only some methods ask for is
    random unless given: `c [H]`, `h [S, H]`, `embedding [vocabulary, H]`, and the jump head's `jump_logits [J, V]`."""

    rows: np.ndarray
    ids: np.ndarray
    committed: Sequence[int] = (4, 5, 6)
    heads: Heads = field(default_factory=Heads)
    c: np.ndarray | None = None
    h: np.ndarray | None = None
    embedding: np.ndarray | None = None
    jump_logits: np.ndarray | None = None

    @property
    def anchor(self) -> int:
        return self.committed[-1]

    @property
    def slots(self) -> int:
        return len(self.rows)

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(-self.rows, axis=1, kind="stable")[:, :k]
        return self.ids[order], np.take_along_axis(self.rows, order, 1)

    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        return self.rows, self.ids

    def context(self) -> np.ndarray:
        return self.c

    def states(self) -> np.ndarray:
        return self.h

    def jump(self, ids: np.ndarray) -> np.ndarray:
        assert len(ids) == sum(self.heads.jump.offsets <= self.slots)
        return np.take_along_axis(self.jump_logits[: len(ids)], np.searchsorted(self.ids, ids), 1)

    def embeddings(self, ids: np.ndarray) -> np.ndarray:
        return self.embedding[ids]

    def prefix_embedding(self) -> np.ndarray:
        return self.embedding[list(self.committed)].mean(axis=0)


def table(rows: object, committed: Sequence[int] = (4, 5, 6)) -> Table:
    logits = np.array(rows, dtype=np.float32)
    return Table(logits, 100 + 10 * np.arange(logits.shape[1]), committed)


def slots_with_margins(*values: float, committed: Sequence[int] = (4, 5, 6)) -> Table:
    """Per slot the best token is 100, the second 110, the third out of reach."""
    return table([[margin, 0.0, NEVER] for margin in values], committed)


def propose(method, draft: Table, **settings: float):
    return method.select(draft, {**method.settings, **settings})


def slots_of(proposal: Proposal) -> list[int]:
    """The slot of each token: of a chain its place, of a tree its depth."""
    assert all(-1 <= parent < place for place, parent in enumerate(proposal.parents)), "parents come first"
    assert len(proposal.parents) in (0, len(proposal.tokens))
    return depths(proposal.parents) if proposal.parents else list(range(len(proposal.tokens)))


def random_parents(rows: int, order: random.Random) -> list[int]:
    """The anchor, then rows that follow any earlier one; now and then a chain or a star."""
    kind = order.choice(("any", "any", "any", "chain", "star"))
    return [-1, *({"any": order.randrange(row), "chain": row - 1, "star": 0}[kind] for row in range(1, rows))]


def path_to(row: int, parents: Sequence[int]) -> list[int]:
    return [*(path_to(parents[row], parents) if parents[row] >= 0 else []), row]


def contexts(count: int) -> list[list[int]]:
    order = np.random.default_rng(7)
    return [order.integers(0, 50_000, 12).tolist() for _ in range(count)]


def random_heads(
    vocabulary: int, hidden: int, slots: int, rank: int = 4, seed: int = 0, offsets: Sequence[int] = (2, 4, 6)
) -> Heads:
    """All heads, with values large enough to change choices. Names, shapes and types are those that drafters/heads.py gives."""
    order = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return order.normal(0.0, 1.0, shape).astype(np.float32)

    inner, jumps = hidden + 3, len(offsets)
    return Heads(
        pair=PairHead(normal(vocabulary, rank), normal(vocabulary, rank), normal(rank, hidden), normal(rank)),
        jump=JumpHead(
            np.array(offsets), normal(jumps, hidden), 1 + normal(hidden), normal(inner, hidden), normal(hidden, inner)
        ),
        fused=FusedHead(np.array(offsets), normal(rank, hidden), normal(jumps, rank), normal(vocabulary, rank)),
        markov=MarkovHead(
            normal(vocabulary, rank), normal(vocabulary, rank), normal(slots), 0.3 * normal(hidden + rank), 2 + normal(1)
        ),
        parareal=PararealFit(
            order.normal(size=8), 0.5 + order.random(8), order.normal(size=8), 0.1, 0.75, 2, 6.0, 6, {"rounds": []}
        ),
        gap=GapFit(-1.0, 0.5, 0.5, {}),
    )


def random_tables(count: int, slots: Sequence[int] = range(1, 16), vocabulary: int = 50_000) -> list[Table]:
    """Random logits, smooth, with many ties, all equal, or with -inf in most places; ids out of a larger vocabulary."""
    order = np.random.default_rng(3)
    drafts = []
    for number in range(count):
        shape = (slots[number % len(slots)], int(order.integers(2, 30)))
        smooth = order.normal(0.0, order.choice([0.05, 1.0, 10.0]), shape)
        sparse = np.where(order.random(shape) < 0.8, -np.inf, smooth)
        logits = (smooth, order.integers(0, 3, shape), np.zeros(shape), sparse)[number % 4]
        ids = np.sort(order.choice(vocabulary, shape[1], replace=False))
        committed = order.integers(0, vocabulary, int(order.integers(1, 50))).tolist()
        drafts.append(Table(logits.astype(np.float32), ids, committed))
    return drafts


def with_heads(drafts: list[Table], heads: Heads, hidden: int, vocabulary: int = 50_000) -> list[Table]:
    """The same drafts with `heads` and with random vectors for whatever a method may ask."""
    order = np.random.default_rng(11)
    embedding = order.normal(size=(vocabulary, hidden)).astype(np.float32)
    for draft in drafts:
        draft.heads, draft.embedding = heads, embedding
        draft.c, draft.h = (order.normal(size=shape).astype(np.float32) for shape in (hidden, (draft.slots, hidden)))
        draft.jump_logits = order.normal(size=(len(heads.jump.offsets), len(draft.ids))).astype(np.float32)
    return drafts


def every_slot_has_a_candidate(draft: Table) -> bool:
    return bool(np.isfinite(draft.rows).any(axis=1).all())
