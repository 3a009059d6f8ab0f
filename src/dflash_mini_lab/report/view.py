"""What the page shows, prepared: pure functions from a benchmark to plain values and charts. Templates only place them."""

from __future__ import annotations

from typing import Any

from dflash_mini_lab.report import charts, explorer, facts, measured
from dflash_mini_lab.report.format import dig, fixed, interval, is_number, listed, moment, percent, plain, plural, seconds, times
from dflash_mini_lab.report.ranking import Benchmark, Row, arms, inexact_arms, measured_cells, rank
from dflash_mini_lab.report.terms import TERMS
from dflash_mini_lab.report.tuning import tuning
from dflash_mini_lab.report.verdict import best_method, verdict

SECTIONS = (
    ("ranking", "Ranking"),
    ("explorer", "Mechanism explorer"),
    ("machine", "Machine and settings"),
    ("acceptance", "Acceptance"),
    ("cost", "Cost of verifying"),
    ("time", "Where the time goes"),
    ("outputs", "Outputs"),
    ("calibration", "Calibration"),
    ("layers", "Linear layers"),
    ("drafter", "Drafter"),
    ("terms", "Terms"),
    ("data", "Raw data"),
)
WINDOW = 4  # tokens shown on each side of a divergence
FLOOR_WORDS = {
    "faster": "faster",
    "slower": "slower",
    "no difference": "no difference",
    "one measurement": "one measurement",
    "inexact": "inexact, no speed-up",
    "reference": "the reference",
    "noise floor": "noise floor",
    "pending": "not measured yet",
}


def page(benchmark: Benchmark) -> dict[str, Any]:
    """Everything the templates need; every key is present for every run, however incomplete."""
    rows = rank(benchmark)
    best = best_method(rows)
    return {
        "verdict": verdict(benchmark),
        "lede": lede(benchmark, rows),
        "sections": SECTIONS,
        "target_name": str(dig(benchmark, "target", "name", default="unknown target")),
        "created": moment(benchmark["created"]) if benchmark.get("created") else "",
        "stamp": str(benchmark.get("created") or ""),
        "lab_version": str(benchmark.get("lab_version") or ""),
        "divergences": divergences(benchmark),
        "gate": gate_words(benchmark),
        "ranking": ranking(benchmark, rows),
        "outputs": outputs(benchmark, rows),
        "acceptance": measured.acceptance(benchmark, rows),
        "explorer": explorer.explorer(benchmark),
        "parareal": explorer.parareal(benchmark),
        "simple_parareal": explorer.simple_parareal(benchmark),
        "cost": measured.verify_cost(benchmark, best),
        "break_even": measured.break_even(benchmark, rows),
        "phases": measured.phases(benchmark, rows),
        "calibration": facts.calibration(benchmark),
        "tuning": tuning(benchmark),
        "layers": facts.linear_plans(benchmark),
        "drafter": facts.drafter(benchmark),
        "target": facts.target(benchmark),
        "machine": facts.machine(benchmark),
        "settings": facts.settings(benchmark),
        "command": facts.command(benchmark),
        "terms": TERMS,
        "schema_version": plain(benchmark.get("schema_version")),
    }


def lede(benchmark: Benchmark, rows: tuple[Row, ...]) -> str:
    """What was measured, in one sentence under the verdict."""
    methods = sum(row.kind == "method" for row in rows)
    cells, tokens = measured_cells(benchmark), dig(benchmark, "settings", "tokens")
    where = " in ".join(str(value) for value in (dig(benchmark, "target", "name"), dig(benchmark, "target", "dtype")) if value)
    device = (
        dig(benchmark, "machine", "gpu")
        if dig(benchmark, "target", "device", default="cpu") != "cpu"
        else dig(benchmark, "machine", "cpu")
    )
    size = f"{plural(len({cell['prompt'] for cell in cells}), 'prompt')}, {plural(len(cells), 'cell')}"
    parts = [plural(methods, "method"), size, f"up to {tokens} new tokens each" if tokens else ""]
    return f"{', '.join(filter(None, parts))}. {where} on {plain(device) if device else 'an unnamed machine'}."


def ranking(benchmark: Benchmark, rows: tuple[Row, ...]) -> dict[str, Any]:
    """Bars with intervals over the noise floor, and the table."""
    floor = _floor(benchmark)
    top = charts.scale_top([value for row in rows for value in (row.mean, row.high)] + list(floor or ()))
    lines = []
    for index, row in enumerate(rows):
        result = dig(benchmark, "results", "arms", row.key, default={})
        factor = times(row.mean) if row.mean is not None else "none"
        words = FLOOR_WORDS.get(row.verdict, row.verdict)
        spread = interval(row.low, row.high)
        lines.append(
            {
                "name": row.name,
                "kind": row.kind,
                "summary": row.summary,
                "width": row.width,
                "verdict": row.verdict,
                "words": words,
                "measured": row.mean is not None,
                "factor": factor if row.mean is not None else "–",
                "interval": spread,
                "speed": fixed(row.speed, 1),
                "tau": fixed(row.tau),
                "acceptance": percent(row.acceptance),
                "exact": _exact_words(row),
                "is_exact": row.exact,
                "chart": charts.bar_lane(
                    f"speed-{index}",
                    f"{row.name}: speed-up {factor} {spread}".strip(),
                    f"{words}.",
                    top,
                    row.mean,
                    row.low,
                    row.high,
                    floor,
                    quiet=row.kind != "method",
                ),
                "more": (
                    row.name,
                    plural(row.runs, "run"),
                    fixed(row.speed, 1),
                    _range(result.get("tokens_per_second")),
                    fixed(row.tau),
                    fixed(result.get("tau_micro")),
                    plain(result.get("rounds")),
                    plain(result.get("proposed")),
                    plain(result.get("accepted")),
                    fixed(result.get("guidance_work_per_round"), 1),
                    seconds(result.get("time_to_first_token")),
                    seconds(result.get("end_to_end_seconds")),
                ),
            }
        )
    return {
        "rows": lines,
        "axis": charts.axis(top, "×"),
        "floor": interval(*floor) if floor else "",
        "methods": sum(row.kind == "method" for row in rows),
        "measured": any(row.mean is not None for row in rows),
    }


def outputs(benchmark: Benchmark, rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    """Per prompt: its text, the reference's, which arms gave the same tokens, and how the tokens arrived round by round."""
    reference = {entry["prompt"]: entry for entry in benchmark.get("reference") or []}
    panels = []
    for number, prompt in enumerate(benchmark.get("prompts") or []):
        expected = reference.get(prompt["id"], {})
        runs = [run for cell in measured_cells(benchmark) if cell["prompt"] == prompt["id"] for run in cell.get("runs") or []]
        same = [
            (row.name, sum(run["tokens"] == expected.get("tokens") for run in own), len(own))
            for row in rows
            for own in [[run for run in runs if run["arm"] == row.key]]
            if own
        ]
        differing = [f"{name} ({count - equal} of {count})" for name, equal, count in same if equal < count]
        if not expected or not same:
            words = "Not decoded yet." if not expected else "No arm has run on this prompt yet."
        elif differing:
            words = f"Not identical: {listed(differing, 20)}. Every other arm gave the reference's tokens."
        else:
            words = f"All {plural(len(runs), 'run')} of {plural(len(same), 'arm')} gave exactly this text, token by token."
        total = len(expected.get("tokens") or [])
        panels.append(
            {
                "id": prompt["id"],
                "category": prompt.get("category") or "",
                "prompt": prompt.get("text") or "",
                "prompt_tokens": prompt.get("prompt_tokens"),
                "text": expected.get("text"),
                "total": total,
                "finish": {
                    "stop": "ended at a stop token",
                    "budget": "cut at the budget",
                    "context": "cut at the context's end",
                }.get(str(expected.get("finish")), ""),
                "identical": bool(same) and not differing,
                "words": words,
                "strips": _strips(number, prompt["id"], rows, runs, total),
            }
        )
    return panels


def divergences(benchmark: Benchmark) -> list[dict[str, Any]]:
    """Every mismatch of the gate, violations first: where it is, what stood there, and how close it was."""
    names = {arm["key"]: arm.get("name") or arm["key"] for arm in arms(benchmark)}
    expected = {entry["prompt"]: entry.get("tokens") or [] for entry in benchmark.get("reference") or []}
    runs = {
        (run["arm"], cell["prompt"], cell.get("repeat", 0)): run.get("tokens") or []
        for cell in benchmark.get("cells") or []
        for run in cell.get("runs") or []
    }
    found = []
    for entry in sorted(dig(benchmark, "gate", "mismatches", default=[]), key=lambda entry: entry["verdict"] == "tie"):
        place = entry.get("position") or 0
        candidates = {token.get("token"): token for token in entry.get("reference_top2") or []}
        mine = runs.get((entry["arm"], entry["prompt"], entry.get("repeat", 0)), [])
        found.append(
            {
                "arm": names.get(entry["arm"], entry["arm"]),
                "prompt": entry["prompt"],
                "repeat": _repeat_words(entry.get("repeat", 0)),
                "position": place + 1,
                "verdict": entry["verdict"],
                "how": _closeness(entry),
                "top": [
                    (plain(token.get("token")), token.get("text") or "", plain(token.get("logit")))
                    for token in candidates.values()
                ],
                "reference": _window(expected.get(entry["prompt"], []), place),
                "output": _window(mine, place),
                "text": entry.get("text"),
            }
        )
    return found


def gate_words(benchmark: Benchmark) -> str:
    gate = dig(benchmark, "gate", default={})
    runs, exact = gate.get("runs") or 0, gate.get("exact") or 0
    if not runs:
        return "Nothing has been compared with the reference yet."
    if exact == runs and not inexact_arms(benchmark):
        return f"All {plural(runs, 'run')} gave the reference's tokens, to the last one."
    return f"{exact} of {plural(runs, 'run')} gave the reference's tokens."


def _floor(benchmark: Benchmark) -> tuple[float, float] | None:
    floor = dig(benchmark, "results", "noise_floor", default={})
    low, high = floor.get("low"), floor.get("high")
    return (low, high) if is_number(low) and is_number(high) else None


def _exact_words(row: Row) -> str:
    if row.exact is None:
        return "–"
    if row.exact:
        return "✓ exact"
    if row.verdict != "inexact":
        return plural(row.ties, "tie")
    return f"✗ {row.exact_runs} of {row.runs}" if row.exact_runs < row.runs else "✗ in warm-up"


def _repeat_words(repeat: int) -> str:
    """Warm-ups have negative repeats."""
    return f"repeat {repeat + 1}" if repeat >= 0 else "warm-up"


def _closeness(entry: dict[str, Any]) -> str:
    gap, difference = entry.get("gap"), entry.get("largest_logit_difference")
    if not is_number(gap) or not is_number(difference):
        return "One of the two texts ended there."
    here = f"There, the reference preferred its own token by {plain(gap)} in logits"
    return f"{here}; before it, the two paths differ by up to {plain(difference)}."


def _range(speed: Any) -> str:
    low, high = dig(speed, "low"), dig(speed, "high")
    return f"{fixed(low, 1)}–{fixed(high, 1)}" if is_number(low) and is_number(high) else "–"


def _strips(number: int, prompt: str, rows: tuple[Row, ...], runs: list[dict[str, Any]], total: int) -> list[dict[str, Any]]:
    strips = []
    for index, row in enumerate(rows):
        steps = next((run["steps"] for run in runs if run["arm"] == row.key and run.get("steps")), None)
        if row.kind != "method" or not steps:
            continue
        rounds = [
            (min(accepted, committed), committed - min(accepted, committed))
            for accepted, committed in zip(steps["accepted"], steps["committed"], strict=False)
        ]
        words = f"{plural(len(rounds), 'target call')} for {plural(1 + sum(steps['committed']), 'token')}"
        strips.append(
            {
                "name": row.name,
                "words": words,
                "chart": charts.rounds_strip(
                    f"rounds-{number}-{index}", f"{row.name} on {prompt}, first repeat", f"{words}.", rounds, total
                ),
            }
        )
    return strips


def _window(tokens: list[int], place: int) -> dict[str, str]:
    """The tokens around a place: those before, the one there ("end" where the text has ended), those after."""
    return {
        "before": " ".join(map(str, tokens[max(place - WINDOW, 0) : place])),
        "there": str(tokens[place]) if place < len(tokens) else "end",
        "after": " ".join(map(str, tokens[place + 1 : place + 1 + WINDOW])),
    }
