"""The lean decoder: the forward pass of a target model with nothing in it but the arithmetic.

Built from the weights of a loaded transformers model (Llama, Qwen2, Qwen3, LFM2): fused q/k/v and gate/up products,
rotary pairs interleaved so that a rotation is one complex product, preallocated K/V, taps on the way. Its logits equal the
library's (tests: float64 to 1e-9). Rollback moves a length (attention) or picks earlier inputs (short convolution).
What it cannot reproduce is refused by `unsupported_reason`, never approximated. No drafting, no greedy choice, no clock.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_mini_lab.packed_linear import BYTES_TO_DEFEAT_CACHE, LinearPlan, PackedLinear, measure_plan, stock_plan
from dflash_mini_lab.rotary import interleaved_rows, rotate

FAMILIES = ("llama", "qwen2", "qwen3", "lfm2")


@dataclass(frozen=True)
class Attention:
    """Causal grouped-query attention. `qk_norm [heads + kv_heads, head_dim]` is None without per-head norms."""

    qkv: PackedLinear
    out: PackedLinear
    qk_norm: Tensor | None
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


@dataclass(frozen=True)
class Layer:
    mixer: Attention | ShortConvolution
    input_norm: Tensor
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass
class LeanCache:
    """Per-layer state of `batch` sequences of one common `length`.

    Attention: `keys/values[i] [batch, kv_heads, capacity, head_dim]`. Convolution: `inputs[i] [batch, taps - 1 + rows, hidden]`,
    the last inputs before the newest call followed by that call's rows, so that `keep` can step back inside it.
    """

    length: int
    capacity: int
    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    inputs: dict[int, Tensor]
    history: int
    last_rows: int = 0

    def keep(self, rows: int) -> None:
        """Keep the first `rows` of the last call's rows (0 … all) and forget the others."""
        if not 0 <= rows <= self.last_rows:
            raise ValueError(f"keep({rows}): the last call had {self.last_rows} rows")
        self.length -= self.last_rows - rows
        for index, window in self.inputs.items():
            self.inputs[index] = window[:, rows : rows + self.history]
        self.last_rows = 0

    def select(self, sequences: Tensor) -> None:
        """Make a batch of the given sequences (indices `[n]`, repeats allowed)."""
        for store in (self.keys, self.values, self.inputs):
            for index in store:
                store[index] = store[index].index_select(0, sequences)


@dataclass
class LeanDecoder:
    """`forward` turns token ids into final hidden states and taps; `logits` turns hidden states into logits."""

    embedding: Tensor
    layers: list[Layer]
    final_norm: Tensor
    head: PackedLinear
    eps: float
    rotation: Tensor
    """`[positions, head_dim / 2]`, complex: e^{i·position·frequency}."""
    plans: list[LinearPlan]
    _masks: dict[int, Tensor] = field(default_factory=dict)

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def new_cache(self, capacity: int, batch: int = 1) -> LeanCache:
        """An empty cache for sequences of up to `capacity` tokens. Raises ValueError past the position table."""
        if capacity > len(self.rotation):
            raise ValueError(f"{capacity} positions asked for, the model has {len(self.rotation)}")
        options = {"dtype": self.dtype, "device": self.embedding.device}
        cache = LeanCache(0, capacity, {}, {}, {}, 0)
        for index, layer in enumerate(self.layers):
            mixer = layer.mixer
            if isinstance(mixer, Attention):
                shape = (batch, mixer.kv_heads, capacity, mixer.head_dim)
                cache.keys[index] = torch.zeros(shape, **options)
                cache.values[index] = torch.zeros(shape, **options)
            else:
                cache.history = len(mixer.kernel) - 1
                cache.inputs[index] = torch.zeros(batch, cache.history, self.hidden_size, **options)
        return cache

    def forward(self, ids: Tensor, cache: LeanCache, taps: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Extend `cache` by `ids [batch, rows]`; returns normed hidden states `[batch, rows, hidden]` and, for each layer
        index in `taps`, that layer's output `[batch, rows, hidden]`. All rows are kept until `cache.keep` says otherwise.
        """
        batch, rows = ids.shape
        past = cache.length
        if past + rows > cache.capacity:
            raise ValueError(f"{past} + {rows} tokens do not fit a cache of {cache.capacity}")
        if cache.last_rows:
            cache.keep(cache.last_rows)
        x = F.embedding(ids, self.embedding)
        rotation = self.rotation[past : past + rows].view(rows, 1, -1)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            normed = F.rms_norm(x, (x.shape[-1],), layer.input_norm, self.eps)
            mixer = layer.mixer
            if isinstance(mixer, Attention):
                mixed = self._attend(mixer, normed, rotation, cache, index, past)
            else:
                mixed = _convolve(mixer, normed, cache, index)
            x = x + mixed
            gate, up = layer.gate_up(F.rms_norm(x, (x.shape[-1],), layer.mlp_norm, self.eps)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
            if index in taps:
                tapped[index] = x
        cache.length = past + rows
        cache.last_rows = rows
        return F.rms_norm(x, (x.shape[-1],), self.final_norm, self.eps), [tapped[index] for index in taps]

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden [..., hidden] → logits [..., vocabulary]`."""
        return self.head(hidden)

    def _attend(self, a: Attention, x: Tensor, rotation: Tensor, cache: LeanCache, index: int, past: int) -> Tensor:
        batch, rows, _ = x.shape
        groups = a.heads // a.kv_heads
        qk, v = a.qkv(x).view(batch, rows, -1, a.head_dim).split([a.heads + a.kv_heads, a.kv_heads], dim=2)
        if a.qk_norm is not None:
            qk = F.rms_norm(qk, (a.head_dim,), None, self.eps) * a.qk_norm
        qk = rotate(qk, rotation)
        q, k = qk.split([a.heads, a.kv_heads], dim=2)
        keys, values = cache.keys[index], cache.values[index]
        keys[:, :, past : past + rows] = k.transpose(1, 2)
        values[:, :, past : past + rows] = v.transpose(1, 2)
        keys, values = keys[:, :, : past + rows], values[:, :, : past + rows]
        q = q.view(batch, rows, a.kv_heads, groups, a.head_dim).permute(0, 2, 3, 1, 4)
        if past == 0 and rows > 1:
            mixed = F.scaled_dot_product_attention(
                q.reshape(batch, a.heads, rows, a.head_dim), keys, values, is_causal=True, enable_gqa=True
            ).view(batch, a.kv_heads, groups, rows, a.head_dim)
        else:
            q = q.reshape(batch, a.kv_heads, groups * rows, a.head_dim)
            mask = None if rows == 1 else self._mask(rows, groups, past, cache.capacity)
            mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            mixed = mixed.view(batch, a.kv_heads, groups, rows, a.head_dim)
        return a.out(mixed.permute(0, 3, 1, 2, 4).reshape(batch, rows, -1))

    def _mask(self, rows: int, groups: int, past: int, capacity: int) -> Tensor:
        """`[groups · rows, past + rows]`: a row sees all of the past and the call's rows up to itself. One stored table
        serves every `past`: its last `rows` columns are the triangle, and the view starts `past` columns before them."""
        table = self._masks.get(rows)
        if table is None or table.shape[1] < capacity + rows or table.shape[0] != groups * rows:
            triangle = torch.full((rows, rows), float("-inf"), dtype=self.dtype, device=self.embedding.device).triu_(1)
            table = F.pad(triangle, (capacity, 0)).repeat(groups, 1)
            self._masks[rows] = table
        return table[:, table.shape[1] - rows - past :]


def _convolve(c: ShortConvolution, x: Tensor, cache: LeanCache, index: int) -> Tensor:
    gate_in, gate_out, value = c.in_proj(x).chunk(3, dim=-1)
    window = torch.cat([cache.inputs[index], gate_in * value], dim=1)
    cache.inputs[index] = window
    rows = x.shape[1]
    mixed = window[:, :rows] * c.kernel[0]
    for tap in range(1, len(c.kernel)):
        mixed = torch.addcmul(mixed, window[:, tap : tap + rows], c.kernel[tap])
    if c.bias is not None:
        mixed = mixed + c.bias
    return c.out(gate_out * mixed)


# --- building from a loaded model ---------------------------------------------------------------------------------


def unsupported_reason(config) -> str | None:
    """Why the lean decoder cannot reproduce this model, or None. `config` is a transformers text config."""
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r} is not one of {', '.join(FAMILIES)}"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"activation {config.hidden_act!r} is not silu"
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in ("default", "linear", "llama3"):
        return f"rotary scaling {rope!r} depends on the sequence length"
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        return "sliding-window attention layers"
    return None


def build_lean_decoder(model: nn.Module, capacity: int, measure: bool = True, consume: bool = False) -> LeanDecoder:
    """Build from a transformers causal LM.

    `capacity`: positions to prepare, clipped to the model's own. `measure=False` keeps stock products (tests, training).
    `consume=True` empties the model's layers as they are read, so that weights are held once; the model is unusable afterwards.
    Raises ValueError with the reason where the family or its settings are not covered.
    """
    config = model.config
    reason = unsupported_reason(config)
    if reason:
        raise ValueError(f"no lean decoder: {reason}")
    base, head = model.model, model.lm_head
    with torch.inference_mode():
        plans = _plans(model, measure)

        def linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
            return PackedLinear(weight, bias, plans[tuple(weight.shape)])

        layers = []
        for layer in base.layers:
            source = _layer_source(layer, config)
            if consume:
                for parameter in layer.parameters():
                    parameter.data = parameter.data.new_empty(0)
            linears = {name: linear(*source.linears.pop(name)) for name in list(source.linears)}
            mixer = source.mixer(linears.pop("mix_in"), linears.pop("mix_out"))
            layers.append(Layer(mixer, source.input_norm, source.mlp_norm, **linears))
        norm = base.embedding_norm if config.model_type == "lfm2" else base.norm
        return LeanDecoder(
            embedding=base.embed_tokens.weight.detach(),
            layers=layers,
            final_norm=norm.weight.detach(),
            head=linear(head.weight.detach(), head.bias),
            eps=norm.variance_epsilon,
            rotation=_rotation_table(base.rotary_emb, min(capacity, config.max_position_embeddings), norm.weight.dtype),
            plans=list(plans.values()),
        )


def _plans(model: nn.Module, measure: bool) -> dict[tuple[int, ...], LinearPlan]:
    """A plan for every weight shape, measured on the first layers that together are too large for the processor's cache."""
    weights: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    head = model.lm_head.weight.detach()
    weights[tuple(head.shape)].append(head)
    if not measure:
        for layer in model.model.layers:
            for weight, _ in _layer_source(layer, model.config).linears.values():
                weights[tuple(weight.shape)] = [weight]
        return {shape: stock_plan(ws[0]) for shape, ws in weights.items()}
    for layer in model.model.layers:
        for weight, _ in _layer_source(layer, model.config).linears.values():
            known = weights[tuple(weight.shape)]
            if sum(w.numel() * w.element_size() for w in known) < BYTES_TO_DEFEAT_CACHE:
                known.append(weight)
    return {shape: measure_plan(ws) for shape, ws in weights.items()}


@dataclass(frozen=True)
class _LayerSource:
    """One library layer's tensors under common names: fused (weight, bias) pairs, norms, and what builds its mixer."""

    linears: dict[str, tuple[Tensor, Tensor | None]]
    input_norm: Tensor
    mlp_norm: Tensor
    mixer: Callable[[PackedLinear, PackedLinear], Attention | ShortConvolution]


def _layer_source(layer: nn.Module, config) -> _LayerSource:
    lfm2 = config.model_type == "lfm2"
    mlp = layer.feed_forward if lfm2 else layer.mlp
    gate, up, down = (mlp.w1, mlp.w3, mlp.w2) if lfm2 else (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    read = _convolution_source if lfm2 and not layer.is_attention_layer else _attention_source
    mix_in, mix_out, mixer = read(layer, config)
    return _LayerSource(
        linears={"mix_in": mix_in, "mix_out": mix_out, "gate_up": _fuse([gate, up]), "down": _fuse([down])},
        input_norm=(layer.operator_norm if lfm2 else layer.input_layernorm).weight.detach(),
        mlp_norm=(layer.ffn_norm if lfm2 else layer.post_attention_layernorm).weight.detach(),
        mixer=mixer,
    )


def _convolution_source(layer: nn.Module, config) -> tuple:
    conv = layer.conv
    kernel = conv.conv.weight.detach().squeeze(1).t().contiguous()
    bias = None if conv.conv.bias is None else conv.conv.bias.detach()
    return _fuse([conv.in_proj]), _fuse([conv.out_proj]), lambda i, o: ShortConvolution(i, o, kernel, bias)


def _attention_source(layer: nn.Module, config) -> tuple:
    attention, head_dim = layer.self_attn, layer.self_attn.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    lfm2 = config.model_type == "lfm2"
    weight, bias = _fuse([attention.q_proj, attention.k_proj, attention.v_proj])
    rotated = interleaved_rows(heads + kv_heads, head_dim)
    rows = torch.cat([rotated, torch.arange(len(rotated), len(weight))]).to(weight.device)
    names = ("q_layernorm", "k_layernorm") if lfm2 else ("q_norm", "k_norm")
    qk_norm = None
    if hasattr(attention, names[0]):
        order = interleaved_rows(1, head_dim).to(weight.device)
        counts = (heads, kv_heads)
        norms = [getattr(attention, name).weight.detach()[order] for name in names]
        qk_norm = torch.cat([norm.expand(count, -1) for norm, count in zip(norms, counts, strict=True)])
    out = attention.out_proj if lfm2 else attention.o_proj
    mix_in = (weight[rows], None if bias is None else bias[rows])
    return mix_in, _fuse([out]), lambda i, o: Attention(i, o, qk_norm, heads, kv_heads, head_dim)


def _fuse(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    weight = torch.cat([linear.weight.detach() for linear in linears]) if len(linears) > 1 else linears[0].weight.detach()
    biases = [linear.bias for linear in linears]
    return weight, None if biases[0] is None else torch.cat([bias.detach() for bias in biases])


def _rotation_table(rotary: nn.Module, positions: int, dtype: torch.dtype) -> Tensor:
    """Complex table from the library's own cosine and sine, so that every static scaling comes with it."""
    probe = torch.zeros(1, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=rotary.inv_freq.device)
    cos, sin = rotary(probe, torch.arange(positions, device=probe.device)[None])
    half = cos.shape[-1] // 2
    return torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
