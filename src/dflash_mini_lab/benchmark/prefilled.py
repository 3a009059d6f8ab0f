"""A target that reads each prompt once: trials answer the same few hundreds of times, and their prefill is not measured."""
from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

from dflash_mini_lab.benchmark.engine import Engine
from dflash_mini_lab.benchmark.wrapped import WrappedSession, WrappedTarget
from dflash_mini_lab.types import Session, Target


def prefilled_once(engine: Engine) -> Engine:
    """`engine` for answers of which only the decoding counts; as it is where sessions cannot be copied."""
    return replace(engine, target=PrefilledOnce(engine.target)) if engine.target.copies else engine


class PrefilledOnce(WrappedTarget):
    """As `target`, but every session begins as a copy of what its prompt's first one was after the prefill."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._kept: dict[tuple[tuple[int, ...], tuple[int, ...] | None], tuple[int, Session, int]] = {}
        """Prompt and taps → capacity, session and first token."""

    def start(self, prompt_ids: Sequence[int], capacity: int, taps: Sequence[int] | None) -> Session:
        asked = tuple(prompt_ids), None if taps is None else tuple(taps)
        if asked not in self._kept or self._kept[asked][0] < capacity:
            session = self._target.start(prompt_ids, capacity, taps)
            self._kept[asked] = capacity, session, session.prefill()
        _, session, first = self._kept[asked]
        return _Prefilled(deepcopy(session, {id(self._target): self._target}), first)


class _Prefilled(WrappedSession):
    def __init__(self, session: Session, first: int) -> None:
        super().__init__(session)
        self._first = first

    def prefill(self) -> int:
        return self._first
