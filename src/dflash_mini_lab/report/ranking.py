"""The arms of a run in the order in which the page and the terminal show them.

The rule that an arm whose output differs gets no speed-up is applied here, once, for every table and chart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_mini_lab.report.format import dig, is_number

Benchmark = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One arm. Numbers are None where the run has not measured them; speeds are new tokens a second."""

    key: str
    name: str
    kind: str  # "baseline" | "control" | "method" | "peer"
    summary: str
    width: int | None  # rows of a verifier call, anchor included
    mean: float | None  # speed-up over method 00; None for an inexact arm, whatever the file says
    low: float | None
    high: float | None
    verdict: (
        str  # "faster" | "slower" | "no difference" | "one measurement" | "inexact" | "reference" | "noise floor" | "pending"
    )
    speed: float | None
    tau: float | None
    acceptance: float | None
    runs: int
    exact_runs: int
    ties: int

    @property
    def exact(self) -> bool | None:
        """None while nothing has been compared."""
        if self.verdict == "inexact":
            return False  # even where only a warm-up differs, which `runs` does not count
        return self.exact_runs == self.runs if self.runs else None


def rank(benchmark: Benchmark) -> tuple[Row, ...]:
    """Fastest first; then arms not measured yet; inexact arms last. No arm is left out."""
    inexact = inexact_arms(benchmark)
    # A speed-up is a ratio to method 00: where 00 itself is wrong, or disagrees with its own repetition, there is none.
    no_ratio = any(arm["key"] in inexact for arm in arms(benchmark) if arm.get("kind") in ("baseline", "control"))
    rows = [_row(benchmark, arm, arm["key"] in inexact, no_ratio) for arm in arms(benchmark)]
    return tuple(sorted(rows, key=lambda row: (row.verdict == "inexact", row.mean is None, -(row.mean or 0.0))))


def arms(benchmark: Benchmark) -> list[dict[str, Any]]:
    return [arm for arm in benchmark.get("arms") or [] if isinstance(arm, dict) and "key" in arm]


def measured_cells(benchmark: Benchmark) -> list[dict[str, Any]]:
    return [cell for cell in benchmark.get("cells") or [] if not cell.get("warmup")]


def planned_cells(benchmark: Benchmark) -> int:
    return len(benchmark.get("prompts") or []) * int(dig(benchmark, "settings", "repeats", default=1))


def differing_runs(benchmark: Benchmark) -> list[tuple[str, str, int]]:
    """(arm, prompt, repeat) of every run, warm-ups included, whose tokens are not the reference's: from the raw tokens alone."""
    expected = {entry["prompt"]: entry.get("tokens") for entry in benchmark.get("reference") or []}
    return [
        (run["arm"], cell["prompt"], cell.get("repeat", 0))
        for cell in benchmark.get("cells") or []
        for run in cell.get("runs") or []
        if cell["prompt"] in expected and run.get("tokens") != expected[cell["prompt"]]
    ]


def inexact_arms(benchmark: Benchmark) -> frozenset[str]:
    """Arms with a violation: by the gate, by the results, or by the raw tokens where the gate names no tie for them."""
    mismatches = dig(benchmark, "gate", "mismatches", default=[])
    ties = {(entry["arm"], entry["prompt"], entry.get("repeat", 0)) for entry in mismatches if entry["verdict"] == "tie"}
    by_gate = {entry["arm"] for entry in mismatches if entry["verdict"] != "tie"}
    by_results = {
        key for key, result in dig(benchmark, "results", "arms", default={}).items() if dig(result, "verdict") == "inexact"
    }
    by_tokens = {run[0] for run in differing_runs(benchmark) if run not in ties}
    return frozenset(by_gate | by_results | by_tokens)


def _row(benchmark: Benchmark, arm: dict[str, Any], inexact: bool, no_ratio: bool) -> Row:
    result = dig(benchmark, "results", "arms", arm["key"], default={})
    kind = arm.get("kind") or "method"
    speedup = {} if inexact or no_ratio else dig(result, "speedup", default={})
    mean = speedup.get("mean")
    if kind == "baseline" and not inexact and not no_ratio and result:
        mean = 1.0
    verdict = "inexact" if inexact else {"baseline": "reference", "control": "noise floor"}.get(kind)
    if verdict is None:
        verdict = result.get("verdict") if is_number(mean) else "pending"
        if verdict == "no difference" and not is_number(speedup.get("low")):
            verdict = "one measurement"  # nothing can be told apart yet, which is not the same as being equal
    mismatches = dig(benchmark, "gate", "mismatches", default=[])
    return Row(
        key=arm["key"],
        name=arm.get("name") or arm["key"],
        kind=kind,
        summary=arm.get("summary") or "",
        width=arm.get("verify_width"),
        mean=mean if is_number(mean) else None,
        low=speedup.get("low") if kind != "baseline" else None,
        high=speedup.get("high") if kind != "baseline" else None,
        verdict=verdict or "pending",
        speed=dig(result, "tokens_per_second", "median"),
        tau=result.get("tau_macro"),
        acceptance=result.get("acceptance_rate"),
        runs=int(result.get("runs") or 0),
        exact_runs=int(result.get("exact_runs") or 0),
        ties=sum(entry["arm"] == arm["key"] and entry["verdict"] == "tie" for entry in mismatches),
    )
