"""The DFlash block drafter at run time: one pass from the target's features and the anchor to scores for every slot.

Fused target features enter every layer as keys and values (arXiv 2602.06036). The context never contains the anchor's own
feature, which does not exist yet; its keys and values are kept and grow by the kept rows of each round, the block's own are
overwritten. Weights in the published layout (layout.py); the embedding and the LM head are the target's, frozen. Where the lab's
own product runs them, weights and head are rounded to 8 bits, a scale for each row: a draft need not be exact, only fast.

A drafter with a width of its own projects the embeddings, and its output projection is multiplied into the head's rows once: a
draft then reads a head as narrow as the drafter. One with a feature window attends to the last positions of its context only.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_mini_lab.calls import MOST_ROWS, in_order
from dflash_mini_lab.compiled import AttentionLayer, ContextCall, compiled_context, compiled_layers, compiled_scores
from dflash_mini_lab.crossings import Crossings, on_host
from dflash_mini_lab.drafters.layout import DRAFT_TO_TARGET, DrafterConfig, check_fit
from dflash_mini_lab.norms import RMSNorm
from dflash_mini_lab.packed_linear import SCREENED, LinearPlan, PackedLinear, measure_plan, rounded_plan, stock_plan
from dflash_mini_lab.rotary import interleaved_rows, rotate, rotation_table
from dflash_mini_lab.scores import best
from dflash_mini_lab.types import NO_HEADS, Heads, JumpHead, Session


class BlockDraft:
    """The scores of one pass, until the session's next one. `hidden [S, hidden]` final slot states; candidates are reduced where
    the logits are."""

    def __init__(self, session: BlockSession, committed: Sequence[int], hidden: Tensor, found: Sequence[Any]) -> None:
        """`found`: as `BlockDrafter.scores` gives it for `hidden`, and for the jump head's states `[J, hidden]` behind it where a
        method needs them: one LM head product serves both. Every method needs scores, so they are drafting, not selection."""
        self.committed, self.anchor, self.slots = committed, committed[-1], hidden.shape[0]
        self._session, self._drafter, self._hidden = session, session.drafter, hidden
        logits, *self._best = found
        self._logits, self._jump = logits[: self.slots], logits[self.slots :]

    @property
    def heads(self) -> Heads:
        return self._drafter.heads

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        k, crossings = min(k, self._logits.shape[-1]), self._drafter.crossings
        if self._best and k <= self._best[0].shape[1]:
            ids, scores = (found[: self.slots, :k] for found in self._best)
            crossings.found_on_host(ids, scores)
            return ids, scores
        if self._logits.is_cuda:
            columns, scores = _best_on_device(self._logits, k, crossings)
        else:
            columns, scores = best(on_host(self._logits), k)
            crossings.found_on_host(columns, scores)
        return self._drafter.draft_ids[columns], scores

    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        return self._drafter.crossings.array(self._logits.float()), self._drafter.draft_ids

    def context(self) -> np.ndarray:
        return self._drafter.crossings.array(self._session.context.float())

    def states(self) -> np.ndarray:
        return self._drafter.crossings.array(self._hidden.float())

    def jump(self, ids: np.ndarray) -> np.ndarray:
        if len(self._jump) != len(ids):
            raise RuntimeError(f"the jump head gave {len(self._jump)} rows, {len(ids)} were asked for: does the method need it?")
        crossings = self._drafter.crossings
        columns = crossings.send(np.searchsorted(self._drafter.draft_ids, ids), self._jump.device)
        return crossings.array(self._jump.gather(1, columns).float())

    def embeddings(self, ids: np.ndarray) -> np.ndarray:
        table, crossings = self._drafter.embedding, self._drafter.crossings
        if self._drafter.host_embedding is not None:
            found = self._drafter.host_embedding[ids]
            crossings.found_on_host(found, asked=np.asarray(ids))
            return found
        return crossings.array(table[crossings.send(np.asarray(ids), table.device)].float())

    def prefix_embedding(self) -> np.ndarray:
        return self._session.prefix_embedding(self.committed)


def _best_on_device(logits: Tensor, k: int, crossings: Crossings) -> tuple[np.ndarray, np.ndarray]:
    """As `scores.best`, where the logits are; only columns and scores cross. topk leaves the order of equal scores open."""
    scores, columns = logits.max(dim=-1, keepdim=True) if k == 1 else logits.topk(k, dim=-1)
    host_columns, host_scores = crossings.array(columns), crossings.array(scores.float())
    order = np.lexsort((host_columns, -host_scores))
    return np.take_along_axis(host_columns, order, 1), np.take_along_axis(host_scores, order, 1)


class _Jump:
    """The jump head's pass, `h = C + e_j; h + down·silu(up·norm(h))`, for the offsets that the drafter's blocks have."""

    def __init__(self, head: JumpHead, config: DrafterConfig, like: Tensor, linear: dict[str, PackedLinear]) -> None:
        usable = head.offset_embedding[head.offsets < config.block_size]
        self.embedding = torch.from_numpy(usable).to(like)
        self.norm = RMSNorm(torch.from_numpy(head.norm).to(like), config.eps)
        self.up, self.down = linear["jump.up"], linear["jump.down"]

    def __call__(self, context: Tensor) -> Tensor:
        """`[hidden] → [J, hidden]`."""
        h = context + self.embedding
        return h + self.down(F.silu(self.up(self.norm(h))))


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
        exact: bool = False,
        known_plans: Sequence[LinearPlan] = (),
        heads: Heads = NO_HEADS,
        crossings: Crossings | None = None,
    ) -> None:
        """`embedding`, `head_weight [vocabulary, hidden]`: the target's own. `measure=False`: stock products; `exact`: no weight
        is rounded; `known_plans`: the target's, for the shapes that both have (not a screened head's: a draft needs every logit);
        `heads`: as drafters/heads.py loads them for this config; `crossings`: the target's, where what crosses is counted
        together."""
        check_fit(config, *embedding.shape)
        dtype, device = embedding.dtype, embedding.device
        self.config, self.embedding, self.crossings = config, embedding, crossings or Crossings()
        self.taps, self.block_size, self.heads = config.taps, config.block_size, heads
        tensors = {name: t.to(device) if name == DRAFT_TO_TARGET else t.to(device, dtype) for name, t in tensors.items()}
        self.host_embedding = on_host(embedding) if device.type == "cpu" and dtype == torch.float32 else None
        draft_to_target = tensors.get(DRAFT_TO_TARGET)
        if draft_to_target is not None:
            head_weight = head_weight[draft_to_target.long()]
        ids = torch.arange(len(head_weight)) if draft_to_target is None else draft_to_target.long()
        self.draft_ids = ids.cpu().numpy()
        """On the host: the target's id of every column of a draft's logits."""
        sources = {"fc": tensors["fc.weight"], "head": head_weight}
        if config.target_hidden_size:
            sources |= {"input": tensors["input.weight"], "head": head_weight @ tensors["output.weight"]}
        for index in range(config.layers):
            sources |= _fused_weights(config, tensors, index)
        sources["context_kv"] = _context_weights(config, tensors)
        if heads.jump:
            sources |= {f"jump.{part}": torch.from_numpy(getattr(heads.jump, part)).to(embedding) for part in ("up", "down")}
        by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for weight in sources.values():
            by_shape[tuple(weight.shape)].append(weight)
        known: dict[tuple[int, ...], LinearPlan] = {
            (plan.out_features, plan.in_features): plan for plan in known_plans if plan.storage != SCREENED
        }
        plans = {
            shape: known.get(shape) or (measure_plan(ws) if measure else stock_plan(ws[0])) for shape, ws in by_shape.items()
        }
        if measure and not exact:
            plans = {shape: rounded_plan(by_shape[shape], plan) for shape, plan in plans.items()}
        self.plans: list[LinearPlan] = [plan for plan in plans.values() if plan not in known_plans]
        linear = {name: PackedLinear(weight, None, plans[tuple(weight.shape)]) for name, weight in sources.items()}
        self.fc, self.head, self.input = linear["fc"], linear["head"], linear.get("input")
        self.context_kv = linear["context_kv"]
        """Every layer's key rows, then every layer's value rows, again: context tokens need no query and no layer order."""
        self.hidden_norm, self.norm = (RMSNorm(tensors[name], config.eps) for name in ("hidden_norm.weight", "norm.weight"))
        usable = heads.jump is not None and heads.jump.offsets[0] < config.block_size
        self.jump = _Jump(heads.jump, config, embedding, linear) if heads.jump and usable else None
        order = interleaved_rows(1, config.head_dim)
        self.layers = []
        k_norms = []
        for index in range(config.layers):
            name = f"layers.{index}."
            q_norm, k_norm = (tensors[f"{name}self_attn.{part}_norm.weight"][order] for part in "qk")
            k_norms.append(k_norm.expand(config.kv_heads, -1))
            self.layers.append(
                AttentionLayer(
                    **{part: linear[f"{index}.{part}"] for part in ("qkv", "out", "gate_up", "down")},
                    qk_norm=RMSNorm(torch.cat([q_norm.expand(config.heads, -1), k_norms[-1]]), config.eps),
                    input_norm=RMSNorm(tensors[name + "input_layernorm.weight"], config.eps),
                    mlp_norm=RMSNorm(tensors[name + "post_attention_layernorm.weight"], config.eps),
                )
            )
        self.context_k_norm = RMSNorm(torch.cat(k_norms), config.eps)
        self.compiled = compiled_layers(self.layers, self.norm, config.heads, config.kv_heads, config.head_dim)
        self.compiled_context = compiled_context(
            self.fc, self.hidden_norm, self.context_kv, self.context_k_norm, config.layers
        )
        self.compiled_scores = compiled_scores(self.head, self.draft_ids)
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim)
        self.rotation = rotation_table(frequencies, max_positions + config.block_size)
        if dtype == torch.float64:
            self.rotation = self.rotation.to(torch.complex128)

    def start(self, session: Session, capacity: int, needs: Sequence[str] = ()) -> BlockSession:
        return BlockSession(self, session, capacity, needs)

    def scores(self, states: Tensor) -> tuple[Any, ...]:
        """`states [rows, hidden]` → logits `[rows, draft vocabulary]`, and where they are found on the way, each row's best: ids
        and scores `[rows, candidates]`."""
        if self.compiled_scores and len(states) <= MOST_ROWS:
            return self.compiled_scores(states)
        return (self.head(states),)


class BlockSession:
    """The drafter's state for one prompt: context keys and values, and where it stopped reading features."""

    context: Tensor
    """`[hidden]`: the fused feature of the last token read, a view."""

    def __init__(self, drafter: BlockDrafter, session: Session, capacity: int, needs: Sequence[str] = ()) -> None:
        self.drafter, self.session, self.length = drafter, session, 0
        self._jump = drafter.jump if "jump" in needs else None
        self._summed: tuple[int, Any] = (0, 0.0)
        config = drafter.config
        self.memory = drafter.embedding.new_zeros(
            config.layers, 2, config.kv_heads, capacity + config.block_size, config.head_dim
        )
        """Keys and values."""
        masks = torch.full((config.block_size,), config.mask_token_id, device=drafter.embedding.device)
        self._block = F.embedding(masks, drafter.embedding)
        """`[block, F]`, F the target's width: what a pass begins with, once the anchor's embedding is in its first row."""
        context, layers = drafter.compiled_context, drafter.compiled
        self._context = context.bind(self.memory, drafter.rotation) if context else None
        self._pass = None
        if self._context and layers and drafter.compiled_scores and config.block_size <= MOST_ROWS:
            self._pass = _CompiledPass(drafter, self.memory, self._block, self._context, scores=not self._jump)

    @torch.inference_mode()
    def draft(self, committed: Sequence[int]) -> BlockDraft:
        """One pass for the block after `committed[-1]`, which is not in the context."""
        d, features, window = self.drafter, self.session.take_features(), self.drafter.config.window
        at_once = None if window and self.length + len(features) > window else self._pass
        reads = at_once is not None and 0 < len(features) <= MOST_ROWS
        self._read_context(features, with_the_pass=reads)
        if self.length != len(committed) - 1:
            raise RuntimeError(f"the drafter has read {self.length} features for {len(committed) - 1} tokens before the anchor")
        if at_once:
            hidden, found = at_once(committed[-1], self.length, reads)
        else:
            self._block[0] = d.embedding[committed[-1]]
            x = self._block[None]
            hidden, found = self._through_layers(d.input(x) if d.input else x)[0, 1:], None
        if self._jump:
            found = d.scores(torch.cat([hidden, d.norm(self._jump(self.context))]))
        return BlockDraft(self, committed, hidden, found or d.scores(hidden))

    def _through_layers(self, x: Tensor) -> Tensor:
        """The block `[1, rows, hidden]` behind the context, in which every slot sees every other; normed."""
        d, config, rows = self.drafter, self.drafter.config, x.shape[1]
        start, end = self.length, self.length + rows
        rotation = d.rotation[start:end]
        first = max(start - config.window, 0) if config.window else 0
        heads, kv_heads, groups = config.heads, config.kv_heads, config.heads // config.kv_heads
        for layer, (keys, values) in zip(d.layers, self.memory, strict=True):
            qkv = layer.qkv(layer.input_norm(x)).view(rows, -1, config.head_dim)
            qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
            assert layer.qk_norm is not None
            q, k = rotate(layer.qk_norm(qk), rotation[:, None]).split([heads, kv_heads], dim=1)
            keys[:, start:end], values[:, start:end] = k.transpose(0, 1), v.transpose(0, 1)
            q = q.view(rows, kv_heads, groups, -1).permute(1, 2, 0, 3).reshape(1, kv_heads, groups * rows, -1)
            mixed = F.scaled_dot_product_attention(q, keys[None, :, first:end], values[None, :, first:end])
            mixed = mixed.view(1, kv_heads, groups, rows, -1).permute(0, 3, 1, 2, 4).reshape(1, rows, -1)
            x = x + layer.out(mixed)
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
        return d.norm(x)

    @torch.inference_mode()
    def prefix_embedding(self, committed: Sequence[int]) -> np.ndarray:
        """Mean `[hidden]` of the embeddings of `committed`, which only ever grows: a round pays for its own tokens."""
        count, total = self._summed
        table, crossings = self.drafter.embedding, self.drafter.crossings
        ids = np.asarray(committed[count:], dtype=np.int64)
        if self.drafter.host_embedding is not None:
            total = total + self.drafter.host_embedding[ids].sum(0, dtype=np.float64)
            self._summed = (len(committed), total)
            mean = (total / len(committed)).astype(np.float32)
            crossings.found_on_host(mean, asked=ids)
            return mean
        new = crossings.send(ids, table.device)
        total = total + table[new].sum(0, dtype=torch.float64)
        self._summed = (len(committed), total)
        return crossings.array((total / len(committed)).float())

    def _read_context(self, features: Tensor, with_the_pass: bool = False) -> None:
        """`with_the_pass`: the compiled context is told alone; the pass will run it."""
        if not len(features):
            return
        d, config = self.drafter, self.drafter.config
        end = self.length + len(features)
        features = features[-config.window :] if config.window else features  # of a long prompt, no block sees the others
        rows = len(features)
        start = end - rows
        if self._context and rows <= MOST_ROWS:
            self._context.tell(features, start)
            if not with_the_pass:
                self._context.run()
            self.length, self.context = end, self._context.fused[rows - 1]
            return
        fused = d.hidden_norm(d.fc(features))
        self.context = fused[-1]
        k, v = d.context_kv(fused).view(rows, 2, -1, config.head_dim).unbind(1)
        k = rotate(d.context_k_norm(k), d.rotation[start:end].view(rows, 1, -1))
        for index, kept in enumerate((k, v)):
            self.memory[:, index, :, start:end] = kept.unflatten(1, (config.layers, -1)).permute(1, 2, 0, 3)
        self.length = end


class _CompiledPass:
    """A session's passes as one call each: what new features add to the context, then the block's layers, then its scores (but
    for the jump head, whose states are scored with the block's, and need its context). Every slot of a window's drafter sees the
    same context only while that is shorter than the window: longer ones are not run here."""

    def __init__(self, drafter: BlockDrafter, memory: Tensor, block: Tensor, context: ContextCall, scores: bool) -> None:
        """`block`: as BlockSession begins a pass; `scores=False`: they are not asked for."""
        size = drafter.config.block_size
        self._drafter, self._context = drafter, context
        self._table = drafter.input(block[:2]).contiguous() if drafter.input else drafter.embedding
        assert drafter.compiled
        assert drafter.compiled_scores
        self._layers = drafter.compiled.bind(memory, self._table, drafter.rotation)
        self._layers.ids[1:size] = 1 if drafter.input else drafter.config.mask_token_id
        self._states = self._layers.out[1:size]
        self._scores = drafter.compiled_scores.bind(self._states) if scores else None
        self._hiding = torch.zeros(size, size)
        """Added to a block's scores of itself: no slot is hidden from another."""
        parts = (self._layers, self._scores) if self._scores else (self._layers,)
        self._whole, self._block = in_order(context, *parts), in_order(*parts)

    def __call__(self, anchor: int, past: int, reads: bool) -> tuple[Tensor, Sequence[Any] | None]:
        """States of the slots, and their scores as `BlockDrafter.scores` gives them. `reads`: the context, told of new features,
        has them still to read."""
        if self._drafter.input:
            self._table[0] = self._drafter.input(self._drafter.embedding[anchor : anchor + 1])[0]
        else:
            self._layers.ids[0] = anchor
        self._layers.tell(len(self._hiding), past, hiding=self._hiding)
        (self._whole if reads else self._block)()
        return self._states, self._scores.found if self._scores else None


def _fused_weights(config: DrafterConfig, tensors: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    name = f"layers.{index}."
    q, k, v, o = (tensors[f"{name}self_attn.{part}_proj.weight"] for part in "qkvo")
    q, k = q[interleaved_rows(config.heads, config.head_dim)], k[interleaved_rows(config.kv_heads, config.head_dim)]
    gate, up, down = (tensors[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return {
        f"{index}.qkv": torch.cat([q, k, v]),
        f"{index}.out": o,
        f"{index}.gate_up": torch.cat([gate, up]),
        f"{index}.down": down,
    }


def _context_weights(config: DrafterConfig, tensors: dict[str, Tensor]) -> Tensor:
    order = interleaved_rows(config.kv_heads, config.head_dim)
    keys = [tensors[f"layers.{index}.self_attn.k_proj.weight"][order] for index in range(config.layers)]
    values = [tensors[f"layers.{index}.self_attn.v_proj.weight"] for index in range(config.layers)]
    return torch.cat([*keys, *values])
