"""The LM head of a target: logits of a few rows, or only their greedy tokens, which need not read every weight in full.

A greedy token is one row of the head out of tens of thousands. `ScreenedHead` reads them all in bfloat16, half the bytes,
bounds the error of that reading, and computes in full only those that could still win: the token is the full head's own.
"""
from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_mini_lab.packed_linear import PackedLinear

ROUNDING = 2.0**-8
"""Twice the relative error of one rounding to bfloat16."""
ROWS_AT_ONCE = 4096
"""Of the head, where a copy is made to look at it: the copies of all rows would be twice its size."""
SUMMATION = 1e-4
"""Relative error of a float32 sum of products, of any length that a head has."""


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
    """`weight [vocabulary, hidden]` float32: a tied head's is the embedding itself, not held twice; `screen`: its bfloat16."""

    def __init__(self, weight: Tensor, screen: PackedLinear) -> None:
        self.weight, self.screen = weight, screen
        self.longest = float(weight.norm(dim=1).max())
        lost = ((rows - rows.bfloat16().float()).norm(dim=1).max() for rows in weight.split(ROWS_AT_ONCE))
        self.coarsest = float(max(lost))

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)

    def greedy(self, hidden: Tensor, vocabulary: int) -> Tensor:
        rows = self.candidates(hidden, vocabulary)
        return rows[F.linear(hidden, self.weight[rows]).argmax(-1)]

    def candidates(self, hidden: Tensor, vocabulary: int) -> Tensor:
        """Ids, ascending, of every token that may be the greedy one of some row.

        With ŵ and x̂ the rounded weight and state, |ŵ·x̂ - w·x| ≤ ‖w - ŵ‖·‖x̂‖ + ‖w‖·‖x - x̂‖, by Cauchy and Schwarz. Twice
        that below a row's best product nothing can win the row; rounding the products keeps their order, so it moves only the
        best one and the bound itself.
        """
        coarse = hidden.bfloat16()
        screened = self.screen(coarse)[:, :vocabulary]
        best = screened.amax(dim=-1, keepdim=True).float()
        size = torch.linalg.vector_norm(coarse.float(), dim=-1, keepdim=True)
        lost = torch.linalg.vector_norm(hidden - coarse.float(), dim=-1, keepdim=True)
        least = best - ROUNDING * best.abs() - 2 * (self.coarsest * size + self.longest * (lost + SUMMATION * size))
        least = (least - ROUNDING * least.abs()).bfloat16()
        return (screened >= least).any(0).nonzero()[:, 0]
