"""The nouns that every layer shares: proposals, drafts, methods, steps, and the errors a user may see. No logic, no torch."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


class UserError(Exception):
    """A mistake or a limit that the user can act on: one line that says what is wrong, where, and what to do. Exit status 2."""


@dataclass(frozen=True)
class Proposal:
    """0 … S draft tokens for the slots after the anchor, and the number of candidate scores computed to choose them."""

    tokens: tuple[int, ...]
    work: int = 0


class Draft(Protocol):
    """One forward pass of the drafter for `slots` (S) slots after `anchor`. A method pays for exactly what it asks."""

    anchor: int
    slots: int
    committed: Sequence[int]
    """Prompt and committed new tokens, the anchor last."""

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


@dataclass(frozen=True)
class Step:
    """One round. `committed` counts tokens the user gets: the round's `accepted + 1`, cut at a stop token or the budget.

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

    def verify(self, tokens: Sequence[int]) -> list[int]:
        """Extend by W tokens; returns the greedy token after each. `keep` must follow before the next call."""
        ...

    def keep(self, rows: int) -> None:
        """Keep the first `rows` rows of the last `verify` call, roll the others back."""
        ...

    def take_features(self) -> Any:
        """Tapped outputs `[rows, taps · hidden]` of the tokens that entered the cache for good since the last call."""
        ...


class Target(Protocol):
    """A verifier."""

    stop_ids: frozenset[int]
    max_positions: int

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

    def start(self, session: Session, capacity: int) -> DrafterSession:
        ...
