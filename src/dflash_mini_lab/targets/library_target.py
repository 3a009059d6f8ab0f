"""Any causal LM of transformers whose cache can be cropped, as a target: the library's own modules, cache and rollback.

Linear layers are replaced by packed ones. Rollback: `activate_past_recording` before decoding, `crop` after every verify call.
Recording disables LFM2's fused one-token path, so sessions of method 00 do not record.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from dflash_mini_lab.crossings import Crossings
from dflash_mini_lab.packed_linear import LinearPlan, PackedLinear, measure_plan
from dflash_mini_lab.targets.features import FeatureLog
from dflash_mini_lab.types import UserError


class LibraryTarget:
    """See types.Target."""

    path = "library"
    trees = False
    """Masks and caches of the library's differ from family to family; a tree would have to be exact in all."""
    copies = True

    def __init__(
        self,
        model: Any,
        stop_ids: frozenset[int],
        vocabulary: int,
        measure: bool = True,
        crossings: Crossings | None = None,
        full_logits: bool = False,
    ) -> None:
        """`full_logits`: logits of every row of a prompt, where only the last one's are needed."""
        self.model, self.stop_ids, self.vocabulary = model, stop_ids, vocabulary
        self.max_positions = model.config.max_position_embeddings
        self.embedding = model.get_input_embeddings().weight.detach()
        self.plans = _pack_linears(model) if measure else []
        self.padded_rows: dict[int, int] = {}
        self.crossings, self.full_logits = crossings or Crossings(), full_logits

    def prepare_steps(self, widths: Sequence[int], taps: Sequence[int]) -> dict[str, Any]:
        """The `decode` entry of benchmark.json: nothing to prepare here."""
        reason = "the library's cache grows, so its steps have no fixed shape"
        return {"steps": "eager", "reason": reason, "widths": []}

    def start(self, prompt_ids: Sequence[int], capacity: int, taps: Sequence[int] | None) -> LibrarySession:
        return LibrarySession(self, prompt_ids, taps)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits `[len(ids), vocabulary]` after every token of a fresh pass, as the gate compares them."""
        return self.model(self._ids(ids), use_cache=False).logits[0, :, : self.vocabulary]

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self.embedding.device)


def _features(output: Any, taps: Sequence[int]) -> Tensor:
    """Of a pass with hidden states, the first of which is the embedding: `[batch, rows, taps · hidden]`."""
    return torch.cat([output.hidden_states[tap + 1] for tap in taps], dim=-1)


class BatchCache(DynamicCache):
    """The library's cache of several sequences of one length; what leaves a window or a convolution is gone."""

    def select(self, sequences: Tensor) -> None:
        """Make a batch of the given sequences (indices `[n]`, repeats allowed)."""
        self.reorder_cache(sequences)


class LibraryDecoder:
    """The library's model as `LeanDecoder` is used to continue batches: training data, which is never rolled back."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.embedding = model.get_input_embeddings().weight.detach()
        self.hidden_size, self.dtype = self.embedding.shape[1], self.embedding.dtype

    def new_cache(self, capacity: int, batch: int = 1) -> BatchCache:
        """It grows as it is filled, in tokens and sequences."""
        return BatchCache(config=self.model.config)

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: BatchCache, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Extend `cache` by `ids [batch, rows]`; returns what `logits` takes, of the last row alone, and features."""
        output = self.model(ids, cache=cache, use_cache=True, logits_to_keep=1, output_hidden_states=bool(taps))
        return output.logits, _features(output, taps) if taps else output.logits[..., :0]

    def logits(self, last: Tensor) -> Tensor:
        """They are the library's own, head, scaling and all."""
        return last


class LibrarySession:
    """See types.Session."""

    def __init__(self, target: LibraryTarget, prompt_ids: Sequence[int], taps: Sequence[int] | None) -> None:
        self.target, self.prompt_ids, self.taps = target, prompt_ids, tuple(taps or ())
        layers = target.model.config.num_hidden_layers
        if any(not 0 <= tap < layers - 1 for tap in self.taps):
            raise UserError(f"Taps {self.taps} must lie in 0 … {layers - 2}: the library norms the last layer's output.")
        self.cache = DynamicCache(config=target.model.config)
        self.recording = taps is not None
        if self.recording:
            self.cache.activate_past_recording()
        self.length = 0
        self._last_rows = 0
        self.features = FeatureLog(len(self.taps) * target.embedding.shape[1], target.embedding)

    def prefill(self) -> int:
        first = self._extend(self.prompt_ids, last_only=True)[-1]
        if self.recording:
            if not self.cache.is_croppable:
                kinds = ", ".join(sorted({type(layer).__name__ for layer in self.cache.layers if not layer.is_croppable}))
                raise UserError(f"This model's cache cannot be rolled back: {kinds} of transformers keeps no history.")
            self.keep(len(self.prompt_ids))
        return first

    def decode_one(self, token: int) -> int:
        return self._extend([token])[0]

    def verify(self, tokens: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        if not self.recording:
            raise RuntimeError("a session of method 00 cannot be rolled back; start it with taps")
        if parents:
            raise RuntimeError("the library's own modules verify no trees")
        return self._extend(tokens)

    @torch.inference_mode()
    def keep(self, rows: int | Sequence[int]) -> None:
        rows = rows if isinstance(rows, int) else len(rows)  # without trees, always the first
        dropped = self._last_rows - rows
        if not 0 <= rows <= self._last_rows:
            raise ValueError(f"keep({rows}): the last call had {self._last_rows} rows")
        self.cache.crop(-dropped)
        self.length -= dropped
        self._last_rows = 0
        self.features.keep(rows)

    def take_features(self) -> Tensor:
        return self.features.take()

    @torch.inference_mode()
    def _extend(self, tokens: Sequence[int], last_only: bool = False) -> list[int]:
        crossings = self.target.crossings
        output = self.target.model(
            crossings.send(tokens, self.target.embedding.device)[None],
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1 if last_only and not self.target.full_logits else len(tokens),
            output_hidden_states=bool(self.taps),
        )
        self.length += len(tokens)
        self._last_rows = len(tokens)
        if self.taps:
            self.features.record(_features(output, self.taps)[0])
        greedy = output.logits[0, :, : self.target.vocabulary].argmax(dim=-1)
        return crossings.integers(greedy[-1:] if last_only else greedy)


class _PackedModule(nn.Module):
    """A packed linear where the library expects a module."""

    def __init__(self, linear: PackedLinear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def _pack_linears(model: Any) -> list[LinearPlan]:
    places: dict[tuple[int, ...], list[tuple[nn.Module, str]]] = defaultdict(list)
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                places[tuple(child.weight.shape)].append((parent, name))
    plans = []
    with torch.inference_mode():
        for where in places.values():
            plan = measure_plan([getattr(parent, name).weight.detach() for parent, name in where])
            plans.append(plan)
            for parent, name in where:
                old = getattr(parent, name)
                bias = None if old.bias is None else old.bias.detach()
                setattr(parent, name, _PackedModule(PackedLinear(old.weight.detach(), bias, plan)))
    return plans
