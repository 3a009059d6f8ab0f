"""The nouns that every layer shares: proposals, heads, drafts, methods, steps, and a user's errors. No logic, no torch."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np


class UserError(Exception):
    """A mistake or a limit that the user can act on: one line that says what is wrong, where, and what to do. Exit status 2."""


@dataclass(frozen=True)
class Proposal:
    """0 … S draft tokens for the slots after the anchor, and the number of candidate scores computed to choose them.

    A chain, one token a slot, unless `parents` makes it a tree: the place of each token's parent among `tokens`, -1 the anchor.
    A parent comes before its children, and the loop may verify any number of the first tokens: the best come first.
    """

    tokens: tuple[int, ...]
    work: int = 0
    parents: tuple[int, ...] = ()

    @classmethod
    def along(cls, ids: np.ndarray, choice: np.ndarray, work: int) -> Proposal:
        """The tokens of a path: candidate `choice[i]` of slot i, from `ids [S, K]`."""
        return cls(tuple(row[index] for row, index in zip(ids.tolist(), choice.tolist(), strict=True)), work)


@dataclass(frozen=True, eq=False)
class PairHead:
    """Low-rank scores of one token after another: `previous`, `next [V, r]`, and their gate from the context, `gate_weight
    [r, H]`, `gate_bias [r]`. Here and below V is the target's whole vocabulary and H the drafter's hidden size, which
    is the target's unless the drafter has a width of its own; arrays are float32."""

    previous: np.ndarray
    next: np.ndarray
    gate_weight: np.ndarray
    gate_bias: np.ndarray


@dataclass(frozen=True, eq=False)
class JumpHead:
    """A pass of its own from the context: `offsets [J]` (int64, slots counted from 1), `offset_embedding [J, H]`, `norm [H]`,
    `up [M, H]`, `down [H, M]`. The drafter runs it."""

    offsets: np.ndarray
    offset_embedding: np.ndarray
    norm: np.ndarray
    up: np.ndarray
    down: np.ndarray


@dataclass(frozen=True, eq=False)
class FusedHead:
    """A residual on slot states: `offsets [J]` (int64, slots counted from 1), `slot [r, H]`, `offset_embedding [J, r]`,
    `token [V, r]`."""

    offsets: np.ndarray
    slot: np.ndarray
    offset_embedding: np.ndarray
    token: np.ndarray


@dataclass(frozen=True, eq=False)
class MarkovHead:
    """A bias from the token before, `previous`, `next [V, r]`, `scale [S]`, and the confidence that a draft survives up to a
    slot, `confidence_weight [H + r]`, `confidence_bias [1]`."""

    previous: np.ndarray
    next: np.ndarray
    scale: np.ndarray
    confidence_weight: np.ndarray
    confidence_bias: np.ndarray


@dataclass(frozen=True, eq=False)
class PararealFit:
    """Method 12's ridge regression on standardised features (`mean`, `scale`, `weights [8]`), and how it is applied."""

    mean: np.ndarray
    scale: np.ndarray
    weights: np.ndarray
    intercept: float
    omega: float
    rounds: int
    clip: float
    candidates: int
    diagnostics: Mapping[str, Any]


@dataclass(frozen=True)
class GapFit:
    """Method 14's ridge regression: the target's gap between the two best is about `intercept + margin·m[i] + slot·i/(S-1)`."""

    intercept: float
    margin: float
    slot: float
    diagnostics: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Heads:
    """What was trained beside a drafter. A field's name is what `Method.needs` calls it; None: this drafter has it not."""

    pair: PairHead | None = None
    jump: JumpHead | None = None
    fused: FusedHead | None = None
    markov: MarkovHead | None = None
    parareal: PararealFit | None = None
    gap: GapFit | None = None

    @property
    def present(self) -> tuple[str, ...]:
        return tuple(item.name for item in fields(self) if getattr(self, item.name) is not None)


NO_HEADS = Heads()


class Draft(Protocol):
    """One forward pass of the drafter for `slots` (S) slots after `anchor`. A method pays for exactly what it asks. Arrays may be
    the drafter's own: they hold until its next pass."""

    anchor: int
    slots: int
    committed: Sequence[int]
    """Prompt and committed new tokens, the anchor last."""

    @property
    def heads(self) -> Heads:
        """The drafter's; those that the method `needs` are there."""
        ...

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids `[S, k]` (int64, the target's vocabulary) and logits `[S, k]` (float32), best first, reduced where the logits are.

        At most as many columns as the draft vocabulary has.
        """
        ...

    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        """All logits `[S, V]` (float32) on the host, V the draft vocabulary, and the target's id of every column `[V]` (int64).

        They are the draft's own: a method leaves them as it found them.
        """
        ...

    def context(self) -> np.ndarray:
        """C `[H]` (float32): the fused target feature of the last token before the anchor."""
        ...

    def states(self) -> np.ndarray:
        """The drafter's final slot states `[S, H]` (float32), those that its logits are made of."""
        ...

    def jump(self, ids: np.ndarray) -> np.ndarray:
        """The jump head's scores `[J, K]` (float32) of candidates `ids [J, K]`, row j for its j-th offset; offsets past the
        last slot have no row. For methods that need `jump`: the pass itself was run, and timed, as drafting."""
        ...

    def embeddings(self, ids: np.ndarray) -> np.ndarray:
        """Rows of the target's embedding, `[*ids.shape, the target's hidden size]` (float32)."""
        ...

    def prefix_embedding(self) -> np.ndarray:
        """Mean (float32) of the `embeddings` of `committed`, the anchor's included."""
        ...


Select = Callable[[Draft, Mapping[str, float]], Proposal]


@dataclass(frozen=True)
class Method:
    """One decoding path. `select` is pure: no state between rounds, it never sees target, cache, answer or clock.

    `select` is None for method 00, which drafts nothing. `grid` maps a setting to the values that calibration may try.
    """

    key: str
    slug: str
    name: str
    summary: str
    select: Select | None
    settings: Mapping[str, float] = field(default_factory=dict)
    grid: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    settings_of: str | None = None
    """Key of the method whose calibrated values this one takes over, for every setting that it has."""
    needs: tuple[str, ...] = ()
    """Names of the heads (fields of `Heads`) without which it cannot run."""
    trees: bool = False
    """Whether it proposes trees, which not every target can verify."""


@dataclass(frozen=True)
class Step:
    """One round. `committed` counts tokens the user gets: the round's `accepted + 1`, without the bonus token
    `max(1, accepted)`, cut at a stop token or the budget.

    Seconds: `draft + select + verify + rest` is the round's whole time.
    """

    rows: int
    proposed: int
    accepted: int
    committed: int
    work: int
    draft: float
    select: float
    verify: float
    rest: float
    depth: int | None = None
    """Of a tree: the slots that it reached. A chain reaches as many as it proposed."""
    path: tuple[int, ...] = ()
    """Of a tree: the rows of the accepted drafts, the anchor's row being 0. A chain's are 1, 2, …, `accepted`."""


@dataclass(frozen=True)
class Decoded:
    """The answer to one prompt. The first token comes out of the prefill: `len(tokens) == 1 + Σ committed`."""

    tokens: tuple[int, ...]
    finish: str
    """`stop`, `budget` or `context` (the model's last position was reached)."""
    prefill_seconds: float
    steps: tuple[Step, ...]

    @property
    def decode_seconds(self) -> float:
        return sum(step.draft + step.select + step.verify + step.rest for step in self.steps)


class Clock(Protocol):
    def now(self) -> float:
        """Seconds. A device clock waits for the device first."""
        ...


class Session(Protocol):
    """One prompt on a target: a cache that extends, verifies and rolls back. All ids are the target's."""

    @property
    def length(self) -> int:
        """Tokens in the cache; the anchor is not among them."""
        ...

    def prefill(self) -> int:
        """Run the prompt; returns the first greedy token."""
        ...

    def decode_one(self, token: int) -> int:
        """The single-row path of method 00: extend by `token`, return the next greedy token. Nothing to roll back."""
        ...

    def verify(self, tokens: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        """Extend by W tokens; returns the greedy token after each. `keep` must follow before the next call.

        Each token follows the one before it, unless `parents` makes them a tree: the row that each follows, an earlier one, and
        -1 for what is in the cache. A row then sees the cache and its own ancestors. Only where the target verifies `trees`.
        """
        ...

    def keep(self, rows: int | Sequence[int]) -> None:
        """Keep these rows of the last `verify` call, in their order, and roll the others back; a number n stands for the first
        n. Of a tree they are a path: the first follows the cache, and each other one the row before it."""
        ...

    def take_features(self) -> Any:
        """Tapped outputs `[rows, taps · hidden]` of the tokens that entered the cache for good since the last call."""
        ...


class Target(Protocol):
    """A verifier."""

    stop_ids: frozenset[int]
    max_positions: int
    vocabulary: int
    """Ids that may be emitted. A head may have more rows, as padding; they are never proposed and never chosen."""
    trees: bool
    """Whether its sessions verify draft trees."""
    copies: bool
    """Whether a session owns its state, so that a deep copy of it, but for the target, is another session."""

    def start(self, prompt_ids: Sequence[int], capacity: int, taps: Sequence[int] | None) -> Session:
        """A session for `prompt_ids` that will hold up to `capacity` tokens.

        `taps`: target layers whose outputs a drafter will read (may be empty). None: a session of method 00, which decodes
        single rows, records nothing and cannot be rolled back.
        """
        ...


class DrafterSession(Protocol):
    def draft(self, committed: Sequence[int]) -> Draft:
        """One drafter pass after `committed[-1]` (the anchor), for the whole block, as it was trained."""
        ...


class Drafter(Protocol):
    taps: tuple[int, ...]
    block_size: int
    """Anchor included: a draft has at most `block_size - 1` slots."""
    heads: Heads

    def start(self, session: Session, capacity: int, needs: Sequence[str] = ()) -> DrafterSession:
        """`needs`: the method's, so that a head with a pass of its own runs within `draft`, and only for whom it is for."""
        ...
