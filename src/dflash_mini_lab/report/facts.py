"""View models of what the run was made of: machine, settings, target, drafter, layer plans, calibration.

Facts are shown as they are found, so that a new setting needs no change here.
"""

from __future__ import annotations

import shlex
from typing import Any

from dflash_mini_lab.report import charts
from dflash_mini_lab.report.format import fixed, is_number, plain, plural, quantity, seconds, size
from dflash_mini_lab.report.ranking import Benchmark, arms

Facts = list[tuple[str, str]]


def target(benchmark: Benchmark) -> Facts:
    return flat(benchmark.get("target"))


def machine(benchmark: Benchmark) -> Facts:
    return flat(benchmark.get("machine")) + flat(benchmark.get("execution"))


def settings(benchmark: Benchmark) -> Facts:
    facts = flat(benchmark.get("settings"))
    facts += [
        (f"{arm.get('name') or arm['key']} runs with", f"{plain(arm['settings'])} ({arm.get('settings_source') or 'default'})")
        for arm in arms(benchmark)
        if arm.get("settings")
    ]
    facts += [
        (f"{arm.get('name') or arm['key']} verifies", f"{plain(arm.get('verify_width'))} rows ({plain(source)})")
        for arm in arms(benchmark)
        if (source := arm.get("verify_width_source")) not in (None, "block")
    ]
    return facts


def command(benchmark: Benchmark) -> str:
    return shlex.join(["python", *map(str, benchmark.get("command") or [])]) if benchmark.get("command") else ""


def drafter(benchmark: Benchmark) -> dict[str, Any] | None:
    found = benchmark.get("drafter")
    if not isinstance(found, dict):
        return None
    rest = {key: value for key, value in found.items() if key not in ("files", "provenance")}
    return {
        "facts": flat(rest),
        "provenance": flat(found.get("provenance")),
        "files": [
            (str(entry.get("name")), size(entry.get("bytes")), str(entry.get("sha256"))) for entry in found.get("files") or []
        ],
    }


def calibration(benchmark: Benchmark) -> dict[str, Any] | None:
    found = benchmark.get("calibration")
    if not isinstance(found, dict) or not found.get("methods"):
        return None
    names = {arm["key"]: arm.get("name") or arm["key"] for arm in arms(benchmark)}
    everything = [trial for entry in found["methods"].values() for trial in entry.get("trials") or []]
    top = charts.scale_top([trial.get("tokens_per_second") for trial in everything])
    methods = []
    for key, entry in found["methods"].items():
        name, chosen = names.get(key, key), entry.get("chosen")
        trials = sorted(entry.get("trials") or [], key=lambda trial: -(trial.get("tokens_per_second") or 0.0))
        speeds = [trial.get("tokens_per_second") for trial in trials]
        methods.append(
            {
                "name": name,
                "chosen": plain(chosen),
                "count": plural(len(trials), "trial"),
                "text": plural(len(trials), "trial"),
                "chart": charts.trials_lane(
                    f"calibration-{key}",
                    f"{name}: {plural(len(trials), 'trial')}, chosen {plain(chosen)}",
                    f"From {fixed(speeds[-1], 1)} to {fixed(speeds[0], 1)} tok/s.",
                    top,
                    speeds,
                    next((trial.get("tokens_per_second") for trial in trials if trial.get("settings") == chosen), None),
                ) if trials else "",
                "trials": [
                    {
                        "settings": plain(trial.get("settings")),
                        "speed": fixed(trial.get("tokens_per_second"), 1),
                        "tau": fixed(trial.get("tau")),
                        "prompts": plain(trial.get("prompts")),
                        "exact": bool(trial.get("exact")),
                        "chosen": trial.get("settings") == chosen,
                    }
                    for trial in trials
                ],
            }
        )
    return {
        "methods": methods,
        "axis": charts.axis(top),
        "prompts": plural(len(found.get("prompts") or []), "prompt"),
        "seconds": seconds(found.get("seconds")),
    }


def linear_plans(benchmark: Benchmark) -> dict[str, Any] | None:
    """Per weight shape and row count: how it runs, the bandwidth reached and the stock layer's."""
    groups, reached, stock_seen = [], [], []
    for plan in benchmark.get("linear_plans") or []:
        speed, stock = plan.get("gigabytes_per_second") or {}, plan.get("stock_gigabytes_per_second") or {}
        lines = []
        for rows in sorted(speed, key=lambda key: (len(str(key)), str(key))):
            here, before = speed.get(rows), stock.get(rows)
            gain = here / before if is_number(here) and is_number(before) and before > 0 else None
            lines.append((rows, fixed(here, 1), fixed(before, 1), fixed(gain, 1, "×")))
        groups.append(
            {
                "shape": f"{plan.get('out_features', '?')} × {plan.get('in_features', '?')}",
                "storage": plain(plan.get("storage")),
                "lines": lines,
            }
        )
        reached += [value for value in [speed.get("1")] if is_number(value)]
        stock_seen += [value for value in [stock.get("1")] if is_number(value)]
    if not groups:
        return None
    words = ""
    if reached:
        words = f"Products of one row read weights at {_span(reached)} GB/s here, those in fewer bits counted in full"
        words += f"; the stock layers reach {_span(stock_seen)}." if stock_seen else "."
    padded = (benchmark.get("padded_rows") or {}).items()
    if padded:
        words += " Faster run as more rows, the extra ones thrown away: "
        words += ", ".join(f"{rows} as {run}" for rows, run in sorted(padded)) + "."
    return {"groups": groups, "words": words}


def flat(tree: Any, prefix: str = "") -> Facts:
    """A JSON object as (label, value) lines, nested objects in place; sizes and counts in their units."""
    facts: Facts = []
    for key, value in (tree or {}).items() if isinstance(tree, dict) else ():
        label = f"{prefix}{str(key).replace('_', ' ')}"
        if isinstance(value, dict) and value:
            facts += flat(value, f"{label}: ")
        elif str(key).endswith("bytes"):
            facts.append((label.removesuffix(" bytes"), size(value)))
        elif str(key).endswith("sha256") and isinstance(value, str) and len(value) == 64:
            facts.append((label, f"{value[:12]}…"))  # enough to recognise; the whole digest is in the raw data
        elif key == "parameters":
            facts.append((label, quantity(value)))
        else:
            facts.append((label, plain(value)))
    return facts


def _span(values: list[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low}–{high}"
