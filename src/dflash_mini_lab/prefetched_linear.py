"""Our own product of few rows and a float32 weight, which asks for the weight before it is needed. LLVM compiles it at load.

A library's small product waits for memory and computes in turns: on some machines six rows then take 1.4 times as long as one.
Here the weight lies in tiles of outputs, read from beginning to end, `BLOCK_BYTES` at a time, and every step asks for cache lines
of the block after, so that reading goes on while the rows are multiplied. Rows that do not fit the registers at once take turns
over a block, in equal parts, each asking for its part of the next one.

Each sum runs over the inputs in their order, whatever the number of rows: a token's values are the same bits whether it is
decoded alone or verified in a block.
"""
from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 8192
CACHE_LINE = 64
_TO_L2 = 2
"""LLVM's locality of a prefetch: 3 is into the first cache, 0 past all."""

# Some inputs' part of the sums of `rows` rows and one tile of outputs, Σ_k x[r, k] · w[k, tile], kept in registers. Meanwhile
# `ahead` is asked for, `stride` bytes a step. Four steps are one turn of the loop: with weights of 16 bits it would hold as much
# counting as arithmetic.
_ROWS = """
define internal void @{type}_rows_{rows}(ptr %x, ptr %w, ptr %y, i64 %inputs, i64 %outputs, i64 %from, i64 %to,
    ptr %ahead, i64 %stride) alwaysinline #0 {{
start:
  %begins = icmp eq i64 %from, 0
  {starts}
  br label %loop
loop:
  %k = phi i64 [%from, %start], [%next, %loop]
  %asked = phi ptr [%ahead, %start], [%asked_next, %loop]
  {phis}
  %skip = mul i64 %k, {tile}
  %here = getelementptr {element}, ptr %w, i64 %skip
  {prefetches}
  %stored = load <{tile} x {element}>, ptr %here, align {bytes}
  {widening}
  {sums}
  %asked_next = getelementptr i8, ptr %asked, i64 %stride
  %next = add nuw i64 %k, 1
  %more = icmp ult i64 %next, %to
  br i1 %more, label %loop, label %end, !llvm.loop !0
end:
  {stores}
  ret void
}}"""
_START = """
  %yskip{r} = mul i64 %outputs, {r}
  %yat{r} = getelementptr float, ptr %y, i64 %yskip{r}
  %earlier{r} = load {vector}, ptr %yat{r}, align 4
  %begun{r} = select i1 %begins, {vector} zeroinitializer, {vector} %earlier{r}"""
_PHI = """
  %old{r} = phi {vector} [%begun{r}, %start], [%new{r}, %loop]"""
_PREFETCH = """
  %line{n} = getelementptr i8, ptr %asked, i64 {place}
  call void @llvm.prefetch.p0(ptr %line{n}, i32 0, i32 {locality}, i32 1)"""
_SUM = """
  %xskip{r} = mul i64 %inputs, {r}
  %xplace{r} = add i64 %xskip{r}, %k
  %xat{r} = getelementptr float, ptr %x, i64 %xplace{r}
  %x{r} = load float, ptr %xat{r}
  %first{r} = insertelement {vector} poison, float %x{r}, i64 0
  %all{r} = shufflevector {vector} %first{r}, {vector} poison, <{tile} x i32> zeroinitializer
  %new{r} = call {vector} @llvm.fma.v{tile}f32({vector} %all{r}, {vector} %weights, {vector} %old{r})"""
_STORE = """
  store {vector} %new{r}, ptr %yat{r}, align 4"""
_WIDENING = {
    torch.float32: "%weights = fadd <{tile} x float> %stored, splat (float -0.0)",
    torch.float16: "%weights = fpext <{tile} x half> %stored to <{tile} x float>",
    torch.bfloat16: """%wide = zext <{tile} x i16> %stored to <{tile} x i32>
  %shifted = shl <{tile} x i32> %wide, splat (i32 16)
  %weights = bitcast <{tile} x i32> %shifted to <{tile} x float>""",
}
"""From what is stored to float32, exactly. (Adding -0 is no operation, and none is left of it.)"""
_ELEMENTS = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "i16"}

# Some tiles of a product, from `first` to before `end`. A block of inputs at a time stays in the first cache for all rows, `most`
# of which are multiplied at once; every such pass asks for its share of the block that comes next.
_TILES = """
define internal void @{type}_tiles(ptr %x, ptr %w, ptr %y, i64 %rows, i64 %inputs, i64 %outputs, i64 %first, i64 %end) #0 {{
start:
  %tile_size = mul i64 %inputs, {tile}
  %fuller = add i64 %rows, {most_less_one}
  %passes = udiv i64 %fuller, {most}
  %stride = udiv i64 {size}, %passes
  br label %next_tile
next_tile:
  %tile = phi i64 [%first, %start], [%tile_after, %tile_done]
  %some = icmp ult i64 %tile, %end
  br i1 %some, label %one_tile, label %done
one_tile:
  %w_skip = mul i64 %tile, %tile_size
  %w_tile = getelementptr {element}, ptr %w, i64 %w_skip
  %column = mul i64 %tile, {tile}
  br label %next_block
next_block:
  %from = phi i64 [0, %one_tile], [%to, %block_done]
  %block_end = add i64 %from, {block}
  %to = call i64 @llvm.umin.i64(i64 %block_end, i64 %inputs)
  %inputs_taken = sub i64 %to, %from
  %share = mul i64 %inputs_taken, %stride
  %ahead_skip = mul i64 %block_end, {tile}
  %ahead_first = getelementptr {element}, ptr %w_tile, i64 %ahead_skip
  br label %next_rows
next_rows:
  %row = phi i64 [0, %next_block], [%row_after, %rows_done]
  %ahead = phi ptr [%ahead_first, %next_block], [%ahead_next, %rows_done]
  %passes_left = phi i64 [%passes, %next_block], [%passes_after, %rows_done]
  %left = sub i64 %rows, %row
  %left_fuller = add i64 %left, %passes_left
  %left_up = sub i64 %left_fuller, 1
  %taken = udiv i64 %left_up, %passes_left
  %x_skip = mul i64 %row, %inputs
  %x_rows = getelementptr float, ptr %x, i64 %x_skip
  %y_skip = mul i64 %row, %outputs
  %y_place = add i64 %y_skip, %column
  %y_rows = getelementptr float, ptr %y, i64 %y_place
  switch i64 %taken, label %rows_done [{cases}]
  {calls}
rows_done:
  %row_after = add i64 %row, %taken
  %ahead_next = getelementptr i8, ptr %ahead, i64 %share
  %passes_after = sub i64 %passes_left, 1
  %again = icmp ult i64 %row_after, %rows
  br i1 %again, label %next_rows, label %block_done
block_done:
  %more_inputs = icmp ult i64 %to, %inputs
  br i1 %more_inputs, label %next_block, label %tile_done
tile_done:
  %tile_after = add i64 %tile, 1
  br label %next_tile
done:
  ret void
}}"""
_CALL = """
few_{rows}:
  call void @{type}_rows_{rows}(ptr %x_rows, ptr %w_tile, ptr %y_rows, i64 %inputs, i64 %outputs, i64 %from, i64 %to,
    ptr %ahead, i64 %stride)
  br label %rows_done"""

# The same of a weight of any type; addresses are integers.
_ANY = """
define void @tiles(i64 %type, i64 %x_at, i64 %w_at, i64 %y_at, i64 %rows, i64 %inputs, i64 %outputs, i64 %first, i64 %end) #0 {{
  %x = inttoptr i64 %x_at to ptr
  %w = inttoptr i64 %w_at to ptr
  %y = inttoptr i64 %y_at to ptr
  switch i64 %type, label %done [{cases}]
  {calls}
done:
  ret void
}}"""
_ANY_CALL = """
type_{type}:
  call void @{type}_tiles(ptr %x, ptr %w, ptr %y, i64 %rows, i64 %inputs, i64 %outputs, i64 %first, i64 %end)
  br label %done"""

# One thread's share of a product.
_JOB = ("type", "x", "w", "y", "rows", "inputs", "outputs")
_SHARE = """
define void @share(ptr %job) #0 {{
  {loads}
  %thread32 = call i32 @omp_get_thread_num()
  %threads32 = call i32 @omp_get_num_threads()  ; which may be fewer than were asked for
  %thread = zext i32 %thread32 to i64
  %threads = zext i32 %threads32 to i64
  %thread_after = add i64 %thread, 1
  %tiles = udiv i64 %outputs, {tile}
  %first_part = mul i64 %tiles, %thread
  %end_part = mul i64 %tiles, %thread_after
  %first = udiv i64 %first_part, %threads
  %end = udiv i64 %end_part, %threads
  call void @tiles(i64 %type, i64 %x, i64 %w, i64 %y, i64 %rows, i64 %inputs, i64 %outputs, i64 %first, i64 %end)
  ret void
}}"""
_LOAD = """
  %{name}_at = getelementptr i64, ptr %job, i64 {n}
  %{name} = load i64, ptr %{name}_at"""
_MODULE = """
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare {vector} @llvm.fma.v{tile}f32({vector}, {vector}, {vector})
declare i64 @llvm.umin.i64(i64, i64)
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
attributes #0 = {{ nounwind "prefer-vector-width"="512" "min-legal-vector-width"="512" }}
{functions}
!0 = distinct !{{!0, !1}}
!1 = !{{!"llvm.loop.unroll.count", i32 4}}"""
TYPES = tuple(_ELEMENTS)
"""Of a packed weight; its place here is the number that `tiles` knows it by."""
WIDE = 32, dict.fromkeys(TYPES, 12)
NARROW = 16, {torch.float32: 4, torch.float16: 6, torch.bfloat16: 6}
"""Outputs of a tile, and rows multiplied at once by the type of the weight, with AVX-512 and without it. The sums of the rows fit
into the registers: six rows at 16 outputs fill them, and widening a weight once for all six is worth more than an even split."""


def program(tile: int, most_rows: Mapping[torch.dtype, int]) -> str:
    """LLVM's text of `tiles` and `share`: tiles of `tile` outputs, and for each type of weight the rows that are multiplied at
    once."""
    functions = []
    vector = f"<{tile} x float>"
    for number, dtype in enumerate(TYPES):
        size, most = tile * dtype.itemsize, most_rows[dtype]
        counts = range(1, most + 1)
        common = {"type": f"t{number}", "tile": tile, "vector": vector, "element": _ELEMENTS[dtype], "size": size}
        common |= {"most": most, "most_less_one": most - 1, "block": BLOCK_BYTES // size}
        lines = enumerate(range(0, size, CACHE_LINE))
        common["prefetches"] = "".join(_PREFETCH.format(n=n, place=place, locality=_TO_L2) for n, place in lines)
        common["widening"] = _WIDENING[dtype].format(tile=tile)
        for rows in counts:
            parts = {
                name: "".join(part.format(r=r, **common) for r in range(rows))
                for name, part in (("starts", _START), ("phis", _PHI), ("sums", _SUM), ("stores", _STORE))
            }
            functions.append(_ROWS.format(rows=rows, bytes=min(size, CACHE_LINE), **parts, **common))
        cases = " ".join(f"i64 {rows}, label %few_{rows}" for rows in counts)
        calls = "".join(_CALL.format(rows=rows, **common) for rows in counts)
        functions.append(_TILES.format(cases=cases, calls=calls, **common))
    numbers = range(len(TYPES))
    cases = " ".join(f"i64 {number}, label %type_t{number}" for number in numbers)
    functions.append(_ANY.format(cases=cases, calls="".join(_ANY_CALL.format(type=f"t{number}") for number in numbers)))
    loads = "".join(_LOAD.format(n=n, name=name) for n, name in enumerate(_JOB))
    functions.append(_SHARE.format(tile=tile, loads=loads))
    return _MODULE.format(vector=vector, tile=tile, functions="\n".join(functions))


def narrowest(weight: Tensor) -> torch.dtype:
    """The smallest type that holds the float32 `weight` exactly: many models are published in 16 bits, and half the bytes are
    read in half the time."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(part.to(dtype).float(), part) for part in (weight[:1], weight)):  # one row refutes most
            return dtype
    return torch.float32


def rounded(weight: Tensor) -> Tensor:
    """The float32 `weight` in numbers that 16 bits hold: float16's, or where one is too large for it bfloat16's."""
    coarse = weight.half().float()
    return coarse if coarse.isfinite().all() else weight.bfloat16().float()


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
        self._share = self._engine.get_function_address("share")
        self.tiles_address = self._engine.get_function_address("tiles")
        self.parallel = openmp.GOMP_parallel
        self.parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self.parallel.restype = None
        self._job = ctypes.c_int64 * len(_JOB)

    def pack(self, weight: Tensor) -> tuple[Tensor, int]:
        """The float32 `weight [outputs, inputs]` → tiles `[outputs / tile, inputs, tile]` of its narrowest type, the last filled
        up with zeros, whose lines begin where cache lines do; and the number of outputs."""
        outputs, inputs = weight.shape
        tiles, dtype = -(-outputs // self.tile), narrowest(weight)
        line = CACHE_LINE // dtype.itemsize  # in elements
        room = torch.zeros(tiles * self.tile * inputs + line, dtype=dtype)
        offset = -(room.data_ptr() // dtype.itemsize) % line
        packed = room[offset : offset + tiles * self.tile * inputs].view(tiles, inputs, self.tile)
        whole = outputs // self.tile
        packed[:whole] = weight[: whole * self.tile].view(whole, self.tile, inputs).transpose(1, 2)
        if rest := outputs % self.tile:
            packed[-1, :, :rest] = weight[-rest:].T
        return packed, outputs

    def product(self, x: Tensor, weight: tuple[Tensor, int], bias: Tensor | None) -> Tensor:
        """`x [..., inputs] → x Wᵀ + b [..., outputs]` of a packed weight, by as many threads as PyTorch uses."""
        packed, outputs = weight
        tiles, inputs, tile = packed.shape
        if x.dtype != torch.float32 or x.shape[-1] != inputs:
            raise ValueError(f"{x.dtype} inputs {tuple(x.shape)} for a float32 product of {inputs}")
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], tiles * tile)
        threads, number = torch.get_num_threads(), TYPES.index(packed.dtype)
        addresses = x.data_ptr(), packed.data_ptr(), y.data_ptr()
        job = self._job(number, *addresses, x.numel() // inputs, inputs, tiles * tile)
        self.parallel(self._share, ctypes.addressof(job), threads, 0)
        if tiles * tile != outputs:
            y = y[..., :outputs].contiguous()
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
