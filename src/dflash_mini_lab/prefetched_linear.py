"""Our own product of few rows and a float32 weight, which asks for the weight before it is needed. LLVM compiles it at load.

A library's small product waits for memory and computes in turns: on some machines six rows then take 1.4 times as long as one.
Here the weight lies in tiles of outputs, read from beginning to end, `BLOCK_BYTES` at a time (prefetched_ir.py), and every step
asks for cache lines of the block after, so that reading goes on while the rows are multiplied. Rows that do not fit the
registers at once take turns over a block, in equal parts, each asking for its part of the next one.

A weight is kept in float32, in 16 bits where they lose nothing, or, where that is asked for, rounded to 8 bits with a scale for
each output. Then the rows are rounded too, to as many bits as their sums leave (15 for 576 inputs), and sums are of whole
numbers: one instruction multiplies two inputs by a weight's two and adds them up, and six rows take half the arithmetic.

Each sum runs over the inputs in their order, whatever the number of rows: a token's values are the same bits whether it is
decoded alone or verified in a block.
"""
from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_mini_lab.prefetched_ir import CACHE_LINE, JOB, LEAST_TOP, MOST_OF_A_BYTE, NARROW, TYPES, WIDE, program


def narrowest(weight: Tensor) -> torch.dtype:
    """The smallest type that holds the float32 `weight` exactly: many models are published in 16 bits, and half the bytes are
    read in half the time."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(part.to(dtype).float(), part) for part in (weight[:1], weight)):  # one row refutes most
            return dtype
    return torch.float32


def in_bytes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The float32 `rows [count, inputs]` as whole numbers (int8), and a scale for each row to multiply them by, `[count]`."""
    scales = rows.abs().amax(1).clamp_min(LEAST_TOP) / MOST_OF_A_BYTE
    return (rows / scales[:, None]).round_().to(torch.int8), scales


def most_of_an_input(inputs: int) -> int:
    """The largest whole number that stands for an input beside 8-bit weights: no sum of `inputs` products leaves 32 bits."""
    return min(2**15 - 1, (2**31 - 1) // (MOST_OF_A_BYTE * inputs))


class PackedWeight(NamedTuple):
    """`tiles [outputs / tile, inputs, tile]`; of 8 bits `[outputs / tile, inputs / 2, tile, 2]` (int8) with a scale for each
    output, `[outputs filled up]`."""

    tiles: Tensor
    outputs: int
    scales: Tensor | None = None

    @property
    def inputs(self) -> int:
        return self.tiles.shape[1] * (1 if self.scales is None else 2)

    @property
    def room(self) -> int:
        """Outputs with those that fill up the last tile."""
        return self.tiles.shape[0] * self.tiles.shape[2]

    @property
    def told(self) -> tuple[int, int, int]:
        """What `tiles` is told of a weight: its type and two addresses."""
        return TYPES.index(self.tiles.dtype), self.tiles.data_ptr(), 0 if self.scales is None else self.scales.data_ptr()


class Kernel:
    """The compiled product. `tile`: outputs in one tile of a packed weight."""

    def __init__(self, llvm: Any, openmp: ctypes.CDLL, tile: int, most_rows: Mapping[torch.dtype, int]) -> None:
        self.tile, self.openmp = tile, openmp
        for name in ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier"):
            llvm.add_symbol(name, ctypes.cast(getattr(openmp, name), ctypes.c_void_p).value)
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
        )
        module = llvm.parse_assembly(program(tile, most_rows))
        llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3)).getModulePassManager().run(
            module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3))
        )
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()
        self._share, self._in_order = (self._engine.get_function_address(name) for name in ("share", "in_order"))
        self.tiles_address = self._engine.get_function_address("tiles")
        self._parallel = openmp.GOMP_parallel
        self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None
        self._job = ctypes.c_int64 * len(JOB)

    def pack(self, weight: Tensor) -> PackedWeight:
        """The float32 `weight [outputs, inputs]` in its narrowest type."""
        return PackedWeight(self._tiles(weight[:, :, None].to(narrowest(weight)))[..., 0], len(weight))

    def pack_bytes(self, weight: Tensor) -> PackedWeight:
        """The float32 `weight [outputs, inputs]`, of an even number of inputs, rounded to 8 bits."""
        whole, scales = in_bytes(weight)
        tiles = self._tiles(whole.view(len(weight), -1, 2))
        filled = F.pad(scales, (0, tiles.shape[0] * self.tile - len(weight)))
        return PackedWeight(tiles, len(weight), filled)

    def in_order(self, threads: int, *parts: tuple[int, int]) -> Callable[[], None]:
        """Programs and their jobs, two addresses each, as one call by so many threads, which meet between two of them."""
        told = (ctypes.c_int64 * (1 + 2 * len(parts)))(len(parts), *(address for part in parts for address in part))
        return partial(self._run, told, threads)

    def _run(self, told: ctypes.Array[ctypes.c_int64], threads: int) -> None:
        self._parallel(self._in_order, told, threads, 0)

    def _tiles(self, weight: Tensor) -> Tensor:
        """`[outputs, steps, width]` → `[outputs / tile, steps, tile, width]`, the last filled up with zeros; lines begin where
        cache lines do."""
        outputs, steps, width = weight.shape
        count = -(-outputs // self.tile)
        line = CACHE_LINE // weight.itemsize  # in elements
        room = weight.new_zeros(count * self.tile * steps * width + line)
        offset = -(room.data_ptr() // weight.itemsize) % line
        tiles = room[offset : len(room) - line + offset].view(count, steps, self.tile, width)
        whole = outputs // self.tile
        tiles[:whole] = weight[: whole * self.tile].view(whole, self.tile, steps, width).transpose(1, 2)
        if rest := outputs % self.tile:
            tiles[-1, :, :rest] = weight[-rest:].transpose(0, 1)
        return tiles

    def product(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """`x [..., inputs] → x Wᵀ + b [..., outputs]` of a packed weight, by as many threads as PyTorch uses."""
        inputs, outputs = weight.inputs, weight.room
        if x.dtype != torch.float32 or x.shape[-1] != inputs:
            raise ValueError(f"{x.dtype} inputs {tuple(x.shape)} for a float32 product of {inputs}")
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], outputs)
        rows, threads = x.numel() // inputs, torch.get_num_threads()
        number, *weight_at = weight.told
        rounded_at = x.new_empty(0 if weight.scales is None else threads * rows * (1 + inputs // 2))
        job = self._job(number, x.data_ptr(), rounded_at.data_ptr(), *weight_at, y.data_ptr(), rows, inputs, outputs)
        self._parallel(self._share, ctypes.addressof(job), threads, 0)
        if outputs != weight.outputs:
            y = y[..., : weight.outputs].contiguous()
        return y if bias is None else y.add_(bias)


@cache
def kernel() -> Kernel | None:
    """The product for this machine; None without LLVM, fused multiply-add and half-precision conversion, or the OpenMP whose
    threads PyTorch uses. On Linux alone: elsewhere nobody has tried it."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        import llvmlite.binding as llvm

        openmp = ctypes.CDLL(None)  # what this process has loaded, so PyTorch's own
    except (ImportError, OSError, TypeError):
        return None
    if not hasattr(openmp, "GOMP_parallel"):
        return None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features, architecture = llvm.get_host_cpu_features(), llvm.get_default_triple().split("-")[0]
    if architecture != "aarch64" and not (architecture == "x86_64" and features.get("fma") and features.get("f16c")):
        return None
    try:
        return Kernel(llvm, openmp, *(WIDE if features.get("avx512f") else NARROW))
    except RuntimeError:  # LLVM's, where it does not know the processor
        return None
