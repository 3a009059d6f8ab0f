"""v(W): what a verifier call of W rows costs, measured in the run itself at a context length that the run has.

Speculation pays when τ > draft cost + v(W), so this curve decides what a method can reach before any method is tried.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_mini_lab.measurement.schedule import rotated_orders
from dflash_mini_lab.measurement.statistics import spread
from dflash_mini_lab.types import Clock, Target

SMALLEST_WIDEST = 8


def measure_verify_cost(
    target: Target, context: Sequence[int], block_size: int, taps: Sequence[int], clock: Clock, repeats: int = 9, seed: int = 0
) -> dict[str, Any]:
    """The `verify_cost` entry of benchmark.json for W = 1 … max(8, `block_size`), after a prefill of `context` token ids.

    W = 1 is method 00's `decode_one` in its own session; wider calls are `verify` + `keep(0)`, so the context stays the same, in
    a session that records `taps` as a drafting run does. Widths are interleaved in rotated order; one pass is run first,
    unmeasured. Only the call is timed, not the roll back (that is a method's `rest`). A context that leaves these calls no room
    before the target's last position is shortened; `context_tokens` says to what.
    """
    rows = list(range(1, max(SMALLEST_WIDEST, block_size) + 1))
    context = context[: max(1, target.max_positions - max(rows[-1], repeats + 1))]
    capacity = min(target.max_positions, len(context) + max(rows[-1], repeats + 1))
    tokens = (list(context) * (1 + rows[-1] // len(context)))[: rows[-1]]
    single, wide = target.start(context, capacity, None), target.start(context, capacity, taps)
    single.prefill()
    wide.prefill()
    seconds: dict[int, list[float]] = {width: [] for width in rows}
    keys = [str(width) for width in rows]
    for repeat, order in enumerate([tuple(keys), *rotated_orders(keys, repeats, seed)]):
        for width in map(int, order):
            started = clock.now()
            if width == 1:
                single.decode_one(tokens[0])
            else:
                wide.verify(tokens[:width])
            elapsed = clock.now() - started
            if width > 1:
                wide.keep(0)
            if repeat:
                seconds[width].append(elapsed)
    spreads = [spread(seconds[width]) for width in rows]
    median = [value for value, _, _ in spreads]
    return {
        "rows": rows,
        "median_seconds": median,
        "low_seconds": [low for _, low, _ in spreads],
        "high_seconds": [high for _, _, high in spreads],
        "ratio": [value / median[0] if median[0] else 0.0 for value in median],
        "context_tokens": len(context),
    }
