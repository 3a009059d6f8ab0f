"""Tapped features computed again from the tokens, where that is cheaper than keeping them: on a GPU."""
from __future__ import annotations

from collections.abc import Sequence as Indices
from typing import Any

import torch
from torch import Tensor

from dflash_mini_lab.targets.lean import LeanDecoder
from dflash_mini_lab.targets.library_target import LibraryDecoder
from dflash_mini_lab.training.shards import Sequence


class ComputedFeatures:
    """The frozen target's outputs at `taps` in one pass over the sequences of a step. Corpus and decoder are on one device."""

    def __init__(self, decoder: LeanDecoder | LibraryDecoder, taps: Indices[int]) -> None:
        self.decoder, self.taps = decoder, taps

    @torch.no_grad()  # no inference mode: the drafter's gradients need these as inputs
    def __call__(self, sequences: list[Sequence]) -> Tensor:
        """`[N, longest - 1, taps · hidden]`. A shorter sequence repeats its last token; nothing before it sees that."""
        tokens = sequences[0].corpus.tokens
        first, length = torch.tensor([(s.first_token, s.length) for s in sequences], device=tokens.device).T[..., None]
        rows = max(sequence.length for sequence in sequences) - 1
        ids = tokens[first + torch.arange(rows, device=tokens.device).minimum(length - 1)]
        cache: Any = self.decoder.new_cache(rows, len(sequences))
        return self.decoder.forward(ids, cache, self.taps)[1]
