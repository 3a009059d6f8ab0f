"""Teacher data on disk: one safetensors file a batch, written whole or not at all, read a sequence at a time.

Tensors: `tokens` int32 `[Σ length]`, `lengths`, `prompt_lengths`, `features` bfloat16 `[Σ (length - 1), taps · hidden]`,
`likely_ids` int32 and `likely` bfloat16 `[Σ answer tokens, TEACHER_CANDIDATES]`.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_mini_lab.drafters.checkpoint import save_tensors
from dflash_mini_lab.files import replacing
from dflash_mini_lab.training.teacher import Trajectory


@dataclass(frozen=True)
class Sequence:
    """One trajectory on disk. `tokens [length]` int64; features and teacher candidates are read when they are asked for."""

    tokens: Tensor
    prompt_length: int
    shard: Path
    first_feature: int
    first_answer: int

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens) - self.prompt_length


def write_shard(path: Path, trajectories: Iterable[Trajectory]) -> int:
    """Returns the number of answer tokens written."""
    found = list(trajectories)
    tensors = {
        "tokens": torch.tensor([token for t in found for token in t.tokens], dtype=torch.int32),
        "lengths": torch.tensor([len(t.tokens) for t in found]),
        "prompt_lengths": torch.tensor([t.prompt_length for t in found]),
        "features": torch.cat([t.features.flatten(1) for t in found]).bfloat16(),
        "likely_ids": torch.cat([t.likely_ids for t in found]),
        "likely": torch.cat([t.likely for t in found]),
    }
    with replacing(path) as part:
        save_tensors(tensors, part)
    return sum(len(t.tokens) - t.prompt_length for t in found)


def read_sequences(folder: Path) -> list[Sequence]:
    """Every trajectory of the shards in `folder`, in the order of the file names."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as shard:
            tokens = shard.get_tensor("tokens").long()
            lengths, prompts = shard.get_tensor("lengths").tolist(), shard.get_tensor("prompt_lengths").tolist()
            token, feature, answer = 0, 0, 0
            for length, prompt in zip(lengths, prompts, strict=True):
                found.append(Sequence(tokens[token : token + length], prompt, path, feature, answer))
                token, feature, answer = token + length, feature + length - 1, answer + length - prompt
    return found


def read_features(sequence: Sequence) -> Tensor:
    """`[length - 1, taps · hidden]`, bfloat16."""
    with safe_open(sequence.shard, "pt") as shard:
        rows = len(sequence.tokens) - 1
        return shard.get_slice("features")[sequence.first_feature : sequence.first_feature + rows]


def read_likely(sequence: Sequence) -> tuple[Tensor, Tensor]:
    """The target's likeliest ids (int64) and their probabilities (float32), `[answer tokens, candidates]` each."""
    with safe_open(sequence.shard, "pt") as shard:
        rows = slice(sequence.first_answer, sequence.first_answer + sequence.answer_tokens)
        return shard.get_slice("likely_ids")[rows].long(), shard.get_slice("likely")[rows].float()
