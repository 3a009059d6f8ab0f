"""The lean decoder as a target whose decode steps have fixed shapes: CUDA graphs on a GPU, their eager twin anywhere else.

Prefill runs eagerly, since every prompt has another length. One state serves all sequences of one kind (method 00's, or those
that a drafter taps), one at a time; every verify width has a step of its own.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dflash_mini_lab.crossings import Crossings
from dflash_mini_lab.targets.features import FeatureLog
from dflash_mini_lab.targets.graphs import CapturedStep, StaticState
from dflash_mini_lab.targets.lean import LeanDecoder
from dflash_mini_lab.targets.lean_target import LeanSession, LeanTarget, checked_taps

WIDEST = 64
"""Rows of the widest step, unless a drafter's block is wider; --verify-width goes no further."""
Kind = tuple[int, ...] | None
"""Which layers a session's drafter taps; None: a session of method 00."""


class CapturedTarget(LeanTarget):
    """See types.Target. A new session ends the older one of its kind."""

    copies = False

    def __init__(
        self,
        decoder: LeanDecoder,
        stop_ids: frozenset[int],
        vocabulary: int,
        crossings: Crossings | None = None,
        full_logits: bool = False,
        capture: bool | None = None,
    ) -> None:
        """`capture`: None asks for graphs on CUDA and for their eager twin elsewhere."""
        super().__init__(decoder, stop_ids, vocabulary, crossings, full_logits)
        self.capture = decoder.embedding.is_cuda if capture is None else capture
        self.refusal: str | None = None
        """Why CUDA would not capture, in its own words."""
        self.widest = WIDEST
        self._states: dict[Kind, StaticState] = {}
        self._steps: dict[tuple[Kind, int, bool], CapturedStep] = {}

    def prepare_steps(self, widths: Sequence[int], taps: Sequence[int]) -> dict[str, Any]:
        """Capture method 00's step and two for each of `widths` with `taps`, for chains and for trees, before anything is timed.

        Returns the `decode` entry of benchmark.json. Where CUDA refuses, every step of the target runs eagerly, and it says why.
        """
        self.widest = max(WIDEST, *widths)
        if self.capture:
            try:
                self.step(None, 1)
                for rows in sorted(set(widths)):
                    self.step(tuple(taps), rows)
                    if rows > 1:  # the anchor alone is no tree
                        self.step(tuple(taps), rows, trees=True)
            except RuntimeError as error:
                self.capture, self.refusal = False, " ".join(str(error).split())[:200]
                self._steps.clear()
                self._states.clear()
        if self.capture:
            return {"steps": "captured", "reason": None, "widths": sorted({1, *widths})}
        reason = f"CUDA refused a capture: {self.refusal}" if self.refusal else "no CUDA: the eager twin of captured steps"
        return {"steps": "eager", "reason": reason, "widths": []}

    def start(self, prompt_ids: Sequence[int], capacity: int, taps: Sequence[int] | None) -> LeanSession:
        if not self.capture and self.refusal:
            return super().start(prompt_ids, capacity, taps)
        return CapturedSession(self, prompt_ids, taps)

    def state(self, kind: Kind) -> StaticState:
        if kind not in self._states:
            with torch.inference_mode():
                self._states[kind] = StaticState(self.decoder, self.max_positions, 1 if kind is None else self.widest)
        return self._states[kind]

    def step(self, kind: Kind, rows: int, trees: bool = False) -> CapturedStep:
        """The step for `rows` rows, made when it is first asked for. One that was not prepared runs eagerly: a capture in the
        middle of a sequence would write into it."""
        key = (kind, rows, trees)
        if key not in self._steps:
            state = self.state(kind)
            with torch.inference_mode():
                capture = self.capture and state.length == 0
                self._steps[key] = CapturedStep(self.decoder, state, rows, kind or (), self.vocabulary, capture, trees)
        return self._steps[key]


class CapturedSession(LeanSession):
    """See types.Session."""

    target: CapturedTarget

    def __init__(self, target: CapturedTarget, prompt_ids: Sequence[int], taps: Sequence[int] | None) -> None:
        self.target, self.prompt_ids = target, prompt_ids
        self.kind: Kind = None if taps is None else checked_taps(taps, target)
        self.taps = self.kind or ()
        self.state = target.state(self.kind)
        self.lease = self.state.lease()
        self.features = FeatureLog(len(self.taps) * target.embedding.shape[1], target.embedding)

    @property
    def length(self) -> int:
        return self.state.length

    @torch.inference_mode()
    def prefill(self) -> int:
        self._require_lease()
        cache = self.state.prefill_cache()
        first = self._run(self.prompt_ids, cache, last_only=True)[-1]
        cache.keep(cache.last_rows)
        self.state.adopt(cache)
        self.features.keep(len(self.prompt_ids))
        return first

    @torch.inference_mode()
    def keep(self, rows: int | Sequence[int]) -> None:
        self._require_lease()
        count = rows if isinstance(rows, int) else self._gathered(rows, self.state)
        self.state.keep(count)
        self.features.keep(count)

    def _extend(self, tokens: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        self._require_lease()
        step = self.target.step(self.kind, len(tokens), trees=bool(parents))
        greedy = step.run(tokens, self.target.crossings, parents)
        if self.taps:
            self.features.record(step.features.clone())  # the next step overwrites its buffer
        return greedy

    def _require_lease(self) -> None:
        if not self.state.holds(self.lease):
            raise RuntimeError("a newer session of this target has taken over the state of this one")
