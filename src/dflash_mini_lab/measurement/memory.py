"""The most memory that a run held: what PyTorch allocated on a CUDA device, or what of this process was resident on a CPU.

Linux can be asked from a moment on; elsewhere the system counts from the start of the process. Nothing here may fail a run.
"""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""See proc(5), /proc/pid/clear_refs: the peak resident set becomes what is resident now."""
Read = Callable[[], int | None]


@dataclass(frozen=True)
class Memory:
    """`peak()`: bytes. `before`: what was held when the run began: libraries and the drafter; a NumPy target's weights too,
    any other reads them later. Without a `source` there is no figure, and `reason` says why."""

    source: str | None
    reason: str | None
    before: int | None = None
    counter: Read | None = None

    def peak(self) -> int | None:
        try:
            return self.counter() if self.counter else None
        except Exception:  # as in find_memory
            return None


def find_memory(device: str) -> Memory:
    """The counter that belongs to `device`, begun now."""
    try:
        return _cuda(device) if device.startswith("cuda") else _resident()
    except Exception as error:  # systems differ, and a missing figure must not end a benchmark
        return Memory(None, " ".join(str(error).split())[:100] or type(error).__name__)


def _cuda(device: str) -> Memory:
    import torch

    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    return Memory("PyTorch's allocations on the GPU", None, before, lambda: torch.cuda.max_memory_allocated(device))


def _resident() -> Memory:
    if STATUS.is_file():
        return of_linux(STATUS, CLEAR)
    if sys.platform == "win32":
        return Memory("resident memory of the process since its start", None, windows_bytes(peak=False), windows_bytes)
    return Memory("resident memory of the process since its start", None, rusage_bytes(), rusage_bytes)


def of_linux(status: Path, clear: Path) -> Memory:
    """From /proc. Where the peak cannot be reset, it is the whole process's."""
    reset = False
    with contextlib.suppress(OSError):
        clear.write_text(RESET_PEAK, encoding="ascii")
        reset = True
    source = "resident memory of the process" + ("" if reset else " since its start")
    return Memory(source, None, status_bytes(status, "VmRSS"), lambda: status_bytes(status, "VmHWM"))


def status_bytes(status: Path, name: str) -> int | None:
    for line in status.read_text(encoding="ascii", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return None


def rusage_bytes() -> int:
    """Of macOS and the BSDs: the first counts bytes, the others KiB."""
    if sys.platform == "win32":  # for the type checker: it has no such module
        raise OSError("not on Windows")
    import resource

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def windows_bytes(peak: bool = True) -> int:
    if sys.platform != "win32":
        raise OSError("only on Windows")
    import ctypes
    from ctypes import wintypes

    class Counters(ctypes.Structure):
        _fields_ = [("size", wintypes.DWORD), ("page_faults", wintypes.DWORD)] + [
            (name, ctypes.c_size_t)
            for name in (
                *("peak_working_set", "working_set", "peak_paged_pool", "paged_pool", "peak_pool", "pool"),
                *("page_file", "peak_page_file"),
            )
        ]

    counters = Counters()
    counters.size = ctypes.sizeof(counters)
    kernel: Any = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel.GetCurrentProcess.restype = wintypes.HANDLE
    ask = kernel.K32GetProcessMemoryInfo
    ask.argtypes = [wintypes.HANDLE, ctypes.c_void_p, wintypes.DWORD]
    if not ask(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.size):
        raise OSError("GetProcessMemoryInfo failed")
    return int(counters.peak_working_set if peak else counters.working_set)
