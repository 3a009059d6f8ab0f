"""Compiled programs and their calls: what a program is told of a model, what a session tells it once, and what every call does.

A job is a record of numbers and addresses (programs.py). Whoever tells an address keeps what lies there.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_mini_lab.prefetched_linear import Kernel

MOST_ROWS = 32
"""Of one call; a longer one has enough rows to keep single operations busy."""
Told = float | Tensor | np.ndarray
"""A number, or what is told as its address."""


class Program:
    """A program, what it is told of a model, and scratch that all its calls share: not for two of them at the same time."""

    def __init__(self, kernel: Kernel, program: Any, job: np.dtype, widest: int, **told: Told) -> None:
        """`widest`: the most inputs of one of its products."""
        self.kernel, self.address, self._rounded = kernel, program.address, MOST_ROWS * (1 + -(-widest // 2))
        self.job, self._kept = np.zeros(1, job), told
        self._scratch: dict[str, Tensor] = {}
        tell(self.job, tile=kernel.tile, rounded_bytes=4 * self._rounded, **told)

    def scratch(self, threads: int, **sizes: int) -> dict[str, Tensor]:
        """Float32 room of at least so many elements, and what `threads` need for rounded rows."""
        for name, size in (("rounded_at", threads * self._rounded), *sizes.items()):
            if name not in self._scratch or self._scratch[name].numel() < size:
                self._scratch[name] = torch.empty(size, dtype=torch.float32)
        return dict(self._scratch)


class Call:
    """A program's job for one session, which keeps the number of threads that it began with."""

    def __init__(self, program: Program, threads: int, told: Mapping[str, Told]) -> None:
        self.program, self.threads, self._kept, self._job = program, threads, told, program.job.copy()
        tell(self._job, **told)
        self._numbers = self._job.view(np.int64)
        self.run = in_order(self)

    def _tell(self, *numbers: int) -> None:
        """What changes from call to call, in the program's order."""
        self._numbers[: len(numbers)] = numbers


def in_order(*calls: Call) -> Callable[[], None]:
    """All of `calls`, prepared by then, as one: threads start once. Whoever keeps it keeps them."""
    parts = ((call.program.address, address(call._job)) for call in calls)
    return calls[0].program.kernel.in_order(calls[0].threads, *parts)


def tell(job: np.ndarray, **told: Told) -> None:
    for name, value in told.items():
        job[0][name] = value if isinstance(value, float | int) else address(value)


def address(array: Tensor | np.ndarray) -> int:
    return array.data_ptr() if isinstance(array, Tensor) else array.ctypes.data
