"""A target that reads each prompt once: trials answer the same few hundreds of times, and their prefill is not measured."""
from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

from dflash_mini_lab.benchmark.engine import Engine
from dflash_mini_lab.types import Session, Target


def prefilled_once(engine: Engine) -> Engine:
    """`engine` for answers of which only the decoding counts; as it is where sessions cannot be copied."""
    return replace(engine, target=PrefilledOnce(engine.target)) if engine.target.copies else engine


class PrefilledOnce:
    """See types.Target: as `target`, but every session begins as a copy of what its prompt's first one was after the prefill."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.stop_ids, self.max_positions = target.stop_ids, target.max_positions
        self.vocabulary, self.trees, self.copies = target.vocabulary, target.trees, target.copies
        self._kept: dict[tuple[tuple[int, ...], tuple[int, ...] | None], tuple[int, Session, int]] = {}
        """Prompt and taps → capacity, session and first token."""

    def start(self, prompt_ids: Sequence[int], capacity: int, taps: Sequence[int] | None) -> Session:
        asked = tuple(prompt_ids), None if taps is None else tuple(taps)
        if asked not in self._kept or self._kept[asked][0] < capacity:
            session = self._target.start(prompt_ids, capacity, taps)
            self._kept[asked] = capacity, session, session.prefill()
        _, session, first = self._kept[asked]
        return _Prefilled(deepcopy(session, {id(self._target): self._target}), first)


class _Prefilled:
    def __init__(self, session: Session, first: int) -> None:
        self._session, self._first = session, first
        self.decode_one, self.verify = session.decode_one, session.verify
        self.keep, self.take_features = session.keep, session.take_features

    @property
    def length(self) -> int:
        return self._session.length

    def prefill(self) -> int:
        return self._first
