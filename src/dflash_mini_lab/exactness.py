"""The exactness gate: an independent greedy reference, the first place where an answer leaves it, and what to think of that.

Independence is the point. The reference runs the stock transformers model on its stock layers and its stock cache, in a loop
of its own; the lab's decode loop, targets and packed products may not enter this file. A target that transformers does not
know brings stock steps of its own, which share no arithmetic with it.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

TIE_FACTOR = 2.0
"""A gap up to this many largest differences is a tie: each of the two logits may be off by one such difference."""

LogitsOf = Callable[[Sequence[int]], np.ndarray]
"""Logits of one path: `n` new tokens → `[n + 1, vocabulary]`, row i being the distribution after the prompt and `i` of them."""


class StockSteps(Protocol):
    """A reference without transformers."""

    def stock_steps(self, prompt_ids: Sequence[int], tokens: Sequence[int]) -> Iterator[np.ndarray]:
        """Logits `[vocabulary]` after the prompt, then after each of `tokens`, which may grow meanwhile."""
        ...


@dataclass(frozen=True)
class Top2:
    """The reference's two best tokens at one position, best first."""

    tokens: tuple[int, int]
    logits: tuple[float, float]

    @property
    def gap(self) -> float:
        return self.logits[0] - self.logits[1]


@dataclass(frozen=True)
class Reference:
    """The answer that every arm must give. `top2[i]` describes the choice of `tokens[i]`."""

    tokens: tuple[int, ...]
    finish: str
    top2: tuple[Top2, ...]


@dataclass(frozen=True)
class Mismatch:
    """Where an answer first left the reference. `gap`: how much the reference preferred its own token to the answer's.

    `largest_logit_difference`: between the two paths, over the common prefix. Both are None where one answer simply ended.
    """

    position: int
    top2: Top2 | None
    gap: float | None
    largest_logit_difference: float | None
    verdict: Literal["tie", "violation"]

    def as_json(self, decode_text: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        pairs = zip(self.top2.tokens, self.top2.logits, strict=True) if self.top2 else ()
        return {
            "position": self.position,
            "reference_top2": [{"token": token, "text": decode_text([token]), "logit": logit} for token, logit in pairs],
            "gap": self.gap,
            "largest_logit_difference": self.largest_logit_difference,
            "verdict": self.verdict,
        }


def reference_greedy(
    model: Any,
    prompt_ids: Sequence[int],
    budget: int,
    stop_ids: frozenset[int],
    max_positions: int,
    vocabulary: int | None = None,
) -> Reference:
    """Plain greedy decoding of `prompt_ids`: up to `budget` tokens, the stop token included. `model`: a stock transformers
    causal LM, or StockSteps. `vocabulary`: ids below it may be chosen; rows of the head past the tokenizer are only padding.

    Ends with finish `stop`, `budget`, or `context` when `max_positions` tokens are in the cache.
    """
    tokens: list[int] = []
    top2: list[Top2] = []
    for row in _stock_steps(model, prompt_ids, tokens):
        logits = row[:vocabulary]
        best = int(logits.argmax())  # the lowest id among equals, as everywhere
        second = int(np.where(np.arange(len(logits)) == best, -np.inf, logits).argmax())
        top2.append(Top2((best, second), (float(logits[best]), float(logits[second]))))
        tokens.append(best)
        if tokens[-1] in stop_ids or len(tokens) >= budget or len(prompt_ids) + len(tokens) > max_positions:
            break
    finish = "stop" if tokens[-1] in stop_ids else "budget" if len(tokens) >= budget else "context"
    return Reference(tuple(tokens), finish, tuple(top2))


def stock_logits(model: Any, prompt_ids: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """The reference's own logits for a given answer, `[len(tokens) + 1, vocabulary]`, row by row as the reference ran."""
    steps = _stock_steps(model, prompt_ids, tokens)
    return np.stack([next(steps) for _ in range(len(tokens) + 1)])


def stock_block_logits(model: Any, prompt_ids: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """As `stock_logits`, from one call over the whole answer: the rounding of a path that verifies many rows at once."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([[*prompt_ids, *tokens]], device=model.device)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(tokens) + 1).logits[0]
    return logits.float().cpu().numpy()


def first_divergence(reference: Sequence[int], tokens: Sequence[int]) -> int | None:
    """The first position at which the two differ, the end of the shorter one included; None when they are equal."""
    for position, (expected, got) in enumerate(zip(reference, tokens, strict=False)):
        if expected != got:
            return position
    return None if len(reference) == len(tokens) else min(len(reference), len(tokens))


def judge(reference: Reference, tokens: Sequence[int], stock: LogitsOf, path: LogitsOf) -> Mismatch | None:
    """None for an exact answer, else its mismatch.

    A tie: at the first divergence the reference preferred its token to the answer's by no more than twice the largest
    difference between the two paths' logits over the common prefix. Anything else, a wrong length or a token that `path` has no
    logit for (a padded row of the head) included, is a violation.
    `stock` and `path` are only asked on a mismatch.
    """
    position = first_divergence(reference.tokens, tokens)
    if position is None:
        return None
    top2 = reference.top2[position] if position < len(reference.top2) else None
    if top2 is None or position >= len(tokens):
        return Mismatch(position, top2, top2.gap if top2 else None, None, "violation")
    common = list(tokens[:position])
    expected, got = stock(common), path(common)
    shared = min(expected.shape[1], got.shape[1])  # the target leaves out padded rows of the head
    difference = float(np.abs(expected[:, :shared] - got[:, :shared]).max())
    gap = float(expected[position, reference.tokens[position]] - expected[position, tokens[position]])
    if tokens[position] >= shared or not (np.isfinite(difference) and np.isfinite(gap)):
        return Mismatch(position, top2, None, None, "violation")
    return Mismatch(position, top2, max(gap, 0.0), difference, "tie" if gap <= TIE_FACTOR * difference else "violation")


def _stock_steps(model: Any, prompt_ids: Sequence[int], tokens: Sequence[int]) -> Iterator[np.ndarray]:
    """Logits `[vocabulary]` after the prompt, then after each of `tokens` (read as they appear: the list may grow meanwhile)."""
    own = getattr(model, "stock_steps", None)
    return own(prompt_ids, tokens) if own else _library_steps(model, prompt_ids, tokens)


def _library_steps(model: Any, prompt_ids: Sequence[int], tokens: Sequence[int]) -> Iterator[np.ndarray]:
    import torch

    step, cache, position = list(prompt_ids), None, 0
    while True:
        with torch.inference_mode():  # around the call alone: a yield inside would leave the caller in inference mode
            ids = torch.tensor([step], device=model.device)
            output = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        cache = output.cache
        yield output.logits[0, -1].double().cpu().numpy()  # holds every dtype's values, and NumPy knows no bfloat16
        step = [tokens[position]]
        position += 1
