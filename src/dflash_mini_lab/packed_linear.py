"""Linear layers for few rows: measure the ways this machine has, keep the fastest, say which.

A verifier call multiplies 1 … 16 rows by every weight of the model, so its time is the time to *read* the weights.
Stock small-row products reach a third of the memory bandwidth; oneDNN's prepacked ones (the operators that
PyTorch's own inductor emits) come close to it. Which is best depends on the machine, so it is measured at load.
Nothing here knows about models, caches or decoding.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MEASURED_ROWS = (1, 2, 4, 6, 8)
PADDED_ROWS = (4, 6)
PACK_ROWS_HINT = 8
"""Row count that oneDNN packs for. Packing for 8 was the fastest at every row count from 1 to 16 (docs/lab-log.md)."""
PADDING_COST = 1.03
BYTES_TO_DEFEAT_CACHE = 96 * 2**20
PLAIN, PACKED = "plain", "prepacked"


@dataclass(frozen=True)
class LinearPlan:
    """How weights of one shape are stored and how each row count is run.

    `run_as` maps a measured row count to the row count it is padded to (itself where padding does not pay);
    `gigabytes_per_second` and `stock_gigabytes_per_second` give the weight-reading rate reached and the one of
    the stock product.
    """

    out_features: int
    in_features: int
    storage: str
    run_as: dict[int, int]
    gigabytes_per_second: dict[int, float]
    stock_gigabytes_per_second: dict[int, float]

    def rows_to_run(self, rows: int) -> int:
        return max(self.run_as.get(rows, rows), rows)

    def as_json(self) -> dict:
        facts = asdict(self)
        for field in ("run_as", "gigabytes_per_second", "stock_gigabytes_per_second"):
            facts[field] = {str(rows): value for rows, value in facts[field].items()}
        return facts


def stock_plan(weight: Tensor) -> LinearPlan:
    """The plan that changes nothing: `F.linear` at every row count."""
    return LinearPlan(weight.shape[0], weight.shape[1], PLAIN, {}, {}, {})


class PackedLinear:
    """`x [..., in] → x Wᵀ + b [..., out]` by a plan. Holds one copy of the weight, in the plan's storage."""

    __slots__ = ("bias", "plan", "storage", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> None:
        self.plan, self.bias = plan, bias
        self.storage = plan.storage
        self.weight = _pack(weight) if plan.storage == PACKED else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.storage == PLAIN:
            return F.linear(x, self.weight, self.bias)
        rows = x.numel() // x.shape[-1]
        run_as = self.plan.rows_to_run(rows)
        if run_as == rows:
            return _prepacked(x, self.weight, self.bias)
        padded = F.pad(x.reshape(rows, -1), (0, 0, 0, run_as - rows))
        return _prepacked(padded, self.weight, self.bias)[:rows].view(*x.shape[:-1], -1)


def packed_storage_works(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN's prepacked product exists here for `dtype`; where it does not, stock is the answer."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    try:
        weight = torch.randn(16, 32).to(dtype)
        x = torch.randn(4, 32).to(dtype)
        difference = _prepacked(x, _pack(weight), None) - F.linear(x, weight)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool(difference.abs().max() < 0.1)


def measure_plan(weights: list[Tensor], repeats: int = 5) -> LinearPlan:
    """Time each way on `weights` (same shape; enough of them that they do not sit in cache) and keep the fastest.

    Storage is chosen by the time summed over MEASURED_ROWS, since one copy of the weights serves every row count;
    padding is then chosen for each row count.
    """
    first = weights[0]
    outputs, inputs = first.shape
    plain = stock_plan(first)
    if not packed_storage_works(first.dtype, first.device):
        return plain
    size = first.numel() * first.element_size()
    sample = weights[: max(1, -(-BYTES_TO_DEFEAT_CACHE // size))]
    packed = [_pack(weight) for weight in sample]
    stock_seconds, packed_seconds = {}, {}
    for rows in sorted({*MEASURED_ROWS, *PADDED_ROWS}):
        x = torch.randn(rows, first.shape[1]).to(first.dtype)
        stock_seconds[rows] = _median_seconds(F.linear, x, sample, repeats)
        packed_seconds[rows] = _median_seconds(_prepacked, x, packed, repeats)
    gigabytes = size * len(sample) / 1e9
    stock_rate = {rows: round(gigabytes / stock_seconds[rows], 1) for rows in MEASURED_ROWS}
    if sum(stock_seconds.values()) <= sum(packed_seconds.values()):
        return LinearPlan(outputs, inputs, PLAIN, {}, stock_rate, stock_rate)
    run_as = {rows: _fastest_row_count(rows, packed_seconds) for rows in MEASURED_ROWS}
    rate = {rows: round(gigabytes / packed_seconds[run_as[rows]], 1) for rows in MEASURED_ROWS}
    return LinearPlan(outputs, inputs, PACKED, run_as, rate, stock_rate)


def _fastest_row_count(rows: int, seconds: dict[int, float]) -> int:
    """`rows`, or the larger measured row count that one is faster run as; padding itself costs a little."""
    larger = [padded for padded in PADDED_ROWS if padded > rows and seconds[padded] * PADDING_COST < seconds[rows]]
    return min(larger, key=lambda padded: seconds[padded]) if larger else rows


def _median_seconds(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for weight in weights:
            product(x, weight)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS_HINT)


def _prepacked(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
