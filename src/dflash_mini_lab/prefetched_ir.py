"""The text of our own product for LLVM (prefetched_linear.py), as tiles of outputs and rows of inputs for each type of weight."""
from __future__ import annotations

import struct
from collections.abc import Mapping

import torch

BLOCK_BYTES = 8192
CACHE_LINE = 64
MOST_OF_A_BYTE = 127
LEAST_TOP = 2.0**-100
"""The largest number of a row counts as at least this, where it is rounded: then its scale is no denormal number."""
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
  %top = phi float [{least_top}, %one_row], [%new_top, %largest]
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
POINTERS = ("x", "rounded", "w", "scales", "y")

# One thread's share of a product.
JOB = ("type", *POINTERS, "rows", "inputs", "outputs")
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
    """LLVM's text of `tiles`, `share` and `in_order`: tiles of `tile` outputs, and for each type of weight the rows that are
    multiplied at once."""
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
    (least_top,) = struct.unpack(">Q", struct.pack(">d", LEAST_TOP))  # a float is written as the bits of a double
    functions.append(_ROUND.format(most_of_a_byte=MOST_OF_A_BYTE, least_top=f"0x{least_top:016X}"))
    functions.append(_ANY.format(cases=cases, calls=calls, pointers="".join(_POINTER.format(name=name) for name in POINTERS)))
    loads = "".join(_LOAD.format(n=n, name=name) for n, name in enumerate(JOB))
    functions += [_SHARE.format(tile=tile, loads=loads), _IN_ORDER.format()]
    return _MODULE.format(vector=vector, tile=tile, functions="\n".join(functions))
