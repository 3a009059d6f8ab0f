"""Every acceptance and cost figure, from step logs alone. Pure NumPy; a log is the `steps` of one run as benchmark.json keeps it.

A rate counts the tokens that its calls and seconds paid for. The first new token comes out of the prefill, so neither that token
nor the prefill call is counted in τ or in throughput, and method 00 has τ = 1 exactly.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflash_mini_lab.types import Decoded

PHASES = ("draft", "select", "verify", "rest")
COUNTS = ("rows", "proposed", "accepted", "committed", "work")

StepLog = Mapping[str, Sequence[Any]]


def columns(decoded: Decoded) -> dict[str, list[Any]]:
    """An answer's step log by columns, as benchmark.json keeps it; `depth` and `path` where trees were proposed."""
    log = {name: [getattr(step, name) for step in decoded.steps] for name in (*COUNTS, *PHASES)}
    if any(step.depth is not None for step in decoded.steps):
        log["depth"] = [step.proposed if step.depth is None else step.depth for step in decoded.steps]
        log["path"] = [list(step.path) for step in decoded.steps]
    return log


def request_tau(log: StepLog) -> float | None:
    """Committed tokens per verifier call of one request; None for a request that ended with its prefill."""
    rounds = len(log["committed"])
    return sum(log["committed"]) / rounds if rounds else None


def tau(logs: Sequence[StepLog]) -> tuple[float | None, float | None]:
    """(request macro, micro): the mean of the requests' τ, and total committed tokens / total calls."""
    taus = [value for value in map(request_tau, logs) if value is not None]
    committed = sum(sum(log["committed"]) for log in logs)
    rounds = sum(len(log["committed"]) for log in logs)
    return (float(np.mean(taus)), committed / rounds) if rounds else (None, None)


def slot_acceptance(logs: Sequence[StepLog]) -> tuple[list[float | None], list[float]]:
    """Per slot, (conditional, joint).

    Conditional: accepted, among the rounds that proposed the slot and accepted every slot before it; None where there was none.
    Joint: accepted together with every slot before it, among all rounds, so that their sum is the accepted drafts per round.
    Of a tree, a slot is a depth, and was proposed where any of its nodes lies as deep.
    """
    reached, accepted = _joined(logs, "depth"), _joined(logs, "accepted")
    conditional: list[float | None] = []
    joint: list[float] = []
    for slot in range(int(reached.max(initial=0))):
        right = int((accepted > slot).sum())
        tried = int(((reached > slot) & (accepted >= slot)).sum())
        conditional.append(right / tried if tried else None)
        joint.append(right / len(accepted))
    return conditional, joint


def accepted_within(logs: Sequence[StepLog], width: int) -> np.ndarray:
    """Drafts of every round that were accepted in its first `width` rows, the anchor's included, `[rounds]`: what the same
    rounds would have accepted of narrower calls. A tree's accepted drafts need not be its first ones."""
    found: list[int] = []
    for log in logs:
        if "path" in log:
            found += [sum(row < width for row in path) for path in log["path"]]
        else:
            found += [min(accepted, width - 1) for accepted in log["accepted"]]
    return np.array(found, dtype=np.int64)


def accepted_histogram(logs: Sequence[StepLog]) -> list[int]:
    """Rounds that accepted 0, 1, 2, … drafts."""
    accepted = _joined(logs, "accepted")
    return np.bincount(accepted).tolist() if len(accepted) else []


def phase_seconds(logs: Sequence[StepLog]) -> dict[str, float]:
    """Total seconds by phase; they sum to the logs' decode seconds."""
    return {phase: float(sum(sum(log[phase]) for log in logs)) for phase in PHASES}


def total(logs: Sequence[StepLog], column: str) -> int:
    return int(sum(sum(log[column]) for log in logs))


def rounds(logs: Sequence[StepLog]) -> int:
    return sum(len(log["rows"]) for log in logs)


def economics(logs: Sequence[StepLog], curve_rows: Sequence[int], curve_seconds: Sequence[float]) -> dict[str, float] | None:
    """What the cost curve predicts for these rounds, in units of one single-row decode (`curve_seconds[0]`).

    draft_cost c: seconds outside the verifier per round. break_even_tau: c + mean v(W) over the rounds' own widths; below this τ
    a method loses. expected_speedup: τ (micro) / break-even. None without rounds or curve.
    """
    count = rounds(logs)
    _, micro = tau(logs)
    if not count or not curve_rows or micro is None or not curve_seconds[0]:
        return None
    single = curve_seconds[0]
    phases = phase_seconds(logs)
    draft_cost = (phases["draft"] + phases["select"] + phases["rest"]) / count / single
    verify_cost = float(np.interp(_joined(logs, "rows"), curve_rows, curve_seconds).mean()) / single
    break_even = draft_cost + verify_cost
    return {"draft_cost": draft_cost, "break_even_tau": break_even, "expected_speedup": micro / break_even}


def _joined(logs: Sequence[StepLog], column: str) -> np.ndarray:
    if column == "depth":
        columns = [log["depth"] if "depth" in log else log["proposed"] for log in logs]
    else:
        columns = [log[column] for log in logs]
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.asarray(found, dtype=np.int64) for found in columns)])
