"""The clocks that a run may be timed with. A test passes its own (`types.Clock`).

Beside them only two places read a clock: packed_linear.py, which times products at load, and crossings.py, whose seconds are
part of a phase and not added to it.
"""
from __future__ import annotations

import time

from dflash_mini_lab.types import Clock


class HostClock:
    """The host's monotonic clock, for work that is over when the call returns: everything on a CPU."""

    def now(self) -> float:
        return time.perf_counter_ns() * 1e-9


class DeviceClock:
    """The host's clock once the CUDA device has finished; without the wait a phase would be timed as its launch."""

    def __init__(self, device: str) -> None:
        self.device = device

    def now(self) -> float:
        import torch

        torch.cuda.synchronize(self.device)
        return time.perf_counter_ns() * 1e-9


def clock_for(device: str) -> Clock:
    """The clock that is honest on `device` (`cpu`, `cuda`, `cuda:0`)."""
    return DeviceClock(device) if device.startswith("cuda") else HostClock()
