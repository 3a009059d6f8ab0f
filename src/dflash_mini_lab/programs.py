"""The programs of compiled.py: what each thread does for one call. A weight is three numbers: its type, its address, and that of
its outputs' scales where it has 8 bits; `rounded_at` is then room for a thread's rows, rounded, of `rounded_bytes` each thread.

Importing this compiles it, or reads what an earlier process compiled; LLVM must know by then the symbols that it names
(`compiled._programs`). Sums may be regrouped into vectors, never by the number of rows.
"""
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba import carray, cfunc, config, from_dtype, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from dflash_mini_lab import prefetched_ir

# Of each program, in its order: what is told with every call, what a session tells once, and what a model does.
LAYERS_CALL = (
    *("rows", "past", "tiled", "taps", "rotation_at", "features_at", "sorted_taps_at", "branching", "hiding_at", "places_at"),
    *("inputs_at", "windows_at"),
)
LAYERS = (
    *("capacity", "table_at", "ids_at", "out_at", "memory_at", "key_tiles_at", "value_tiles_at"),
    *("tile", "float32", "layers", "hidden", "inner", "heads", "kv_heads", "head_dim", "normed_heads", "biased", "attending"),
    *("history", "weights_at", "norms_at", "places_of_kind_at", "qkv_biases_at", "qk_norms_at", "kernels_at"),
    *("stream_at", "norm_at", "qkv_at", "queries_at", "scores_at", "sums_at", "mixed_at", "added_at", "gate_up_at", "act_at"),
    *("rounded_at", "rounded_bytes", "eps"),
)
CONTEXT_CALL = ("rows", "past", "features_at", "rotation_at")
CONTEXT = (
    *("capacity", "fused_at", "memory_at"),
    *("tile", "features", "hidden", "layers", "kv_heads", "head_dim"),
    *("weights_at", "norm_at", "k_norm_at", "projected_at", "kv_at", "rounded_at", "rounded_bytes", "eps"),
)
HEAD_CALL = ("rows", "vocabulary")
HEAD = (
    *("x_at", "ids_at"),
    *("tile", "hidden", "outputs", "screen_at", "weight_at", "lost_at", "lost_of_block_at"),
    *("screened_at", "tops_at", "least_at", "logits_at", "winners_at", "rounded_at", "rounded_bytes", "lost_by_inputs"),
)
SCORES_CALL = ("rows",)
SCORES = (
    *("x_at", "scores_at", "best_ids_at", "best_scores_at"),
    *("tile", "hidden", "outputs", "vocabulary", "candidates", "weight_at", "ids_at"),
    *("columns_at", "kept_at", "rounded_at", "rounded_bytes"),
)
FLOATS = ("eps", "lost_by_inputs")


def job(*names: str) -> np.dtype:
    """What a program is told, in 8 bytes each: FLOATS, whole numbers, and `…_at`, which are addresses."""
    return np.dtype([(name, np.float64 if name in FLOATS else np.int64) for name in names])


LAYERS_JOB, CONTEXT_JOB = job(*LAYERS_CALL, *LAYERS), job(*CONTEXT_CALL, *CONTEXT)
HEAD_JOB, SCORES_JOB = job(*HEAD_CALL, *HEAD), job(*SCORES_CALL, *SCORES)

if llvm.get_host_cpu_features().get("avx512f"):  # LLVM's default for many of these processors is half as wide
    config.CPU_NAME, config.CPU_FEATURES = llvm.get_host_cpu_name(), f"{llvm.get_host_cpu_features().flatten()},-prefer-256-bit"

f32 = np.float32
BLOCK = 64
"""Numbers whose largest is looked at first, where few of many are wanted."""
LEAST_TOP = f32(prefetched_ir.LEAST_TOP)
BLOCKS_AT_ONCE = 16
"""Of a head, whose products are looked at while they are in cache."""
thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())
number_of_threads = types.ExternalFunction("omp_get_num_threads", types.int32())
"""It may be fewer than were asked for."""
barrier = types.ExternalFunction("GOMP_barrier", types.void())
multiply_tiles = types.ExternalFunction("dflash_tiles", types.void(*[types.int64] * 11))
"""`multiply_tiles(type of the weight, x, room for x rounded, weight, its scales, y, rows, inputs, outputs, first tile, end
tile)`; addresses are numbers. A job's `float32` is that type's number."""
compiled = njit(fastmath={"reassoc", "contract", "nsz"}, error_model="numpy", cache=True)


@intrinsic
def pointer(_: Any, address: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), build


LOG2_E = f32(np.log2(np.e))
C0, C1, C2, C3, C4, C5, C6 = (f32(np.log(2.0) ** n / np.prod(np.arange(1.0, n + 1))) for n in range(7))


@njit(error_model="numpy", inline="always", cache=True)
def exp(x):  # of x ≤ 0, to 2⁻²²: 2^n · 2^r, r in [-1/2, 1/2] by Taylor's series; of -inf 2⁻¹²⁶, which no sum feels
    power = max(x * LOG2_E, f32(-126))
    n = np.int32(power - f32(0.5))
    r = power - f32(n)
    series = C0 + r * (C1 + r * (C2 + r * (C3 + r * (C4 + r * (C5 + r * C6)))))
    return series * np.int32(np.int32(n + np.int32(127)) << np.int32(23)).view(np.float32)


@compiled
def share(count, thread, threads):
    return count * thread // threads, count * (thread + 1) // threads


@compiled
def whole_tiles(count, tile):
    return (count + tile - 1) // tile * tile


@compiled
def dot(x, y):
    total = f32(0)
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@compiled
def normalise(x, weight, eps, out):
    scale = f32(1) / np.sqrt(dot(x, x) / f32(len(x)) + eps)
    for i in range(len(x)):
        out[i] = x[i] * scale * weight[i]


@compiled
def add(x, y):
    for i in range(len(x)):
        x[i] += y[i]


@compiled
def rotate(x, turn, scale, out):
    for i in range(len(x) // 2):
        a, b, cosine, sine = x[2 * i], x[2 * i + 1], turn[2 * i], turn[2 * i + 1]
        out[2 * i], out[2 * i + 1] = (a * cosine - b * sine) * scale, (a * sine + b * cosine) * scale


@compiled
def gate(gates, ups, out):  # silu(g) · u
    for i in range(len(out)):
        g = gates[i]
        e = exp(-abs(g))
        out[i] = g * (f32(1) if g >= f32(0) else e) / (f32(1) + e) * ups[i]


@compiled
def largest(x):
    top = f32(-np.inf)
    for i in range(len(x)):
        top = max(top, x[i])
    return top


@compiled
def soften(x):  # softmax
    top, total = largest(x), f32(0)
    for p in range(len(x)):
        x[p] = exp(x[p] - top)
        total += x[p]
    part = f32(1) / total
    for p in range(len(x)):
        x[p] *= part


@compiled
def tile_keys(keys, first, end, tiles):  # positions first … end - 1: a weight's outputs
    tile = tiles.shape[2]
    for p in range(first, end):
        key, part, place = keys[p], tiles[p // tile], p % tile
        for i in range(len(key)):
            part[i, place] = key[i]


@compiled
def tile_values(values, first, end, tiles):  # positions first … end - 1: a weight's inputs
    tile = tiles.shape[2]
    for t in range(len(tiles)):
        for p in range(first, end):
            value, part = values[p, t * tile :], tiles[t, p]
            for i in range(min(tile, len(value))):
                part[i] = value[i]


@compiled
def multiply(weight, x_at, rounded_at, y_at, rows, inputs, outputs, tile, thread, threads):  # this thread's tiles of x · weightᵀ
    first, end = share(outputs // tile, thread, threads)
    multiply_tiles(weight[0], x_at, rounded_at, weight[1], weight[2], y_at, rows, inputs, outputs, first, end)


@compiled
def convolve(parts, inputs, window, kernel, places, branching, first, end, out):  # LFM2's, the columns first … end - 1
    rows, hidden = out.shape
    history = len(inputs)
    for h in range(history):
        window[h, first:end] = inputs[h, first:end]
    for r in range(rows):
        for i in range(first, end):
            window[history + r, i] = parts[r, i] * parts[r, 2 * hidden + i]
    for r in range(rows):
        for i in range(first, end):
            total = kernel[history, i] * window[history + r, i]
            for tap in range(history):
                place = places[r, tap] if branching else r + tap
                total += kernel[tap, i] * window[place, i]
            out[r, i] = parts[r, hidden + i] * total


@cfunc(types.void(types.CPointer(from_dtype(LAYERS_JOB))), cache=True)
def layers_program(job_at):
    job = carray(job_at, 1)[0]
    thread, threads, tile = thread_number(), number_of_threads(), job.tile
    rows, past, d = job.rows, job.past, job.head_dim
    heads, kv_heads, hidden, inner = job.heads, job.kv_heads, job.hidden, job.inner
    groups, wide, eps = heads // kv_heads, (heads + 2 * kv_heads) * d, f32(job.eps)
    ids = carray(pointer(job.ids_at), (rows,), np.int64)
    out = carray(pointer(job.out_at), (rows, hidden), f32)
    features = carray(pointer(job.features_at), (rows, job.taps, hidden), f32)
    rotation = carray(pointer(job.rotation_at), (rows, d), f32)
    hiding = carray(pointer(job.hiding_at), (rows, rows), f32)
    taps = carray(pointer(job.sorted_taps_at), (job.taps, 2), np.int64)  # the layer, and its place among the features
    weights = carray(pointer(job.weights_at), (job.layers, 4, 3), np.int64)
    norms = carray(pointer(job.norms_at), (2 * job.layers + 1, hidden), f32)
    # Of the layer in its kind: n the n-th that attends, -1 - n the n-th that convolves.
    place_of_kind = carray(pointer(job.places_of_kind_at), (job.layers,), np.int64)
    qkv_biases = carray(pointer(job.qkv_biases_at), (job.attending, wide), f32)
    qk_norms = carray(pointer(job.qk_norms_at), (job.attending, job.normed_heads, d), f32)
    memory = carray(pointer(job.memory_at), (job.attending, 2, kv_heads, job.capacity, d), f32)
    convolving, history = job.layers - job.attending, job.history
    kernels = carray(pointer(job.kernels_at), (convolving, history + 1, hidden), f32)
    inputs_at = carray(pointer(job.inputs_at), (convolving,), np.int64)
    windows = carray(pointer(job.windows_at), (convolving, history + rows, hidden), f32)
    places = carray(pointer(job.places_at), (rows, history), np.int64)
    parts, convolved = carray(pointer(job.qkv_at), (rows, 3 * hidden), f32), carray(pointer(job.mixed_at), (rows, hidden), f32)
    qkv = carray(pointer(job.qkv_at), (rows, wide), f32)
    mixed = carray(pointer(job.mixed_at), (rows, heads * d), f32)
    added = carray(pointer(job.added_at), (rows, hidden), f32)
    gate_up = carray(pointer(job.gate_up_at), (rows, 2 * inner), f32)
    act = carray(pointer(job.act_at), (rows, inner), f32)
    stream_at, norm_at = job.stream_at + thread * 4 * rows * hidden, job.norm_at + thread * 4 * rows * hidden
    rounded_at = job.rounded_at + thread * job.rounded_bytes
    stream, normed = carray(pointer(stream_at), (rows, hidden), f32), carray(pointer(norm_at), (rows, hidden), f32)
    # Attention is two products for each key and value head, of its queries and the keys and of the scores and the values.
    end, positions, wide_d = past + rows, whole_tiles(job.capacity, tile), whole_tiles(d, tile)
    run, queries_of_head = whole_tiles(end, tile), groups * rows
    key_tiles = carray(pointer(job.key_tiles_at), (job.attending, kv_heads, positions // tile, d, tile), f32)
    value_tiles = carray(pointer(job.value_tiles_at), (job.attending, kv_heads, wide_d // tile, positions, tile), f32)
    queries = carray(pointer(job.queries_at), (heads * rows, d), f32)
    scores_at = job.scores_at + thread * 4 * queries_of_head * positions
    sums_at = job.sums_at + thread * 4 * queries_of_head * wide_d
    scores = carray(pointer(scores_at), (queries_of_head, run), f32)
    sums = carray(pointer(sums_at), (queries_of_head, wide_d), f32)
    first_item, end_item = share(heads * rows, thread, threads)
    first_gate, end_gate = share(inner, thread, threads)
    first_column, end_column = share(hidden, thread, threads)

    for r in range(rows):  # every thread has its own copy of the residual stream, so that norms need no barrier
        stream[r] = carray(pointer(job.table_at + ids[r] * 4 * hidden), (hidden,), f32)
    done = 0
    for layer in range(job.layers):
        for r in range(rows):
            normalise(stream[r], norms[2 * layer], eps, normed[r])
        kind = place_of_kind[layer]
        attends = kind >= 0
        width = wide if attends else 3 * hidden
        multiply(weights[layer, 0], norm_at, rounded_at, job.qkv_at, rows, hidden, width, tile, thread, threads)
        barrier()
        if not attends:
            convolution = -1 - kind
            inputs = carray(pointer(inputs_at[convolution]), (history, hidden), f32)
            kernel, window = kernels[convolution], windows[convolution]
            convolve(parts, inputs, window, kernel, places, job.branching, first_column, end_column, convolved)
        else:
            for h in range(thread, heads + 2 * kv_heads, threads):
                for r in range(rows):
                    part = qkv[r, h * d : (h + 1) * d]
                    if job.biased:
                        add(part, qkv_biases[kind, h * d : (h + 1) * d])
                    if h < job.normed_heads:
                        normalise(part, qk_norms[kind, h], eps, part)
                    if h < heads:
                        rotate(part, rotation[r], f32(1) / np.sqrt(f32(d)), queries[h * rows + r])
                    elif h < heads + kv_heads:
                        rotate(part, rotation[r], f32(1), memory[kind, 0, h - heads, past + r])
                    else:
                        memory[kind, 1, h - heads - kv_heads, past + r] = part
                if h >= heads + kv_heads:
                    of_head = h - heads - kv_heads
                    tile_values(memory[kind, 1, of_head], job.tiled, end, value_tiles[kind, of_head])
                elif h >= heads:
                    tile_keys(memory[kind, 0, h - heads], job.tiled, end, key_tiles[kind, h - heads])
            barrier()
            for of_head in range(kv_heads):
                first = max(first_item, of_head * queries_of_head)
                count = min(end_item, (of_head + 1) * queries_of_head) - first
                if count <= 0:
                    continue
                keys_at, values_at = key_tiles[kind, of_head].ctypes.data, value_tiles[kind, of_head].ctypes.data
                queries_at = job.queries_at + first * 4 * d
                multiply_tiles(job.float32, queries_at, 0, keys_at, 0, scores_at, count, d, run, 0, run // tile)
                for n in range(count):
                    r = (first + n) % rows
                    seen = past + (rows if job.branching else r + 1)
                    if job.branching:
                        add(scores[n, past:seen], hiding[r])
                    soften(scores[n, :seen])
                    scores[n, seen:] = f32(0)
                for t in range(wide_d // tile):
                    tile_at = values_at + t * 4 * positions * tile
                    multiply_tiles(job.float32, scores_at, 0, tile_at, 0, sums_at + t * 4 * tile, count, run, wide_d, 0, 1)
                for n in range(count):
                    h, r = (first + n) // rows, (first + n) % rows
                    mixed[r, h * d : (h + 1) * d] = sums[n, :d]
        barrier()
        width = heads * d if attends else hidden
        multiply(weights[layer, 1], job.mixed_at, rounded_at, job.added_at, rows, width, hidden, tile, thread, threads)
        barrier()
        for r in range(rows):
            add(stream[r], added[r])
            normalise(stream[r], norms[2 * layer + 1], eps, normed[r])
        multiply(weights[layer, 2], norm_at, rounded_at, job.gate_up_at, rows, hidden, 2 * inner, tile, thread, threads)
        barrier()
        for r in range(rows):
            ups = gate_up[r, inner + first_gate : inner + end_gate]
            gate(gate_up[r, first_gate:end_gate], ups, act[r, first_gate:end_gate])
        barrier()
        multiply(weights[layer, 3], job.act_at, rounded_at, job.added_at, rows, inner, hidden, tile, thread, threads)
        barrier()
        for r in range(rows):
            add(stream[r], added[r])
        while thread == 0 and done < job.taps and taps[done, 0] == layer:
            features[:, taps[done, 1]] = stream
            done += 1
    if thread == 0:
        for r in range(rows):
            normalise(stream[r], norms[2 * job.layers], eps, out[r])


@cfunc(types.void(types.CPointer(from_dtype(CONTEXT_JOB))), cache=True)
def context_program(job_at):
    job = carray(job_at, 1)[0]
    thread, threads, tile = thread_number(), number_of_threads(), job.tile
    rows, past, hidden, d, eps = job.rows, job.past, job.hidden, job.head_dim, f32(job.eps)
    heads, rounded_at = job.layers * job.kv_heads, job.rounded_at + thread * job.rounded_bytes
    weights = carray(pointer(job.weights_at), (2, 3), np.int64)
    norm = carray(pointer(job.norm_at), (hidden,), f32)
    k_norm = carray(pointer(job.k_norm_at), (heads, d), f32)
    rotation = carray(pointer(job.rotation_at), (rows, d), f32)
    memory = carray(pointer(job.memory_at), (job.layers, 2, job.kv_heads, job.capacity, d), f32)
    projected = carray(pointer(job.projected_at), (rows, hidden), f32)
    fused = carray(pointer(job.fused_at), (rows, hidden), f32)
    kv = carray(pointer(job.kv_at), (rows, 2, heads, d), f32)
    first_row, end_row = share(rows, thread, threads)
    first_head, end_head = share(heads, thread, threads)

    multiply(weights[0], job.features_at, rounded_at, job.projected_at, rows, job.features, hidden, tile, thread, threads)
    barrier()
    for r in range(first_row, end_row):
        normalise(projected[r], norm, eps, fused[r])
    barrier()
    multiply(weights[1], job.fused_at, rounded_at, job.kv_at, rows, hidden, 2 * heads * d, tile, thread, threads)
    barrier()
    for h in range(first_head, end_head):
        layer, head = h // job.kv_heads, h % job.kv_heads
        for r in range(rows):
            normalise(kv[r, 0, h], k_norm[h], eps, kv[r, 0, h])
            rotate(kv[r, 0, h], rotation[r], f32(1), memory[layer, 0, head, past + r])
            memory[layer, 1, head, past + r] = kv[r, 1, h]


@cfunc(types.void(types.CPointer(from_dtype(HEAD_JOB))), cache=True)
def head_program(job_at):
    job = carray(job_at, 1)[0]
    thread, threads, tile = thread_number(), number_of_threads(), job.tile
    rows, hidden, outputs = job.rows, job.hidden, job.outputs
    blocks, tiles_of_block = (outputs + BLOCK - 1) // BLOCK, BLOCK // tile
    x = carray(pointer(job.x_at), (rows, hidden), f32)
    screen = carray(pointer(job.screen_at), (3,), np.int64)
    weight = carray(pointer(job.weight_at), (job.vocabulary, hidden), f32)
    lost = carray(pointer(job.lost_at), (outputs,), f32)
    lost_of_block = carray(pointer(job.lost_of_block_at), (blocks,), f32)
    screened = carray(pointer(job.screened_at), (rows, outputs), f32)
    tops = carray(pointer(job.tops_at), (rows, blocks), f32)
    least = carray(pointer(job.least_at), (threads, rows), f32)
    logits = carray(pointer(job.logits_at), (threads, rows), f32)
    winners = carray(pointer(job.winners_at), (threads, rows), np.int64)
    ids = carray(pointer(job.ids_at), (rows,), np.int64)
    rounded_at = job.rounded_at + thread * job.rounded_bytes
    first_block, end_block = share(blocks, thread, threads)

    least[thread] = f32(-np.inf)
    for some in range(first_block, end_block, BLOCKS_AT_ONCE):
        some_end = min(some + BLOCKS_AT_ONCE, end_block)
        first, end = some * tiles_of_block, min(some_end * tiles_of_block, outputs // tile)
        multiply_tiles(screen[0], job.x_at, rounded_at, screen[1], screen[2], job.screened_at, rows, hidden, outputs, first, end)
        for r in range(rows):
            norm = np.sqrt(dot(x[r], x[r]))
            for block in range(some, some_end):
                tops[r, block] = largest(screened[r, block * BLOCK : min((block + 1) * BLOCK, job.vocabulary)])
                least[thread, r] = max(least[thread, r], tops[r, block] - norm * lost_of_block[block])
    barrier()
    for r in range(rows):
        norm, lost_by_x = np.sqrt(dot(x[r], x[r])), f32(2 * job.lost_by_inputs) * max(largest(np.abs(x[r])), LEAST_TOP)
        enough = largest(least[:, r]) - lost_by_x
        logits[thread, r], winners[thread, r] = f32(-np.inf), 0
        for block in range(first_block, end_block):
            if tops[r, block] + norm * lost_of_block[block] < enough:
                continue
            for token in range(block * BLOCK, min((block + 1) * BLOCK, job.vocabulary)):
                if screened[r, token] + norm * lost[token] >= enough:
                    logit = dot(x[r], weight[token])
                    if logit > logits[thread, r]:
                        logits[thread, r], winners[thread, r] = logit, token
    barrier()
    if thread == 0:
        for r in range(rows):
            winner = 0
            for other in range(1, threads):
                if logits[other, r] > logits[winner, r]:
                    winner = other
            ids[r] = winners[winner, r]


@compiled
def keep_best(block, first, columns, scores):  # the best of the columns from `first` on among those kept, of equal ones the lower
    last = len(scores) - 1
    if not largest(block) > scores[last]:
        return
    for column in range(len(block)):
        place, z = last, block[column]
        if z > scores[place]:
            while place > 0 and z > scores[place - 1]:
                columns[place], scores[place] = columns[place - 1], scores[place - 1]
                place -= 1
            columns[place], scores[place] = first + column, z


@cfunc(types.void(types.CPointer(from_dtype(SCORES_JOB))), cache=True)
def scores_program(job_at):
    job = carray(job_at, 1)[0]
    thread, threads, tile = thread_number(), number_of_threads(), job.tile
    rows, hidden, outputs, candidates = job.rows, job.hidden, job.outputs, job.candidates
    weight = carray(pointer(job.weight_at), (3,), np.int64)
    rounded_at = job.rounded_at + thread * job.rounded_bytes
    ids = carray(pointer(job.ids_at), (job.vocabulary,), np.int64)
    scores = carray(pointer(job.scores_at), (rows, outputs), f32)
    columns = carray(pointer(job.columns_at), (threads, rows, candidates), np.int64)
    kept = carray(pointer(job.kept_at), (threads, rows, candidates), f32)
    best_ids = carray(pointer(job.best_ids_at), (rows, candidates), np.int64)
    best_scores = carray(pointer(job.best_scores_at), (rows, candidates), f32)
    first_tile, end_tile = share(outputs // tile, thread, threads)
    first_row, end_row = share(rows, thread, threads)
    end = min(end_tile * tile, job.vocabulary)
    at_once = BLOCKS_AT_ONCE * BLOCK // tile

    columns[thread], kept[thread] = 0, f32(-np.inf)
    for first in range(first_tile, end_tile, at_once):
        last = min(first + at_once, end_tile)
        multiply_tiles(weight[0], job.x_at, rounded_at, weight[1], weight[2], job.scores_at, rows, hidden, outputs, first, last)
        for r in range(rows):
            for start in range(first * tile, min(last * tile, end), BLOCK):
                keep_best(scores[r, start : min(start + BLOCK, end)], start, columns[thread, r], kept[thread, r])
    barrier()
    for r in range(first_row, end_row):  # the lower columns are the lower threads'
        for other in range(1, threads):
            for n in range(candidates):
                keep_best(kept[other, r, n : n + 1], columns[other, r, n], columns[0, r], kept[0, r])
        for n in range(candidates):
            best_ids[r, n], best_scores[r, n] = ids[columns[0, r, n]], kept[0, r, n]
