"""From raw cells to the `gate` counts and `results` of benchmark.json. Pure: everything here can be recomputed from the file."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from dflash_mini_lab.benchmark_file import Benchmark
from dflash_mini_lab.measurement import step_log
from dflash_mini_lab.measurement.statistics import Floor, Ratio, geometric_mean_ratio, noise_floor, spread, verdict

BASELINE, CONTROL = "00", "00'"
RunKey = tuple[str, str, int]
"""(arm, prompt, repeat); warm-ups have negative repeats."""


def runs_by_key(benchmark: Benchmark) -> dict[RunKey, dict[str, Any]]:
    return {(run["arm"], cell["prompt"], cell["repeat"]): run for cell in benchmark["cells"] for run in cell["runs"]}


def measured_runs(benchmark: Benchmark) -> dict[RunKey, dict[str, Any]]:
    return {key: run for key, run in runs_by_key(benchmark).items() if key[2] >= 0}


def inexact_runs(benchmark: Benchmark) -> list[RunKey]:
    """Every run, warm-ups included, whose tokens or length are not the reference's."""
    expected = {entry["prompt"]: entry["tokens"] for entry in benchmark["reference"]}
    return [key for key, run in runs_by_key(benchmark).items() if run["tokens"] != expected[key[1]]]


def gate(benchmark: Benchmark, mismatches: list[dict[str, Any]], judged: bool) -> dict[str, Any]:
    """The `gate` entry. Without any run, or while inexact runs are not judged yet, its verdict is pending."""
    runs = len(runs_by_key(benchmark))
    inexact = len(inexact_runs(benchmark))
    if any(mismatch["verdict"] == "violation" for mismatch in mismatches):
        outcome = "violation"
    elif inexact and judged:
        outcome = "ties"
    else:
        outcome = "pending" if inexact or not runs else "exact"
    return {"verdict": outcome, "runs": runs, "exact": runs - inexact, "mismatches": mismatches}


def violating_arms(benchmark: Benchmark) -> frozenset[str]:
    """Arms with a run that differs from the reference and has not been judged a tie."""
    ties = {(m["arm"], m["prompt"], m["repeat"]) for m in benchmark["gate"]["mismatches"] if m["verdict"] == "tie"}
    return frozenset(key[0] for key in inexact_runs(benchmark) if key not in ties)


def gate_fails(benchmark: Benchmark) -> bool:
    """Exit status 3: a violation in any dtype; in float32 and wider a tie as well."""
    outcome = benchmark["gate"]["verdict"]
    return outcome == "violation" or (outcome == "ties" and benchmark["target"]["dtype"] in ("float32", "float64"))


def results(benchmark: Benchmark) -> dict[str, Any] | None:
    """The `results` entry from the measured cells; None while there is none."""
    measured = measured_runs(benchmark)
    if not measured:
        return None
    violating = violating_arms(benchmark)
    inexact = set(inexact_runs(benchmark))
    found, floor = speedups(benchmark)
    arms = {}
    for arm in benchmark["arms"]:
        runs = {key: run for key, run in measured.items() if key[0] == arm["key"]}
        if not runs:
            continue
        exact = arm["key"] not in violating
        speedup = found[arm["key"]]
        arms[arm["key"]] = {
            "runs": len(runs),
            "exact_runs": sum(key not in inexact for key in runs),
            "speedup": vars(speedup) if speedup else None,
            "verdict": _verdict(speedup, floor, exact),
            **_speed(runs.values()),
            **_beside_time(list(runs.values())),
            **_acceptance(list(runs.values()), benchmark["verify_cost"], arm["kind"]),
        }
    return {"noise_floor": {"low": floor.low, "high": floor.high, "wide": floor.wide}, "arms": arms}


def speedups(benchmark: Benchmark) -> tuple[dict[str, Ratio | None], Floor]:
    """Each arm's speed-up over method 00, and the run's noise floor. An inexact arm has none, and none has one over an
    inexact method 00."""
    measured, violating = measured_runs(benchmark), violating_arms(benchmark)
    seed = int(benchmark["settings"].get("seed", 0))
    again = None if violating & {BASELINE, CONTROL} else _speedup(measured, CONTROL, seed)
    arms = [arm["key"] for arm in benchmark["arms"]]
    found = {key: _speedup(measured, key, seed) if not violating & {BASELINE, key} else None for key in arms}
    return found, noise_floor(again) if again else Floor(None, None)


def seconds_per_token(run: dict[str, Any]) -> float | None:
    """Decode seconds per token that they paid for: all but the tokens that came with the prefill. None where there is none."""
    tokens = len(run["tokens"]) - run.get("first_tokens", 1)
    return run["decode_seconds"] / tokens if tokens > 0 and run["decode_seconds"] > 0 else None


def _speedup(measured: dict[RunKey, dict[str, Any]], arm: str, seed: int) -> Ratio | None:
    """Method 00's time over the arm's, per token, cell by cell. For equal texts that is the ratio of decode times."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for (key, prompt, repeat), run in measured.items():
        baseline = measured.get((BASELINE, prompt, repeat))
        if key != arm or baseline is None:
            continue
        theirs, ours = seconds_per_token(baseline), seconds_per_token(run)
        if theirs and ours:
            ratios[prompt].append(theirs / ours)
    return geometric_mean_ratio(ratios, seed) if ratios else None


def _verdict(speedup: Ratio | None, floor: Floor, exact: bool) -> str:
    return verdict(speedup or Ratio(1.0, None, None), floor, exact)


def _speed(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    runs = list(runs)
    rates = [1 / seconds for seconds in map(seconds_per_token, runs) if seconds]
    speed = None
    if rates:
        median, low, high = spread(rates)
        speed = {"median": median, "low": low, "high": high}
    return {
        "tokens_per_second": speed,
        "time_to_first_token": spread([run["prefill_seconds"] for run in runs])[0],
        "end_to_end_seconds": spread([run["prefill_seconds"] + run["decode_seconds"] for run in runs])[0],
    }


def _beside_time(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Joules, and what crossed between host and device, per new token; each only where every run has it."""
    tokens = sum(len(run["tokens"]) for run in runs)
    entry: dict[str, Any] = {}
    if all("joules" in run for run in runs):
        entry["joules_per_token"] = sum(run["joules"] for run in runs) / tokens
    if all("crossings" in run for run in runs):
        entry["crossings_per_token"] = {
            way: {name: sum(run["crossings"][way][name] for run in runs) / tokens for name in ("count", "bytes", "seconds")}
            for way in ("to_device", "to_host")
        }
    return entry


def _acceptance(runs: list[dict[str, Any]], curve: dict[str, Any] | None, kind: str) -> dict[str, Any]:
    """Everything that comes from step logs; all null for a peer, whose rounds cannot be seen."""
    names = (
        *("tau_macro", "tau_micro", "acceptance_rate", "proposed", "accepted", "rounds", "slot_conditional", "slot_joint"),
        *("accepted_histogram", "phase_seconds", "guidance_work_per_round", "draft_cost", "break_even_tau", "expected_speedup"),
    )
    entry: dict[str, Any] = dict.fromkeys(names)
    logs = [run["steps"] for run in runs]
    if any(log is None for log in logs):
        return entry
    rounds, proposed = step_log.rounds(logs), step_log.total(logs, "proposed")
    accepted = step_log.total(logs, "accepted")
    entry["tau_macro"], entry["tau_micro"] = step_log.tau(logs)
    entry["slot_conditional"], entry["slot_joint"] = step_log.slot_acceptance(logs)
    entry |= {
        "acceptance_rate": accepted / proposed if proposed else None,
        "proposed": proposed,
        "accepted": accepted,
        "rounds": rounds,
        "accepted_histogram": step_log.accepted_histogram(logs),
        "phase_seconds": step_log.phase_seconds(logs),
        "guidance_work_per_round": step_log.total(logs, "work") / rounds if rounds else None,
    }
    if kind == "method" and curve:
        entry |= step_log.economics(logs, curve["rows"], curve["median_seconds"]) or {}
    return entry
