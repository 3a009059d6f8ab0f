"""What the page of a comparison shows, prepared: pure functions to plain values and charts. The template only places them."""

from __future__ import annotations

from typing import Any

from dflash_mini_lab.report import charts, facts
from dflash_mini_lab.report.comparison import CAUTION, Comparison, described, legend, sentence, warnings
from dflash_mini_lab.report.facts import Facts
from dflash_mini_lab.report.terms import TERMS

OWN_TERMS = (
    (
        "ratio",
        "A / B",
        "Decode seconds per new token of run A, divided by those of run B. Repeats of separate runs are no pairs: for each "
        "prompt it is the ratio of the two geometric means over repeats, and over prompts their geometric mean.",
    ),
    (
        "joint",
        "Noise of both runs",
        "Each run has a noise floor, from Normal against itself. A ratio holds the noise of both, so the two floors are "
        "multiplied; a ratio whose interval overlaps it is called “no difference”.",
    ),
)
BORROWED_TERMS = ("method", "normal", "new", "speedup", "floor", "exact", "warmup")


def page(comparison: Comparison) -> dict[str, Any]:
    """Everything the template needs."""
    told = {line.verdict for line in comparison.lines}
    failed = any(word.startswith("inexact") for word in told)
    return {
        "sentence": sentence(comparison),
        "tone": "fail" if failed else "good" if told & {"A faster", "B faster"} else "plain",
        "warnings": list(warnings(comparison)),
        "runs": described(comparison),
        "legend": legend(comparison),
        "caution": CAUTION,
        "rows": _rows(comparison),
        "axis": charts.axis(_top(comparison), "×"),
        "measured": any(line.ratio for line in comparison.lines),
        "changes": [(change.field, change.a, change.b, change.axis) for change in comparison.changes],
        "facts": _facts(comparison),
        "prompts": ", ".join(comparison.prompts),
        "terms": OWN_TERMS + tuple(term for term in TERMS if term[0] in BORROWED_TERMS),
        "lab_version": str(comparison.runs[0].get("lab_version") or ""),
    }


def _top(comparison: Comparison) -> float:
    ratios = [value for line in comparison.lines if line.ratio for value in (line.ratio.mean, line.ratio.high)]
    return charts.scale_top([*ratios, *(comparison.floor or ())])


def _rows(comparison: Comparison) -> list[dict[str, Any]]:
    top = _top(comparison)
    rows = []
    for index, line in enumerate(comparison.lines):
        ratio = line.ratio
        mean, low, high = (ratio.mean, ratio.low, ratio.high) if ratio else (None, None, None)
        told = ratio.words if ratio else "none"
        rows.append(
            {
                "name": line.name,
                "kind": line.kind,
                "inexact": line.verdict.startswith("inexact"),
                "note": line.note,
                "factor": told.split()[0] if ratio else "–",
                "interval": " ".join(told.split()[1:]) if ratio else "",
                "measured": ratio is not None,
                "words": line.verdict,
                "own": [factor.words if factor else "–" for factor in (line.speedup_a, line.speedup_b)],
                "chart": charts.bar_lane(
                    f"ratio-{index}",
                    f"{line.name}: A / B {told}",
                    f"{line.verdict}.",
                    top,
                    mean,
                    low,
                    high,
                    comparison.floor,
                    quiet=line.kind != "method",
                ),
            }
        )
    return rows


def _facts(comparison: Comparison) -> list[tuple[str, str, str, bool]]:
    """(label, in A, in B, whether they differ) of all that the two files say about target, drafter, machine and settings."""
    lines = []
    for part in ("target", "drafter", "machine", "settings"):
        a, b = (dict(_of(run, part)) for run in comparison.runs)
        for label in a | b:
            values = a.get(label, "–"), b.get(label, "–")
            lines.append((f"{part}: {label}", *values, values[0] != values[1]))
    return lines


def _of(run: dict[str, Any], part: str) -> Facts:
    if part != "drafter":
        return facts.flat(run.get(part))
    found = facts.drafter(run) or {"facts": [], "files": []}
    return found["facts"] + [(name, f"{digest[:12]}…") for name, _, digest in found["files"]]
