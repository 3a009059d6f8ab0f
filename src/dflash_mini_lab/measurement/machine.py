"""Facts about the machine that a speed depends on. Nothing here may fail a run: what cannot be had is null or "unknown"."""
from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

RELEVANT_ISA = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    *("neon", "asimd", "asimdhp", "asimddp", "fphp", "i8mm", "bf16", "sve", "sve2", "svei8mm", "svebf16", "sme", "sme2"),
)
"""The instruction sets that decide how fast small products run, by Linux's names; others are noise in a report."""
MACOS_ISA = {
    "hw.optional.neon": "neon",
    "hw.optional.arm.FEAT_FP16": "asimdhp",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_SME": "sme",
    "hw.optional.avx2_0": "avx2",
    "hw.optional.avx512f": "avx512f",
}

T = TypeVar("T")


def facts(device: str = "cpu", backend: str = "torch", threads: int | None = None) -> dict[str, Any]:
    """The `machine` entry of benchmark.json; call it before the first measurement, for the load average.

    `backend`: whose products run, `torch` or `numpy`; what takes no part is null. NumPy cannot be asked for its threads:
    `threads` is what it was told.
    """
    torch = backend == "torch"
    more = (_attempt(_cuda_facts) or {}) if device.startswith("cuda") else {}
    return {
        "cpu": _attempt(_cpu_name) or "unknown",
        "isa": _attempt(_isa) or _attempt(_torch_isa if torch else _numpy_isa) or [],
        "cores": _attempt(_cores) or 1,
        "threads": (_attempt(_torch_threads) if torch else threads) or 1,
        "memory_bytes": _attempt(_memory_bytes),
        "os": _attempt(platform.platform) or sys.platform,
        "python": platform.python_version(),
        "torch": _attempt(lambda: version("torch")) if torch else None,
        "transformers": _attempt(lambda: version("transformers")) if torch else None,
        "numpy": _attempt(lambda: version("numpy")),
        "blas": _attempt(_blas if torch else _numpy_blas),
        "load_average": load_average(),
        "gpu": _attempt(lambda: _gpu_name(device)),
        **more,
    }


def load_average() -> list[float] | None:
    """Over 1, 5 and 15 minutes; None where the system has none (Windows)."""
    return _attempt(lambda: [round(load, 2) for load in os.getloadavg()])


def _attempt(fact: Callable[[], T]) -> T | None:
    try:
        return fact()
    except Exception:  # any failure, on any system: a missing fact must not end a benchmark
        return None


def _cpu_name() -> str:
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string")
    if sys.platform == "win32":
        return _windows_cpu_name()
    names = _cpuinfo()
    return names.get("model name") or names.get("Model") or names.get("Hardware") or _lscpu_name() or platform.machine()


def _cpuinfo() -> dict[str, str]:
    """The first processor's fields; empty where the system has no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return parse_cpuinfo(text)


def parse_cpuinfo(text: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def relevant_isa(flags: str) -> list[str]:
    """The flags of a cpuinfo line that matter for speed, in a fixed order."""
    present = set(flags.lower().split())
    return [name for name in RELEVANT_ISA if name in present]


def _isa() -> list[str]:
    if sys.platform == "darwin":
        return [name for key, name in MACOS_ISA.items() if _attempt(lambda key=key: _sysctl(key)) == "1"]
    fields = _cpuinfo()
    return relevant_isa(fields.get("flags") or fields.get("Features") or "")


def _torch_isa() -> list[str]:
    """What PyTorch itself dispatches to (`avx2`, `avx512`, `default`), the one answer that every system has."""
    import torch

    return [torch.backends.cpu.get_cpu_capability().lower()]


def _numpy_isa() -> list[str]:
    return relevant_isa(" ".join(_numpy_build()["SIMD Extensions"]["found"]))


def _numpy_build() -> dict[str, Any]:
    import numpy

    build: dict[str, Any] = numpy.show_config(mode="dicts")  # type: ignore[assignment]
    return build


def _cores() -> int | None:
    """Processors this process may use: fewer than the machine has under an affinity mask."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _torch_threads() -> int:
    import torch

    return torch.get_num_threads()


def _memory_bytes() -> int:
    if sys.platform == "win32":
        return _windows_memory_bytes()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _blas() -> str | None:
    import torch

    return parse_torch_config(torch.__config__.show())


def _numpy_blas() -> str:
    """The library behind NumPy's products, e.g. `scipy-openblas 0.3.31`."""
    blas = _numpy_build()["Build Dependencies"]["blas"]
    return " ".join(str(blas[name]) for name in ("name", "version") if blas.get(name))


def parse_torch_config(config: str) -> str | None:
    """The libraries behind PyTorch's products, e.g. `mkl, oneDNN v3.11.2`."""
    parts = re.findall(r"BLAS_INFO=(\w+)", config)[:1]
    parts += [f"oneDNN {version}" for version in re.findall(r"(?:MKL-DNN|oneDNN)\s+(v[\d.]+\d)", config)[:1]]
    return ", ".join(parts) or None


def _gpu_name(device: str) -> str | None:
    if not device.startswith("cuda"):
        return None
    import torch

    return torch.cuda.get_device_name(device)


def _cuda_facts() -> dict[str, Any]:
    import torch

    from dflash_mini_lab.measurement.gpu import driver_version

    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu_memory_bytes": device.total_memory,
        "gpu_capability": f"{device.major}.{device.minor}",
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _sysctl(name: str) -> str:
    command = ["sysctl", "-n", name]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=5, check=True).stdout.strip()


def _lscpu_name() -> str | None:
    """ARM's cpuinfo names no model; lscpu knows its part numbers."""
    listing = subprocess.run(["lscpu"], capture_output=True, text=True, errors="replace", timeout=5, check=False).stdout
    return parse_cpuinfo(listing).get("Model name")


def _windows_cpu_name() -> str:
    if sys.platform != "win32":  # for the type checker: winreg exists nowhere else
        raise OSError("not Windows")
    import winreg

    with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
        return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()


def _windows_memory_bytes() -> int:
    if sys.platform != "win32":
        raise OSError("not Windows")

    class MemoryStatus(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong)] + [
            (name, ctypes.c_ulonglong) for name in ("total", "free", "page", "page_free", "virtual", "virtual_free", "extended")
        ]

    status = MemoryStatus()
    status.length = ctypes.sizeof(status)
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("GlobalMemoryStatusEx failed")
    return int(status.total)
