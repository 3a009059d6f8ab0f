"""The tuned verify widths: what was tried, what the cost model expected, and how often the two agree. Pure view models."""

from __future__ import annotations

from typing import Any

from dflash_mini_lab.report import charts
from dflash_mini_lab.report.format import dig, fixed, is_number, plain, plural, seconds
from dflash_mini_lab.report.ranking import Benchmark, arms

HEADS = ("Width", "Answers", "tok/s measured", "tok/s expected", "τ", "E(W)", "v(W)", "Exact", "Choice")
VERDICTS = ("same", "within noise", "differ", "unknown")


def tuning(benchmark: Benchmark) -> dict[str, Any] | None:
    """Per method: width → measured and expected speed, both choices marked. None for a run that tuned nothing."""
    entries = dig(benchmark, "tuning", "methods", default={})
    if not entries:
        return None
    names = {arm["key"]: arm.get("name") or arm["key"] for arm in arms(benchmark)}
    single = next(iter(dig(benchmark, "verify_cost", "median_seconds", default=[])), None)
    trials = [trial for entry in entries.values() for trial in entry.get("trials") or []]
    top = charts.scale_top([trial.get("tokens_per_second") for trial in trials])
    methods = []
    for key, entry in entries.items():
        name, chosen, expected = names.get(key, key), entry.get("chosen"), dig(entry, "analytic", "chosen")
        model = {line["width"]: line for line in dig(entry, "analytic", "widths", default=[])}
        speeds = {trial["width"]: trial.get("tokens_per_second") for trial in entry.get("trials") or []}
        words = f"{_words(chosen, expected)}{_difference(dig(benchmark, 'tuning', 'agreement', 'methods', key))}"
        tried = "; ".join(f"{width} rows: {fixed(speed, 1)} tok/s" for width, speed in speeds.items())
        methods.append(
            {
                "name": name,
                "words": words,
                "draft_cost": fixed(dig(entry, "analytic", "draft_cost")),
                "text": f"W {plain(chosen)}",
                "chart": charts.trials_lane(
                    f"tuning-{key}",
                    f"{name}: {words}",
                    f"{tried}.",
                    top,
                    list(speeds.values()),
                    speeds.get(chosen),
                    speeds.get(expected),
                ),
                "table": [
                    (
                        trial["width"],
                        len(trial["cells"]) if "cells" in trial else "–",
                        fixed(trial.get("tokens_per_second"), 1),
                        fixed(_expected_speed(model.get(trial["width"]), single), 1),
                        fixed(trial.get("tau")),
                        fixed(dig(model.get(trial["width"]), "tokens_per_round")),
                        fixed(dig(model.get(trial["width"]), "verify_cost")),
                        "✓" if trial.get("exact") else "✗ no",
                        _marks(trial["width"], chosen, expected),
                    )
                    for trial in entry.get("trials") or []
                ],
            }
        )
    return {
        "methods": methods,
        "axis": charts.axis(top),
        "heads": HEADS,
        "sentence": f"{agreement(benchmark).capitalize()}.",
        "prompts": plural(len(dig(benchmark, "calibration", "prompts", default=[])), "prompt"),
        "seconds": seconds(dig(benchmark, "tuning", "seconds")),
    }


def agreement(benchmark: Benchmark) -> str:
    """ "tuned widths agree with the cost model for 3 of 5 methods; for 1 the two differ by less than the noise"; empty for a run
    that tuned nothing. A method for which one of the two choices is missing does not agree."""
    entries = dig(benchmark, "tuning", "methods", default={})
    if not entries:
        return ""
    agreed = sum(entry.get("agree") is True for entry in entries.values())
    parts = [f"tuned widths agree with the cost model for {agreed} of {plural(len(entries), 'method')}"]
    verdicts = [line["verdict"] for line in dig(benchmark, "tuning", "agreement", "methods", default={}).values()]
    _, tied, apart, unknown = map(verdicts.count, VERDICTS)
    parts += [f"for {tied} the two differ by less than the noise"] if tied else []
    parts += [f"for {apart} by more"] if apart else []
    parts += [f"for {unknown} there is nothing to compare"] if unknown else []
    return "; ".join(parts)


def difference(line: dict[str, Any] | None) -> str:
    """An entry of `tuning.agreement` in a few words: "✓", "within the noise, +0.6 ± 2.1%", "✗ +4.0 ± 2.1%"; empty where it is
    unknown."""
    if not line or line["verdict"] == "unknown":
        return ""
    if line["verdict"] == "same":
        return "✓"
    mark = "within the noise," if line["verdict"] == "within noise" else "✗"
    return f"{mark} {100 * line['difference']:+.1f} ± {100 * line['noise']:.1f}%"


def _difference(line: dict[str, Any] | None) -> str:
    """The same behind the two choices: how much slower the model's choice was."""
    words = difference(line)
    if not line or not words or line["verdict"] == "same":
        return ""
    where = "within the noise" if line["verdict"] == "within noise" else "beyond the noise"
    time = f"{100 * line['difference']:+.1f}% time"
    return f", {time} over {plural(line['cells'], 'answer')}: {where} (±{100 * line['noise']:.1f}%)"


def _expected_speed(line: Any, single: Any) -> float | None:
    """Tokens a second at the model's speed-up over single-row decodes of `single` seconds."""
    speedup = dig(line, "speedup")
    return speedup / single if is_number(speedup) and is_number(single) and single > 0 else None


def _words(chosen: int | None, expected: int | None) -> str:
    measured = f"fastest at {chosen}" if chosen else "no exact trial, so the whole block"
    return f"{measured}; cost model: {expected or 'no prediction'}"


def _marks(width: int, chosen: int | None, expected: int | None) -> str:
    return ", ".join(word for word, choice in (("✓ measured", chosen), ("✓ cost model", expected)) if choice == width)
