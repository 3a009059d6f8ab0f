"""The "results" of the made-up benchmark in sample.py, computed from its cells apart from the lab's own code."""

from __future__ import annotations

import math
import random
from statistics import median
from typing import Any

SLOTS = 5
SINGLE = 0.0292  # seconds of a single-row decode
RATIO = (1.0, 1.12, 1.04, 0.97, 1.0, 1.02, 1.13, 1.19)  # v(1) … v(8)


def results(benchmark: dict[str, Any]) -> dict[str, Any]:
    """The "results" of a benchmark, from its cells."""
    cells = [cell for cell in benchmark["cells"] if not cell["warmup"]]
    expected = {entry["prompt"]: entry["tokens"] for entry in benchmark["reference"]}
    floor = _speedup(cells, "00'")
    low, high = floor["low"], floor["high"]
    found = {}
    for arm in benchmark["arms"]:
        key = arm["key"]
        runs = [(cell["prompt"], run) for cell in cells for run in cell["runs"] if run["arm"] == key]
        exact = sum(run["tokens"] == expected[prompt] for prompt, run in runs)
        speedup = _speedup(cells, key)
        broken = any(entry["arm"] == key and entry["verdict"] == "violation" for entry in benchmark["gate"]["mismatches"])
        verdict = "inexact" if broken else _verdict(speedup, low, high)
        speeds = sorted(len(run["tokens"]) / run["decode_seconds"] for _, run in runs)
        entry = {
            "runs": len(runs),
            "exact_runs": exact,
            "speedup": None if broken else speedup,
            "verdict": verdict,
            "tokens_per_second": {
                "median": median(speeds),
                "low": speeds[len(speeds) // 4],
                "high": speeds[len(speeds) * 3 // 4],
            },
            "time_to_first_token": median(run["prefill_seconds"] for _, run in runs),
            "end_to_end_seconds": median(run["prefill_seconds"] + run["decode_seconds"] for _, run in runs),
        }
        found[key] = entry | _from_steps([run["steps"] for _, run in runs], arm)
    return {"noise_floor": {"low": low, "high": high, "wide": low is not None and (low < 0.95 or high > 1.05)}, "arms": found}


def _speedup(cells: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """Geometric mean over cells, and a bootstrap interval over prompts, or none with a single prompt."""
    logs: dict[str, list[float]] = {}
    for cell in cells:
        seconds = {run["arm"]: run["decode_seconds"] for run in cell["runs"]}
        logs.setdefault(cell["prompt"], []).append(math.log(seconds["00"] / seconds[key]))
    means = [sum(values) / len(values) for values in logs.values()]
    mean = math.exp(sum(means) / len(means))
    if len(means) == 1:
        return {"mean": mean, "low": None, "high": None}
    random_ = random.Random(11)
    drawn = sorted(math.exp(sum(random_.choices(means, k=len(means))) / len(means)) for _ in range(400))
    return {"mean": mean, "low": drawn[9], "high": drawn[390]}


def _verdict(speedup: dict[str, Any], low: float | None, high: float | None) -> str:
    if low is None or high is None or speedup["low"] is None:
        return "no difference"
    return "faster" if speedup["low"] > high else "slower" if speedup["high"] < low else "no difference"


def _from_steps(logs: list[dict[str, Any] | None], arm: dict[str, Any]) -> dict[str, Any]:
    kept = [log for log in logs if log]
    if not kept:
        return dict.fromkeys(
            (
                "tau_macro",
                "tau_micro",
                "acceptance_rate",
                "proposed",
                "accepted",
                "rounds",
                "slot_conditional",
                "slot_joint",
                "accepted_histogram",
                "phase_seconds",
                "guidance_work_per_round",
                "draft_cost",
                "break_even_tau",
                "expected_speedup",
            )
        )
    total = {name: sum(sum(log[name]) for log in kept) for name in kept[0]}
    rounds = sum(len(log["rows"]) for log in kept)
    lengths = [accepted for log in kept for accepted in log["accepted"]]
    reached = [sum(length >= slot for length in lengths) for slot in range(SLOTS + 1)]
    found: dict[str, Any] = {
        "tau_macro": sum(sum(log["committed"]) / len(log["rows"]) for log in kept) / len(kept),
        "tau_micro": total["committed"] / rounds,
        "acceptance_rate": total["accepted"] / total["proposed"] if total["proposed"] else None,
        "proposed": total["proposed"],
        "accepted": total["accepted"],
        "rounds": rounds,
        "phase_seconds": {name: round(total[name], 6) for name in ("draft", "select", "verify", "rest")},
        "guidance_work_per_round": total["work"] / rounds,
    }
    if arm["kind"] != "method":
        return found | dict.fromkeys(
            ("slot_conditional", "slot_joint", "accepted_histogram", "draft_cost", "break_even_tau", "expected_speedup")
        )
    cost = (total["draft"] + total["select"] + total["rest"]) / rounds / SINGLE
    return found | {
        "slot_joint": [reached[slot] / rounds for slot in range(1, SLOTS + 1)],
        "slot_conditional": [reached[slot] / reached[slot - 1] if reached[slot - 1] else None for slot in range(1, SLOTS + 1)],
        "accepted_histogram": [lengths.count(length) for length in range(SLOTS + 1)],
        "draft_cost": cost,
        "break_even_tau": cost + RATIO[SLOTS],
        "expected_speedup": found["tau_macro"] / (cost + RATIO[SLOTS]),
    }
