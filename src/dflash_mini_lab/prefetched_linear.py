"""Our own product of few rows and a float32 weight, which asks for the weight before it is needed. LLVM compiles it at load.

A library's small product waits for memory and computes in turns: on some machines six rows then take 1.4 times as long as one.
Here the weight lies in tiles of outputs, read from beginning to end, `BLOCK_BYTES` at a time, and every step asks for cache lines
of the block after, so that reading goes on while the rows are multiplied. Rows that do not fit the registers at once take turns
over a block, in equal parts, each asking for its part of the next one.

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

BLOCK_BYTES = 8192
CACHE_LINE = 64
MOST_OF_A_BYTE = 127
_TO_L2 = 2
"""LLVM's locality of a prefetch: 3 is into the first cache, 0 past all."""

# Some inputs' part of the sums of `rows` rows and one tile of outputs, Σ_k x[r, k] · w[k, tile], kept in registers. Meanwhile
# `ahead` is asked for, `stride` bytes a step. Four steps are one turn of the loop: with weights of 16 bits it would hold as much
# counting as arithmetic. Of 8 bits, an input here is a pair of them, and sums are scaled at the end.
_ROWS = """
define internal void @{type}_rows_{rows}(ptr %x, ptr %x_scales, ptr %w, ptr %w_scales, ptr %y, i64 %inputs, i64 %outputs,
    i64 %from, i64 %to, ptr %ahead, i64 %stride) alwaysinline #0 {{
start:
  %begins = icmp eq i64 %from, 0
  %ends = icmp eq i64 %to, %inputs
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
  br i1 %more, label %loop, label %end, !llvm.loop !{unrolled}
end:
  {scaling}
  {stores}
  ret void
}}"""
_START = """
  %yskip{r} = mul i64 %outputs, {r}
  %yat{r} = getelementptr float, ptr %y, i64 %yskip{r}
  %earlier{r} = load {total}, ptr %yat{r}, align 4
  %begun{r} = select i1 %begins, {total} zeroinitializer, {total} %earlier{r}"""
_PHI = """
  %old{r} = phi {total} [%begun{r}, %start], [%new{r}, %loop]"""
_PREFETCH = """
  %line{n} = getelementptr i8, ptr %asked, i64 {place}
  call void @llvm.prefetch.p0(ptr %line{n}, i32 0, i32 {locality}, i32 1)"""
_X_AT = """
  %xskip{r} = mul i64 %inputs, {r}
  %xplace{r} = add i64 %xskip{r}, %k
  %xat{r} = getelementptr float, ptr %x, i64 %xplace{r}"""
_SUM = """
  %x{r} = load float, ptr %xat{r}
  %first{r} = insertelement {vector} poison, float %x{r}, i64 0
  %all{r} = shufflevector {vector} %first{r}, {vector} poison, <{tile} x i32> zeroinitializer
  %new{r} = call {vector} @llvm.fma.v{tile}f32({vector} %all{r}, {vector} %weights, {vector} %old{r})"""
_STORE = """
  store {total} %new{r}, ptr %yat{r}, align 4"""
_PAIR_SUM = """
  %x{r} = load i32, ptr %xat{r}
  %first{r} = insertelement {total} poison, i32 %x{r}, i64 0
  %all{r} = shufflevector {total} %first{r}, {total} poison, {total} zeroinitializer
  %pairs{r} = bitcast {total} %all{r} to <{numbers} x i16>
  %wide{r} = sext <{numbers} x i16> %pairs{r} to <{numbers} x i32>
  %products{r} = mul nsw <{numbers} x i32> %wide{r}, %weights
  %evens{r} = shufflevector <{numbers} x i32> %products{r}, <{numbers} x i32> poison, {total} <{even}>
  %odds{r} = shufflevector <{numbers} x i32> %products{r}, <{numbers} x i32> poison, {total} <{odd}>
  %pair_sums{r} = add nsw {total} %evens{r}, %odds{r}
  %new{r} = add nsw {total} %old{r}, %pair_sums{r}"""
_PAIR_SCALING = """
  %scales = load {vector}, ptr %w_scales, align 4"""
_PAIR_STORE = """
  %scale_at{r} = getelementptr float, ptr %x_scales, i64 {r}
  %scale{r} = load float, ptr %scale_at{r}
  %first_scale{r} = insertelement {vector} poison, float %scale{r}, i64 0
  %all_scales{r} = shufflevector {vector} %first_scale{r}, {vector} poison, {total} zeroinitializer
  %both_scales{r} = fmul {vector} %all_scales{r}, %scales
  %whole{r} = sitofp {total} %new{r} to {vector}
  %scaled{r} = fmul {vector} %whole{r}, %both_scales{r}
  %unfinished{r} = bitcast {total} %new{r} to {vector}
  %stored{r} = select i1 %ends, {vector} %scaled{r}, {vector} %unfinished{r}
  store {vector} %stored{r}, ptr %yat{r}, align 4"""
_WIDENING = {
    torch.float32: "%weights = fadd <{tile} x float> %stored, splat (float -0.0)",
    torch.float16: "%weights = fpext <{tile} x half> %stored to <{tile} x float>",
    torch.bfloat16: """%wide = zext <{tile} x i16> %stored to <{tile} x i32>
  %shifted = shl <{tile} x i32> %wide, splat (i32 16)
  %weights = bitcast <{tile} x i32> %shifted to <{tile} x float>""",
    torch.int8: """%bytes = bitcast <{tile} x i16> %stored to <{numbers} x i8>
  %weights = sext <{numbers} x i8> %bytes to <{numbers} x i32>""",
}
"""From what is stored to float32, exactly; of 8 bits, to whole numbers. (Adding -0 is no operation, and none is left of it.)"""
_ELEMENTS = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "i16", torch.int8: "i16"}
"""What is stored of an output at a step."""

# Some tiles of a product, from `first` to before `end`. A block of inputs at a time stays in the first cache for all rows, `most`
# of which are multiplied at once; every such pass asks for its share of the block that comes next.
_TILES = """
define internal void @{type}_tiles(ptr %x, ptr %x_scales, ptr %w, ptr %w_scales, ptr %y, i64 %rows, i64 %inputs, i64 %outputs,
    i64 %first, i64 %end) #0 {{
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
  %tile_scales = getelementptr float, ptr %w_scales, i64 %column
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
  %row_scales = getelementptr float, ptr %x_scales, i64 %row
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
  call void @{type}_rows_{rows}(ptr %x_rows, ptr %row_scales, ptr %w_tile, ptr %tile_scales, ptr %y_rows, i64 %inputs,
    i64 %outputs, i64 %from, i64 %to, ptr %ahead, i64 %stride)
  br label %rows_done"""

# Rows as whole numbers of 16 bits, the largest input `most`, and a scale for each row.
_ROUND = """
define internal void @round_rows(ptr %x, ptr %scales, ptr %whole, i64 %rows, i64 %inputs) #0 {{
start:
  %bytes = mul i64 %inputs, {most_of_a_byte}
  %fits = udiv i64 2147483647, %bytes
  %most_input = call i64 @llvm.umin.i64(i64 %fits, i64 32767)
  %most = uitofp i64 %most_input to float
  br label %next_row
next_row:
  %row = phi i64 [0, %start], [%row_after, %row_done]
  %some = icmp ult i64 %row, %rows
  br i1 %some, label %one_row, label %done
one_row:
  %skip = mul i64 %row, %inputs
  %x_row = getelementptr float, ptr %x, i64 %skip
  %whole_row = getelementptr i16, ptr %whole, i64 %skip
  br label %largest
largest:
  %k = phi i64 [0, %one_row], [%next, %largest]
  %top = phi float [0x3810000000000000, %one_row], [%new_top, %largest]
  %at = getelementptr float, ptr %x_row, i64 %k
  %value = load float, ptr %at
  %size = call float @llvm.fabs.f32(float %value)
  %new_top = call nnan nsz float @llvm.maxnum.f32(float %size, float %top)
  %next = add nuw i64 %k, 1
  %more = icmp ult i64 %next, %inputs
  br i1 %more, label %largest, label %scale
scale:
  %scale_at = getelementptr float, ptr %scales, i64 %row
  %scale_of_row = fdiv float %new_top, %most
  store float %scale_of_row, ptr %scale_at
  %factor = fdiv float %most, %new_top
  br label %round
round:
  %i = phi i64 [0, %scale], [%next_i, %round]
  %from = getelementptr float, ptr %x_row, i64 %i
  %exact = load float, ptr %from
  %scaled = fmul float %exact, %factor
  %near = call float @llvm.rint.f32(float %scaled)
  %number = fptosi float %near to i32
  %short = trunc i32 %number to i16
  %to = getelementptr i16, ptr %whole_row, i64 %i
  store i16 %short, ptr %to
  %next_i = add nuw i64 %i, 1
  %more_i = icmp ult i64 %next_i, %inputs
  br i1 %more_i, label %round, label %row_done
row_done:
  %row_after = add i64 %row, 1
  br label %next_row
done:
  ret void
}}"""

# The same of a weight of any type; addresses are integers. With 8 bits, `rounded` has room for the rows' scales and numbers.
_ANY = """
define void @tiles(i64 %type, i64 %x_at, i64 %rounded_at, i64 %w_at, i64 %scales_at, i64 %y_at, i64 %rows, i64 %inputs,
    i64 %outputs, i64 %first, i64 %end) #0 {{
  {pointers}
  switch i64 %type, label %done [{cases}]
  {calls}
done:
  ret void
}}"""
_ANY_CALL = """
type_{type}:
  call void @{type}_tiles(ptr %x, ptr null, ptr %w, ptr null, ptr %y, i64 %rows, i64 %inputs, i64 %outputs, i64 %first, i64 %end)
  br label %done"""
_BYTES_CALL = """
type_{type}:
  %whole = getelementptr float, ptr %rounded, i64 %rows
  call void @round_rows(ptr %x, ptr %rounded, ptr %whole, i64 %rows, i64 %inputs)
  %pairs = udiv i64 %inputs, 2
  call void @{type}_tiles(ptr %whole, ptr %rounded, ptr %w, ptr %scales, ptr %y, i64 %rows, i64 %pairs, i64 %outputs, i64 %first,
    i64 %end)
  br label %done"""
_POINTER = """
  %{name} = inttoptr i64 %{name}_at to ptr"""
_POINTERS = ("x", "rounded", "w", "scales", "y")

# One thread's share of a product.
_JOB = ("type", *_POINTERS, "rows", "inputs", "outputs")
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
  %numbers = mul i64 %rows, %inputs
  %bytes_of_numbers = mul i64 %numbers, 2
  %bytes_of_scales = mul i64 %rows, 4
  %bytes_of_thread = add i64 %bytes_of_numbers, %bytes_of_scales
  %rounded_skip = mul i64 %thread, %bytes_of_thread
  %rounded_here = add i64 %rounded, %rounded_skip
  call void @tiles(i64 %type, i64 %x, i64 %rounded_here, i64 %w, i64 %scales, i64 %y, i64 %rows, i64 %inputs, i64 %outputs,
    i64 %first, i64 %end)
  ret void
}}"""

# Programs and their jobs, `told` how many and then their addresses in turns, one after the other: threads meet between two.
_IN_ORDER = """
declare void @GOMP_barrier()
define void @in_order(ptr %told) #0 {{
start:
  %count = load i64, ptr %told
  br label %next
next:
  %n = phi i64 [0, %start], [%after, %met]
  %place = mul i64 %n, 2
  %program_place = add i64 %place, 1
  %job_place = add i64 %place, 2
  %program_at = getelementptr ptr, ptr %told, i64 %program_place
  %job_at = getelementptr ptr, ptr %told, i64 %job_place
  %program = load ptr, ptr %program_at
  %job = load ptr, ptr %job_at
  call void %program(ptr %job)
  %after = add i64 %n, 1
  %more = icmp ult i64 %after, %count
  br i1 %more, label %met, label %done
met:
  call void @GOMP_barrier()
  br label %next
done:
  ret void
}}"""
_LOAD = """
  %{name}_at = getelementptr i64, ptr %job, i64 {n}
  %{name} = load i64, ptr %{name}_at"""
_MODULE = """
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare {vector} @llvm.fma.v{tile}f32({vector}, {vector}, {vector})
declare i64 @llvm.umin.i64(i64, i64)
declare float @llvm.fabs.f32(float)
declare float @llvm.maxnum.f32(float, float)
declare float @llvm.rint.f32(float)
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
attributes #0 = {{ nounwind "prefer-vector-width"="512" "min-legal-vector-width"="512" }}
{functions}
!0 = distinct !{{!0, !1}}
!1 = !{{!"llvm.loop.unroll.count", i32 4}}
!2 = distinct !{{!2, !3}}
!3 = !{{!"llvm.loop.unroll.disable"}}"""
TYPES = tuple(_ELEMENTS)
"""Of a packed weight; its place here is the number that `tiles` knows it by."""
WIDE = 32, dict.fromkeys(TYPES, 12)
NARROW = 16, {torch.float32: 4, torch.float16: 6, torch.bfloat16: 6, torch.int8: 6}
"""Outputs of a tile, and rows multiplied at once by the type of the weight, with AVX-512 and without it. The sums of the rows fit
into the registers: six rows at 16 outputs fill them, and widening a weight once for all six is worth more than an even split."""


def program(tile: int, most_rows: Mapping[torch.dtype, int]) -> str:
    """LLVM's text of `tiles` and `share`: tiles of `tile` outputs, and for each type of weight the rows that are multiplied at
    once."""
    functions = []
    vector = f"<{tile} x float>"
    for number, dtype in enumerate(TYPES):
        pairs = dtype == torch.int8
        size, most = tile * dtype.itemsize * (2 if pairs else 1), most_rows[dtype]
        counts = range(1, most + 1)
        common = {"type": f"t{number}", "tile": tile, "vector": vector, "element": _ELEMENTS[dtype], "size": size}
        common |= {"most": most, "most_less_one": most - 1, "block": BLOCK_BYTES // size}
        lines = enumerate(range(0, size, CACHE_LINE))
        common |= {"total": f"<{tile} x i32>" if pairs else vector, "numbers": 2 * tile, "unrolled": 2 if pairs else 0}
        places = [", ".join(f"i32 {place}" for place in range(first, 2 * tile, 2)) for first in (0, 1)]
        common |= dict(zip(("even", "odd"), places, strict=True))
        common["scaling"] = _PAIR_SCALING.format(**common) if pairs else ""
        sums, store = (_PAIR_SUM, _PAIR_STORE) if pairs else (_SUM, _STORE)
        common["prefetches"] = "".join(_PREFETCH.format(n=n, place=place, locality=_TO_L2) for n, place in lines)
        common["widening"] = _WIDENING[dtype].format(**common)
        for rows in counts:
            parts = {
                name: "".join(part.format(r=r, **common) for r in range(rows))
                for name, part in (("starts", _START), ("phis", _PHI), ("sums", _X_AT + sums), ("stores", store))
            }
            functions.append(_ROWS.format(rows=rows, bytes=min(size, CACHE_LINE), **parts, **common))
        cases = " ".join(f"i64 {rows}, label %few_{rows}" for rows in counts)
        calls = "".join(_CALL.format(rows=rows, **common) for rows in counts)
        functions.append(_TILES.format(cases=cases, calls=calls, **common))
    cases = " ".join(f"i64 {number}, label %type_t{number}" for number in range(len(TYPES)))
    calls = "".join((_BYTES_CALL if dtype == torch.int8 else _ANY_CALL).format(type=f"t{n}") for n, dtype in enumerate(TYPES))
    functions.append(_ROUND.format(most_of_a_byte=MOST_OF_A_BYTE))
    functions.append(_ANY.format(cases=cases, calls=calls, pointers="".join(_POINTER.format(name=name) for name in _POINTERS)))
    loads = "".join(_LOAD.format(n=n, name=name) for n, name in enumerate(_JOB))
    functions += [_SHARE.format(tile=tile, loads=loads), _IN_ORDER.format()]
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


def in_bytes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The float32 `rows [count, inputs]` as whole numbers (int8), and a scale for each row to multiply them by, `[count]`."""
    scales = rows.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / MOST_OF_A_BYTE
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
        self._job = ctypes.c_int64 * len(_JOB)

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
