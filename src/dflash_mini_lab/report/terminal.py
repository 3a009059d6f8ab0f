"""The result in the terminal: the verdict, what to know before believing it, and one line for each arm. Plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from dflash_mini_lab.report.format import console_text, fixed, interval, percent, times
from dflash_mini_lab.report.ranking import Benchmark, Row, rank
from dflash_mini_lab.report.tuning import agreement
from dflash_mini_lab.report.verdict import verdict

# Column → from which width of the terminal it is shown. A narrow one keeps what a reader must not miss: "no difference"
# and "slower" stay when the throughput goes.
_COLUMNS = (("Method", 0), ("tok/s", 64), ("Speed-up", 0), ("τ", 70), ("Accepted", 78), ("Exact", 0), ("", 56))
_LONGEST_NAME = 24


def results_table(benchmark: Benchmark, width: int = 80, encoding: str | None = "utf-8") -> str:
    """The arms as an aligned table that fits `width` columns and holds only characters of `encoding`."""
    lines = [[name for name, _ in _COLUMNS], *(_cells(row) for row in rank(benchmark))]
    # name, speed-up and remark read as words; the rest are figures
    return aligned(lines, [least for _, least in _COLUMNS], (0, 2, len(_COLUMNS) - 1), width, encoding)


def aligned(lines: list[list[str]], least: Sequence[int], left: Sequence[int], width: int, encoding: str | None) -> str:
    """Lines of texts as a table: a column is there from `least` columns of terminal on; those in `left` are flush left."""
    shown = [index for index, needed in enumerate(least) if width >= needed]
    texts = [[console_text(line[index], encoding).replace("\n", " ") for index in shown] for line in lines]
    widths = [max(len(line[column]) for line in texts) for column in range(len(shown))]
    widths[0] = max(min(widths[0], width - sum(widths[1:]) - 2 * len(shown)), 6)
    return "\n".join(_line(line, widths, [index in left for index in shown]) for line in texts)


def summary(benchmark: Benchmark, width: int = 80, encoding: str | None = "utf-8") -> str:
    """The verdict sentence, its warnings, the table, and what came of tuning, for the end of a run."""
    found = verdict(benchmark)
    head = [found.sentence, *(f"! {warning}" for warning in found.warnings)]
    foot = f"\n\n{tuned}" if (tuned := agreement(benchmark)) else ""
    return "\n".join(console_text(line, encoding) for line in head) + "\n\n" + results_table(benchmark, width, encoding) + foot


def print_summary(benchmark: Benchmark, stream: TextIO, width: int = 80) -> None:
    """Write the summary to a stream in what its encoding can print."""
    stream.write(summary(benchmark, width, getattr(stream, "encoding", None)) + "\n")
    stream.flush()


def _cells(row: Row) -> list[str]:
    factor = (
        f"{times(row.mean)} {interval(row.low, row.high)}".strip()
        if row.mean is not None
        else "none"
        if row.verdict == "inexact"
        else "–"
    )
    exact = "–" if row.exact is None else "✓" if row.exact else f"✗ {row.exact_runs}/{row.runs}"
    remark = row.verdict if row.verdict not in ("faster", "reference") else ""
    speed = fixed(row.speed, 0 if (row.speed or 0) >= 1000 else 1)  # a name needs the room more than a thousandth does
    return [row.name[:_LONGEST_NAME], speed, factor, fixed(row.tau), percent(row.acceptance), exact, remark]


def _line(texts: list[str], widths: list[int], left: list[bool]) -> str:
    cells = [
        text[:wide].ljust(wide) if flush else text.rjust(wide) for text, wide, flush in zip(texts, widths, left, strict=False)
    ]
    return "  ".join(cells).rstrip()
