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

from dflash_mini_lab.calls import MOST_ROWS, Call, Program, Told
from dflash_mini_lab.norms import RMSNorm
from dflash_mini_lab.packed_linear import OURS, PackedLinear
from dflash_mini_lab.prefetched_linear import TYPES, Kernel, PackedWeight, in_bytes, kernel, most_of_an_input

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


class CompiledLayers(Program):
    """Layers of causal grouped-query attention, all of one shape, or gated short convolution, each with a gated MLP, and the norm
    behind them."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer | ConvolutionLayer],
        final_norm: RMSNorm,
        heads: int,
        kv_heads: int,
        head_dim: int,
        kernel: Kernel,
        programs: Any,
    ) -> None:
        norms = [norm for layer in layers for norm in (layer.input_norm, layer.mlp_norm)]
        attending = [layer for layer in layers if isinstance(layer, AttentionLayer)]
        convolving = [layer for layer in layers if isinstance(layer, ConvolutionLayer)]
        qk_norms = [layer.qk_norm.weight for layer in attending if layer.qk_norm]
        biases = [layer.qkv.bias for layer in attending if layer.qkv.bias is not None]
        self.hidden, inner = layers[0].out.weight.outputs, layers[0].down.weight.inputs
        self.head_dim, self.groups = head_dim, heads // kv_heads
        self.history = len(convolving[0].kernel) - 1 if convolving else 0
        self.convolving = len(convolving)
        self._layers = layers  # their weights are read by address
        place: list[int] = []
        for layer in layers:
            attends = isinstance(layer, AttentionLayer)
            place.append(sum(earlier >= 0 for earlier in place) if attends else -1 - sum(earlier < 0 for earlier in place))
        kernels = [layer.kernel for layer in convolving]
        super().__init__(
            kernel,
            programs.layers_program,
            programs.LAYERS_JOB,
            max(product.weight.inputs for layer in layers for product in layer.products),
            float32=TYPES.index(torch.float32),
            layers=len(layers),
            hidden=self.hidden,
            inner=inner,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            normed_heads=heads + kv_heads if qk_norms else 0,
            biased=bool(biases),
            attending=len(attending),
            history=self.history,
            weights_at=torch.tensor([[product.weight.told for product in layer.products] for layer in layers]),
            norms_at=torch.stack([norm.weight for norm in (*norms, final_norm)]),
            places_of_kind_at=torch.tensor(place),
            qkv_biases_at=torch.stack(biases) if biases else NOTHING,
            qk_norms_at=torch.stack(qk_norms) if qk_norms else NOTHING,
            kernels_at=torch.stack(kernels) if kernels else NOTHING,
            qkv_at=torch.empty(MOST_ROWS, max((heads + 2 * kv_heads) * head_dim, 3 * self.hidden)),
            queries_at=torch.empty(MOST_ROWS, heads * head_dim),
            mixed_at=torch.empty(MOST_ROWS, max(heads * head_dim, self.hidden)),
            added_at=torch.empty(MOST_ROWS, self.hidden),
            gate_up_at=torch.empty(MOST_ROWS, 2 * inner),
            act_at=torch.empty(MOST_ROWS, inner),
            eps=final_norm.eps,
        )

    def bind(self, memory: Tensor, table: Tensor, rotation: Tensor) -> LayersCall:
        """Calls of one session. `memory [attending layers, 2, kv_heads, capacity, head_dim]`, where keys and values enter behind
        the first `past`; a row begins as the row of `table [ids, hidden]` that its id names; `rotation [positions, head_dim /
        2]`, complex."""
        _check_tensors(memory, table, rotation)
        if table.shape[1:] != (self.hidden,) or table.dtype != torch.float32:
            raise ValueError(f"{table.dtype} rows {tuple(table.shape)} do not fit these layers")
        return LayersCall(self, memory, table, rotation)


class LayersCall(Call):
    """The calls of one session. Keys and values lie once more as a product reads its weight, in tiles of positions, and of the
    head's numbers; a call brings in what it added and what came before without it.
    """

    def __init__(self, layers: CompiledLayers, memory: Tensor, table: Tensor, rotation: Tensor) -> None:
        self._layers, threads = layers, torch.get_num_threads()
        tile, (attending, _, kv_heads, self._capacity, head_dim) = layers.kernel.tile, memory.shape
        positions, parts = -(-self._capacity // tile) * tile, -(-head_dim // tile)
        self.ids = np.zeros(MOST_ROWS, np.int64)
        self.out = torch.empty(MOST_ROWS, layers.hidden)
        """Of the last call: every row's state behind the last layer, normed."""
        self._taps: Sequence[int] = ()
        self._tiled, self._sorted_taps = 0, NOTHING
        stream, queries = threads * MOST_ROWS * layers.hidden, threads * layers.groups * MOST_ROWS
        sizes = {"stream_at": stream, "norm_at": stream, "scores_at": queries * positions, "sums_at": queries * parts * tile}
        told: dict[str, Told] = {
            "capacity": self._capacity,
            "table_at": table,
            "ids_at": self.ids,
            "out_at": self.out,
            "memory_at": memory,
            "key_tiles_at": memory.new_zeros(attending, kv_heads, positions // tile, head_dim, tile),
            "value_tiles_at": memory.new_zeros(attending, kv_heads, parts, positions, tile),
        }
        self._rotation, self._turn_bytes = rotation, rotation.shape[1] * rotation.itemsize
        super().__init__(layers, threads, told | layers.scratch(threads, **sizes))

    def tell(
        self,
        rows: int,
        past: int,
        taps: Sequence[int] = (),
        inputs: Sequence[Tensor] = (),
        rotation: Tensor | None = None,
        hiding: Tensor | None = None,
        places: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Prepare a call of the rows that `ids` names, behind `past` positions. Returns what it will fill: the outputs of the
        layers in `taps` side by side, `[rows, taps · hidden]`; and each convolution's earlier inputs, `inputs`, `[1, history,
        hidden]` each, followed by the call's, `[convolutions, 1, history + rows, hidden]`.

        A row follows the one before it, or where `hiding [rows, rows]` is given, that is added to the scores of the call's own
        keys, 0 or -inf; then `places [rows, history]` says where among its window each row's earlier inputs are, and `rotation
        [rows, head_dim / 2]` which position it has. What is given must live until the call is over.
        """
        _check_room(past, rows, self._capacity)
        if self._taps != taps:
            self._taps, self._sorted_taps = taps, torch.tensor(sorted(zip(taps, range(len(taps)), strict=True)))
        features = torch.empty(rows, len(taps) * self._layers.hidden)
        inputs_at = windows = NOTHING
        if inputs:
            self._inputs = [earlier.contiguous() for earlier in inputs]
            inputs_at = torch.tensor([earlier.data_ptr() for earlier in self._inputs])
            windows = torch.empty(self._layers.convolving, 1, self._layers.history + rows, self._layers.hidden)
        turns_at = self._rotation.data_ptr() + past * self._turn_bytes if rotation is None else rotation.data_ptr()
        tree = (0, 0, 0) if hiding is None else (1, hiding.data_ptr(), 0 if places is None else places.data_ptr())
        self._tell(
            *(rows, past, min(self._tiled, past), len(taps), turns_at, features.data_ptr(), self._sorted_taps.data_ptr()),
            *(*tree, inputs_at.data_ptr(), windows.data_ptr()),
        )
        self._given = rotation, hiding, places, inputs_at, features, windows
        self._tiled = past  # the call's own rows may still be moved or written again
        return features, windows


class CompiledContext(Program):
    """What a block drafter does with new features: fused, normed, and turned into every layer's keys and values."""

    def __init__(
        self,
        fc: PackedLinear,
        norm: RMSNorm,
        context_kv: PackedLinear,
        k_norm: RMSNorm,
        layers: int,
        kernel: Kernel,
        programs: Any,
    ) -> None:
        """`context_kv`: every layer's key rows, then every layer's value rows; `k_norm`: `[layers · kv_heads, head_dim]`."""
        self.hidden, (heads, head_dim) = fc.weight.outputs, k_norm.weight.shape
        self._products = fc, context_kv
        super().__init__(
            kernel,
            programs.context_program,
            programs.CONTEXT_JOB,
            max(fc.weight.inputs, self.hidden),
            features=fc.weight.inputs,
            hidden=self.hidden,
            layers=layers,
            kv_heads=heads // layers,
            head_dim=head_dim,
            weights_at=torch.tensor([product.weight.told for product in self._products]),
            norm_at=norm.weight.contiguous(),
            k_norm_at=k_norm.weight.contiguous(),
            projected_at=torch.empty(MOST_ROWS, self.hidden),
            kv_at=torch.empty(MOST_ROWS, 2 * heads * head_dim),
            eps=norm.eps,
        )

    def bind(self, memory: Tensor, rotation: Tensor) -> ContextCall:
        """`memory` and `rotation` as for CompiledLayers."""
        _check_tensors(memory, rotation)
        return ContextCall(self, memory, rotation)


class ContextCall(Call):
    """The calls of one session."""

    def __init__(self, context: CompiledContext, memory: Tensor, rotation: Tensor) -> None:
        threads, self._capacity = torch.get_num_threads(), memory.shape[3]
        self.fused = torch.empty(MOST_ROWS, context.hidden)
        """Of the last call's features."""
        self._rotation, self._turn_bytes = rotation, rotation.shape[1] * rotation.itemsize
        told: dict[str, Told] = {"capacity": self._capacity, "fused_at": self.fused, "memory_at": memory}
        super().__init__(context, threads, told | context.scratch(threads))

    def tell(self, features: Tensor, past: int) -> None:
        """Prepare a call for `features [rows, taps · hidden]` behind `past` positions."""
        rows = len(features)
        _check_room(past, rows, self._capacity)
        self._given = features = features.contiguous()
        self._tell(rows, past, features.data_ptr(), self._rotation.data_ptr() + past * self._turn_bytes)


class CompiledHead(Program):
    """Greedy tokens of a float32 LM head that is read in 8 bits.

    A greedy token is one row of the head out of tens of thousands. With ŵ a rounded row and x̂ the rounded state, |ŵ·x̂ - w·x| ≤
    ‖w - ŵ‖·‖x‖ + ‖ŵ‖·‖x - x̂‖ by Cauchy and Schwarz, and what float32 adds to a sum of `hidden` products. A token that cannot
    reach what another has at least cannot win; the few others are computed in full. The token is the full head's own, up to the
    order in which float32 products are summed. Hidden states are finite.
    """

    def __init__(self, weight: Tensor, kernel: Kernel, programs: Any) -> None:
        """`weight [vocabulary, hidden]`, of an even width: a tied head's is the embedding itself, not held twice."""
        hidden, lost, longest = weight.shape[1], [], 0.0
        for rows in weight.split(ROWS_AT_ONCE):
            whole, scales = in_bytes(rows)
            coarse = whole * scales[:, None]
            lost.append((rows - coarse).norm(dim=1) + hidden * 2.0**-23 * coarse.norm(dim=1))
            longest = max(longest, float(coarse.norm(dim=1).max()))
        self._screen = kernel.pack_bytes(weight)
        outputs, blocks = self._screen.room, -(-self._screen.room // programs.BLOCK)
        lost_of_row = F.pad(torch.cat(lost), (0, blocks * programs.BLOCK - len(weight)))
        super().__init__(
            kernel,
            programs.head_program,
            programs.HEAD_JOB,
            hidden,
            hidden=hidden,
            outputs=outputs,
            screen_at=torch.tensor(self._screen.told),
            weight_at=weight,
            lost_at=lost_of_row,
            lost_of_block_at=lost_of_row.view(blocks, programs.BLOCK).amax(1),
            screened_at=torch.empty(MOST_ROWS, outputs),
            tops_at=torch.empty(MOST_ROWS, blocks),
            lost_by_inputs=ROUNDS_OFF * hidden**0.5 * longest / most_of_an_input(hidden),
        )

    def bind(self, hidden: Tensor) -> HeadCall:
        """Calls for states that stand in the first rows of `hidden [at most MOST_ROWS, hidden]`."""
        return HeadCall(self, hidden)

    def __call__(self, hidden: Tensor, vocabulary: int) -> Tensor:
        """`hidden [rows, hidden]` → ids `[rows]` of the largest logits among the first `vocabulary`, of equal ones the lowest."""
        found: list[int] = []
        for rows in hidden.split(MOST_ROWS):
            call = self.bind(rows.contiguous())
            call.tell(len(rows), vocabulary)
            call.run()
            found += call.found()
        return torch.tensor(found)


class HeadCall(Call):
    """The calls of one session."""

    def __init__(self, head: CompiledHead, hidden: Tensor) -> None:
        threads = torch.get_num_threads()
        self._ids, each = np.empty(MOST_ROWS, np.int64), threads * MOST_ROWS
        told: dict[str, Told] = {"x_at": hidden, "ids_at": self._ids}
        super().__init__(head, threads, told | head.scratch(threads, least_at=each, logits_at=each, winners_at=2 * each))

    def tell(self, rows: int, vocabulary: int) -> None:
        self._rows = rows
        self._tell(rows, vocabulary)

    def found(self) -> list[int]:
        """The last call's ids: for each row that of the largest logit among the first `vocabulary`, of equal ones the lowest."""
        return self._ids[: self._rows].tolist()


class CompiledScores(Program):
    """A draft's scores, and the best of every row, kept while they are computed."""

    def __init__(self, head: PackedLinear, ids: np.ndarray, kernel: Kernel, programs: Any) -> None:
        """`ids [vocabulary]` (int64): the target's id of every row of the head."""
        weight: PackedWeight = head.weight
        hidden, self._head, self.vocabulary = weight.inputs, head, weight.outputs
        self.outputs, self.candidates = weight.room, min(CANDIDATES, self.vocabulary)
        super().__init__(
            kernel,
            programs.scores_program,
            programs.SCORES_JOB,
            hidden,
            hidden=hidden,
            outputs=self.outputs,
            vocabulary=self.vocabulary,
            candidates=self.candidates,
            weight_at=torch.tensor(weight.told),
            ids_at=torch.from_numpy(ids),
        )

    def bind(self, hidden: Tensor) -> ScoresCall:
        """Calls for all rows of `hidden [rows, hidden]`, which lie together."""
        rows = len(hidden)
        if not 0 < rows <= MOST_ROWS or hidden.dtype != torch.float32:
            raise ValueError(f"{hidden.dtype} rows {tuple(hidden.shape)}: at most {MOST_ROWS} at once, of float32")
        return ScoresCall(self, hidden)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, np.ndarray, np.ndarray]:
        """As ScoresCall.found, of these rows alone."""
        call = self.bind(hidden.contiguous())
        call.run()
        return call.found


class ScoresCall(Call):
    """The calls of one session."""

    def __init__(self, scores: CompiledScores, hidden: Tensor) -> None:
        rows, threads = len(hidden), torch.get_num_threads()
        ids, best = np.empty((rows, scores.candidates), np.int64), np.empty((rows, scores.candidates), np.float32)
        all_scores = torch.empty(rows, scores.outputs)
        self.found = all_scores[:, : scores.vocabulary], ids, best
        """Of the last call: scores `[rows, vocabulary]`; ids (int64) and scores of each row's best `[rows, candidates]`, best
        first, of equal ones the lower row of the head. A row needs as many finite scores."""
        told: dict[str, Told] = {"x_at": hidden, "scores_at": all_scores, "best_ids_at": ids, "best_scores_at": best}
        room = threads * MOST_ROWS * scores.candidates
        super().__init__(scores, threads, told | scores.scratch(threads, kept_at=room, columns_at=2 * room))
        self._tell(rows)


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


def _check_tensors(memory: Tensor, *others: Tensor) -> None:
    """The last of `others` is a rotation."""
    rotation = others[-1]
    if not all(tensor.is_contiguous() for tensor in (memory, *others)):
        raise ValueError("a session's tensors are read by address: they must lie together")
    enough = len(rotation) >= memory.shape[3] and rotation.shape[1:] == (memory.shape[4] // 2,)
    if not enough or rotation.dtype != torch.complex64:
        raise ValueError(f"a {rotation.dtype} rotation {tuple(rotation.shape)} for a memory {tuple(memory.shape)}")


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
