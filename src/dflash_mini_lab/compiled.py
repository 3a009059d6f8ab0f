"""What a round does on a CPU, as few compiled calls: all layers, a drafter's context, an LM head. Every thread of a call runs the
same program, and they meet at barriers.

A pass of single tensor operations spends as long between its products as in them, for the weights have just driven every
instruction and every Python object out of the cache. Here nothing but the arithmetic is left (programs.py, compiled by
Numba); the products are those of prefetched_linear.py.

A row of a chain has the same bits whether it is decoded alone or verified in a block: every sum runs in an order that does not
depend on the number of rows. (Between the rows of a tree's path others lie, and sums are grouped otherwise.)
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_mini_lab.norms import RMSNorm
from dflash_mini_lab.packed_linear import OURS, PackedLinear
from dflash_mini_lab.prefetched_linear import TYPES, Kernel, PackedWeight, in_bytes, kernel, most_of_an_input

MOST_ROWS = 32
"""Of one call; a longer one has enough rows to keep single operations busy."""
ROWS_AT_ONCE = 4096
"""Of a head, where differences are looked at."""
ROUNDS_OFF = 0.51
"""By how much an input leaves a whole number at most, and a little for its own scaling."""
CANDIDATES = 8
"""Of a draft's slot, found as its scores are computed; as many as any method asks for."""
NOTHING = torch.empty(0)
"""Where a call has nothing to read or write: a tensor costs 5 µs, and more where weights have just been through the cache."""


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's parts; of the products `qkv` alone may have a bias. `qk_norm`, weights `[heads + kv_heads, head_dim]`, is None
    without per-head norms."""

    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    input_norm: RMSNorm
    mlp_norm: RMSNorm
    qk_norm: RMSNorm | None

    @property
    def products(self) -> tuple[PackedLinear, ...]:
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(frozen=True)
class ConvolutionLayer:
    """LFM2's gated short convolution; `kernel [history + 1, hidden]`, oldest input first."""

    in_proj: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    input_norm: RMSNorm
    mlp_norm: RMSNorm
    kernel: Tensor

    @property
    def products(self) -> tuple[PackedLinear, ...]:
        return self.in_proj, self.out, self.gate_up, self.down


class _Compiled:
    """A program, what every call of it is told, and the tensors whose addresses it is told."""

    def __init__(self, tiles: Kernel, program: Any, job: np.dtype, widest: int, **told: float | Tensor) -> None:
        """`widest`: the most inputs of one of its products."""
        self._parallel, self._program = tiles.parallel, program.address
        self._job = np.zeros(1, job)
        self._call, self._job_at = self._job.view(np.int64), self._job.ctypes.data
        self._kept: dict[str, Tensor] = {}
        self._rounded = MOST_ROWS * (1 + -(-widest // 2))
        self._tell(tile=tiles.tile, rounded_bytes=4 * self._rounded, **told)

    def _tell(self, **told: float | Tensor) -> None:
        for name, value in told.items():
            if isinstance(value, Tensor):
                self._kept[name] = value
            self._job[0][name] = value.data_ptr() if isinstance(value, Tensor) else value

    def _run(self, *told: int) -> None:
        """`told`: what changes from call to call, in the program's order; first of all the number of threads."""
        self._call[: len(told)] = told
        self._parallel(self._program, self._job_at, told[0], 0)

    def _make_room(self, threads: int, **sizes: int) -> None:
        """Float32 scratch of at least so many elements, and what `threads` need for rounded rows."""
        for name, size in (("rounded_at", threads * self._rounded), *sizes.items()):
            if name not in self._kept or self._kept[name].numel() < size:
                self._tell(**{name: torch.empty(size, dtype=torch.float32)})


class KeyValueTiles:
    """Keys and values of one session once more, as a product reads its weight: tiles of positions, and of the head's numbers.

    `keys [attending layers, kv_heads, positions / tile, head_dim, tile]`, `values [attending layers, kv_heads, head_dim / tile,
    positions, tile]`. A call brings in what it added and what came before without it; `length` positions are in for good.
    """

    def __init__(self, memory: Tensor, tile: int) -> None:
        """For `memory [attending layers, 2, kv_heads, capacity, head_dim]`."""
        attending, _, kv_heads, capacity, head_dim = memory.shape
        positions, parts = -(-capacity // tile), -(-head_dim // tile)
        self.keys = memory.new_zeros(attending, kv_heads, positions, head_dim, tile)
        self.values = memory.new_zeros(attending, kv_heads, parts, positions * tile, tile)
        self.length = 0


class CompiledLayers(_Compiled):
    """Layers of causal grouped-query attention, all of one shape, or gated short convolution, each with a gated MLP, and the norm
    behind them. Not for two calls at the same time."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer | ConvolutionLayer],
        final_norm: RMSNorm,
        heads: int,
        kv_heads: int,
        head_dim: int,
        tiles: Kernel,
        programs: Any,
    ) -> None:
        norms = [norm for layer in layers for norm in (layer.input_norm, layer.mlp_norm)]
        attending = [layer for layer in layers if isinstance(layer, AttentionLayer)]
        convolving = [layer for layer in layers if isinstance(layer, ConvolutionLayer)]
        qk_norms = [layer.qk_norm.weight for layer in attending if layer.qk_norm]
        biases = [layer.qkv.bias for layer in attending if layer.qkv.bias is not None]
        self._hidden, inner = layers[0].out.weight.outputs, layers[0].down.weight.inputs
        self._tile, self._groups = tiles.tile, heads // kv_heads
        self._history = len(convolving[0].kernel) - 1 if convolving else 0
        self._convolving = len(convolving)
        self._layers = layers  # their weights are read by address
        self._taps: tuple[int, ...] | None = None
        place: list[int] = []
        for layer in layers:
            attends = isinstance(layer, AttentionLayer)
            place.append(sum(earlier >= 0 for earlier in place) if attends else -1 - sum(earlier < 0 for earlier in place))
        kernels = [layer.kernel for layer in convolving]
        super().__init__(
            tiles,
            programs.layers_program,
            programs.LAYERS_JOB,
            max(product.weight.inputs for layer in layers for product in layer.products),
            float32=TYPES.index(torch.float32),
            layers=len(layers),
            hidden=self._hidden,
            inner=inner,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            normed_heads=heads + kv_heads if qk_norms else 0,
            biased=bool(biases),
            attending=len(attending),
            history=self._history,
            weights_at=torch.tensor([[product.weight.told for product in layer.products] for layer in layers]),
            norms_at=torch.stack([norm.weight for norm in (*norms, final_norm)]),
            places_of_kind_at=torch.tensor(place),
            qkv_biases_at=torch.stack(biases) if biases else NOTHING,
            qk_norms_at=torch.stack(qk_norms) if qk_norms else NOTHING,
            kernels_at=torch.stack(kernels) if kernels else NOTHING,
            qkv_at=torch.empty(MOST_ROWS, max((heads + 2 * kv_heads) * head_dim, 3 * self._hidden)),
            queries_at=torch.empty(MOST_ROWS, heads * head_dim),
            mixed_at=torch.empty(MOST_ROWS, max(heads * head_dim, self._hidden)),
            added_at=torch.empty(MOST_ROWS, self._hidden),
            gate_up_at=torch.empty(MOST_ROWS, 2 * inner),
            act_at=torch.empty(MOST_ROWS, inner),
            eps=final_norm.eps,
        )

    def tiles_of(self, memory: Tensor) -> KeyValueTiles:
        """Empty ones for a session with that `memory`; its calls share them."""
        return KeyValueTiles(memory, self._tile)

    def __call__(
        self,
        x: Tensor,
        memory: Tensor,
        key_values: KeyValueTiles,
        past: int,
        rotation: Tensor,
        taps: Sequence[int] = (),
        inputs: Sequence[Tensor] = (),
        hiding: Tensor | None = None,
        places: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`x [1, rows, hidden]` through every layer, normed; the outputs of the layers in `taps` side by side, `[1, rows,
        taps · hidden]`; each convolution's earlier inputs followed by this call's, `[convolutions, 1, history + rows, hidden]`.

        Keys and values enter `memory [attending layers, 2, kv_heads, capacity, head_dim]` behind the first `past`, and
        `key_values`, which `tiles_of` made for it; `rotation [rows, head_dim / 2]`, complex; `inputs`: each convolution's earlier
        ones, `[1, history, hidden]`. A row follows the one before it, or where `hiding [rows, rows]` is given, that is added to
        the scores of this call's own keys, 0 or -inf, and `places [rows, history]` says where among its window each row's
        earlier inputs are.
        """
        rows, capacity, threads = x.shape[1], memory.shape[3], torch.get_num_threads()
        _check_room(past, rows, capacity)
        if x.shape[2] != self._hidden or x.dtype != torch.float32 or rotation.shape != (rows, memory.shape[4] // 2):
            raise ValueError(f"{x.dtype} rows {tuple(x.shape)} with a rotation {tuple(rotation.shape)} do not fit these layers")
        stream = threads * MOST_ROWS * self._hidden
        _, _, parts, positions, tile = key_values.values.shape
        queries = threads * self._groups * MOST_ROWS
        self._make_room(threads, stream_at=stream, norm_at=stream, scores_at=queries * positions, sums_at=queries * parts * tile)
        if self._taps != tuple(taps):
            self._taps, self._sorted_taps = tuple(taps), torch.tensor(sorted(zip(taps, range(len(taps)), strict=True)))
        inputs = [earlier.contiguous() for earlier in inputs]
        inputs_at = torch.tensor([earlier.data_ptr() for earlier in inputs], dtype=torch.int64) if inputs else NOTHING
        x, rotation = x.contiguous(), rotation.contiguous()
        out, features = torch.empty_like(x), x.new_empty(1, rows, len(taps) * self._hidden) if taps else x[..., :0]
        windows = x.new_empty(self._convolving, 1, self._history + rows, self._hidden) if inputs else NOTHING
        optional = [tensor if tensor is None else tensor.contiguous() for tensor in (hiding, places)]
        told = (x, out, features, self._sorted_taps, rotation, memory, key_values.keys, key_values.values, inputs_at, windows)
        addresses = [tensor.data_ptr() for tensor in told]
        addresses += [0 if tensor is None else tensor.data_ptr() for tensor in optional]
        self._run(threads, rows, past, capacity, min(key_values.length, past), hiding is not None, len(taps), *addresses)
        key_values.length = past  # the call's own rows may still be moved or written again
        return out, features, windows


class CompiledContext(_Compiled):
    """What a block drafter does with new features: fused, normed, and turned into every layer's keys and values."""

    def __init__(
        self,
        fc: PackedLinear,
        norm: RMSNorm,
        context_kv: PackedLinear,
        k_norm: RMSNorm,
        layers: int,
        tiles: Kernel,
        programs: Any,
    ) -> None:
        """`context_kv`: every layer's key rows, then every layer's value rows; `k_norm`: `[layers · kv_heads, head_dim]`."""
        hidden, (heads, head_dim) = fc.weight.outputs, k_norm.weight.shape
        self._products, self._hidden = (fc, context_kv), hidden
        super().__init__(
            tiles,
            programs.context_program,
            programs.CONTEXT_JOB,
            max(fc.weight.inputs, hidden),
            features=fc.weight.inputs,
            hidden=hidden,
            layers=layers,
            kv_heads=heads // layers,
            head_dim=head_dim,
            weights_at=torch.tensor([product.weight.told for product in self._products]),
            norm_at=norm.weight.contiguous(),
            k_norm_at=k_norm.weight.contiguous(),
            projected_at=torch.empty(MOST_ROWS, hidden),
            kv_at=torch.empty(MOST_ROWS, 2 * heads * head_dim),
            eps=norm.eps,
        )

    def __call__(self, features: Tensor, memory: Tensor, past: int, rotation: Tensor) -> Tensor:
        """`features [rows, taps · hidden]` → fused `[rows, hidden]`; `memory`, `past` and `rotation` as for CompiledLayers."""
        rows, capacity = len(features), memory.shape[3]
        _check_room(past, rows, capacity)
        features, rotation, fused = features.contiguous(), rotation.contiguous(), features.new_empty(rows, self._hidden)
        addresses = (tensor.data_ptr() for tensor in (features, fused, rotation, memory))
        threads = torch.get_num_threads()
        self._make_room(threads)
        self._run(threads, rows, past, capacity, *addresses)
        return fused


class CompiledHead(_Compiled):
    """Greedy tokens of a float32 LM head that is read in 8 bits.

    A greedy token is one row of the head out of tens of thousands. With ŵ a rounded row and x̂ the rounded state, |ŵ·x̂ - w·x| ≤
    ‖w - ŵ‖·‖x‖ + ‖ŵ‖·‖x - x̂‖ by Cauchy and Schwarz, and what float32 adds to a sum of `hidden` products. A token that cannot
    reach what another has at least cannot win; the few others are computed in full. The token is the full head's own, up to the
    order in which float32 products are summed. Hidden states are finite.
    """

    def __init__(self, weight: Tensor, tiles: Kernel, programs: Any) -> None:
        """`weight [vocabulary, hidden]`, of an even width: a tied head's is the embedding itself, not held twice."""
        hidden, lost, longest = weight.shape[1], [], 0.0
        for rows in weight.split(ROWS_AT_ONCE):
            whole, scales = in_bytes(rows)
            coarse = whole * scales[:, None]
            lost.append((rows - coarse).norm(dim=1) + hidden * 2.0**-23 * coarse.norm(dim=1))
            longest = max(longest, float(coarse.norm(dim=1).max()))
        self._screen = tiles.pack_bytes(weight)
        self.outputs, self._blocks = self._screen.room, -(-self._screen.room // programs.BLOCK)
        lost_of_row = F.pad(torch.cat(lost), (0, self._blocks * programs.BLOCK - len(weight)))
        super().__init__(
            tiles,
            programs.head_program,
            programs.HEAD_JOB,
            hidden,
            hidden=hidden,
            outputs=self.outputs,
            screen_at=torch.tensor(self._screen.told),
            weight_at=weight,
            lost_at=lost_of_row,
            lost_of_block_at=lost_of_row.view(self._blocks, programs.BLOCK).amax(1),
            screened_at=torch.empty(MOST_ROWS, self.outputs),
            tops_at=torch.empty(MOST_ROWS, self._blocks),
            lost_by_inputs=ROUNDS_OFF * hidden**0.5 * longest / most_of_an_input(hidden),
        )

    def __call__(self, hidden: Tensor, vocabulary: int) -> Tensor:
        """`hidden [rows, hidden]` → ids `[rows]` of the largest logits among the first `vocabulary`, of equal ones the lowest."""
        return torch.cat([self._few(rows.contiguous(), vocabulary) for rows in hidden.split(MOST_ROWS)])

    def _few(self, hidden: Tensor, vocabulary: int) -> Tensor:
        rows, threads = len(hidden), torch.get_num_threads()
        each = threads * MOST_ROWS
        self._make_room(threads, least_at=each, logits_at=each)
        ids = torch.empty(threads + 1, rows, dtype=torch.int64)
        self._run(threads, rows, vocabulary, hidden.data_ptr(), ids.data_ptr())
        return ids[threads]


class CompiledScores(_Compiled):
    """A draft's scores, and the best of every row, kept while they are computed."""

    def __init__(self, head: PackedLinear, ids: np.ndarray, tiles: Kernel, programs: Any) -> None:
        """`ids [vocabulary]` (int64): the target's id of every row of the head."""
        weight: PackedWeight = head.weight
        self._head, self._hidden, self._vocabulary = head, weight.inputs, weight.outputs
        self._outputs, self.candidates = weight.room, min(CANDIDATES, self._vocabulary)
        super().__init__(
            tiles,
            programs.scores_program,
            programs.SCORES_JOB,
            self._hidden,
            hidden=self._hidden,
            outputs=self._outputs,
            vocabulary=self._vocabulary,
            candidates=self.candidates,
            weight_at=torch.tensor(weight.told),
            ids_at=torch.from_numpy(ids),
        )

    def __call__(self, hidden: Tensor) -> tuple[Tensor, np.ndarray, np.ndarray]:
        """`hidden [rows, hidden]` → scores `[rows, vocabulary]`; ids (int64) and scores of each row's best `[rows, candidates]`,
        best first, of equal ones the lower row of the head. A row needs as many finite scores."""
        rows, threads = len(hidden), torch.get_num_threads()
        if not 0 < rows <= MOST_ROWS or hidden.dtype != torch.float32:
            raise ValueError(f"{hidden.dtype} rows {tuple(hidden.shape)}: at most {MOST_ROWS} at once, of float32")
        room = threads * MOST_ROWS * self.candidates
        self._make_room(threads, kept_at=room, columns_at=2 * room)
        hidden, scores = hidden.contiguous(), hidden.new_empty(rows, self._outputs)
        ids, best = hidden.new_empty(rows, self.candidates, dtype=torch.int64), hidden.new_empty(rows, self.candidates)
        self._run(threads, rows, *(tensor.data_ptr() for tensor in (hidden, scores, ids, best)))
        return scores[:, : self._vocabulary], ids.numpy(), best.numpy()


def compiled_head(weight: Tensor) -> CompiledHead | None:
    """None where this machine cannot run it, or the weight is not float32 on a CPU, of an even width and finite."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or weight.shape[1] % 2:
        return None
    if (found := _program_for([])) is None or not all(rows.isfinite().all() for rows in weight.split(ROWS_AT_ONCE)):
        return None
    return CompiledHead(weight.contiguous(), *found)


def compiled_layers(
    layers: Sequence[AttentionLayer | ConvolutionLayer], final_norm: RMSNorm, heads: int, kv_heads: int, head_dim: int
) -> CompiledLayers | None:
    """The layers as one program; None where this machine cannot run it, or where a weight or a norm is not such as it reads."""
    found = _program_for([product for layer in layers for product in layer.products])
    if found is None or not any(isinstance(layer, AttentionLayer) for layer in layers):
        return None
    norms = [norm for layer in layers for norm in (layer.input_norm, layer.mlp_norm, getattr(layer, "qk_norm", None)) if norm]
    if any(norm.eps != final_norm.eps or norm.weight.dtype != torch.float32 for norm in (*norms, final_norm)):
        return None
    others = [product for layer in layers for product in layer.products if product is not getattr(layer, "qkv", None)]
    if any(product.bias is not None for product in others):
        return None
    kinds = {type(layer) for layer in layers}
    shapes = {
        (
            type(layer),
            bool(getattr(layer, "qk_norm", None)),
            layer.products[0].bias is None,
            *(product.weight.tiles.shape for product in layer.products),
        )
        for layer in layers
    }
    if len(shapes) > len(kinds) or len({layer.down.weight.tiles.shape for layer in layers}) > 1:
        return None  # layers of one kind that differ
    return CompiledLayers(layers, final_norm, heads, kv_heads, head_dim, *found)


def compiled_context(
    fc: PackedLinear, norm: RMSNorm, context_kv: PackedLinear, k_norm: RMSNorm, layers: int
) -> CompiledContext | None:
    """As `compiled_layers`."""
    if (found := _program_for([fc, context_kv])) is None or norm.eps != k_norm.eps:
        return None
    return CompiledContext(fc, norm, context_kv, k_norm, layers, *found)


def compiled_scores(head: PackedLinear, ids: np.ndarray) -> CompiledScores | None:
    """As `compiled_layers`."""
    found = _program_for([head], whole_tiles=False)
    return CompiledScores(head, ids, *found) if found else None


def can_compile() -> bool:
    return _program_for([]) is not None


def _program_for(products: Sequence[PackedLinear], whole_tiles: bool = True) -> tuple[Kernel, Any] | None:
    """The kernel and the module of programs, where all of `products` are the kernel's and in whole tiles."""
    if not all(product.storage in OURS for product in products):
        return None
    tiles = kernel()
    if tiles is None or (whole_tiles and any(product.weight.outputs % tiles.tile for product in products)):
        return None
    programs = _programs(tiles)
    return (tiles, programs) if programs else None


def _check_room(past: int, rows: int, capacity: int) -> None:
    if not 0 < rows <= MOST_ROWS or past + rows > capacity:
        raise ValueError(f"{past} + {rows} rows: at most {MOST_ROWS} at once, and {capacity} in all")


@cache
def _programs(tiles: Kernel) -> Any:
    """The module of programs; None without Numba."""
    import llvmlite.binding as llvm

    llvm.add_symbol("dflash_tiles", tiles.tiles_address)
    try:
        from dflash_mini_lab import programs
    except (ImportError, RuntimeError):  # a RuntimeError is Numba's, where it finds no place to keep what it compiled
        return None
    return programs
