"""What a method saw and did, round by round, for the report's explorer: one answer by the one loop, listened to from outside.

The target and the method that `decode` is given are wrapped, so that the loop itself, and every timed run, stays as it is. Times
of a recorded answer are thrown away.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dflash_mini_lab.benchmark.arms import Arm
from dflash_mini_lab.benchmark.engine import Engine
from dflash_mini_lab.benchmark.wrapped import WrappedSession, WrappedTarget
from dflash_mini_lab.decoding import decode
from dflash_mini_lab.methods import by_key
from dflash_mini_lab.scores import LARGEST
from dflash_mini_lab.trees import depths
from dflash_mini_lab.types import Clock, Draft, Method, Proposal, Session, Step, Target

ROUNDS, SLOTS = 12, 120
"""Kept of each method: so many rounds, or fewer where long blocks have more slots than that together."""
CANDIDATES = 4
"""Kept of each slot, best first; a method's choice that is further down is kept as one more."""
DEEPEST = 16
"""Candidates among which a choice is looked for."""
DECIMALS = 3


@dataclass
class Recorder:
    """Listens to one `decode`: what `select` was shown and answered, and what each verifier call gave."""

    rounds: list[dict[str, Any]] = field(default_factory=list)
    _chosen: dict[str, Any] | None = None

    def listening(self, method: Method) -> Method:
        """`method` with a `select` that answers the same."""
        select = method.select
        assert select is not None

        def heard(draft: Draft, settings: Mapping[str, float]) -> Proposal:
            proposal = select(draft, settings)
            self._chosen = {"slots": slots_of(draft, proposal), "proposal": list(proposal.tokens)}
            if proposal.parents:
                self._chosen["parents"] = list(proposal.parents)
            return proposal

        return replace(method, select=heard)

    def verified(self, length: int, tokens: Sequence[int], greedy: Sequence[int]) -> None:
        """One verifier call on `tokens` (the anchor first) with `length` tokens in the cache before it."""
        chosen, self._chosen = self._chosen or {"slots": [], "proposal": []}, None
        self.rounds.append({"position": length + 1, "anchor": tokens[0], **chosen, "greedy": list(greedy)})


def slots_of(draft: Draft, proposal: Proposal) -> list[dict[str, list[Any]]]:
    """Each slot's best candidates, ids and logits, and the proposed tokens after them that are none of them."""
    ids, scores = draft.top(DEEPEST)
    at = depths(proposal.parents) if proposal.parents else range(len(proposal.tokens))
    scores = np.nan_to_num(scores.astype(np.float64), nan=-LARGEST, posinf=LARGEST, neginf=-LARGEST).round(DECIMALS)
    slots = []
    for slot in range(draft.slots):
        kept = list(range(min(CANDIDATES, ids.shape[1])))
        for token, there in zip(proposal.tokens, at, strict=True):
            if there == slot:
                place = np.flatnonzero(ids[slot] == token)
                kept += [int(index) for index in place if index not in kept]
        slots.append({"ids": ids[slot, kept].tolist(), "logits": scores[slot, kept].tolist()})
    return slots


class _HeardTarget(WrappedTarget):
    """`target` whose sessions tell the recorder of every verifier call."""

    def __init__(self, target: Target, recorder: Recorder) -> None:
        super().__init__(target)
        self._recorder = recorder

    def start(self, prompt_ids: Sequence[int], capacity: int, taps: Sequence[int] | None) -> _HeardSession:
        return _HeardSession(super().start(prompt_ids, capacity, taps), self._recorder)


class _HeardSession(WrappedSession):
    def __init__(self, session: Session, recorder: Recorder) -> None:
        super().__init__(session)
        self._recorder = recorder

    def verify(self, tokens: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        length = self.length
        greedy = super().verify(tokens, parents)
        self._recorder.verified(length, tokens, greedy)
        return greedy


def record(
    engine: Engine, arm: Arm, prompt_ids: Sequence[int], budget: int, clock: Clock, expected: Sequence[int], bonus: bool = True
) -> dict[str, Any]:
    """The first rounds of one arm's answer, decoded as in a cell, and whether the whole of it was the tokens `expected`.

    `bonus`: as `decode` takes it.
    """
    recorder = Recorder()
    method, target = recorder.listening(by_key(arm.key)), _HeardTarget(engine.target, recorder)
    decoded = decode(target, prompt_ids, method, budget, clock, engine.drafter, arm.settings, arm.verify_width, bonus)
    heard = zip(recorder.rounds, decoded.steps, strict=True)
    kept = rounds_kept(engine.drafter.block_size - 1 if engine.drafter else 1)
    return {
        "exact": list(decoded.tokens) == list(expected),
        "of": len(decoded.steps),
        "rounds": [{**entry, **counts(step)} for entry, step in heard][:kept],
    }


def rounds_kept(slots: int) -> int:
    return max(1, min(ROUNDS, SLOTS // slots))


def counts(step: Step) -> dict[str, int]:
    return {"proposed": step.proposed, "accepted": step.accepted, "committed": step.committed, "work": step.work}


def texts(entries: Iterable[dict[str, Any]], decode_text: Callable[[Sequence[int]], str]) -> dict[str, str]:
    """Token id → its text, for every id in the rounds of `entries`. An id that is no text of its own has the tokenizer's mark
    for that, or nothing."""
    ids: set[int] = set()
    for entry in entries:
        for known in entry["rounds"]:
            ids.update([known["anchor"], *known["proposal"], *known["greedy"]])
            ids.update(token for slot in known["slots"] for token in slot["ids"])
    return {str(token): decode_text([token]) for token in sorted(ids)}
