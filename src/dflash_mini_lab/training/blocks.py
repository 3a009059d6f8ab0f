"""Training batches: random anchors in the answers, their block inputs, and the labels of every slot."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_mini_lab.drafters.checkpoint import DrafterConfig
from dflash_mini_lab.training.losses import UNTRAINED
from dflash_mini_lab.training.shards import Sequence, read_features, read_likely


@dataclass(frozen=True)
class Blocks:
    """features `[N, tokens, taps · F]`, F the target's width; anchors, anchor_ids `[N, A]`; labels `[N, A, S]` target ids or
    UNTRAINED; likely_ids, likely `[N, A, S, candidates]`: what the target held likeliest at each slot, given the true tokens
    before it."""

    features: Tensor
    anchors: Tensor
    anchor_ids: Tensor
    labels: Tensor
    likely_ids: Tensor
    likely: Tensor


def cut_blocks(sequences: list[Sequence], anchors: int, block_size: int, generator: torch.Generator) -> Blocks:
    """`anchors` random blocks from each sequence. An anchor is an answer token that has a successor."""
    read = [read_features(sequence) for sequence in sequences]
    longest = max(len(rows) for rows in read)
    features = torch.zeros(len(read), longest, read[0].shape[1], dtype=read[0].dtype)
    places, ids, labels, likely_ids, likely = [], [], [], [], []
    for index, (sequence, rows) in enumerate(zip(sequences, read, strict=True)):
        features[index, : len(rows)] = rows
        last = len(sequence.tokens) - 2
        place = torch.randint(min(sequence.prompt_length, last), last + 1, (anchors,), generator=generator)
        slots = place[:, None] + torch.arange(1, block_size)
        inside = slots < len(sequence.tokens)
        label = sequence.tokens[slots.clamp(max=len(sequence.tokens) - 1)]
        places.append(place)
        ids.append(sequence.tokens[place])
        labels.append(torch.where(inside, label, UNTRAINED))
        candidates, probabilities = read_likely(sequence)
        row = (slots - sequence.prompt_length).clamp(0, sequence.answer_tokens - 1)
        likely_ids.append(candidates[row])
        likely.append(probabilities[row])
    return Blocks(features, *map(torch.stack, (places, ids, labels, likely_ids, likely)))


def block_embeddings(blocks: Blocks, embedding: Tensor, config: DrafterConfig) -> Tensor:
    """The drafter's input `[N, A, B, F]`, float32: the target's embedding of `[anchor, MASK × S]`."""
    anchor = embedding[blocks.anchor_ids][:, :, None]
    mask = embedding[config.mask_token_id].expand(*blocks.anchor_ids.shape, config.block_size - 1, -1)
    return torch.cat([anchor, mask], dim=2).float()


def draft_labels(blocks: Blocks, to_draft: Tensor) -> Tensor:
    """`[N, A, S]` labels as rows of the draft vocabulary (`target_to_draft`), UNTRAINED outside it too."""
    return torch.where(blocks.labels >= 0, to_draft[blocks.labels.clamp(min=0)], UNTRAINED)


def choose_draft_vocabulary(sequences: Iterable[Sequence], size: int, vocabulary: int) -> Tensor:
    """The `size` most frequent answer tokens, ascending (`draft_to_target`). Fewer seen: filled up with the lowest unseen ids."""
    counts: Counter[int] = Counter()
    for sequence in sequences:
        counts.update(sequence.tokens[sequence.prompt_length :].tolist())
    size = min(size, vocabulary)
    chosen = [token for token, _ in counts.most_common(size)]
    seen = set(chosen)
    chosen += [token for token in range(vocabulary) if token not in seen][: size - len(chosen)]
    return torch.tensor(sorted(chosen))


def target_to_draft(draft_to_target: Tensor, vocabulary: int) -> Tensor:
    """`[vocabulary]`: row of each target id in the draft vocabulary, UNTRAINED where it has none."""
    rows = torch.full((vocabulary,), UNTRAINED)
    rows[draft_to_target] = torch.arange(len(draft_to_target))
    return rows
