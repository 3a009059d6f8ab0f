"""Linear layers for few rows: measure the ways this machine has, keep the fastest, say which.

A verifier call multiplies 1 … 16 rows by every weight of the model, so its time is the time to *read* the weights.
Stock small-row products reach a third of the memory bandwidth on many machines; oneDNN's prepacked one (the operator that
PyTorch's own inductor emits) and ours (prefetched_linear.py) come closer to it. Which is best depends on the machine, so it is
measured at load.
Nothing here knows about models, caches or decoding.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_mini_lab.prefetched_linear import Kernel, PackedWeight, kernel, narrowest

MEASURED_ROWS = (1, 2, 3, 4, 5, 6, 7, 8)
PACK_ROWS_HINT = 8
"""Row count that oneDNN's weights are packed for: they were the fastest at every row count from 1 to 16 when packed for 8
(docs/lab-log.md), and may be used for any number of rows."""
PADDING_COST = 1.02
BYTES_TO_DEFEAT_CACHE = 96 * 2**20
FAR_BEHIND = 1.2
"""Times the time of the fastest."""
MOST_COPIES = 64
"""Of one weight: a model whose weights are smaller than this makes them sits in cache when it runs, too."""
PLAIN, ONEDNN, PREFETCHED, ROUNDED, SCREENED = "plain", "oneDNN prepacked", "prefetched tiles", "8-bit tiles", "8-bit screen"
"""How weights are stored. A screened LM head reads a copy in 8 bits to find the few rows worth an exact product (compiled.py)."""
PREPACKED = (PREFETCHED, ONEDNN)
OURS = (PREFETCHED, ROUNDED)
"""Those that prefetched_linear.py multiplies."""


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

    __slots__ = ("bias", "product", "storage", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> None:
        self.storage = plan.storage
        pack, self.product = WAYS[plan.storage]
        self.weight, self.bias = pack(weight), bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


def storage_works(storage: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is that prepacked product here for `dtype`; where there is none, stock is the answer."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if storage == PREFETCHED and (dtype != torch.float32 or kernel() is None):
        return False
    pack, product = WAYS[storage]
    try:
        generator = torch.Generator().manual_seed(0)  # the same answer in every run
        weight = torch.randn(16, 32, generator=generator).to(dtype)
        x = torch.randn(4, 32, generator=generator).to(dtype)
        return torch.allclose(product(x, pack(weight), None), F.linear(x, weight), rtol=0.02, atol=0.05)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


def measure_plan(weights: list[Tensor], repeats: int = 3) -> LinearPlan:
    """Time stock and prepacked products on `weights`, all of one shape.

    One copy of a weight serves every row count, so the storage with the smallest time summed over MEASURED_ROWS is kept. One that
    is far behind after a single turn gets no other.
    """
    outputs, inputs = weights[0].shape
    prepacked = [storage for storage in PREPACKED if storage_works(storage, weights[0].dtype, weights[0].device)]
    if not prepacked:
        return stock_plan(weights[0])
    rates: dict[str, dict[int, float]] = {}
    for storage in (*prepacked, PLAIN):
        best = min(map(_seconds_for_a_gigabyte, rates.values()), default=float("inf"))
        rates[storage] = _rates(storage, weights, repeats, FAR_BEHIND * best)
    fastest = min(rates, key=lambda storage: _seconds_for_a_gigabyte(rates[storage]))
    return LinearPlan(outputs, inputs, fastest, rates[fastest], rates[PLAIN])


def _rates(storage: str, weights: list[Tensor], repeats: int, limit: float = float("inf")) -> dict[int, float]:
    """GB/s at each of MEASURED_ROWS, the median of `repeats` turns over them; one turn is enough to see that they take more than
    `limit` seconds for a GB. Weights are copied until they cannot sit in cache as they are stored."""
    first = weights[0]
    stored_type = torch.int8 if storage == ROUNDED else narrowest(first) if storage == PREFETCHED else first.dtype
    count = max(1, min(MOST_COPIES, -(-BYTES_TO_DEFEAT_CACHE // (first.numel() * stored_type.itemsize))))
    pack, product = WAYS[storage]
    copies = (first.clone() for _ in range(count - len(weights)))  # one at a time: they may be far larger than what is stored
    stored = [pack(weight) for weight in chain(weights[:count], copies)]
    gigabytes = first.numel() * first.element_size() * len(stored) / 1e9
    # A batch of one, as in a decoder: a stock product folds it first.
    inputs = {rows: torch.randn(1, rows, first.shape[1]).to(first.dtype) for rows in MEASURED_ROWS}
    turns: list[dict[int, float]] = []
    while len(turns) < repeats and (not turns or _seconds_for_a_gigabyte(turns[0]) <= limit):
        turns.append({rows: gigabytes / _seconds(product, x, stored) for rows, x in inputs.items()})
    return {rows: median(turn[rows] for turn in turns) for rows in MEASURED_ROWS}


def _seconds_for_a_gigabyte(rates: dict[int, float]) -> float:
    return sum(1 / rate for rate in rates.values())


def rounded_plan(weights: list[Tensor], plan: LinearPlan, storage: str = ROUNDED) -> LinearPlan:
    """`plan`, or where reading our own 8-bit tiles is faster summed over MEASURED_ROWS, one of those: of a weight that may be
    rounded, or (SCREENED) of an LM head in tiles that they screen. Rates count the float32 bytes that they stand for, and so
    compare."""
    ours = storage_works(PREFETCHED, weights[0].dtype, weights[0].device)
    if storage == SCREENED and plan.storage != PREFETCHED:
        return plan
    if not ours or not plan.gigabytes_per_second or plan.in_features % 2:
        return plan
    coarse = replace(plan, storage=storage, gigabytes_per_second=_rates(ROUNDED, weights, 3))
    return coarse if sum(map(coarse.seconds, MEASURED_ROWS)) <= sum(map(plan.seconds, MEASURED_ROWS)) else plan


def unscreened(plan: LinearPlan) -> LinearPlan:
    """Of a screened head's plan, that of a product with the same weights: another layer's that has the head's shape."""
    return replace(plan, storage=PREFETCHED) if plan.storage == SCREENED else plan


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


def _seconds(product: Product, x: Tensor, weights: list[Any]) -> float:
    product(x, weights[0], None)  # a first call pays for what later ones find warm
    start = time.perf_counter()
    for weight in weights:
        product(x, weight, None)
    return time.perf_counter() - start


def _pack_onednn(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS_HINT)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _pack_prefetched(weight: Tensor) -> PackedWeight:
    return _ours().pack(weight)


def _pack_rounded(weight: Tensor) -> PackedWeight:
    return _ours().pack_bytes(weight)


def _prefetched(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    return _ours().product(x, weight, bias)


def _ours() -> Kernel:
    if (ours := kernel()) is None:
        raise NotImplementedError("No prefetched product on this machine.")
    return ours


Product = Callable[[Tensor, Any, Tensor | None], Tensor]
WAYS: dict[str, tuple[Callable[[Tensor], Any], Product]] = {
    PLAIN: (lambda weight: weight, F.linear),
    ONEDNN: (_pack_onednn, _onednn),
    PREFETCHED: (_pack_prefetched, _prefetched),
    ROUNDED: (_pack_rounded, _prefetched),
}
"""For each storage but a screen, how a weight is put into it and the product that reads it."""
