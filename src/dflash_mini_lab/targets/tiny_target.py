"""The tiny reference as a target, in NumPy: no cache, the visible sequence is computed anew at every call.

That makes rolling back trivial (forget the last ids) and the answer easy to check. It also makes a call as expensive as its
whole sequence, so its absolute speed must never stand beside that of a target with a cache.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_mini_lab.numpy_ops import rms_norm, rotate, rotation_table, silu, softmax
from dflash_mini_lab.targets.tiny import END, TinyConfig
from dflash_mini_lab.trees import row_table
from dflash_mini_lab.types import UserError


@dataclass(frozen=True)
class _Layer:
    """Weights as `[in, out]`; queries, keys and values are one product, gate and up another."""

    input_norm: np.ndarray
    qkv: np.ndarray
    out: np.ndarray
    mlp_norm: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray


class TinyTarget:
    """See types.Target."""

    path = "numpy"
    trees = copies = True

    def __init__(self, config: TinyConfig, tensors: Mapping[str, np.ndarray], full_logits: bool = False) -> None:
        """`full_logits`: logits of the whole sequence at every call, where only the new rows' are needed."""
        self.config, self.full_logits = config, full_logits
        self.stop_ids, self.max_positions = frozenset({END}), config.max_position_embeddings
        self.vocabulary = config.vocab_size
        self.embedding = tensors["model.embed_tokens.weight"]
        self.head = np.ascontiguousarray(self.embedding.T)
        self.norm = tensors["model.norm.weight"]
        self.layers = [_layer(tensors, f"model.layers.{index}.") for index in range(config.num_hidden_layers)]
        self.rotation = rotation_table(config.rope_theta, config.head_dim, self.max_positions)

    def start(self, prompt_ids: Sequence[int], capacity: int, taps: Sequence[int] | None) -> TinySession:
        return TinySession(self, prompt_ids, taps)

    def forward(
        self, ids: Sequence[int], taps: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Normed last states `[len(ids), hidden]`, and the outputs of the layers in `taps`, each `[len(ids), hidden]`. The last
        `len(parents)` ids are a tree behind the others."""
        config, rows = self.config, len(ids)
        heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        groups = heads // kv_heads
        unseen, rotation = np.triu(np.full((rows, rows), -np.inf, dtype=np.float32), 1), self.rotation[:, :rows]
        if parents:
            past, table = rows - len(parents), np.array(row_table(parents, 0))
            unseen[past:, past:] = np.where(table[:, 1:], 0, -np.inf)
            rotation = np.concatenate([rotation[:, :past], self.rotation[:, past + table[:, 0]]], axis=1)
        x = self.embedding[list(ids)]
        outputs = []
        for layer in self.layers:
            qkv = (rms_norm(x, layer.input_norm, config.rms_norm_eps) @ layer.qkv).reshape(rows, -1, d).transpose(1, 0, 2)
            q, k = np.split(rotate(qkv[: heads + kv_heads], rotation), [heads])
            v = qkv[heads + kv_heads :]
            q = q.reshape(kv_heads, groups, rows, d)
            scores = q @ k[:, None].swapaxes(-1, -2) * d**-0.5 + unseen
            mixed = softmax(scores) @ v[:, None]
            x = x + mixed.reshape(heads, rows, d).transpose(1, 0, 2).reshape(rows, -1) @ layer.out
            gate, up = np.split(rms_norm(x, layer.mlp_norm, config.rms_norm_eps) @ layer.gate_up, 2, axis=-1)
            x = x + silu(gate) * up @ layer.down
            outputs.append(x)
        return rms_norm(x, self.norm, config.rms_norm_eps), [outputs[tap] for tap in taps]

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits `[len(ids), vocabulary]` after every token, as the gate compares them."""
        return self.forward(ids)[0] @ self.head


class TinySession:
    """See types.Session. The ids are all its state; features are those of the last call, which had every row."""

    def __init__(self, target: TinyTarget, prompt_ids: Sequence[int], taps: Sequence[int] | None) -> None:
        layers = target.config.num_hidden_layers
        if any(not 0 <= tap < layers for tap in taps or ()):
            raise UserError(f"The drafter reads layers {tuple(taps or ())}; this target's layers are 0 … {layers - 1}.")
        self.target, self.prompt_ids, self.taps = target, prompt_ids, taps
        self.ids: list[int] = []
        self.length = 0
        self._features = np.zeros((0, len(taps or ()) * target.config.hidden_size), dtype=np.float32)
        self._taken = 0

    def prefill(self) -> int:
        first = self._extend(self.prompt_ids, rows=1)[0]
        self.keep(len(self.prompt_ids))
        return first

    def decode_one(self, token: int) -> int:
        greedy = self._extend([token], rows=1)
        self.keep(1)
        return greedy[0]

    def verify(self, tokens: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        if self.taps is None:
            raise RuntimeError("a session of method 00 cannot be rolled back; start it with taps")
        return self._extend(tokens, rows=len(tokens), parents=parents)

    def keep(self, rows: int | Sequence[int]) -> None:
        waiting = len(self.ids) - self.length
        count = rows if isinstance(rows, int) else len(rows)
        if not 0 <= count <= waiting or not (isinstance(rows, int) or set(rows) <= set(range(waiting))):
            raise ValueError(f"keep({rows}): the last call had {waiting} rows")
        if not isinstance(rows, int):
            places = [self.length + row for row in rows]
            self.ids[self.length :] = [self.ids[place] for place in places]
            if self.taps:
                self._features[self.length : self.length + count] = self._features[places]
        self.length += count
        del self.ids[self.length :]

    def take_features(self) -> np.ndarray:
        taken, self._taken = self._taken, self.length
        return self._features[taken : self.length]

    def _extend(self, tokens: Sequence[int], rows: int, parents: Sequence[int] = ()) -> list[int]:
        """The greedy tokens of the last `rows` rows of the whole sequence with `tokens` behind it."""
        self.ids += tokens
        hidden, tapped = self.target.forward(self.ids, self.taps or (), parents)
        if tapped:
            self._features = np.concatenate(tapped, axis=-1)
        needed = hidden if self.target.full_logits else hidden[-rows:]
        return (needed @ self.target.head).argmax(axis=-1)[-rows:].tolist()


def _layer(tensors: Mapping[str, np.ndarray], name: str) -> _Layer:
    def stacked(*parts: str) -> np.ndarray:
        return np.ascontiguousarray(np.concatenate([tensors[f"{name}{part}_proj.weight"] for part in parts]).T)

    return _Layer(
        input_norm=tensors[name + "input_layernorm.weight"],
        qkv=stacked("self_attn.q", "self_attn.k", "self_attn.v"),
        out=stacked("self_attn.o"),
        mlp_norm=tensors[name + "post_attention_layernorm.weight"],
        gate_up=stacked("mlp.gate", "mlp.up"),
        down=stacked("mlp.down"),
    )
