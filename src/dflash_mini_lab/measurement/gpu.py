"""The CUDA GPU as PyTorch sees it: what is there, why it cannot serve, and a product whose numbers are checked.

A GPU run is a GPU run: everything that is missing is one sentence, and nothing falls back to the CPU.
"""
from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_mini_lab.bootstrap_gpu import ON_A_CPU, dotted, find_driver
from dflash_mini_lab.bootstrap_install import BootstrapError
from dflash_mini_lab.types import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GIB = 2**30
MARGIN = 2**30
"""Bytes beside the weights: CUDA's own context, workspaces, caches, graphs."""
SLACK = 4
SIDE = 512
"""Rows, columns and depth of the checked product."""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    free_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Cuda:
    """What PyTorch says. `build`: the CUDA it was built for, None for a CPU build; `problem`: why it has no GPU."""

    torch: str
    build: str | None
    cudnn: int | None
    driver: str | None
    gpus: tuple[Gpu, ...]
    architectures: tuple[str, ...]
    problem: str | None


def check(say: Callable[[str], None], dtype: str) -> None:
    """Say what is here, and run a float16 product and one of `dtype`, summed as the run's are. Raises UserError, one sentence,
    for a GPU that cannot serve."""
    cuda = look()
    for line in lines(cuda):
        say(line)
    if reason := refusal(cuda):
        raise UserError(reason)
    sum_in_float32()
    for kind in dict.fromkeys(("float16", dtype)):
        say(checked_product("cuda", kind))


def sum_in_float32() -> None:
    """Every product of the process sums in float32, those of float16 and bfloat16 too, and float32 itself is not cut to TF32:
    shorter sums would differ between the row counts that are compared, and ties would be taken for what the model says."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False


def look() -> Cuda:
    """Ask PyTorch. Raises nothing."""
    problem = None
    gpus: list[Gpu] = []
    if torch.version.cuda:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what they would say is in `problem`
                torch.cuda.init()
                gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
        except Exception as error:  # CUDA raises RuntimeError and AssertionError, with advice of many lines
            problem = " ".join(str(error).split())
    return Cuda(
        torch=torch.__version__,
        build=torch.version.cuda,
        cudnn=torch.backends.cudnn.version() if torch.version.cuda and not problem else None,
        driver=driver_version(),
        gpus=tuple(gpus),
        architectures=tuple(torch.cuda.get_arch_list()) if gpus else (),
        problem=problem,
    )


def _gpu(index: int) -> Gpu:
    device = torch.cuda.get_device_properties(index)
    free, _ = torch.cuda.mem_get_info(index)
    return Gpu(device.name, device.total_memory, free, (device.major, device.minor))


def driver_version() -> str | None:
    try:
        return find_driver().version
    except BootstrapError:
        return None


def lines(cuda: Cuda) -> list[str]:
    """What was found, for people."""
    found = [
        f"GPU {index}: {gpu.name}, {gpu.memory_bytes / GIB:.1f} GiB ({gpu.free_bytes / GIB:.1f} free), "
        f"compute capability {dotted(gpu.capability)}"
        for index, gpu in enumerate(cuda.gpus)
    ]
    build = f"CUDA {cuda.build}, cuDNN {cuda.cudnn or 'unknown'}" if cuda.build else "no CUDA"
    return [*found, f"NVIDIA driver {cuda.driver or 'unknown'}; PyTorch {cuda.torch} ({build})"]


def refusal(cuda: Cuda) -> str | None:
    """Why no run is possible on GPU 0, in one sentence; None when one is."""
    if cuda.build is None:
        return (
            f"this PyTorch ({cuda.torch}) is built without CUDA: leave --no-bootstrap out, and run_gpu.py installs one with it; "
            f"{ON_A_CPU}"
        )
    if cuda.problem and re.search(r"driver.*too old|insufficient for", cuda.problem):
        return (
            f"the NVIDIA driver {cuda.driver or 'here'} is too old for this PyTorch's CUDA {cuda.build}: update the driver, or "
            "remove .venv-gpu so that a build which fits it is installed."
        )
    if cuda.problem or not cuda.gpus:
        return f"PyTorch finds no CUDA GPU here ({(cuda.problem or 'none is visible')[:200]}); {ON_A_CPU}"
    gpu = cuda.gpus[0]
    if not serves(cuda.architectures, gpu.capability):
        known = ", ".join(cuda.architectures)
        return f"{gpu.name} has compute capability {dotted(gpu.capability)}, which this PyTorch has no kernels for ({known})."
    return None


def serves(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether kernels for `architectures` (`sm_80`, `sm_90a`, `compute_120`) run: binaries within a major version, upwards;
    `compute_` code on everything newer."""
    for word in architectures:
        kind, _, digits = word.partition("_")
        number = re.sub(r"\D", "", digits)
        if len(number) < 2:
            continue
        version = (int(number[:-1]), int(number[-1]))
        if version <= capability and (kind == "compute" or version[0] == capability[0]):
            return True
    return not architectures  # a build that does not say is given the chance


def needed_bytes(parameters: int, dtype: str) -> int:
    """The weights twice, since the library's own model is there as well whenever a reference or a verdict is made."""
    return 2 * parameters * DTYPES[dtype].itemsize + MARGIN


def memory_refusal(name: str, needed: int, free: int) -> str | None:
    if free >= needed:
        return None
    return (
        f"{name} needs about {needed / GIB:.1f} GiB of GPU memory and {free / GIB:.1f} GiB are free: end what else uses the GPU, "
        "or take a smaller target or a narrower --dtype."
    )


def require_memory(name: str, parameters: int, dtype: str) -> None:
    """Raises UserError when the target will not fit into what is free on the current GPU."""
    free, _ = torch.cuda.mem_get_info()
    if reason := memory_refusal(name, needed_bytes(parameters, dtype), free):
        raise UserError(reason)


@contextmanager
def full_memory_explained() -> Iterator[None]:
    """Turns PyTorch's own error into a UserError: one sentence instead of a traceback."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            "the GPU's memory became full: end what else uses it, or take a smaller target, fewer tokens or a narrower --dtype; "
            "--resume continues a benchmark, the same command goes on with --prepare."
        ) from error


def checked_product(
    device: str, dtype: str, multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul
) -> str:
    """One product in `dtype` on `device` against float64 on the host, and the sentence about it. Raises UserError if it is wrong.

    Bound, element by element: SLACK roundings to `dtype` of a sum as large as |A|·|B|. A wrong element is off by far more.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIDE, SIDE, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    on_device = a.to(device), b.to(device)
    multiply(*on_device).cpu()  # the first call loads libraries
    started = time.perf_counter()
    got = multiply(*on_device).cpu().double()
    seconds = time.perf_counter() - started
    error = (got - a.double() @ b.double()).abs()
    bound = (a.double().abs() @ b.double().abs()) * (SLACK * torch.finfo(DTYPES[dtype]).eps)
    share = float((error / bound).max())
    if not share <= 1:
        raise UserError(f"a {dtype} product on {device} is wrong: off by {float(error.max()):.3g}, {share:.3g} times its bound.")
    return (
        f"A {dtype} product of {SIDE} × {SIDE} × {SIDE} agrees with float64 (largest error {float(error.max()):.2g}, "
        f"{share:.0%} of its bound) and takes {seconds * 1e3:.2f} ms with its way back."
    )
