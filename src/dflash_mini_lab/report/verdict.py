"""The run in one sentence, and what a reader must know before believing it. Pure: a benchmark in, words out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_mini_lab.report.format import dig, fixed, interval, listed, plain, plural, times
from dflash_mini_lab.report.ranking import Benchmark, Row, inexact_arms, measured_cells, planned_cells, rank

_ORDER = ("faster", "no difference", "one measurement", "slower")


@dataclass(frozen=True)
class Verdict:
    sentence: str
    tone: str  # "good" | "plain" | "fail" | "pending"
    warnings: tuple[str, ...]  # most serious first


def verdict_sentence(benchmark: Benchmark) -> str:
    """ "DFlash is 1.83× [1.74–1.91] faster here; output identical", or the honest equivalent."""
    return verdict(benchmark).sentence


def verdict(benchmark: Benchmark) -> Verdict:
    rows = rank(benchmark)
    best = best_method(rows)
    failed = [row for row in rows if row.verdict == "inexact"]
    complete = bool(benchmark.get("complete"))
    warnings = tuple(_warnings(benchmark, rows, failed))
    if failed:
        return Verdict(_failure(failed, best), "fail", warnings)
    if best is None:
        return Verdict(_no_method(benchmark, rows), "plain" if complete else "pending", warnings)
    sentence = f"{_speed(best, _noisy(benchmark))}; {_output(benchmark)}"
    if not complete:
        return Verdict(f"So far, {sentence}", "pending", warnings)
    if gate_failed(benchmark):
        return Verdict(sentence, "fail", warnings)
    return Verdict(sentence, "good" if best.verdict == "faster" and not _noisy(benchmark) else "plain", warnings)


def best_method(rows: tuple[Row, ...]) -> Row | None:
    """The method to name in the headline: a clear win before no difference before a loss, then by speed-up."""
    candidates = [row for row in rows if row.kind == "method" and row.mean is not None and row.verdict in _ORDER]
    return min(candidates, key=lambda row: (_ORDER.index(row.verdict), -(row.mean or 0.0)), default=None)


def gate_failed(benchmark: Benchmark) -> bool:
    """Whether the run ends with exit status 3: a violation, or in float32 any tie."""
    ties_fail = dig(benchmark, "target", "dtype", default="float32") in ("float32", "float64")
    return bool(inexact_arms(benchmark)) or (ties_fail and dig(benchmark, "gate", "verdict") == "ties")


def _noisy(benchmark: Benchmark) -> bool:
    return bool(dig(benchmark, "results", "noise_floor", "wide", default=False))


def _speed(row: Row, noisy: bool) -> str:
    factor = f"{times(row.mean)} {interval(row.low, row.high)}".strip()
    if row.verdict == "faster":
        return f"{row.name} is {factor} faster here" + (", on a noisy machine" if noisy else "")
    if row.verdict == "slower":
        return f"{row.name} is slower here, {factor} the speed of normal decoding"
    if row.verdict == "one measurement":
        return f"A single measurement puts {row.name} at {factor}, too little to call"
    if noisy:
        return f"This machine was too noisy to tell whether {row.name} helps ({factor})"
    return f"{row.name} makes no difference here ({factor}, within the noise)"


def _output(benchmark: Benchmark) -> str:
    gate = dig(benchmark, "gate", default={})
    state = gate.get("verdict", "pending")
    if state == "exact":
        return "output identical" + ("" if benchmark.get("complete") else " so far")
    if state == "ties":
        return _but_for_ties(sum(entry["verdict"] == "tie" for entry in gate.get("mismatches") or []))
    return "output not checked yet"


def _but_for_ties(ties: int) -> str:
    return f"output identical but for {plural(ties, 'numerical tie')}" if ties else "output identical"


def _failure(failed: list[Row], best: Row | None) -> str:
    wrong = listed([row.name for row in failed])
    if any(row.kind in ("baseline", "control") for row in failed):
        return f"Output changed: {wrong} did not reproduce the reference, so this run has no speed-ups"
    gets = "it gets" if len(failed) == 1 else "they get"
    sentence = f"Output changed: {wrong} failed the exactness gate, so {gets} no speed-up"
    return f"{sentence}. {_speed(best, False)}; {_but_for_ties(best.ties)}" if best else sentence


def _no_method(benchmark: Benchmark, rows: tuple[Row, ...]) -> str:
    if not any(row.kind == "method" for row in rows):
        speed = next((row.speed for row in rows if row.kind == "baseline"), None)
        return f"Only normal decoding ran here: {fixed(speed, 1)} tokens a second; {_output(benchmark)}"
    if not benchmark.get("complete"):
        done, planned = len(measured_cells(benchmark)), planned_cells(benchmark)
        return f"Unfinished run: {done} of {plural(planned, 'cell')} measured, no result yet"
    return f"No method has a speed-up in this run; {_output(benchmark)}"


def _warnings(benchmark: Benchmark, rows: tuple[Row, ...], failed: list[Row]) -> Iterator[str]:
    for row in failed:
        count = f" in {row.runs - row.exact_runs} of {plural(row.runs, 'run')}" if row.runs > row.exact_runs else ""
        yield f"{row.name} differs from the reference{count}."
    if not failed and gate_failed(benchmark):
        yield "The exactness gate failed: in float32 even a tie is one too many."
    elif tied := [row for row in rows if row.ties]:
        names = listed([f"{row.name} ({row.ties})" for row in tied])
        yield f"Ties, where two tokens score the same within rounding: {names}."
    if not benchmark.get("complete"):
        done, planned = len(measured_cells(benchmark)), planned_cells(benchmark)
        yield f"This run is not finished: {done} of {plural(planned, 'cell')} measured. --resume continues it."
    if ablations := dig(benchmark, "settings", "ablations"):
        yield f"An ablation: {plain(ablations)}. The text stays the same; the speed-ups are not those of the lab as it is."
    if dig(benchmark, "target", "path") == "numpy":
        yield (
            "This target recomputes the visible sequence at every call, so its tokens a second say nothing about targets with a "
            "cache: read its ratios, its acceptance and its exactness."
        )
    if _noisy(benchmark):
        floor = dig(benchmark, "results", "noise_floor", default={})
        yield (
            f"Noisy machine: normal decoding measured twice differs by {interval(floor.get('low'), floor.get('high'))}, "
            "which is wider than ±5\u202f%. Trust only large differences, or run again on a quieter machine."
        )
    if len(benchmark.get("prompts") or []) == 1:
        yield "One prompt only: this shows that everything works, and says little about speed."
