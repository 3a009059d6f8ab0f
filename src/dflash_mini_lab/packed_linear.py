"""Linear layers for few rows: measure the ways this machine has, keep the fastest, say which.

A verifier call multiplies 1 … 16 rows by every weight of the model, so its time is the time to *read* the weights.
Stock small-row products reach a third of the memory bandwidth; oneDNN's prepacked ones (the operators that
PyTorch's own inductor emits) come close to it. Which is best depends on the machine, so it is measured at load.
Nothing here knows about models, caches or decoding.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MEASURED_ROWS = (1, 2, 3, 4, 5, 6, 7, 8)
PACK_ROWS_HINT = 8
"""Row count that oneDNN packs for. Packing for 8 was the fastest at every row count from 1 to 16 (docs/lab-log.md)."""
PADDING_COST = 1.02
BYTES_TO_DEFEAT_CACHE = 96 * 2**20
MOST_COPIES = 64
"""Of one weight: a model whose weights are smaller than this makes them sits in cache when it runs, too."""
PLAIN, PACKED, SCREENED = "plain", "prepacked", "bfloat16 screen"
"""How weights are stored. A screened LM head reads a bfloat16 copy to find the few rows worth an exact product (lm_head.py)."""


@dataclass(frozen=True)
class LinearPlan:
    """How weights of one shape are stored, and the weight-reading rate at each measured row count, ours and the stock product's.

    Empty rates: nothing was measured, the stock product serves.
    """

    out_features: int
    in_features: int
    storage: str
    gigabytes_per_second: dict[int, float] = field(default_factory=dict)
    stock_gigabytes_per_second: dict[int, float] = field(default_factory=dict)

    def seconds(self, rows: int) -> float:
        """Relative time of one product with `rows` rows, in weights per measured rate."""
        return self.out_features * self.in_features / self.gigabytes_per_second[rows]

    def as_json(self) -> dict[str, Any]:
        facts = asdict(self)
        for name in ("gigabytes_per_second", "stock_gigabytes_per_second"):
            facts[name] = {str(rows): round(rate, 1) for rows, rate in facts[name].items()}
        return facts


def stock_plan(weight: Tensor) -> LinearPlan:
    """The plan that changes nothing: `F.linear` at every row count."""
    return LinearPlan(weight.shape[0], weight.shape[1], PLAIN)


def padded_rows(plans: Sequence[tuple[LinearPlan, int]]) -> dict[int, int]:
    """Row counts that a whole forward pass runs faster as a larger one, by the summed time of its products.

    `plans`: each shape's plan and how often it occurs. A single row is often faster run as four, with the others thrown away.
    """
    if not all(plan.gigabytes_per_second for plan, _ in plans):
        return {}
    total = {rows: sum(count * plan.seconds(rows) for plan, count in plans) for rows in MEASURED_ROWS}
    better = {}
    for rows in MEASURED_ROWS:
        best = min((larger for larger in MEASURED_ROWS if larger >= rows), key=lambda larger: total[larger])
        if total[best] * PADDING_COST < total[rows]:
            better[rows] = best
    return better


class PackedLinear:
    """`x [..., in] → x Wᵀ + b [..., out]` by a plan. Holds one copy of the weight, in the plan's storage."""

    __slots__ = ("bias", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> None:
        self.bias, self.packed = bias, plan.storage == PACKED
        self.weight = _pack(weight) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        return (_prepacked if self.packed else F.linear)(x, self.weight, self.bias)


def packed_storage_works(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN's prepacked product exists here for `dtype`; where it does not, stock is the answer."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    try:
        generator = torch.Generator().manual_seed(0)  # the same answer in every run
        weight = torch.randn(16, 32, generator=generator).to(dtype)
        x = torch.randn(4, 32, generator=generator).to(dtype)
        return torch.allclose(_prepacked(x, _pack(weight), None), F.linear(x, weight), rtol=0.02, atol=0.05)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


def measure_plan(weights: list[Tensor], repeats: int = 5) -> LinearPlan:
    """Time stock and prepacked products on `weights` (same shape; copies are added until they cannot sit in cache).

    One copy of a weight serves every row count, so the storage with the smaller time summed over MEASURED_ROWS is kept.
    """
    first = weights[0]
    outputs, inputs = first.shape
    if not packed_storage_works(first.dtype, first.device):
        return stock_plan(first)
    size = first.numel() * first.element_size()
    count = max(1, min(MOST_COPIES, -(-BYTES_TO_DEFEAT_CACHE // size)))
    sample = [*weights[:count], *(first.clone() for _ in range(count - len(weights)))]
    packed = [_pack(weight) for weight in sample]
    stock_seconds, packed_seconds = {}, {}
    for rows in MEASURED_ROWS:
        x = torch.randn(rows, inputs).to(first.dtype)
        stock_seconds[rows] = _median_seconds(F.linear, x, sample, repeats)
        packed_seconds[rows] = _median_seconds(_prepacked, x, packed, repeats)
    gigabytes = size * len(sample) / 1e9
    stock_rate = {rows: gigabytes / seconds for rows, seconds in stock_seconds.items()}
    packed_rate = {rows: gigabytes / seconds for rows, seconds in packed_seconds.items()}
    if sum(stock_seconds.values()) <= sum(packed_seconds.values()):
        return LinearPlan(outputs, inputs, PLAIN, stock_rate, stock_rate)
    return LinearPlan(outputs, inputs, PACKED, packed_rate, stock_rate)


def screen_plan(weight: Tensor, plan: LinearPlan) -> LinearPlan:
    """`plan`, or one to screen the float32 `weight` by a prepacked bfloat16 copy, where that is faster summed over MEASURED_ROWS.

    Its rates count the float32 bytes that it replaces, so that they compare with other plans'.
    """
    if weight.dtype != torch.float32 or not plan.gigabytes_per_second:
        return plan
    coarse = measure_plan([weight.bfloat16()])
    rates = {rows: 2 * rate for rows, rate in coarse.gigabytes_per_second.items()}
    screened = LinearPlan(plan.out_features, plan.in_features, SCREENED, rates, plan.stock_gigabytes_per_second)
    if coarse.storage != PACKED or sum(map(screened.seconds, rates)) >= sum(map(plan.seconds, rates)):
        return plan
    return screened


def bfloat16_is_faster(device: torch.device | str = "cpu", rows: int = 256, features: int = 768) -> bool:
    """Whether a product of many rows runs faster in bfloat16 than in float32 there; on many processors it is far slower.

    On CUDA it is wherever the GPU has it. On a CPU the two take turns, and the best of each counts: what else the machine does
    must not decide hours of training.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    best = {torch.bfloat16: float("inf"), torch.float32: float("inf")}
    for _ in range(12):
        for dtype in best:
            x, weight = torch.ones(rows, features, dtype=dtype), torch.ones(features, features, dtype=dtype)
            started = time.perf_counter()
            F.linear(x, weight)
            best[dtype] = min(best[dtype], time.perf_counter() - started)
    return best[torch.bfloat16] < best[torch.float32]


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
