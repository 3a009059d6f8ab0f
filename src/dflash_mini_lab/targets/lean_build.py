"""From a loaded transformers model to a lean decoder: every family's tensors under common names, packed by measured plans.

Families: Llama, Qwen2, Qwen3, LFM2. What cannot be reproduced is refused by `unsupported_reason`, never approximated.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_mini_lab.norms import RMSNorm
from dflash_mini_lab.packed_linear import (
    BYTES_TO_DEFEAT_CACHE,
    PACKED,
    SCREENED,
    LinearPlan,
    PackedLinear,
    measure_plan,
    padded_rows,
    screen_plan,
    stock_plan,
)
from dflash_mini_lab.rotary import interleaved_rows
from dflash_mini_lab.targets.lean import Attention, Layer, LeanDecoder, ShortConvolution
from dflash_mini_lab.targets.lm_head import FullHead, LMHead, ScreenedHead

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
    ablation); `screen=False` has the LM head compute every logit (an ablation).
    `consume=True` empties the model's layers as they are read, so that weights are held once; the model is unusable afterwards.
    Raises ValueError with the reason where the family or its settings are not covered.
    """
    config = model.config
    reason = unsupported_reason(config)
    if reason:
        raise ValueError(f"no lean decoder: {reason}")
    base, head = model.model, model.lm_head
    with torch.inference_mode():
        plans = _plans(model, measure, screen)

        def linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
            return PackedLinear(weight, bias, plans[tuple(weight.shape)])

        layers = []
        counts = Counter([tuple(head.weight.shape)])
        for layer in base.layers:
            source = _layer_source(layer, config)
            counts.update(tuple(weight.shape) for weight, _ in source.linears.values())
            if consume:
                for parameter in layer.parameters():
                    parameter.data = parameter.data.new_empty(0)
            linears = {name: linear(*source.linears.pop(name)) for name in list(source.linears)}
            mixer = source.mixer(linears.pop("mix_in"), linears.pop("mix_out"))
            layers.append(Layer(mixer, source.input_norm, source.mlp_norm, **linears))
        norm = base.embedding_norm if config.model_type == "lfm2" else base.norm
        padded = padded_rows([(plans[shape], count) for shape, count in counts.items()])
        return LeanDecoder(
            embedding=base.embed_tokens.weight.detach(),
            layers=layers,
            final_norm=_norm(norm),
            head=_head(head.weight.detach(), head.bias, plans[tuple(head.weight.shape)], padded),
            rotation=_rotation_table(base.rotary_emb, min(capacity, config.max_position_embeddings), norm.weight.dtype),
            plans=list(plans.values()),
            padded_rows=padded,
        )


def _plans(model: Any, measure: bool, screen: bool) -> dict[tuple[int, ...], LinearPlan]:
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
    measured = {shape: measure_plan(ws) for shape, ws in weights.items()}
    if screen and model.lm_head.bias is None:
        measured[tuple(head.shape)] = screen_plan(head, measured[tuple(head.shape)])
    return measured


def _head(weight: Tensor, bias: Tensor | None, plan: LinearPlan, padded: dict[int, int]) -> LMHead:
    if plan.storage == SCREENED:
        return ScreenedHead(weight, PackedLinear(weight.bfloat16(), None, LinearPlan(weight.shape[0], weight.shape[1], PACKED)))
    return FullHead(PackedLinear(weight, bias, plan), padded)


@dataclass(frozen=True)
class _LayerSource:
    """One library layer's tensors under common names: fused (weight, bias) pairs, norms, and what builds its mixer."""

    linears: dict[str, tuple[Tensor, Tensor | None]]
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
        linears={"mix_in": mix_in, "mix_out": mix_out, "gate_up": _fuse([gate, up]), "down": _fuse([down])},
        input_norm=_norm(layer.operator_norm if lfm2 else layer.input_layernorm),
        mlp_norm=_norm(layer.ffn_norm if lfm2 else layer.post_attention_layernorm),
        mixer=mixer,
    )


def _convolution_source(layer: Any, config: Any) -> tuple:
    conv = layer.conv
    kernel = conv.conv.weight.detach().squeeze(1).t().contiguous()
    bias = None if conv.conv.bias is None else conv.conv.bias.detach()
    return _fuse([conv.in_proj]), _fuse([conv.out_proj]), lambda i, o: ShortConvolution(i, o, kernel, bias)


def _attention_source(layer: Any, config: Any) -> tuple:
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
        weight_of_heads = torch.cat([norm.expand(count, -1) for norm, count in zip(norms, counts, strict=True)])
        qk_norm = RMSNorm(weight_of_heads, getattr(attention, names[0]).variance_epsilon)
    out = attention.out_proj if lfm2 else attention.o_proj
    mix_in = (weight[rows], None if bias is None else bias[rows])
    return mix_in, _fuse([out]), lambda i, o: Attention(i, o, qk_norm, heads, kv_heads, head_dim)


def _norm(module: Any) -> RMSNorm:
    return RMSNorm(module.weight.detach(), module.variance_epsilon)


def _fuse(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    weight = torch.cat([linear.weight.detach() for linear in linears]) if len(linears) > 1 else linears[0].weight.detach()
    biases = [linear.bias for linear in linears]
    return weight, None if biases[0] is None else torch.cat([bias.detach() for bias in biases])


def _rotation_table(rotary: Any, positions: int, dtype: torch.dtype) -> Tensor:
    """Complex table from the library's own cosine and sine, so that every static scaling comes with it."""
    probe = torch.zeros(1, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=rotary.inv_freq.device)
    cos, sin = rotary(probe, torch.arange(positions, device=probe.device)[None])
    half = cos.shape[-1] // 2
    return torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
