"""The tiny target's greedy reference for the exactness gate: one token at a time, one head at a time, in plain loops.

Independence is the point. It shares with `tiny_target.py` the numbers of the file and nothing of the arithmetic: keys and values
are kept, no two positions or heads are computed together, and the only product is a matrix times a vector.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dflash_mini_lab.targets.tiny import TinyConfig

Rows = list[list[np.ndarray]]
"""`[key/value head][position]` → vector `[head_dim]`."""


class PlainReference:
    """See exactness.StockSteps."""

    def __init__(self, config: TinyConfig, tensors: Mapping[str, np.ndarray]) -> None:
        self.config, self.tensors = config, tensors

    def stock_steps(self, prompt_ids: Sequence[int], tokens: Sequence[int]) -> Iterator[np.ndarray]:
        """Logits `[vocabulary]` after the prompt, then after each of `tokens`, which may grow meanwhile."""
        heads, layers = range(self.config.num_key_value_heads), range(self.config.num_hidden_layers)
        keys: list[Rows] = [[[] for _ in heads] for _ in layers]
        values: list[Rows] = [[[] for _ in heads] for _ in layers]
        for position, token in enumerate(prompt_ids[:-1]):
            self._token(token, position, keys, values)
        yield self._token(prompt_ids[-1], len(prompt_ids) - 1, keys, values)
        new = 0
        while True:
            yield self._token(tokens[new], len(prompt_ids) + new, keys, values)
            new += 1

    def _token(self, token: int, position: int, keys: list[Rows], values: list[Rows]) -> np.ndarray:
        embedding = self.tensors["model.embed_tokens.weight"]
        state = embedding[token]
        for index in range(self.config.num_hidden_layers):
            name = f"model.layers.{index}."
            normed = self._normed(state, name + "input_layernorm")
            state = state + self._attention(normed, position, name + "self_attn.", keys[index], values[index])
            normed = self._normed(state, name + "post_attention_layernorm")
            gate = self._linear(normed, name + "mlp.gate_proj")
            opened = np.array([value / (1.0 + math.exp(-value)) for value in gate.tolist()], dtype=gate.dtype)
            state = state + self._linear(opened * self._linear(normed, name + "mlp.up_proj"), name + "mlp.down_proj")
        return embedding @ self._normed(state, "model.norm")

    def _attention(self, normed: np.ndarray, position: int, name: str, keys: Rows, values: Rows) -> np.ndarray:
        d, kv_heads = self.config.head_dim, self.config.num_key_value_heads
        query, key, value = (self._linear(normed, f"{name}{part}_proj") for part in "qkv")
        for head in range(kv_heads):
            keys[head].append(self._turned(key[head * d : (head + 1) * d], position))
            values[head].append(value[head * d : (head + 1) * d])
        mixed = []
        for head in range(self.config.num_attention_heads):
            shared = head * kv_heads // self.config.num_attention_heads
            turned = self._turned(query[head * d : (head + 1) * d], position)
            scores = [float(turned @ other) / math.sqrt(d) for other in keys[shared]]
            largest = max(scores)
            weights = [math.exp(score - largest) for score in scores]
            total = sum(weights)
            rows = zip(weights, values[shared], strict=True)
            mixed.append(sum((weight / total * row for weight, row in rows), np.zeros(d, dtype=value.dtype)))
        return self._linear(np.concatenate(mixed), name + "o_proj")

    def _turned(self, vector: np.ndarray, position: int) -> np.ndarray:
        """Pair (i, i + head_dim/2) turned by `position · θ^(-2i/head_dim)`."""
        d = self.config.head_dim
        turned = vector.copy()
        for first in range(d // 2):
            second = first + d // 2
            angle = position * self.config.rope_theta ** (-2.0 * first / d)
            turned[first] = vector[first] * math.cos(angle) - vector[second] * math.sin(angle)
            turned[second] = vector[second] * math.cos(angle) + vector[first] * math.sin(angle)
        return turned

    def _normed(self, vector: np.ndarray, name: str) -> np.ndarray:
        mean_square = sum(value * value for value in vector.tolist()) / len(vector)
        return vector / math.sqrt(mean_square + self.config.rms_norm_eps) * self.tensors[name + ".weight"]

    def _linear(self, vector: np.ndarray, name: str) -> np.ndarray:
        return self.tensors[name + ".weight"] @ vector
