"""What runs now and how long the rest will take: a live bar on a terminal, a line a cell in a log.

Use:
    with Progress(total=108) as progress:
        progress.now("DFlash", "tides")     # before a run starts
        progress.done()                     # after it
        progress.cell("tides, repeat 1")    # after a cell
Never part of a measurement: call it between runs, not inside one.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from tqdm import tqdm

from dflash_mini_lab.report.format import console_text


class _Bar(tqdm):
    monitor_interval = 0  # tqdm's watching thread would run beside what is being measured


class Progress:
    """A context manager; what it drew on a terminal is gone when it ends."""

    def __init__(self, total: int, label: str = "benchmark", stream: TextIO | None = None, width: int | None = None) -> None:
        """`total` runs; `width` in columns, the terminal's own by default."""
        self.label = label
        self.stream = sys.stderr if stream is None else stream
        self.live = bool(getattr(self.stream, "isatty", lambda: False)())
        self._bar = _Bar(
            total=total,
            file=self.stream,
            disable=not self.live,
            leave=False,
            ncols=width,
            mininterval=0,
            ascii=True,
            desc=self._printable(label),
            dynamic_ncols=width is None,
            bar_format="{desc} [{bar:16}] {n_fmt}/{total_fmt}, {remaining} left{postfix}",
        )
        self._total, self._finished = total, 0
        self._started = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()

    def now(self, arm: str, prompt: str) -> None:
        """Say what is about to run."""
        self._bar.set_postfix_str(self._printable(f"{arm} on {prompt}"))

    def done(self, runs: int = 1) -> None:
        """Count finished runs."""
        self._finished += runs
        self._bar.update(runs)

    def cell(self, text: str) -> None:
        """A cell is complete: a line in a log; on a terminal the bar has said so already."""
        if self.live:
            return
        left = "time left unknown"
        if self._finished:
            left = f"{tqdm.format_interval(left_seconds(time.monotonic() - self._started, self._finished, self._total))} left"
        self.stream.write(self._printable(f"{self.label}: {self._finished}/{self._total}, {text}, {left}") + "\n")
        self.stream.flush()

    def _printable(self, text: str) -> str:
        return console_text(text, getattr(self.stream, "encoding", None)).replace("\n", " ")


def left_seconds(elapsed: float, finished: int, total: int) -> float:
    """Seconds until the end at the pace so far."""
    return elapsed / finished * max(total - finished, 0)
