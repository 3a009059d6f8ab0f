"""The LM head of a target: logits of a few rows, or only their greedy tokens, which need not read every weight in full."""
from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from dflash_mini_lab.compiled import CompiledHead, HeadCall
from dflash_mini_lab.packed_linear import PackedLinear


class LMHead(Protocol):
    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden [rows, hidden] → [rows, vocabulary]`."""
        ...

    def greedy(self, hidden: Tensor, vocabulary: int) -> Tensor:
        """Ids `[rows]` of the largest logits among the first `vocabulary`, of equal ones the lowest."""
        ...


class FullHead:
    """`padded_rows`: row counts that run faster as a larger one; the rows added are thrown away."""

    def __init__(self, linear: PackedLinear, padded_rows: Mapping[int, int] = MappingProxyType({})) -> None:
        self.linear, self.padded_rows = linear, padded_rows

    def logits(self, hidden: Tensor) -> Tensor:
        rows = len(hidden)
        run = self.padded_rows.get(rows, rows)
        return self.linear(F.pad(hidden, (0, 0, 0, run - rows)))[:rows] if run > rows else self.linear(hidden)

    def greedy(self, hidden: Tensor, vocabulary: int) -> Tensor:
        return self.logits(hidden)[:, :vocabulary].argmax(-1)


class ScreenedHead:
    """`weight [vocabulary, hidden]` float32, of which a greedy token reads a copy in 8 bits (compiled.py)."""

    def __init__(self, weight: Tensor, screened: CompiledHead) -> None:
        self.weight, self._screened = weight, screened

    def bind(self, hidden: Tensor) -> HeadCall:
        """As CompiledHead.bind: `greedy` of what will stand there."""
        return self._screened.bind(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)

    def greedy(self, hidden: Tensor, vocabulary: int) -> Tensor:
        return self._screened(hidden, vocabulary)
