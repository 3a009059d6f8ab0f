"""The lean decoder: the forward pass of a target model with nothing in it but the arithmetic.

Fused q/k/v and gate/up products, rotary pairs interleaved so that a rotation is one complex product, preallocated K/V, taps
on the way. Its logits equal the library's (tests: float64 to 1e-9). Rollback moves a length (attention) or picks earlier inputs
(short convolution). The rows of a call may be a tree, in which each sees its own ancestors alone. Built by lean_build.py. No
drafting, no clock.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache as cache_of
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_mini_lab.calls import MOST_ROWS, in_order
from dflash_mini_lab.compiled import CompiledLayers, HeadCall, LayersCall
from dflash_mini_lab.norms import RMSNorm
from dflash_mini_lab.packed_linear import LinearPlan, PackedLinear
from dflash_mini_lab.rotary import rotate
from dflash_mini_lab.targets.lm_head import LMHead, ScreenedHead


@dataclass(frozen=True)
class Attention:
    """Causal grouped-query attention. `qk_norm`, weights `[heads + kv_heads, head_dim]`, is None without per-head norms."""

    qkv: PackedLinear
    out: PackedLinear
    qk_norm: RMSNorm | None
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class ShortConvolution:
    """LFM2's gated short convolution; `kernel [taps, hidden]`, oldest input first."""

    in_proj: PackedLinear
    out: PackedLinear
    kernel: Tensor
    bias: Tensor | None


Mix = Callable[[int, Attention | ShortConvolution, Tensor], Tensor]
"""`mix(layer index, mixer, normed x)`: what a layer adds to x from the rows before each of its own."""


@dataclass(frozen=True)
class Layer:
    mixer: Attention | ShortConvolution
    input_norm: RMSNorm
    mlp_norm: RMSNorm
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True)
class TreeRows:
    """A call whose rows are a tree, from a `trees.row_table` of theirs on the device, for `history` earlier inputs."""

    table: Tensor
    history: int

    @property
    def depths(self) -> Tensor:
        return self.table[:, 0]

    def hidden(self, like: Tensor) -> Tensor:
        """A mask `[rows, rows]` of the dtype of `like`: 0 for a row and its ancestors, -inf for all others."""
        seen = self.table[:, 1 + self.history :]
        return like.new_zeros(seen.shape).masked_fill_(seen == 0, float("-inf"))

    def padded(self, run: int) -> TreeRows:
        """With rows that see nothing of the call, up to `run`; whatever comes out of them is thrown away."""
        return TreeRows(F.pad(self.table, (0, run - len(self.table), 0, run - len(self.table))), self.history)

    @property
    def places(self) -> Tensor:
        """Where in a convolution's window each row's earlier inputs are, `[rows, history]`, oldest first."""
        return self.table[:, 1 : 1 + self.history]

    def inputs(self, window: Tensor) -> list[Tensor]:
        """As `chain_inputs`."""
        return [*(window.index_select(1, places) for places in self.places.unbind(1)), window[:, self.history :]]


@dataclass
class LeanCache:
    """State of `batch` sequences of one common `length`.

    Attention: `memory [attention layers, 2, batch, kv_heads, capacity, head_dim]`, keys and values of the layers `attending`, of
    which `keys/values[i]` are views. Convolution: `inputs[i] [batch, taps - 1 + rows, hidden]`, the last inputs before the newest
    call followed by that call's rows, so that `keep` can step back inside it.
    """

    length: int
    capacity: int
    memory: Tensor
    attending: tuple[int, ...]
    inputs: dict[int, Tensor]
    history: int
    last_rows: int = 0
    compiled: CompiledStep | None = None
    """Calls of compiled layers on this memory, from the first on."""
    keys: dict[int, Tensor] = field(init=False)
    values: dict[int, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.keys, self.values = layer_views(self.memory, self.attending)

    def __deepcopy__(self, memo: dict[int, Any]) -> LeanCache:
        inputs = {index: window.clone() for index, window in self.inputs.items()}
        return replace(self, memory=self.memory.clone(), inputs=inputs, compiled=None)

    def keep(self, rows: int) -> None:
        """Keep the first `rows` of the last call's rows (0 … all) and forget the others."""
        if not 0 <= rows <= self.last_rows:
            raise ValueError(f"keep({rows}): the last call had {self.last_rows} rows")
        self.length -= self.last_rows - rows
        for index, window in self.inputs.items():
            self.inputs[index] = window[:, rows : rows + self.history]
        self.last_rows = 0

    def gather(self, rows: Tensor) -> None:
        """Bring `rows [n]` of the last call, in ascending order, to the first places of that call, for `keep(n)`."""
        bring_forward(self.memory, 4, self.length - self.last_rows, rows)
        for window in self.inputs.values():
            bring_forward(window, 1, self.history, rows)

    def select(self, sequences: Tensor) -> None:
        """Make a batch of the given sequences (indices `[n]`, repeats allowed)."""
        self.memory = self.memory.index_select(2, sequences)
        self.keys, self.values = layer_views(self.memory, self.attending)
        self.compiled = None
        for index, window in self.inputs.items():
            self.inputs[index] = window.index_select(0, sequences)


def layer_views(memory: Tensor, attending: Iterable[int]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Keys and values by layer, `[batch, kv_heads, positions, head_dim]` each."""
    parts = dict(zip(attending, memory, strict=True))
    return {index: part[0] for index, part in parts.items()}, {index: part[1] for index, part in parts.items()}


def bring_forward(stored: Tensor, dim: int, first: int, rows: Tensor) -> None:
    """What stands `rows [n]` places behind `first` along `dim` moves to the places from `first` on."""
    stored.narrow(dim, first, len(rows)).copy_(stored.index_select(dim, first + rows))


@dataclass(frozen=True)
class CompiledStep:
    """The compiled layers' calls on one cache; `greedy` runs the screened head behind them, where there is one."""

    layers: LayersCall
    head: HeadCall | None
    greedy: Callable[[], None] | None


@dataclass
class LeanDecoder:
    """`forward` turns token ids into final hidden states and features; `logits` turns hidden states into logits."""

    embedding: Tensor
    layers: list[Layer]
    final_norm: RMSNorm
    head: LMHead
    rotation: Tensor
    """`[positions, head_dim / 2]`, complex: e^{i·position·frequency}."""
    plans: list[LinearPlan]
    padded_rows: dict[int, int]
    """Row counts that run faster as a larger one; the rows added are computed and thrown away."""
    compiled: CompiledLayers | None = None
    """The layers and the final norm as one call, for few rows of one sequence."""
    _masks: dict[int, Tensor] = field(default_factory=dict)

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @cached_property
    def history(self) -> int:
        """Earlier inputs that a row's short convolution reads; 0 without one."""
        return max((len(layer.mixer.kernel) - 1 for layer in self.layers if isinstance(layer.mixer, ShortConvolution)), default=0)

    def new_cache(self, capacity: int, batch: int = 1) -> LeanCache:
        """An empty cache for sequences of up to `capacity` tokens. Raises ValueError past the position table."""
        if capacity > len(self.rotation):
            raise ValueError(f"{capacity} positions asked for, the model has {len(self.rotation)}")
        attending = {index: layer.mixer for index, layer in enumerate(self.layers) if isinstance(layer.mixer, Attention)}
        like = next(iter(attending.values()), None)
        shape = (like.kv_heads, capacity, like.head_dim) if like else (0, capacity, 0)
        memory = self.embedding.new_zeros(len(attending), 2, batch, *shape)
        convolving = [index for index in range(len(self.layers)) if index not in attending]
        inputs = {index: self.embedding.new_zeros(batch, self.history, self.hidden_size) for index in convolving}
        return LeanCache(0, capacity, memory, tuple(attending), inputs, self.history)

    def forward(
        self, ids: Tensor, cache: LeanCache, taps: Sequence[int] = (), tree: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Extend `cache` by `ids [batch, rows]`; returns normed hidden states `[batch, rows, hidden]` and features, the outputs
        of the layers in `taps` side by side, `[batch, rows, taps · hidden]`. All rows are kept until `cache.keep` says otherwise.

        `tree`: the rows' `trees.row_table` for this decoder's `history`, where each does not follow the one before it.
        """
        rows = ids.shape[1]
        if self.compiled and len(ids) == 1 and rows <= MOST_ROWS:
            low, high = int(ids.min()), int(ids.max())
            if not 0 <= low <= high < len(self.embedding):
                raise IndexError(f"ids from {low} to {high} of an embedding with {len(self.embedding)} rows")
            step, features = self._prepared(ids[0], cache, taps, tree)
            step.layers.run()
            return step.layers.out[None, :rows].clone(), features[None]
        past = self._begun(rows, cache)
        run = self.padded_rows.get(rows, rows) if len(ids) == 1 else rows  # a batch has enough rows of its own
        if past + run > len(self.rotation):
            run = rows
        x = F.embedding(F.pad(ids, (0, run - rows)) if run > rows else ids, self.embedding)
        rotation = self.rotation[past : past + run].view(run, 1, -1)
        branches, mask_of = None, None
        if tree is not None:
            branches = TreeRows(tree, self.history)
            if run > rows:
                branches = branches.padded(run)
            rotation = self.rotation.index_select(0, past + branches.depths).view(run, 1, -1)
        if branches:
            mask = F.pad(branches.hidden(self.embedding)[:, :rows], (past, 0))
            mask_of = cache_of(lambda groups: mask.repeat(groups, 1))

        def mix(index: int, mixer: Attention | ShortConvolution, normed: Tensor) -> Tensor:
            if isinstance(mixer, Attention):
                return self._attend(mixer, normed, rotation, cache, index, rows, mask_of)
            return _convolve(mixer, normed, cache, index, rows, branches)

        x, features = self.through_layers(x, mix, taps)
        cache.length = past + rows
        cache.last_rows = rows
        return self.final_norm(x[:, :rows]), features[:, :rows]

    def step(
        self, tokens: Sequence[int], cache: LeanCache, vocabulary: int, taps: Sequence[int] = (), tree: Tensor | None = None
    ) -> tuple[list[int], Tensor]:
        """`forward` of a few rows of one sequence and `greedy` as one call, where `can_step`: ids, and features `[rows, taps ·
        hidden]`."""
        step, features = self._prepared(tokens, cache, taps, tree)
        assert step.head
        assert step.greedy
        step.head.tell(len(tokens), vocabulary)
        step.greedy()
        return step.head.found(), features

    def can_step(self, rows: int) -> bool:
        return self.compiled is not None and isinstance(self.head, ScreenedHead) and rows <= MOST_ROWS

    def _begun(self, rows: int, cache: LeanCache) -> int:
        """The positions behind which a call of so many rows stands."""
        past = cache.length
        if past + rows > cache.capacity:
            raise ValueError(f"{past} + {rows} tokens do not fit a cache of {cache.capacity}")
        if cache.last_rows:
            cache.keep(cache.last_rows)
        return past

    def _prepared(
        self, ids: Sequence[int] | Tensor, cache: LeanCache, taps: Sequence[int], tree: Tensor | None
    ) -> tuple[CompiledStep, Tensor]:
        """The compiled layers, told of a call; `cache` as it will be after it. Features as `step` gives them."""
        rows, past = len(ids), self._begun(len(ids), cache)
        step = cache.compiled = cache.compiled or self._bound(cache)
        step.layers.ids[:rows] = ids
        inputs, tree_rows = list(cache.inputs.values()), tuple[Tensor, ...]()
        if tree is not None:
            branches = TreeRows(tree, self.history)
            rotation = self.rotation.index_select(0, past + branches.depths)
            tree_rows = (rotation, branches.hidden(self.embedding), branches.places.contiguous())
        features, windows = step.layers.tell(rows, past, tuple(taps), inputs, *tree_rows)
        if inputs:
            cache.inputs = dict(zip(cache.inputs, windows, strict=True))
        cache.length, cache.last_rows = past + rows, rows
        return step, features

    def _bound(self, cache: LeanCache) -> CompiledStep:
        assert self.compiled
        layers = self.compiled.bind(cache.memory[:, :, 0], self.embedding, self.rotation)
        if not isinstance(self.head, ScreenedHead):
            return CompiledStep(layers, None, None)
        head = self.head.bind(layers.out)
        return CompiledStep(layers, head, in_order(layers, head))

    def through_layers(self, x: Tensor, mix: Mix, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """`x [batch, rows, hidden]` through every layer, and features as `forward` gives them. `mix` attends or convolves: it
        alone knows what came before, and how it is kept."""
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x = x + mix(index, layer.mixer, layer.input_norm(x))
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
            if index in taps:
                tapped[index] = x
        return x, torch.cat([tapped[index] for index in taps], dim=-1) if taps else x[..., :0]

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden [rows, hidden] → logits [rows, vocabulary]`."""
        return self.head.logits(hidden)

    def greedy(self, hidden: Tensor, vocabulary: int) -> Tensor:
        """`hidden [rows, hidden] →` the ids `[rows]` of the largest logits among the first `vocabulary`."""
        return self.head.greedy(hidden, vocabulary)

    def _attend(
        self,
        a: Attention,
        x: Tensor,
        rotation: Tensor,
        cache: LeanCache,
        index: int,
        rows: int,
        tree: Callable[[int], Tensor] | None,
    ) -> Tensor:
        """`x [batch, run, hidden]`, of which the first `rows` rows are real and enter the cache. `tree(groups)`: the mask of rows
        that are a tree, as `_mask` gives a chain's."""
        batch, run, _ = x.shape
        past, groups = cache.length, a.heads // a.kv_heads
        q, k, v = project(a, x, rotation)
        keys, values = cache.keys[index], cache.values[index]
        keys[:, :, past : past + rows] = k[:, :rows].transpose(1, 2)
        values[:, :, past : past + rows] = v[:, :rows].transpose(1, 2)
        keys, values = keys[:, :, : past + rows], values[:, :, : past + rows]
        if tree is None and past == 0 and run == rows > 1:
            q = q.reshape(batch, a.heads, rows, a.head_dim)
            mixed = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        else:
            q = q.reshape(batch, a.kv_heads, groups * run, a.head_dim)
            if tree is not None:
                mask: Tensor | None = tree(groups)
            else:
                mask = None if rows == 1 else self._mask(rows, run, groups, past, cache.capacity)
            if mask is None and batch > 1 and not x.is_cuda:  # one token of many sequences: plain products are faster
                mixed = (q * a.head_dim**-0.5 @ keys.transpose(-1, -2)).softmax(-1) @ values
            else:
                mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return merge(a, mixed, run)

    def _mask(self, rows: int, run: int, groups: int, past: int, capacity: int) -> Tensor:
        """`[groups · run, past + rows]`: a row sees all of the past and the call's rows up to itself. One stored table serves
        every `past`: its last `run` columns are the triangle, and the view starts `past` columns before them."""
        table = self._masks.get(run)
        if table is None or table.shape[1] < capacity + run or table.shape[0] != groups * run:
            triangle = torch.full((run, run), float("-inf"), dtype=self.dtype, device=self.embedding.device).triu_(1)
            table = F.pad(triangle, (capacity, 0)).repeat(groups, 1)
            self._masks[run] = table
        first = table.shape[1] - run - past
        mask = table[:, first : first + past + rows]
        return mask.contiguous() if mask.is_cuda else mask  # CUDA's fused kernels read rows from aligned addresses on


def project(a: Attention, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`x [batch, rows, hidden]` → rotated queries `[batch, kv_heads, groups, rows, head_dim]`, rotated keys and values
    `[batch, rows, kv_heads, head_dim]`."""
    batch, rows, _ = x.shape
    qk, v = a.qkv(x).view(batch, rows, -1, a.head_dim).split([a.heads + a.kv_heads, a.kv_heads], dim=2)
    if a.qk_norm is not None:
        qk = a.qk_norm(qk)
    q, k = rotate(qk, rotation).split([a.heads, a.kv_heads], dim=2)
    return q.view(batch, rows, a.kv_heads, a.heads // a.kv_heads, a.head_dim).permute(0, 2, 3, 1, 4), k, v


def merge(a: Attention, mixed: Tensor, rows: int) -> Tensor:
    """Attention's output, heads first and a group's rows together, back to `[batch, rows, hidden]`."""
    mixed = mixed.view(len(mixed), a.kv_heads, a.heads // a.kv_heads, rows, a.head_dim)
    return a.out(mixed.permute(0, 3, 1, 2, 4).reshape(len(mixed), rows, -1))


def _convolve(c: ShortConvolution, x: Tensor, cache: LeanCache, index: int, rows: int, tree: TreeRows | None) -> Tensor:
    gate_in, gate_out, value = c.in_proj(x).chunk(3, dim=-1)
    window = torch.cat([cache.inputs[index], gate_in * value], dim=1)
    cache.inputs[index] = window[:, : cache.history + rows]
    return convolve(c, tree.inputs(window) if tree else chain_inputs(c, window), gate_out)


def chain_inputs(c: ShortConvolution, window: Tensor) -> list[Tensor]:
    """Of `window [batch, taps - 1 + rows, hidden]`, what each tap of the kernel reads, `[batch, rows, hidden]`, oldest first."""
    rows = window.shape[1] - len(c.kernel) + 1
    return [window[:, tap : tap + rows] for tap in range(len(c.kernel))]


def convolve(c: ShortConvolution, inputs: Sequence[Tensor], gate_out: Tensor) -> Tensor:
    """`inputs`: as `chain_inputs` gives them; `gate_out [batch, rows, hidden]` → `[batch, rows, hidden]`."""
    mixed = inputs[0] * c.kernel[0]
    for tap in range(1, len(c.kernel)):
        mixed = torch.addcmul(mixed, inputs[tap], c.kernel[tap])
    if c.bias is not None:
        mixed = mixed + c.bias
    return c.out(gate_out * mixed)
