"""Teacher data on disk: one safetensors file a batch, written whole or not at all, read into flat tensors on one device.

Tensors: `tokens` int32 `[Σ length]`, `lengths`, `prompt_lengths`, `features` bfloat16 `[Σ (length - 1), taps · hidden]` (without
columns where they were not kept), `likely_ids` int32 and `likely` bfloat16 `[Σ answer tokens, TEACHER_CANDIDATES]`.

Features are a hundred times the rest: they stay on disk, or are computed again (features.py), whichever is the faster.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_mini_lab.drafters.checkpoint import save_tensors
from dflash_mini_lab.files import replacing
from dflash_mini_lab.training.teacher import Trajectory


@dataclass(frozen=True)
class Corpus:
    """The trajectories of a folder, end to end. `tokens [Σ length]` int64; `likely_ids`, `likely [Σ answer tokens, candidates]`;
    `features`: those of some of its sequences, `[N, longest - 1, taps · hidden]`, with anything behind a shorter one's end."""

    tokens: Tensor
    likely_ids: Tensor
    likely: Tensor
    features: Callable[[list[Sequence]], Tensor]


@dataclass(frozen=True)
class Sequence:
    """One trajectory of a corpus: where its tokens and answer begin there, and its features in its shard."""

    corpus: Corpus
    first_token: int
    length: int
    prompt_length: int
    first_answer: int
    shard: Path
    first_feature: int

    @property
    def tokens(self) -> Tensor:
        """`[length]` int64."""
        return self.corpus.tokens[self.first_token : self.first_token + self.length]

    @property
    def answer_tokens(self) -> int:
        return self.length - self.prompt_length


def write_shard(path: Path, trajectories: Iterable[Trajectory]) -> int:
    """Returns the number of answer tokens written."""
    found = list(trajectories)
    tensors = {
        "tokens": torch.tensor([token for t in found for token in t.tokens], dtype=torch.int32),
        "lengths": torch.tensor([len(t.tokens) for t in found]),
        "prompt_lengths": torch.tensor([t.prompt_length for t in found]),
        "features": torch.cat([t.features for t in found]).bfloat16(),
        "likely_ids": torch.cat([t.likely_ids for t in found]),
        "likely": torch.cat([t.likely for t in found]),
    }
    with replacing(path) as part:
        save_tensors(tensors, part)
    return sum(len(t.tokens) - t.prompt_length for t in found)


def read_sequences(
    folder: Path, device: torch.device | str = "cpu", features: Callable[[list[Sequence]], Tensor] | None = None
) -> list[Sequence]:
    """Every trajectory of the shards in `folder`, in the order of the file names. `features`: None takes those in the shards."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        return []
    parts: dict[str, list[Tensor]] = {"tokens": [], "likely_ids": [], "likely": []}
    places: list[tuple[int, int, int, int, Path, int]] = []
    token = answer = 0
    for path in paths:
        with safe_open(path, "pt") as shard:
            for name, found in parts.items():
                found.append(shard.get_tensor(name))
            feature = 0
            lengths, prompts = shard.get_tensor("lengths").tolist(), shard.get_tensor("prompt_lengths").tolist()
            for length, prompt in zip(lengths, prompts, strict=True):
                places.append((token, length, prompt, answer, path, feature))
                token, answer, feature = token + length, answer + length - prompt, feature + length - 1
    tokens, likely_ids, likely = (torch.cat(found).to(device) for found in parts.values())
    corpus = Corpus(tokens.long(), likely_ids, likely, features or read_features)
    return [Sequence(corpus, *place) for place in places]


def have_features(folder: Path) -> bool:
    """Whether every shard in `folder` holds its features."""
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            if not shard.get_slice("features").get_shape()[1]:
                return False
    return True


def read_features(sequences: list[Sequence]) -> Tensor:
    """`[N, longest - 1, taps · hidden]` from the shards, bfloat16, zero behind each sequence's end."""
    rows = []
    for sequence in sequences:
        with safe_open(sequence.shard, "pt") as shard:
            first = sequence.first_feature
            rows.append(shard.get_slice("features")[first : first + sequence.length - 1])
    padded = rows[0].new_zeros(len(rows), max(map(len, rows)), rows[0].shape[1])
    for index, found in enumerate(rows):
        padded[index, : len(found)] = found
    return padded.to(sequences[0].corpus.tokens.device)
