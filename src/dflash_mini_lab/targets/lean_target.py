"""The lean decoder as a target: sessions that prefill, verify and roll back one prompt."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_mini_lab.crossings import Crossings
from dflash_mini_lab.targets.features import FeatureLog
from dflash_mini_lab.targets.graphs import StaticState
from dflash_mini_lab.targets.lean import LeanCache, LeanDecoder
from dflash_mini_lab.trees import row_table
from dflash_mini_lab.types import UserError


class LeanTarget:
    """See types.Target. Greedy ids are reduced where the logits are; only W integers cross to the host."""

    path = "lean"
    trees = copies = True

    def __init__(
        self,
        decoder: LeanDecoder,
        stop_ids: frozenset[int],
        vocabulary: int,
        crossings: Crossings | None = None,
        full_logits: bool = False,
    ) -> None:
        """`vocabulary`: ids that may be emitted; padded rows of the head beyond it never are. `full_logits`: logits of every row
        of a prompt, where only the last one's are needed."""
        self.decoder, self.stop_ids, self.vocabulary = decoder, stop_ids, vocabulary
        self.max_positions = len(decoder.rotation)
        self.embedding = decoder.embedding
        self.plans, self.padded_rows = decoder.plans, decoder.padded_rows
        self.crossings, self.full_logits = crossings or Crossings(), full_logits

    def prepare_steps(self, widths: Sequence[int], taps: Sequence[int]) -> dict[str, Any]:
        """The `decode` entry of benchmark.json: nothing to prepare here."""
        return {"steps": "eager", "reason": "graphs are CUDA's; here a step is a call", "widths": []}

    def start(self, prompt_ids: Sequence[int], capacity: int, taps: Sequence[int] | None) -> LeanSession:
        return LeanSession(self, prompt_ids, capacity, taps)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits `[len(ids), vocabulary]` after every token of a fresh pass, as the gate compares them."""
        cache = self.decoder.new_cache(len(ids))
        hidden, _ = self.decoder.forward(self._ids(ids), cache)
        return self.decoder.logits(hidden[0])[:, : self.vocabulary]

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self.embedding.device)


class LeanSession:
    """See types.Session."""

    def __init__(self, target: LeanTarget, prompt_ids: Sequence[int], capacity: int, taps: Sequence[int] | None) -> None:
        self.target, self.prompt_ids, self.taps = target, prompt_ids, checked_taps(taps or (), target)
        self.cache = target.decoder.new_cache(capacity)
        self.features = FeatureLog(len(self.taps) * target.embedding.shape[1], target.embedding)

    @property
    def length(self) -> int:
        return self.cache.length

    @torch.inference_mode()
    def prefill(self) -> int:
        first = self._run(self.prompt_ids, self.cache, last_only=True)[-1]
        self.keep(len(self.prompt_ids))
        return first

    @torch.inference_mode()
    def decode_one(self, token: int) -> int:
        return self._extend([token])[0]

    @torch.inference_mode()
    def verify(self, tokens: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        return self._extend(tokens, parents)

    def keep(self, rows: int | Sequence[int]) -> None:
        count = rows if isinstance(rows, int) else self._gathered(rows, self.cache)
        self.cache.keep(count)
        self.features.keep(count)

    def take_features(self) -> Tensor:
        return self.features.take()

    @torch.inference_mode()
    def _gathered(self, rows: Sequence[int], memory: LeanCache | StaticState) -> int:
        """Bring these rows of the last call to its first places; returns how many they are."""
        if not set(rows) <= set(range(memory.last_rows)):
            raise ValueError(f"keep({list(rows)}): the last call had {memory.last_rows} rows")
        if list(rows) != list(range(len(rows))):
            there = self.target.crossings.send(rows, self.target.embedding.device)
            memory.gather(there)
            self.features.gather(there)
        return len(rows)

    def _extend(self, tokens: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        return self._run(tokens, self.cache, parents=parents)

    def _run(
        self, tokens: Sequence[int], cache: LeanCache, last_only: bool = False, parents: Sequence[int] = ()
    ) -> list[int]:
        decoder, crossings = self.target.decoder, self.target.crossings
        device = self.target.embedding.device
        tree = crossings.send(np.array(row_table(parents, decoder.history), dtype=np.int64), device) if parents else None
        if not last_only and decoder.can_step(len(tokens)):
            chosen, features = decoder.step(tokens, cache, self.target.vocabulary, self.taps, tree)
            if self.taps:
                self.features.record(features)
            crossings.ids_on_host(len(tokens))
            return chosen
        ids = crossings.send(tokens, device)[None]
        hidden, features = decoder.forward(ids, cache, self.taps, tree)
        if self.taps:
            self.features.record(features[0])
        needed = hidden[0, -1:] if last_only and not self.target.full_logits else hidden[0]
        greedy = decoder.greedy(needed, self.target.vocabulary)
        return crossings.integers(greedy[-1:] if last_only else greedy)


def checked_taps(taps: Sequence[int], target: LeanTarget) -> tuple[int, ...]:
    layers = len(target.decoder.layers)
    if any(not 0 <= tap < layers for tap in taps):
        raise UserError(f"The drafter reads layers {tuple(taps)}; this target's layers are 0 … {layers - 1}.")
    return tuple(taps)
