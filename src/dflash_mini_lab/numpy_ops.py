"""What a transformer is made of beside its products, in NumPy: shared by the tiny target and the NumPy block drafter."""
from __future__ import annotations

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / √(mean(x²) + ε) · weight over the last axis."""
    return x * (weight / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis; -∞ is allowed, a row of nothing else is not."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def silu(x: np.ndarray) -> np.ndarray:
    """x · sigmoid(x), by the hyperbolic tangent: it cannot overflow."""
    return 0.5 * x * (1 + np.tanh(0.5 * x))


def rotation_table(theta: float, head_dim: int, positions: int) -> np.ndarray:
    """Cosines and sines `[2, positions, head_dim / 2]`; float32, as the library computes them."""
    frequencies = 1.0 / np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)])


def rotate(x: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """Rotary embedding of the pairs (i, i + head_dim/2): `x [..., rows, head_dim]`, `rotation [2, rows, head_dim / 2]`."""
    cos, sin = rotation
    left, right = np.split(x, 2, axis=-1)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
