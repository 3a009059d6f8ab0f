"""The trainable block drafter: the same mathematics as drafters/block.py (a test holds them together), many blocks at once.

Module names are the published tensor names, so `state_dict` is the checkpoint. No optimiser, no data here.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_mini_lab.drafters.checkpoint import DrafterConfig

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, `[sequences or 1, positions, 1, head_dim]`."""


class TrainableDrafter(nn.Module):
    frequencies: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size * len(config.taps), config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.eps)
        self.input = self.output = None
        if config.target_hidden_size:
            self.input = nn.Linear(config.target_hidden_size, config.hidden_size, bias=False)
            self.output = nn.Linear(config.hidden_size, config.target_hidden_size, bias=False)
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, features: Tensor, block_embeddings: Tensor, anchors: Tensor) -> Tensor:
        """Final slot states `[sequences, blocks, S, hidden]`; F below is the target's width.

        features `[sequences, tokens, taps · F]`, right-padded (no block reaches past its anchor, so padding is never seen);
        block_embeddings `[sequences, blocks, B, F]` of `[anchor, MASK × S]`; anchors `[sequences, blocks]` positions.
        A block sees the context strictly before its anchor, as far back as the window reaches, and itself.
        """
        sequences, tokens, _ = features.shape
        _, blocks, size, _ = block_embeddings.shape
        context = self.hidden_norm(self.fc(features).float())
        x = block_embeddings.flatten(1, 2)
        if self.input is not None:
            x = self.input(x).float()
        positions = (anchors[..., None] + torch.arange(size, device=anchors.device)).reshape(sequences, -1)
        context_rotation = self._rotation(torch.arange(tokens, device=anchors.device)[None])
        block_rotation = self._rotation(positions)
        hidden = hidden_context(tokens, anchors, size, self.config.window)
        for layer in self.layers:
            x = layer(x, context, hidden, block_rotation, context_rotation)
        return self.norm(x.view(sequences, blocks, size, -1)[:, :, 1:])

    def scoring_rows(self, head: Tensor) -> Tensor:
        """Rows of the target's head `[V, F]` as slot states are multiplied by them, `[V, hidden]`."""
        return head if self.output is None else head @ self.output.weight

    def _rotation(self, positions: Tensor) -> Rotation:
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, :, None]
        return angles.cos(), angles.sin()


class _Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.eps)

    def forward(self, x: Tensor, context: Tensor, hidden: Tensor, block: Rotation, before: Rotation) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, hidden, block, before)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        inner, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, config.eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.eps)

    def forward(self, x: Tensor, context: Tensor, hidden: Tensor, block: Rotation, before: Rotation) -> Tensor:
        """`hidden`: see hidden_context. A block sees no other: so the context's scores and each block's own are two products, not
        one with a mask over every pair of blocks (half the time on a CPU)."""
        config, size = self.config, self.config.block_size

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, config.head_dim))

        def all_heads(y: Tensor) -> Tensor:
            return y.repeat_interleave(config.heads // config.kv_heads, dim=2).transpose(1, 2)

        q = _rotate_half(self.q_norm(heads(self.q_proj(x)).float()), block).transpose(1, 2) * config.head_dim**-0.5
        k = all_heads(_rotate_half(self.k_norm(heads(self.k_proj(x)).float()), block)).unflatten(2, (-1, size))
        k_context = all_heads(_rotate_half(self.k_norm(heads(self.k_proj(context)).float()), before))
        v, v_context = all_heads(heads(self.v_proj(x))).unflatten(2, (-1, size)), all_heads(heads(self.v_proj(context)))
        far = (q @ k_context.transpose(-1, -2)).float().masked_fill(hidden, float("-inf"))
        near = (q.unflatten(2, (-1, size)) @ k.transpose(-1, -2)).float().flatten(2, 3)
        weights = torch.cat([far, near], dim=-1).softmax(-1).to(v.dtype)
        of_context, of_block = weights.split([far.shape[-1], size], dim=-1)
        mixed = of_context @ v_context + (of_block.unflatten(2, (-1, size)) @ v).flatten(2, 3)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def hidden_context(tokens: int, anchors: Tensor, size: int, window: int | None = None) -> Tensor:
    """`[sequences, 1, blocks · size, tokens]`: true but at the `window` positions before a row's anchor (None: all before it)."""
    back = anchors[..., None] - torch.arange(tokens, device=anchors.device)
    sees = (back > 0) & (back <= (window or tokens))
    return ~sees.repeat_interleave(size, dim=1)[:, None]


def _rotate_half(x: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin
