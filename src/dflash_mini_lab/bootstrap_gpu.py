"""Before PyTorch is installed: which NVIDIA driver and GPUs are here, and which CUDA build of PyTorch fits them.

Part of the bootstrap: standard library only. `nvidia-smi` comes with every driver, so it is asked; nothing else is.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from dflash_mini_lab.bootstrap_install import BootstrapError

INDEX = "https://download.pytorch.org/whl/"
ON_A_CPU = "python run_cpu.py measures on the CPU."
Version = tuple[int, int]


@dataclass(frozen=True)
class Build:
    """One CUDA build of PyTorch: its index, the CUDA version that the driver must offer, and the compute capabilities it serves.

    A driver runs every CUDA of its own major version (NVIDIA's minor version compatibility), so 12.0 is enough for 12.8.
    """

    name: str
    driver: Version
    oldest: Version
    newest: Version


BUILDS = (
    Build("cu130", driver=(13, 0), oldest=(7, 5), newest=(99, 9)),
    Build("cu128", driver=(12, 0), oldest=(7, 5), newest=(12, 0)),
    Build("cu126", driver=(12, 0), oldest=(5, 0), newest=(9, 0)),
)
"""The best first. An index without the pinned version is passed over. CUDA 13 dropped Maxwell, Pascal and Volta (5.0 to 7.0); its
build carries portable code for GPUs that are newer than itself."""


@dataclass(frozen=True)
class Driver:
    """What `nvidia-smi` says: the driver, the newest CUDA that it runs, and each GPU's (name, compute capability)."""

    version: str
    cuda: Version
    gpus: tuple[tuple[str, Version], ...]


def find_driver() -> Driver:
    """The driver of this machine. Raises BootstrapError, one sentence, when there is none, it does not answer, or has no GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise BootstrapError(f"there is no NVIDIA driver here (nvidia-smi is not on the PATH), so no CUDA GPU; {ON_A_CPU}")
    query = ["--query-gpu=name,compute_cap", "--format=csv,noheader"]
    return read_driver(ask(program, []), ask(program, query))


def ask(program: str, arguments: list[str]) -> str:
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BootstrapError(f"the NVIDIA driver does not answer (nvidia-smi: {error}); {ON_A_CPU}") from error
    return done.stdout or done.stderr


def read_driver(summary: str, listing: str) -> Driver:
    """From what `nvidia-smi` prints, and what it lists for `--query-gpu=name,compute_cap`."""
    version = re.search(r"(?:Driver|KMD) Version\s*:\s*([\d.]+)", summary)
    cuda = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+)\.(\d+)", summary)
    if version is None or cuda is None:
        said = " ".join(summary.split())[:200] or "it said nothing"
        raise BootstrapError(f"the NVIDIA driver finds no usable GPU (nvidia-smi: {said}); {ON_A_CPU}")
    found = re.findall(r"^(.+?), *(\d+)\.(\d+)\s*$", listing, re.MULTILINE)
    gpus = tuple((name.strip(), (int(major), int(minor))) for name, major, minor in found)
    if not gpus and "is not a valid field" not in listing:  # drivers too old to know the field are refused for their age
        raise BootstrapError(f"the NVIDIA driver {version[1]} is here but lists no GPU; {ON_A_CPU}")
    return Driver(version[1], (int(cuda[1]), int(cuda[2])), gpus)


def fitting_builds(driver: Driver) -> list[str]:
    """Names of the builds that run on this driver and its newest GPU, the best first. Raises BootstrapError if there is none."""
    oldest = min(build.driver for build in BUILDS)
    if driver.cuda < oldest or not driver.gpus:
        raise BootstrapError(
            f"the NVIDIA driver {driver.version} is too old: it runs CUDA {dotted(driver.cuda)}, and PyTorch's builds need "
            f"{dotted(oldest)} or newer; update the driver."
        )
    name, capability = max(driver.gpus, key=lambda gpu: gpu[1])
    able = [build for build in BUILDS if build.oldest <= capability <= build.newest]
    if not able:
        raise BootstrapError(
            f"{name} has compute capability {dotted(capability)}, and PyTorch's builds need "
            f"{dotted(min(build.oldest for build in BUILDS))} or newer."
        )
    fitting = [build.name for build in able if build.driver <= driver.cuda]
    if not fitting:
        needed = min(build.driver for build in able)
        raise BootstrapError(
            f"the NVIDIA driver {driver.version} is too old for {name}: it runs CUDA {dotted(driver.cuda)}, and PyTorch's build "
            f"for this GPU needs {dotted(needed)}; update the driver."
        )
    return fitting


def torch_indexes(driver: Driver) -> str:
    """The addresses of the fitting builds, separated by blanks, as `bootstrap.launch` takes them."""
    return " ".join(INDEX + name for name in fitting_builds(driver))


def dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
