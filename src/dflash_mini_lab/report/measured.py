"""View models of what was measured round by round: acceptance, the cost of verifying, and where the time goes."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from dflash_mini_lab.report import charts
from dflash_mini_lab.report.format import dig, fixed, is_number, milliseconds, percent, times
from dflash_mini_lab.report.ranking import Benchmark, Row

PHASES = (("draft", "Draft"), ("select", "Select"), ("verify", "Verify"), ("rest", "Rest"))


def acceptance(benchmark: Benchmark, rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    """Per method: acceptance by slot and the histogram of accepted lengths, as charts and as numbers."""
    panels = []
    for index, row in enumerate(rows):
        result = dig(benchmark, "results", "arms", row.key, default={})
        joint, conditional = result.get("slot_joint") or [], result.get("slot_conditional") or []
        counts = result.get("accepted_histogram") or []
        if row.kind != "method" or not (joint or conditional or counts):
            continue
        shares = [count / max(sum(counts), 1) for count in counts]
        panels.append(
            {
                "name": row.name,
                "rate": percent(row.acceptance),
                "tau": fixed(row.tau),
                "micro": fixed(result.get("tau_micro")),
                "slots": charts.slot_chart(
                    f"slots-{index}", f"{row.name}: acceptance by slot", _slots_in_words(joint), joint, conditional
                ),
                "lengths": charts.histogram(
                    f"lengths-{index}", f"{row.name}: accepted drafts per round", _lengths_in_words(shares), shares
                ),
                "slot_table": [
                    (slot + 1, percent(pair[0]), percent(pair[1])) for slot, pair in enumerate(zip_longest(conditional, joint))
                ],
                "length_table": [
                    (length, count, percent(share)) for length, (count, share) in enumerate(zip(counts, shares, strict=False))
                ],
            }
        )
    return panels


def verify_cost(benchmark: Benchmark, best: Row | None) -> dict[str, Any] | None:
    """v(W) as a chart and a table; with the best method's break-even and reached τ at its width."""
    cost = dig(benchmark, "verify_cost", default={})
    single = next(iter(cost.get("median_seconds") or []), None)
    points = [
        point
        for point in zip_longest(
            *(cost.get(name) or [] for name in ("rows", "ratio", "median_seconds", "low_seconds", "high_seconds"))
        )
        if is_number(point[0]) and is_number(point[1])
    ]
    if not points or not is_number(single) or single <= 0:
        return None
    rows, ratio = [point[0] for point in points], [point[1] for point in points]
    low = [(point[3] / single) if is_number(point[3]) else point[1] for point in points]
    high = [(point[4] / single) if is_number(point[4]) else point[1] for point in points]
    needed = dig(benchmark, "results", "arms", best.key, "break_even_tau") if best else None
    method = None
    if best and best.width is not None and best.width in rows and is_number(needed) and is_number(best.tau):
        method = (best.width, needed, best.tau)
    words = f"From {times(ratio[0])} at {rows[0]} row to {times(ratio[-1])} at {rows[-1]} rows."
    if best and method:
        words += f" {best.name} at width {best.width} needs τ {fixed(needed)} and reaches {fixed(best.tau)}."
    return {
        "chart": charts.cost_curve(
            "cost", "Cost of verifying W rows, relative to one row", words, rows, ratio, low, high, method
        ),
        "words": words,
        "method": best.name if best and method else None,
        "context": cost.get("context_tokens"),
        "table": [
            (point[0], times(point[1]), milliseconds(point[2]), f"{milliseconds(point[3])} – {milliseconds(point[4])}")
            for point in points
        ],
    }


def break_even(benchmark: Benchmark, rows: tuple[Row, ...]) -> dict[str, Any] | None:
    """Per method: the τ it needs against the τ it reaches, and the speed-up expected from that against the measured one."""
    found = []
    for row in rows:
        result = dig(benchmark, "results", "arms", row.key, default={})
        if row.kind == "method" and is_number(result.get("break_even_tau")) and is_number(row.tau):
            found.append((row, result))
    if not found:
        return None
    top = charts.scale_top([value for row, result in found for value in (row.tau, result["break_even_tau"])])
    lanes = []
    for index, (row, result) in enumerate(found):
        needed = result["break_even_tau"]
        text = f"needs {fixed(needed)}, reaches {fixed(row.tau)}"
        lanes.append(
            {
                "name": row.name,
                "text": text,
                "chart": charts.range_lane(
                    f"even-{index}", f"{row.name}: break-even τ and reached τ", f"It {text}.", top, needed, row.tau or 0.0
                ),
                "table": (
                    row.name,
                    row.width or "–",
                    fixed(result.get("draft_cost")),
                    fixed(needed),
                    fixed(row.tau),
                    times(result.get("expected_speedup")) if row.verdict != "inexact" else "withheld",
                    times(row.mean) if row.verdict != "inexact" else "withheld",
                ),
            }
        )
    return {"lanes": lanes, "axis": charts.axis(top)}


def phases(benchmark: Benchmark, rows: tuple[Row, ...]) -> dict[str, Any] | None:
    """Per arm: how long a round takes and on what; time to first token apart."""
    found = []
    for row in rows:
        result = dig(benchmark, "results", "arms", row.key, default={})
        rounds, spent = result.get("rounds"), result.get("phase_seconds")
        if is_number(rounds) and rounds > 0 and isinstance(spent, dict):
            found.append((row, result, [(key, label, float(spent.get(key) or 0.0) / rounds) for key, label in PHASES]))
    if not found:
        return None
    top = charts.scale_top([sum(part[2] for part in parts) * 1000 for _, _, parts in found], least=1e-3)
    lanes = []
    for index, (row, result, parts) in enumerate(found):
        whole = sum(part[2] for part in parts)
        words = ", ".join(f"{label.lower()} {milliseconds(length)}" for _, label, length in parts if length > 0)
        lanes.append(
            {
                "name": row.name,
                "text": f"{milliseconds(whole)} a round",
                "chart": charts.stack_lane(
                    f"phases-{index}",
                    f"{row.name}: {milliseconds(whole)} a round",
                    f"{words}.",
                    top,
                    [(key, length * 1000) for key, _, length in parts],
                ),
                "table": (
                    row.name,
                    *(milliseconds(length) for _, _, length in parts),
                    milliseconds(whole),
                    milliseconds(1 / row.speed) if row.speed else "–",
                    milliseconds(result.get("time_to_first_token")),
                ),
            }
        )
    return {"lanes": lanes, "axis": charts.axis(top, " ms"), "legend": PHASES}


def _slots_in_words(joint: list[float]) -> str:
    return "Joint acceptance, slot by slot: " + ", ".join(percent(share) for share in joint) + "."


def _lengths_in_words(shares: list[float]) -> str:
    return "; ".join(f"{length} accepted in {percent(share)} of rounds" for length, share in enumerate(shares)) + "."
