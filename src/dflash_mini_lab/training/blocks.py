"""Training batches: random anchors in the answers, their block inputs, and the labels of every slot."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_mini_lab.drafters.checkpoint import DrafterConfig
from dflash_mini_lab.training.losses import UNTRAINED
from dflash_mini_lab.training.shards import Sequence

HELD_OUT_SEQUENCES, HELD_OUT_ANCHORS, HELD_OUT_GROUP = 160, 12, 8
"""A look is taken on so many answers, so many blocks of each, so many answers in one pass."""


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
    """`anchors` random blocks from each sequence, all of one corpus, on its device. An anchor is an answer token that has a
    successor. The places come from the host's `generator`, so that they are the same on every device."""
    corpus = sequences[0].corpus
    device = corpus.tokens.device
    places = []
    for sequence in sequences:
        last = sequence.length - 2
        places.append(torch.randint(min(sequence.prompt_length, last), last + 1, (anchors,), generator=generator))
    place = torch.stack(places).to(device)
    where = [(s.first_token, s.length, s.prompt_length, s.first_answer) for s in sequences]
    first, length, prompt, answer = torch.tensor(where, device=device).T[..., None, None]
    slots = place[..., None] + torch.arange(1, block_size, device=device)
    labels = corpus.tokens[first + slots.minimum(length - 1)]
    row = answer + (slots - prompt).clamp(min=0).minimum(length - prompt - 1)
    return Blocks(
        features=corpus.features(sequences),
        anchors=place,
        anchor_ids=corpus.tokens[first[..., 0] + place],
        labels=torch.where(slots < length, labels, UNTRAINED),
        likely_ids=corpus.likely_ids[row].long(),
        likely=corpus.likely[row].float(),
    )


def held_out_blocks(sequences: list[Sequence], block_size: int) -> Iterator[Blocks]:
    """Blocks of the first answers that are longer than one, a group at a time: the same at every look."""
    generator = torch.Generator().manual_seed(5)
    usable = [sequence for sequence in sequences if sequence.answer_tokens > block_size][:HELD_OUT_SEQUENCES]
    for start in range(0, len(usable), HELD_OUT_GROUP):
        yield cut_blocks(usable[start : start + HELD_OUT_GROUP], HELD_OUT_ANCHORS, block_size, generator)


def block_embeddings(blocks: Blocks, embedding: Tensor, config: DrafterConfig) -> Tensor:
    """The drafter's input `[N, A, B, F]`, float32: the target's embedding of `[anchor, MASK × S]`."""
    anchor = embedding[blocks.anchor_ids][:, :, None]
    mask = embedding[config.mask_token_id].expand(*blocks.anchor_ids.shape, config.block_size - 1, -1)
    return torch.cat([anchor, mask], dim=2).float()


def draft_labels(blocks: Blocks, to_draft: Tensor) -> Tensor:
    """`[N, A, S]` labels as rows of the draft vocabulary (`target_to_draft`), UNTRAINED outside it too."""
    return torch.where(blocks.labels >= 0, to_draft[blocks.labels.clamp(min=0)], UNTRAINED)


def choose_draft_vocabulary(sequences: Iterable[Sequence], size: int, vocabulary: int) -> Tensor:
    """The `size` most frequent answer tokens, ascending (`draft_to_target`); of equally frequent ones, or of unseen ones where
    too few were seen, the lowest."""
    answers = torch.cat([sequence.tokens[sequence.prompt_length :] for sequence in sequences])
    counts = torch.bincount(answers, minlength=vocabulary)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def target_to_draft(draft_to_target: Tensor, vocabulary: int) -> Tensor:
    """`[vocabulary]`: row of each target id in the draft vocabulary, UNTRAINED where it has none."""
    rows = torch.full((vocabulary,), UNTRAINED, device=draft_to_target.device)
    rows[draft_to_target] = torch.arange(len(draft_to_target), device=draft_to_target.device)
    return rows
