"""The block drafter of `block.py` in NumPy, for a target whose features are NumPy arrays. The same checkpoint, the same scores.

Plain products on the published weights: nothing is fused across layers, nothing is packed. A test holds the two together.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from dflash_mini_lab.drafters.layout import DRAFT_TO_TARGET, DrafterConfig, check_fit, read_checkpoint
from dflash_mini_lab.numpy_ops import rms_norm, rotate, rotation_table, silu, softmax
from dflash_mini_lab.scores import best
from dflash_mini_lab.types import NO_HEADS, Heads, Session


def load_arrays(folder: Path) -> tuple[DrafterConfig, dict[str, np.ndarray]]:
    """Config and tensors, every shape checked. Raises UserError naming the file and the tensor that does not fit."""
    return read_checkpoint(folder, load_file)


class NumpyDraft:
    """See types.Draft. `hidden [S, hidden]`: final slot states; `jump [J, hidden]`: the jump head's, if it ran."""

    def __init__(
        self, session: NumpyBlockSession, committed: Sequence[int], hidden: np.ndarray, jump: np.ndarray | None = None
    ) -> None:
        self.committed, self.anchor, self.slots = committed, committed[-1], len(hidden)
        self._session, self._drafter, self._hidden = session, session.drafter, hidden
        logits = (hidden if jump is None else np.concatenate([hidden, jump])) @ self._drafter.head
        self._logits, self._jump = logits[: self.slots], logits[self.slots :]

    @property
    def heads(self) -> Heads:
        return self._drafter.heads

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        columns, scores = best(self._logits, min(k, self._logits.shape[1]))
        return self._drafter.draft_ids[columns], scores

    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        return self._logits, self._drafter.draft_ids

    def context(self) -> np.ndarray:
        return self._session.context

    def states(self) -> np.ndarray:
        return self._hidden

    def jump(self, ids: np.ndarray) -> np.ndarray:
        if len(self._jump) != len(ids):
            raise RuntimeError(f"the jump head gave {len(self._jump)} rows, {len(ids)} were asked for: does the method need it?")
        return np.take_along_axis(self._jump, np.searchsorted(self._drafter.draft_ids, ids), 1)

    def embeddings(self, ids: np.ndarray) -> np.ndarray:
        return self._drafter.embedding[ids]

    def prefix_embedding(self) -> np.ndarray:
        return self._session.prefix_embedding(self.committed)


class NumpyBlockDrafter:
    """Runs a checkpoint on one target. Raises UserError where the two do not fit."""

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, np.ndarray],
        embedding: np.ndarray,
        head_weight: np.ndarray,
        max_positions: int,
        heads: Heads = NO_HEADS,
    ) -> None:
        """`embedding`, `head_weight [vocabulary, hidden]`: the target's own. `heads`: as drafters/heads.py loads them."""
        check_fit(config, *embedding.shape)
        self.config, self.embedding = config, embedding
        self.taps, self.block_size, self.heads = config.taps, config.block_size, heads
        ids = tensors.get(DRAFT_TO_TARGET)
        self.draft_ids = np.arange(len(head_weight)) if ids is None else ids.astype(np.int64)
        """The target's id of every column of a draft's logits."""
        head = head_weight[self.draft_ids]
        self.head = np.ascontiguousarray((head @ tensors["output.weight"] if config.target_hidden_size else head).T)
        self.rotation = rotation_table(config.rope_theta, config.head_dim, max_positions + config.block_size)
        weights = {name: t for name, t in tensors.items() if name != DRAFT_TO_TARGET}
        self.weights = {name: np.ascontiguousarray(t.T, embedding.dtype) for name, t in weights.items()}
        """Matrices as `[in, out]`, in the target's number format."""

    def start(self, session: Session, capacity: int, needs: Sequence[str] = ()) -> NumpyBlockSession:
        return NumpyBlockSession(self, session, capacity, needs)

    def jump(self, context: np.ndarray) -> np.ndarray | None:
        """Final states `[J, hidden]` of the jump head's pass from `context [hidden]`, for the offsets that a block has; None for
        none."""
        head = self.heads.jump
        if head is None or head.offsets[0] >= self.block_size:
            return None
        h = context + head.offset_embedding[head.offsets < self.block_size]
        h = h + silu(rms_norm(h, head.norm, self.config.eps) @ head.up.T) @ head.down.T
        return self.norm(h, "norm")

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[name + ".weight"]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, self.weights[name + ".weight"], self.config.eps)

    def split(self, x: np.ndarray, name: str) -> np.ndarray:
        """One projection of `x [rows, hidden]`, `[heads, rows, head_dim]`."""
        return self.linear(x, name).reshape(len(x), -1, self.config.head_dim).transpose(1, 0, 2)

    def turned(self, x: np.ndarray, layer: str, part: str, start: int) -> np.ndarray:
        """Queries or keys of `x`, whose first row is at position `start`: projected, normed and rotated."""
        y = self.norm(self.split(x, f"{layer}self_attn.{part}_proj"), f"{layer}self_attn.{part}_norm")
        return rotate(y, self.rotation[:, start : start + len(x)])


class NumpyBlockSession:
    """The drafter's state for one prompt: keys and values of its context, and where it stopped reading features."""

    context: np.ndarray
    """`[hidden]`: the fused feature of the last token read."""

    def __init__(self, drafter: NumpyBlockDrafter, session: Session, capacity: int, needs: Sequence[str] = ()) -> None:
        self.drafter, self.session, self.length = drafter, session, 0
        self._jumps = "jump" in needs
        self._summed: tuple[int, np.ndarray | float] = (0, 0.0)
        config = drafter.config
        shape = (config.layers, 2, config.kv_heads, capacity + config.block_size, config.head_dim)
        self.memory = np.zeros(shape, dtype=drafter.embedding.dtype)

    def draft(self, committed: Sequence[int]) -> NumpyDraft:
        """One pass for the block after `committed[-1]`, which is not in the context."""
        self._read_context(self.session.take_features())
        if self.length != len(committed) - 1:
            raise RuntimeError(f"the drafter has read {self.length} features for {len(committed) - 1} tokens before the anchor")
        d, config = self.drafter, self.drafter.config
        rows, groups = config.block_size, config.heads // config.kv_heads
        x = d.embedding[[committed[-1], *[config.mask_token_id] * (rows - 1)]]
        if config.target_hidden_size:
            x = d.linear(x, "input")
        start, end = self.length, self.length + rows
        first = max(start - config.window, 0) if config.window else 0
        for index in range(config.layers):
            layer = f"layers.{index}."
            normed = d.norm(x, layer + "input_layernorm")
            q = d.turned(normed, layer, "q", start).reshape(config.kv_heads, groups, rows, -1)
            self._remember(index, normed, start)
            keys, values = self.memory[index, :, :, None, first:end]
            mixed = softmax(q @ keys.swapaxes(-1, -2) * config.head_dim**-0.5) @ values
            mixed = mixed.reshape(config.heads, rows, -1).transpose(1, 0, 2).reshape(rows, -1)
            x = x + d.linear(mixed, layer + "self_attn.o_proj")
            normed = d.norm(x, layer + "post_attention_layernorm")
            opened = silu(d.linear(normed, layer + "mlp.gate_proj")) * d.linear(normed, layer + "mlp.up_proj")
            x = x + d.linear(opened, layer + "mlp.down_proj")
        return NumpyDraft(self, committed, d.norm(x[1:], "norm"), d.jump(self.context) if self._jumps else None)

    def prefix_embedding(self, committed: Sequence[int]) -> np.ndarray:
        """Mean `[hidden]` of the embeddings of `committed`, which only ever grows: a round pays for its own tokens."""
        count, total = self._summed
        total = total + self.drafter.embedding[list(committed[count:])].sum(axis=0, dtype=np.float64)
        self._summed = (len(committed), total)
        return (total / len(committed)).astype(np.float32)

    def _read_context(self, features: np.ndarray) -> None:
        if not len(features):
            return
        fused = self.drafter.norm(self.drafter.linear(features, "fc"), "hidden_norm")
        self.context = fused[-1]
        for index in range(self.drafter.config.layers):
            self._remember(index, fused, self.length)
        self.length += len(features)

    def _remember(self, index: int, x: np.ndarray, start: int) -> None:
        """Keys and values of `x`, whose first row is at position `start`, into layer `index`'s memory."""
        d, layer = self.drafter, f"layers.{index}."
        rows = slice(start, start + len(x))
        self.memory[index, 0, :, rows] = d.turned(x, layer, "k", start)
        self.memory[index, 1, :, rows] = d.split(x, layer + "self_attn.v_proj")
