"""Rotary position embedding as one complex product, shared by the lean decoder and the block drafter.

The library rotates the pair (i, i + d/2); here the rows of every query and key projection are permuted once so that a pair
lies side by side. The product of a query and a key does not change when both are permuted alike.
"""
from __future__ import annotations

import torch
from torch import Tensor


def interleaved_rows(heads: int, head_dim: int) -> Tensor:
    """Row order `[heads · head_dim]` that puts each head's pair (i, i + head_dim/2) side by side."""
    half = head_dim // 2
    pairs = torch.stack([torch.arange(half), torch.arange(half) + half], dim=1).flatten()
    return (torch.arange(heads)[:, None] * head_dim + pairs).flatten()


def rotation_table(inverse_frequencies: Tensor, positions: int) -> Tensor:
    """e^{i·position·frequency}, complex `[positions, head_dim / 2]`; angles in float32, as the library computes them."""
    angles = torch.arange(positions, device=inverse_frequencies.device)[:, None].float() * inverse_frequencies.float()
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """`x [..., rows, heads, head_dim]` with interleaved pairs, `rotation [rows, 1, head_dim / 2]` → rotated, same shape."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)
