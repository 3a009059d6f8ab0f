"""What a benchmark needs of a model and its drafter, in two bundles: what is known before weights are read, and what runs.

The same two for every backend, and for a test's tiny model.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dflash_mini_lab.exactness import LogitsOf
from dflash_mini_lab.types import NO_HEADS, Drafter, Heads, Target

if TYPE_CHECKING:  # a comparison of two files needs no torch
    from dflash_mini_lab.crossings import Crossings


@dataclass(frozen=True)
class Engine:
    """A verifier and its drafter, ready to decode. `path_logits(prompt ids)` gives the target's own logits for an answer to it:
    the second of the two paths that a verdict compares."""

    target: Target
    drafter: Drafter | None
    path_logits: Callable[[Sequence[int]], LogitsOf]
    linear_plans: list[dict[str, Any]]
    padded_rows: dict[str, int]
    decode: dict[str, Any] | None = None
    """How decode steps run: the `decode` of benchmark.json's `execution`."""
    crossings: Crossings | None = None
    """What went between host and device so far, target and drafter together."""


@dataclass(frozen=True)
class Model:
    """A target as its files describe it. `stock()` lends the library's own model, for references, peers and verdicts; a target
    that the library does not know lends its own StockSteps.

    `build(capacity)` makes the engine for sequences of up to `capacity` tokens. `block_size` is 1 without a drafter.
    """

    stop_ids: frozenset[int]
    max_positions: int
    block_size: int
    encode_prompt: Callable[[str], list[int]]
    decode_text: Callable[[Sequence[int]], str]
    stock: Callable[[], AbstractContextManager[Any]]
    build: Callable[[int], Engine]
    target_facts: dict[str, Any]
    drafter_facts: dict[str, Any] | None
    heads: Heads = NO_HEADS
    """Those of the drafter: what a method may need is known before weights are read."""
    vocabulary: int | None = None
    """Ids that may be emitted; None: every row of the head."""
    device: str = "cpu"
    trees: bool = True
    """Whether the target verifies draft trees."""
    backend: Literal["torch", "numpy"] = "torch"
