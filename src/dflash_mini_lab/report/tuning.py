"""The tuned verify widths: what was tried, what the cost model expected, and how often the two agree. Pure view models."""

from __future__ import annotations

from typing import Any

from dflash_mini_lab.report.format import dig, fixed, is_number, plural, seconds
from dflash_mini_lab.report.ranking import Benchmark, arms

HEADS = ("Width", "tok/s measured", "tok/s expected", "τ", "E(W)", "v(W)", "Exact", "Choice")


def tuning(benchmark: Benchmark) -> dict[str, Any] | None:
    """Per method: width → measured and expected speed, both choices marked. None for a run that tuned nothing."""
    entries = dig(benchmark, "tuning", "methods", default={})
    if not entries:
        return None
    names = {arm["key"]: arm.get("name") or arm["key"] for arm in arms(benchmark)}
    single = next(iter(dig(benchmark, "verify_cost", "median_seconds", default=[])), None)
    methods = []
    for key, entry in entries.items():
        chosen, expected = entry.get("chosen"), dig(entry, "analytic", "chosen")
        model = {line["width"]: line for line in dig(entry, "analytic", "widths", default=[])}
        methods.append(
            {
                "name": names.get(key, key),
                "words": _words(chosen, expected),
                "draft_cost": fixed(dig(entry, "analytic", "draft_cost")),
                "table": [
                    (
                        trial["width"],
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
        "heads": HEADS,
        "sentence": f"{agreement(benchmark).capitalize()}.",
        "prompts": plural(len(dig(benchmark, "calibration", "prompts", default=[])), "prompt"),
        "seconds": seconds(dig(benchmark, "tuning", "seconds")),
    }


def agreement(benchmark: Benchmark) -> str:
    """ "tuned widths agree with the cost model for 3 of 5 methods"; empty for a run that tuned nothing. A method for which one of
    the two choices is missing does not agree."""
    entries = dig(benchmark, "tuning", "methods", default={})
    if not entries:
        return ""
    agreed = sum(entry.get("agree") is True for entry in entries.values())
    return f"tuned widths agree with the cost model for {agreed} of {plural(len(entries), 'method')}"


def _expected_speed(line: Any, single: Any) -> float | None:
    """Tokens a second at the model's speed-up over single-row decodes of `single` seconds."""
    speedup = dig(line, "speedup")
    return speedup / single if is_number(speedup) and is_number(single) and single > 0 else None


def _words(chosen: int | None, expected: int | None) -> str:
    measured = f"fastest at {chosen}" if chosen else "no exact trial, so the whole block"
    return f"{measured}; cost model: {expected or 'no prediction'}"


def _marks(width: int, chosen: int | None, expected: int | None) -> str:
    return ", ".join(word for word, choice in (("✓ measured", chosen), ("✓ cost model", expected)) if choice == width)
