"""A comparison of two runs as the page and the terminal take it, and its words. Pure; what computes it is in a layer above."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_mini_lab.report.format import console_text, dig, interval, listed, moment, plural, times
from dflash_mini_lab.report.ranking import Benchmark, measured_cells, planned_cells
from dflash_mini_lab.report.terminal import aligned

CAUTION = (
    "The intervals speak about prompts. Two runs also differ by what else their machines did at the time, which no interval "
    "holds; the ratio of Normal to itself shows how much."
)
SHOWN_FIELDS = 3


@dataclass(frozen=True)
class Factor:
    """A ratio with its interval, which a single measurement has not."""

    mean: float
    low: float | None
    high: float | None

    @property
    def words(self) -> str:
        return f"{times(self.mean)} {interval(self.low, self.high)}".strip()


@dataclass(frozen=True)
class Line:
    """One arm. `ratio`: A's decode time per token over B's; None for an arm that is inexact or not measured in either."""

    key: str
    name: str
    kind: str
    ratio: Factor | None
    verdict: str  # "A faster" | "B faster" | "no difference" | "one measurement" | "no floor" | "inexact in …" | "not in …"
    speedup_a: Factor | None
    speedup_b: Factor | None
    note: str = ""  # what differs in the arm's own settings


@dataclass(frozen=True)
class Change:
    """A field in which the runs differ, its two values in short, and the word by which the command line names it."""

    field: str
    axis: str
    a: str
    b: str

    @property
    def words(self) -> str:
        return f"{self.field} is {self.a} in A and {self.b} in B"


@dataclass(frozen=True)
class Comparison:
    """`files`: where A and B lie, as the user wrote it. `across`: the differences that are meant, by axis.

    `floor`: what a ratio cannot be told from 1, by the noise of both runs. `other_texts`: prompts whose references differ.
    """

    files: tuple[str, str]
    runs: tuple[Benchmark, Benchmark]
    across: tuple[str, ...]
    changes: tuple[Change, ...]
    lines: tuple[Line, ...]
    floor: tuple[float, float] | None
    prompts: tuple[str, ...]
    other_texts: tuple[str, ...] = ()


def sentence(comparison: Comparison) -> str:
    """ "B is faster in 2 of 3 arms, A in none; 1 shows no difference": all arms, since to name one is to choose it."""
    told = [line.verdict for line in comparison.lines if line.kind != "control"]
    faster, slower, equal = (told.count(word) for word in ("B faster", "A faster", "no difference"))
    judged = faster + slower + equal
    wrong = sum(word.startswith("inexact") for word in told)
    failed = f"; {plural(wrong, 'arm')} changed the output" if wrong else ""
    if not judged:
        measured = any(line.ratio for line in comparison.lines)
        return ("Too little was measured to tell A from B" if measured else "No arm has a ratio") + failed
    if equal == judged:
        return f"No difference between A and B in {plural(judged, 'arm')}{failed}"
    ahead, behind, many, few = ("B", "A", faster, slower) if faster >= slower else ("A", "B", slower, faster)
    rest = f"; {equal} {'shows' if equal == 1 else 'show'} no difference" if equal else ""
    return f"{ahead} is faster in {many} of {plural(judged, 'arm')}, {behind} in {few or 'none'}{rest}{failed}"


def warnings(comparison: Comparison) -> Iterator[str]:
    """What to know before believing it; the differences that are meant come first."""
    for axis in comparison.across:
        fields = [change.words for change in comparison.changes if change.axis == axis]
        more = f"; and {len(fields) - SHOWN_FIELDS} more" if len(fields) > SHOWN_FIELDS else ""
        yield f"Across {axis}, on purpose: {'; '.join(fields[:SHOWN_FIELDS]) or 'the same in both'}{more}."
    for line in comparison.lines:
        if line.verdict.startswith("inexact"):
            yield f"{line.name} is {line.verdict}: its output is not the reference's, so it gets no ratio."
    for label, run in zip("AB", comparison.runs, strict=True):
        if not run.get("complete"):
            yield f"{label} is not finished: {len(measured_cells(run))} of {plural(planned_cells(run), 'cell')} measured."
    if effort := [change.words for change in comparison.changes if change.axis not in comparison.across]:
        yield f"The runs measured different amounts: {'; '.join(effort)}."
    if comparison.other_texts:
        yield f"The references differ for {listed(list(comparison.other_texts))}: other text, other drafts."
    normal = next((line for line in comparison.lines if line.kind == "baseline"), None)
    if not comparison.across and normal and normal.ratio and normal.verdict in ("A faster", "B faster"):
        yield (
            f"Normal differs from itself ({normal.ratio.words}) with no field changed: the machine was not the same in both "
            "runs. The speed-ups can be compared; the ratios cannot."
        )


def described(comparison: Comparison) -> list[tuple[str, str]]:
    """A and B in a line each: file, target, machine, time."""
    lines = []
    for label, file, run in zip("AB", comparison.files, comparison.runs, strict=True):
        threads = dig(run, "settings", "threads")
        known = [dig(run, "target", "name"), dig(run, "target", "dtype"), dig(run, "machine", "cpu")]
        parts = [str(fact) for fact in known if fact] + ([plural(threads, "thread")] if isinstance(threads, int) else [])
        lines.append((label, f"{file}: {', '.join(parts)}; {moment(run.get('created'))}"))
    return lines


def legend(comparison: Comparison) -> str:
    """What the ratio is."""
    size = plural(len(comparison.prompts), "prompt")
    floor = f" Within {interval(*comparison.floor)}, the noise of both runs, it says nothing." if comparison.floor else ""
    return (
        "A / B is A's decode time per token over B's: above 1, B is faster. It is the geometric mean over "
        f"{size}, with its 95\u202f% bootstrap interval.{floor}"
    )


def summary(comparison: Comparison, width: int = 80, encoding: str | None = "utf-8") -> str:
    """The whole comparison for a terminal of `width` columns."""
    runs = [f"{label}  {words}" for label, words in described(comparison)]
    head = [sentence(comparison), *runs, *(f"! {warning}" for warning in warnings(comparison))]
    lines = [["Method", "A / B", "A's own", "B's own", ""]]
    for line in comparison.lines:
        own = [times(factor.mean) if factor else "–" for factor in (line.speedup_a, line.speedup_b)]
        lines.append([line.name[:24], line.ratio.words if line.ratio else "none", *own, line.verdict])
    table = aligned(lines, (0, 0, 64, 64, 0), (0, 1, 4), width, encoding)
    notes = [f"{line.name}: {line.note}." for line in comparison.lines if line.note]
    foot = [*notes, legend(comparison), "A's own and B's own: the speed-up over Normal within that run.", CAUTION]
    head, foot = ([console_text(line, encoding) for line in part] for part in (head, foot))
    return "\n".join([*head, "", table, "", *foot])
