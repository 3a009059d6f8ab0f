"""Joules: a GPU's own counter through NVML, or the processor's through RAPL; or the reason why there is none.

Both count everything that the device did, whoever asked for it. Nothing here may fail a run.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
Read = Callable[[], float | None]


@dataclass(frozen=True)
class Energy:
    """`read()`: joules so far, of which only differences mean anything; None when the counter fails. Without a `source` there is
    no counter, and `reason` says why."""

    source: str | None
    reason: str | None
    counter: Read | None = None

    def read(self) -> float | None:
        return self.counter() if self.counter else None


def find_energy(device: str, powercap: Path = POWERCAP) -> Energy:
    """The counter that belongs to `device`: NVML's on CUDA, RAPL's on a CPU."""
    return _nvml(device) if device.startswith("cuda") else rapl(powercap)


def rapl(powercap: Path = POWERCAP) -> Energy:
    """The counters of all processor packages, from Linux's powercap folder; since 2020 only root may read them by default."""
    packages = []
    for zone in sorted(powercap.glob("intel-rapl:*")) if powercap.is_dir() else []:
        try:
            if (zone / "name").read_text(encoding="ascii").startswith("package"):
                packages.append((zone / "energy_uj", int((zone / "max_energy_range_uj").read_text(encoding="ascii"))))
                packages[-1][0].read_text(encoding="ascii")
        except (OSError, ValueError) as error:
            return Energy(None, f"{zone.name}: {getattr(error, 'strerror', None) or error}")
    if not packages:
        return Energy(None, f"no processor package in {powercap}")
    return Energy(f"RAPL ({len(packages)} processor package{'s' * (len(packages) > 1)})", None, _Sum(packages))


class _Sum:
    """Microjoule counters that wrap, as one in joules that does not, if it is read more than once in a turn (many minutes)."""

    def __init__(self, counters: list[tuple[Path, int]]) -> None:
        self._counters = counters
        self._last = [0] * len(counters)
        self._total = 0

    def __call__(self) -> float | None:
        for place, (path, size) in enumerate(self._counters):
            try:
                now = int(path.read_text(encoding="ascii"))
            except (OSError, ValueError):
                return None
            self._total += (now - self._last[place]) % (size + 1)
            self._last[place] = now
        return self._total * 1e-6


def _nvml(device: str) -> Energy:
    try:
        import pynvml
        import torch

        pynvml.nvmlInit()
        properties = torch.cuda.get_device_properties(device)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")  # an index would ignore CUDA_VISIBLE_DEVICES

        def read() -> float | None:
            try:
                return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) * 1e-3
            except pynvml.NVMLError:
                return None

        if read() is None:
            return Energy(None, "NVML: this GPU has no energy counter")
        return Energy("NVML (the GPU alone)", None, read)
    except ImportError:
        return Energy(None, "NVML: nvidia-ml-py is not installed")
    except Exception as error:  # NVML and CUDA raise errors of their own, and a missing figure must not end a benchmark
        return Energy(None, f"NVML: {' '.join(str(error).split())[:100]}")
