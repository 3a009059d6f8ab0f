"""The DFlash block drafter at run time: one pass from the target's features and the anchor to scores for every slot.

Fused target features enter every layer as keys and values (arXiv 2602.06036). The context never contains the anchor's own
feature, which does not exist yet; its keys and values are kept and grow by the kept rows of each round, the block's own are
overwritten. Weights in the published layout (checkpoint.py); the embedding and the LM head are the target's, frozen.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_mini_lab.drafters.checkpoint import DRAFT_TO_TARGET, DrafterConfig
from dflash_mini_lab.packed_linear import LinearPlan, PackedLinear, measure_plan, stock_plan
from dflash_mini_lab.rotary import interleaved_rows, rotate, rotation_table
from dflash_mini_lab.types import Session, UserError


@dataclass(frozen=True)
class _Layer:
    qkv: PackedLinear
    context_kv: PackedLinear
    """The key and value rows of `qkv` again, for context tokens, which need no query."""
    out: PackedLinear
    q_norm: Tensor
    k_norm: Tensor
    input_norm: Tensor
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


class BlockDraft:
    """The scores of one pass. `hidden [S, hidden]` final slot states; candidates are reduced where the logits are."""

    def __init__(self, drafter: BlockDrafter, committed: Sequence[int], hidden: Tensor) -> None:
        self.committed, self.anchor, self.slots = committed, committed[-1], hidden.shape[0]
        self._drafter, self._hidden = drafter, hidden

    @cached_property
    def _logits(self) -> Tensor:
        return self._drafter.head(self._hidden)

    @torch.inference_mode()
    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        if k == 1:
            scores, rows = self._logits.max(dim=-1, keepdim=True)
        else:
            scores, rows = self._logits.topk(min(k, self._logits.shape[-1]), dim=-1)
        columns, values = rows.cpu().numpy(), scores.float().cpu().numpy()
        if k > 1:  # topk leaves the order of equal scores open; max takes the lower column, and so does a search on the host
            order = np.lexsort((columns, -values))
            columns, values = np.take_along_axis(columns, order, 1), np.take_along_axis(values, order, 1)
        return self._drafter.draft_ids[columns], values

    @torch.inference_mode()
    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        return self._logits.float().cpu().numpy(), self._drafter.draft_ids


class BlockDrafter:
    """Runs a checkpoint on one target. Raises UserError where the two do not fit."""

    def __init__(
        self,
        config: DrafterConfig,
        tensors: dict[str, Tensor],
        embedding: Tensor,
        head_weight: Tensor,
        max_positions: int,
        measure: bool = True,
    ) -> None:
        """`embedding`, `head_weight [vocabulary, hidden]`: the target's own. `measure=False`: stock products."""
        _check_fit(config, embedding)
        dtype, device = embedding.dtype, embedding.device
        self.config, self.embedding = config, embedding
        self.taps, self.block_size = config.taps, config.block_size
        tensors = {name: t.to(device) if name == DRAFT_TO_TARGET else t.to(device, dtype) for name, t in tensors.items()}
        draft_to_target = tensors.get(DRAFT_TO_TARGET)
        if draft_to_target is not None:
            head_weight = head_weight[draft_to_target.long()]
        ids = torch.arange(len(head_weight)) if draft_to_target is None else draft_to_target.long()
        self.draft_ids = ids.cpu().numpy()
        """On the host: the target's id of every column of a draft's logits."""
        sources = {"fc": tensors["fc.weight"], "head": head_weight}
        for index in range(config.layers):
            sources |= _fused_weights(config, tensors, index)
        by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for weight in sources.values():
            by_shape[tuple(weight.shape)].append(weight)
        plans = {shape: measure_plan(ws) if measure else stock_plan(ws[0]) for shape, ws in by_shape.items()}
        self.plans: list[LinearPlan] = list(plans.values())
        linear = {name: PackedLinear(weight, None, plans[tuple(weight.shape)]) for name, weight in sources.items()}
        self.fc, self.head = linear["fc"], linear["head"]
        self.hidden_norm, self.norm = tensors["hidden_norm.weight"], tensors["norm.weight"]
        order = interleaved_rows(1, config.head_dim)
        self.layers = []
        for index in range(config.layers):
            name = f"layers.{index}."
            self.layers.append(
                _Layer(
                    **{part: linear[f"{index}.{part}"] for part in ("qkv", "context_kv", "out", "gate_up", "down")},
                    q_norm=tensors[name + "self_attn.q_norm.weight"][order],
                    k_norm=tensors[name + "self_attn.k_norm.weight"][order],
                    input_norm=tensors[name + "input_layernorm.weight"],
                    mlp_norm=tensors[name + "post_attention_layernorm.weight"],
                )
            )
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim)
        self.rotation = rotation_table(frequencies, max_positions + config.block_size)
        if dtype == torch.float64:
            self.rotation = self.rotation.to(torch.complex128)

    def start(self, session: Session, capacity: int) -> BlockSession:
        return BlockSession(self, session, capacity)


class BlockSession:
    """The drafter's state for one prompt: context keys and values, and where it stopped reading features."""

    def __init__(self, drafter: BlockDrafter, session: Session, capacity: int) -> None:
        self.drafter, self.session, self.length = drafter, session, 0
        config = drafter.config
        shape = (2, 1, config.kv_heads, capacity + config.block_size, config.head_dim)
        like = drafter.embedding
        self.memory = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(config.layers)]

    @torch.inference_mode()
    def draft(self, committed: Sequence[int]) -> BlockDraft:
        """One pass for the block after `committed[-1]`, which is not in the context."""
        self._read_context(self.session.take_features())
        if self.length != len(committed) - 1:
            raise RuntimeError(f"the drafter has read {self.length} features for {len(committed) - 1} tokens before the anchor")
        d = self.drafter
        config, rows = d.config, d.config.block_size
        ids = torch.full((rows,), config.mask_token_id, device=d.embedding.device)
        ids[0] = committed[-1]
        x = F.embedding(ids, d.embedding)[None]
        start, end = self.length, self.length + rows
        rotation = d.rotation[start:end].view(rows, 1, -1)
        heads, kv_heads, groups = config.heads, config.kv_heads, config.heads // config.kv_heads
        for layer, memory in zip(d.layers, self.memory, strict=True):
            qkv = layer.qkv(_norm(x, layer.input_norm, config.eps)).view(1, rows, -1, config.head_dim)
            q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
            q = rotate(_norm(q, layer.q_norm, config.eps), rotation)
            memory[0, :, :, start:end] = rotate(_norm(k, layer.k_norm, config.eps), rotation).transpose(1, 2)
            memory[1, :, :, start:end] = v.transpose(1, 2)
            q = q.view(1, rows, kv_heads, groups, -1).permute(0, 2, 3, 1, 4).reshape(1, kv_heads, groups * rows, -1)
            mixed = F.scaled_dot_product_attention(q, memory[0, :, :, :end], memory[1, :, :, :end])
            mixed = mixed.view(1, kv_heads, groups, rows, -1).permute(0, 3, 1, 2, 4).reshape(1, rows, -1)
            x = x + layer.out(mixed)
            gate, up = layer.gate_up(_norm(x, layer.mlp_norm, config.eps)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
        return BlockDraft(d, committed, _norm(x[0, 1:], d.norm, config.eps))

    def _read_context(self, features: Tensor) -> None:
        rows = features.shape[0]
        if not rows:
            return
        d, config = self.drafter, self.drafter.config
        fused = _norm(d.fc(features), d.hidden_norm, config.eps)[None]
        start, end = self.length, self.length + rows
        rotation = d.rotation[start:end].view(rows, 1, -1)
        for layer, memory in zip(d.layers, self.memory, strict=True):
            k, v = layer.context_kv(fused).view(1, rows, 2, config.kv_heads, config.head_dim).unbind(2)
            memory[0, :, :, start:end] = rotate(_norm(k, layer.k_norm, config.eps), rotation).transpose(1, 2)
            memory[1, :, :, start:end] = v.transpose(1, 2)
        self.length = end


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _fused_weights(config: DrafterConfig, tensors: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    name = f"layers.{index}."
    q, k, v, o = (tensors[f"{name}self_attn.{part}_proj.weight"] for part in "qkvo")
    q, k = q[interleaved_rows(config.heads, config.head_dim)], k[interleaved_rows(config.kv_heads, config.head_dim)]
    gate, up, down = (tensors[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return {
        f"{index}.qkv": torch.cat([q, k, v]),
        f"{index}.context_kv": torch.cat([k, v]),
        f"{index}.out": o,
        f"{index}.gate_up": torch.cat([gate, up]),
        f"{index}.down": down,
    }


def _check_fit(config: DrafterConfig, embedding: Tensor) -> None:
    vocabulary, hidden = embedding.shape
    if config.hidden_size != hidden:
        raise UserError(f"This drafter was made for a target of hidden size {config.hidden_size}; this one has {hidden}.")
    if config.vocabulary != vocabulary:
        raise UserError(f"This drafter was made for a vocabulary of {config.vocabulary}; this target has {vocabulary}.")
    if not 0 <= config.mask_token_id < vocabulary:
        raise UserError(f"The drafter's mask token {config.mask_token_id} is not a row of the {vocabulary}-row embedding.")
