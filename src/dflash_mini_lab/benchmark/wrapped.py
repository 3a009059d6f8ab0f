"""A target and a session around others, which listen to them or begin them otherwise: what is not overridden is theirs."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_mini_lab.types import Session, Target


class WrappedTarget:
    """See types.Target."""

    def __init__(self, target: Target) -> None:
        self.stop_ids, self.max_positions, self.vocabulary = target.stop_ids, target.max_positions, target.vocabulary
        self.trees, self.copies = target.trees, target.copies
        self._target = target

    def start(self, prompt_ids: Sequence[int], capacity: int, taps: Sequence[int] | None) -> Session:
        return self._target.start(prompt_ids, capacity, taps)


class WrappedSession:
    """See types.Session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def length(self) -> int:
        return self._session.length

    def prefill(self) -> int:
        return self._session.prefill()

    def decode_one(self, token: int) -> int:
        return self._session.decode_one(token)

    def verify(self, tokens: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        return self._session.verify(tokens, parents)

    def keep(self, rows: int | Sequence[int]) -> None:
        self._session.keep(rows)

    def take_features(self) -> Any:
        return self._session.take_features()
