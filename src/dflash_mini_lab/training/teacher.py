"""Teacher data: what the target itself says, and what it computed while saying it: its likeliest tokens, tapped features.

Prompts of one exact token length form a batch, so every sequence of a batch has the same position at every step: no padding,
no masks, and the same decoder as in the benchmark. Finished sequences are dropped from the batch as it runs.
On a CPU features are taken during generation; computing them again would cost as much as the generation itself. On a GPU they
would fill any disk, and computing them again costs little.
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
ACTIVATIONS, LOGITS = 24, 4
"""Hidden states a token, and copies of the logits, that are alive at once in a pass."""


@dataclass(frozen=True)
class Trajectory:
    """One prompt and its answer, on the host. `features [tokens - 1, taps · hidden]`: the last token was never fed back.

    `likely_ids`, `likely [answer tokens, candidates]`: the tokens the target held likeliest where it chose each answer token,
    best first, and their probabilities.
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
    candidates: int = TEACHER_CANDIDATES,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    vocabulary: int | None = None,
) -> Iterator[Trajectory]:
    """Continue `prompts [batch, length]` until a stop token (kept as the last token) or `new_tokens`; greedy at temperature 0.
    `vocabulary`: ids below it may be said; None: every row of the head.

    What all prompts begin with (a chat template) is computed once. Yields each trajectory as it finishes, not in the order of
    the prompts, with the features of `taps` and the `candidates` likeliest tokens. `generator`: of the decoder's device.
    """
    device = decoder.embedding.device
    prompts, stops = prompts.to(device), torch.tensor(list(stop_ids), device=device)
    batch, length = prompts.shape
    shared = min(int((prompts == prompts[0]).all(dim=0).cumprod(0).sum()), length - 1)
    cache: Any = decoder.new_cache(length + new_tokens)
    tokens = torch.zeros(batch, length + new_tokens, dtype=torch.long, device=device)
    tokens[:, :length] = prompts
    width = len(taps) * decoder.hidden_size
    features = torch.zeros(batch, length + new_tokens - 1, width, dtype=decoder.dtype, device=device)
    candidates = min(candidates, vocabulary or len(decoder.embedding))
    likely_ids = torch.zeros(batch, new_tokens, candidates, dtype=torch.int32, device=device)
    likely = torch.zeros(batch, new_tokens, candidates, dtype=torch.bfloat16, device=device)
    going, left = torch.ones(batch, dtype=torch.bool, device=device), batch
    if shared:
        _, features[:, :shared] = decoder.forward(prompts[:1, :shared], cache, taps)
    cache.select(torch.zeros(batch, dtype=torch.long, device=device))
    step = prompts[:, shared:]
    for position in range(length, length + new_tokens):
        hidden, features[:, position - step.shape[1] : position] = decoder.forward(step, cache, taps)
        logits = decoder.logits(hidden[:, -1])[:, :vocabulary]
        answered = position - length + 1
        if candidates:
            wide = logits.float()
            best, ids = wide.topk(candidates)
            likely_ids[:, answered - 1] = ids
            largest = best[:, :1]
            likely[:, answered - 1] = (best - largest).exp() / wide.sub_(largest).exp_().sum(-1, keepdim=True)
        greedy = temperature == 0 and candidates  # then the choice is found already
        step = ids[:, :1] if greedy else _next_tokens(logits, temperature, generator)[:, None]
        tokens[:, position] = step[:, 0]
        last = position == length + new_tokens - 1
        done = going & (torch.isin(step[:, 0], stops) | last)
        rows = done.nonzero()[:, 0]
        if not len(rows):  # the one number of a step that the host waits for
            continue
        kept = (features[rows, :position], likely_ids[rows, :answered], likely[rows, :answered])
        for answer, *facts in zip(tokens[rows, : position + 1].tolist(), *(part.cpu() for part in kept), strict=True):
            yield Trajectory(answer, length, *facts)
        going &= ~done
        left -= len(rows)
        if not left:
            return
        if left < COMPACT_BELOW * len(going):
            rows = going.nonzero()[:, 0]
            cache.select(rows)
            tokens, features, step, going = tokens[rows], features[rows], step[rows], going[rows]
            likely_ids, likely = likely_ids[rows], likely[rows]


def begin_answers(
    decoder: LeanDecoder | LibraryDecoder, prompts: Tensor, tokens: int, stop_ids: Sequence[int], seed: int, vocabulary: int
) -> Tensor:
    """`prompts [batch, length]` with the first `tokens` of an answer, sampled at temperature 1: `[≤ batch, length + tokens]`; an
    answer that ended by then is left out."""
    generator = torch.Generator(decoder.embedding.device).manual_seed(seed)
    begun = continue_batch(
        decoder, prompts, tokens, stop_ids, candidates=0, temperature=1.0, generator=generator, vocabulary=vocabulary
    )
    going = [trajectory.tokens for trajectory in begun if trajectory.tokens[-1] not in stop_ids]
    return torch.tensor(going, dtype=torch.long).view(len(going), prompts.shape[1] + tokens)


def rows_that_fit(decoder: LeanDecoder, positions: int, free_bytes: int) -> int:
    """Sequences of `positions` tokens that a batch can have in half of `free_bytes`: their cache, the activations of a prompt's
    pass (counted as ACTIVATIONS hidden states a token) and the float32 logits of a step, at least 1."""
    cache = decoder.new_cache(positions)
    row = sum(stored.numel() * stored.element_size() for stored in (cache.memory, *cache.inputs.values()))
    row += positions * decoder.hidden_size * decoder.embedding.element_size() * ACTIVATIONS + len(decoder.embedding) * 4 * LOGITS
    return max(1, free_bytes // 2 // row)


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
