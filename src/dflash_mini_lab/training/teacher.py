"""Teacher data: what the target itself says, with the tapped features it computed while saying it.

Prompts of one exact token length form a batch, so every sequence of a batch has the same position at every step: no padding,
no masks, and the same decoder as in the benchmark. Finished sequences are dropped from the batch as it runs.
Features are taken during generation; computing them again would cost as much as the generation itself.
"""
from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_mini_lab.targets.lean import LeanDecoder
from dflash_mini_lab.targets.library_target import LibraryDecoder

SMALLEST_BATCH = 8
"""Length buckets with fewer prompts than this are skipped: they would run at a tenth of the rate."""
COMPACT_BELOW = 0.85
"""Share of unfinished sequences under which the batch is compacted; each compaction copies the whole cache."""


TEACHER_CANDIDATES = 16
"""Tokens kept of the target's distribution at each answer token: nearly all of its mass, at a thousandth of the size."""


@dataclass(frozen=True)
class Trajectory:
    """One prompt and its answer. `features [tokens - 1, taps, hidden]`: the last token was never fed back.

    `likely_ids`, `likely [answer tokens, TEACHER_CANDIDATES]`: the tokens the target held likeliest where it chose each answer
    token, best first, and their probabilities.
    """

    tokens: list[int]
    prompt_length: int
    features: Tensor
    likely_ids: Tensor
    likely: Tensor


@torch.inference_mode()
def continue_batch(
    decoder: LeanDecoder | LibraryDecoder,
    prompts: Tensor,
    new_tokens: int,
    stop_ids: Sequence[int],
    taps: Sequence[int] = (),
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    vocabulary: int | None = None,
) -> Iterator[Trajectory]:
    """Continue `prompts [batch, length]` until a stop token (kept as the last token) or `new_tokens`; greedy at temperature 0.
    `vocabulary`: ids below it may be said; None: every row of the head.

    What all prompts begin with (a chat template) is computed once. Yields each trajectory as it finishes, not in the order of
    the prompts.
    """
    batch, length = prompts.shape
    shared = min(int((prompts == prompts[0]).all(dim=0).cumprod(0).sum()), length - 1)
    cache: Any = decoder.new_cache(length + new_tokens)
    tokens = torch.zeros(batch, length + new_tokens, dtype=torch.long)
    tokens[:, :length] = prompts
    features = torch.zeros(batch, length + new_tokens - 1, len(taps), decoder.hidden_size, dtype=decoder.dtype)
    candidates = min(TEACHER_CANDIDATES, vocabulary or len(decoder.embedding))
    likely_ids = torch.zeros(batch, new_tokens, candidates, dtype=torch.int32)
    likely = torch.zeros(batch, new_tokens, candidates, dtype=torch.bfloat16)
    stops = torch.tensor(list(stop_ids))
    going = torch.ones(batch, dtype=torch.bool)
    if shared:
        _, tapped = decoder.forward(prompts[:1, :shared], cache, taps)
        if taps:
            features[:, :shared] = torch.stack(tapped, dim=2)
    cache.select(torch.zeros(batch, dtype=torch.long))
    step = prompts[:, shared:]
    for position in range(length, length + new_tokens):
        hidden, tapped = decoder.forward(step, cache, taps)
        if taps:
            features[:, position - step.shape[1] : position] = torch.stack(tapped, dim=2)
        logits = decoder.logits(hidden[:, -1])[:, :vocabulary]
        step = _next_tokens(logits, temperature, generator)[:, None]
        tokens[:, position] = step[:, 0]
        answered = position - length + 1
        if taps:
            wide = logits.float()
            best, ids = wide.topk(candidates)
            likely_ids[:, answered - 1] = ids
            likely[:, answered - 1] = (best - wide.logsumexp(-1, keepdim=True)).exp()
        last = position == length + new_tokens - 1
        done = going & (torch.isin(step[:, 0], stops) | last)
        for row in done.nonzero()[:, 0].tolist():
            yield Trajectory(
                tokens[row, : position + 1].tolist(),
                length,
                features[row, :position].clone(),
                likely_ids[row, :answered].clone(),
                likely[row, :answered].clone(),
            )
        going &= ~done
        if not going.any():
            return
        if going.float().mean() < COMPACT_BELOW:
            rows = going.nonzero()[:, 0]
            cache.select(rows)
            tokens, features, step, going = tokens[rows], features[rows], step[rows], going[rows]
            likely_ids, likely = likely_ids[rows], likely[rows]


def equal_length_batches(prompts: list[list[int]], batch: int, seed: int, smallest: int = SMALLEST_BATCH) -> list[Tensor]:
    """Group prompts by exact length into shuffled batches `[≤ batch, length]`; those under `smallest` prompts are left out."""
    order = random.Random(seed)
    buckets: dict[int, list[list[int]]] = defaultdict(list)
    for prompt in prompts:
        buckets[len(prompt)].append(prompt)
    batches = []
    for bucket in buckets.values():
        order.shuffle(bucket)
        parts = [bucket[start : start + batch] for start in range(0, len(bucket), batch)]
        batches += [torch.tensor(part) for part in parts if len(part) >= smallest]
    order.shuffle(batches)
    return batches


def _next_tokens(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)[:, 0]
