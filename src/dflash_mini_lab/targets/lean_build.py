"""From a loaded transformers model to a lean decoder: every family's tensors under common names, packed by measured plans.

Families: Llama, Qwen2, Qwen3, LFM2. What cannot be reproduced is refused by `unsupported_reason`, never approximated.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dflash_mini_lab.compiled import AttentionLayer, CompiledLayers, ConvolutionLayer, can_compile, compiled_head, compiled_layers
from dflash_mini_lab.norms import RMSNorm
from dflash_mini_lab.packed_linear import (
    BYTES_TO_DEFEAT_CACHE,
    PLAIN,
    SCREENED,
    LinearPlan,
    PackedLinear,
    measure_plan,
    padded_rows,
    rounded_plan,
    unscreened,
)
from dflash_mini_lab.rotary import interleaved_rows
from dflash_mini_lab.targets.lean import Attention, Layer, LeanDecoder, ShortConvolution
from dflash_mini_lab.targets.lm_head import FullHead, LMHead, ScreenedHead
from dflash_mini_lab.targets.reading import give_back_memory

FAMILIES = ("llama", "qwen2", "qwen3", "lfm2")


def unsupported_reason(config: Any) -> str | None:
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


def build_lean_decoder(
    model: Any, capacity: int, measure: bool = True, consume: bool = False, screen: bool = True
) -> LeanDecoder:
    """Build from a transformers causal LM.

    `capacity`: positions to prepare, clipped to the model's own. `measure=False` keeps stock products (tests, training, an
    ablation); `screen=False` has the LM head compute every logit (training data, an ablation).
    `consume=True` empties the model's linear layers as they are read, so that weights are held once; the model is unusable
    afterwards.
    Raises ValueError with the reason where the family or its settings are not covered.
    """
    config = model.config
    reason = unsupported_reason(config)
    if reason:
        raise ValueError(f"no lean decoder: {reason}")
    base, head = model.model, model.lm_head
    with torch.inference_mode():
        plans = _plans(model, measure, screen)

        def linear(fused: _Fused) -> PackedLinear:
            packed = PackedLinear(*fused.read(), unscreened(plans[fused.shape]))
            if consume:
                fused.empty()
            return packed

        layers = []
        counts = Counter([tuple(head.weight.shape)])
        for layer in base.layers:
            source = _layer_source(layer, config)
            counts.update(fused.shape for fused in source.linears.values())
            linears = {name: linear(fused) for name, fused in source.linears.items()}
            mixer = source.mixer(linears.pop("mix_in"), linears.pop("mix_out"))
            layers.append(Layer(mixer, source.input_norm, source.mlp_norm, **linears))
            if consume:
                give_back_memory()
        norm = base.embedding_norm if config.model_type == "lfm2" else base.norm
        compiled = _compiled(layers, _norm(norm))
        padded = {} if compiled else padded_rows([(plans[shape], count) for shape, count in counts.items()])
        return LeanDecoder(
            embedding=base.embed_tokens.weight.detach(),
            layers=layers,
            final_norm=_norm(norm),
            head=_head(head.weight.detach(), head.bias, plans[tuple(head.weight.shape)], padded),
            rotation=_rotation_table(base.rotary_emb, min(capacity, config.max_position_embeddings), norm.weight.dtype),
            plans=list(plans.values()),
            padded_rows=padded,
            compiled=compiled,
        )


def _compiled(layers: Sequence[Layer], final_norm: RMSNorm) -> CompiledLayers | None:
    parts: list[AttentionLayer | ConvolutionLayer] = []
    like: Attention | None = None
    for layer in layers:
        mixer, rest = layer.mixer, (layer.gate_up, layer.down, layer.input_norm, layer.mlp_norm)
        if isinstance(mixer, Attention):
            like = mixer
            parts.append(AttentionLayer(mixer.qkv, mixer.out, *rest, mixer.qk_norm))
        elif mixer.bias is None:
            parts.append(ConvolutionLayer(mixer.in_proj, mixer.out, *rest, mixer.kernel))
        else:
            return None
    return compiled_layers(parts, final_norm, like.heads, like.kv_heads, like.head_dim) if like else None


def _plans(model: Any, measure: bool, screen: bool) -> dict[tuple[int, ...], LinearPlan]:
    """A plan for every weight shape, measured one shape after the other: what is copied for one is gone before the next."""
    head = model.lm_head.weight.detach()
    shapes = dict.fromkeys([tuple(head.shape), *(fused.shape for fused in _fused_linears(model))])
    if not measure:
        return {shape: LinearPlan(shape[0], shape[1], PLAIN) for shape in shapes}
    measured = {}
    for shape in shapes:
        sample = _sample(model, shape)
        plan = measure_plan(sample)
        if screen and shape == tuple(head.shape) and model.lm_head.bias is None and can_compile():
            plan = rounded_plan(sample[:1], plan, SCREENED)
        measured[shape] = replace(plan, out_features=shape[0])
        give_back_memory()
    return measured


def _sample(model: Any, shape: tuple[int, ...]) -> list[Tensor]:
    """Weights of one shape that together are too large for the processor's cache, but no larger: of a larger one, some rows."""
    head = model.lm_head.weight.detach()
    bytes_of_a_row = shape[1] * head.element_size()
    sample = [head[: -(-BYTES_TO_DEFEAT_CACHE // bytes_of_a_row)]] if tuple(head.shape) == shape else []
    for fused in _fused_linears(model):
        if fused.shape == shape and sum(w.numel() * w.element_size() for w in sample) < BYTES_TO_DEFEAT_CACHE:
            sample.append(fused.read()[0])
    return sample


def _fused_linears(model: Any) -> Iterator[_Fused]:
    for layer in model.model.layers:
        yield from _layer_source(layer, model.config).linears.values()


def _head(weight: Tensor, bias: Tensor | None, plan: LinearPlan, padded: dict[int, int]) -> LMHead:
    if plan.storage == SCREENED and (screened := compiled_head(weight)):
        return ScreenedHead(weight, screened)
    return FullHead(PackedLinear(weight, bias, unscreened(plan)), padded)


@dataclass(frozen=True)
class _Fused:
    """Linear layers of the library's that become one, by rows. Nothing is copied before `read`."""

    linears: tuple[nn.Linear, ...]
    rows: Tensor | None = None
    """The order of the rows, where it changes."""

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(linear.weight.shape[0] for linear in self.linears), self.linears[0].weight.shape[1]

    def read(self) -> tuple[Tensor, Tensor | None]:
        """The weight, a copy unless it is one layer's as it is; and the bias."""
        biases = [linear.bias for linear in self.linears]
        bias = None if biases[0] is None else self._ordered([bias.detach() for bias in biases])
        return self._ordered([linear.weight.detach() for linear in self.linears]), bias

    def _ordered(self, parts: list[Tensor]) -> Tensor:
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole if self.rows is None else whole[self.rows.to(whole.device)]

    def empty(self) -> None:
        for linear in self.linears:
            linear.weight.data = linear.weight.data.new_empty(0)


@dataclass(frozen=True)
class _LayerSource:
    """One library layer's tensors under common names: fused linear layers, norms, and what builds its mixer."""

    linears: dict[str, _Fused]
    input_norm: RMSNorm
    mlp_norm: RMSNorm
    mixer: Callable[[PackedLinear, PackedLinear], Attention | ShortConvolution]


def _layer_source(layer: Any, config: Any) -> _LayerSource:
    lfm2 = config.model_type == "lfm2"
    mlp = layer.feed_forward if lfm2 else layer.mlp
    gate, up, down = (mlp.w1, mlp.w3, mlp.w2) if lfm2 else (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    read = _convolution_source if lfm2 and not layer.is_attention_layer else _attention_source
    mix_in, mix_out, mixer = read(layer, config)
    return _LayerSource(
        linears={"mix_in": mix_in, "mix_out": mix_out, "gate_up": _Fused((gate, up)), "down": _Fused((down,))},
        input_norm=_norm(layer.operator_norm if lfm2 else layer.input_layernorm),
        mlp_norm=_norm(layer.ffn_norm if lfm2 else layer.post_attention_layernorm),
        mixer=mixer,
    )


def _convolution_source(layer: Any, config: Any) -> tuple:
    conv = layer.conv
    kernel = conv.conv.weight.detach().squeeze(1).t().contiguous()
    bias = None if conv.conv.bias is None else conv.conv.bias.detach()
    return _Fused((conv.in_proj,)), _Fused((conv.out_proj,)), lambda i, o: ShortConvolution(i, o, kernel, bias)


def _attention_source(layer: Any, config: Any) -> tuple:
    attention, head_dim = layer.self_attn, layer.self_attn.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    lfm2 = config.model_type == "lfm2"
    rotated = interleaved_rows(heads + kv_heads, head_dim)
    rows = torch.cat([rotated, torch.arange(len(rotated), len(rotated) + kv_heads * head_dim)])
    mix_in = _Fused((attention.q_proj, attention.k_proj, attention.v_proj), rows)
    names = ("q_layernorm", "k_layernorm") if lfm2 else ("q_norm", "k_norm")
    qk_norm = None
    if hasattr(attention, names[0]):
        order = interleaved_rows(1, head_dim).to(attention.q_proj.weight.device)
        counts = (heads, kv_heads)
        norms = [getattr(attention, name).weight.detach()[order] for name in names]
        weight_of_heads = torch.cat([norm.expand(count, -1) for norm, count in zip(norms, counts, strict=True)])
        qk_norm = RMSNorm(weight_of_heads, getattr(attention, names[0]).variance_epsilon)
    out = attention.out_proj if lfm2 else attention.o_proj
    return mix_in, _Fused((out,)), lambda i, o: Attention(i, o, qk_norm, heads, kv_heads, head_dim)


def _norm(module: Any) -> RMSNorm:
    return RMSNorm(module.weight.detach(), module.variance_epsilon)


def _rotation_table(rotary: Any, positions: int, dtype: torch.dtype) -> Tensor:
    """Complex table from the library's own cosine and sine, so that every static scaling comes with it."""
    probe = torch.zeros(1, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=rotary.inv_freq.device)
    cos, sin = rotary(probe, torch.arange(positions, device=probe.device)[None])
    half = cos.shape[-1] // 2
    return torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
