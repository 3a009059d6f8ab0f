"""The tiny reference on disk: two Llama layers over the words of a small text, and how text becomes ids and ids text.

`target.json`, `target.safetensors` (the Llama tensor names) and `words.txt`, beside the drafter in its published layout. Reading
and checking only; NumPy and safetensors are all that it needs.
"""
from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from dflash_mini_lab.tensors import block_shapes, refuse_other_shapes
from dflash_mini_lab.types import UserError

CONFIG_FILE, TENSOR_FILE, WORD_FILE = "target.json", "target.safetensors", "words.txt"
MASK, UNKNOWN, START, END = range(4)
"""The first four words are none: the drafter's mask token, any word that the text has not, a text's start, and its end."""
SPECIAL = ("<mask>", "<unknown>", "<start>", "<end>")
PIECES = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
"""A word with its apostrophes, or one sign. White space only parts them."""
CLOSING = frozenset(".,;:?!)")
"""Signs with no blank before them."""


@dataclass(frozen=True)
class TinyConfig:
    """Field names are those of a Llama config. The embedding is the head as well."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float


class Words:
    """The vocabulary: a word's id is its line in `words.txt`, counted from 0."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words, self.ids = tuple(words), {word: identity for identity, word in enumerate(words)}

    @classmethod
    def of(cls, text: str) -> Words:
        """Every word and sign of `text`, the most frequent first, equally frequent ones by the alphabet."""
        counts = Counter(PIECES.findall(text))
        return cls([*SPECIAL, *sorted(counts, key=lambda word: (-counts[word], word))])

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        """START, then an id for each word and sign. A word that is only known in small letters is that one."""
        return [START, *(self.ids.get(piece, self.ids.get(piece.lower(), UNKNOWN)) for piece in PIECES.findall(text))]

    def decode(self, ids: Iterable[int]) -> str:
        """A blank and the word for each id, no blank before a closing sign. Start, end and mask are not shown."""
        known = (self.words[identity] for identity in ids if identity not in (MASK, START, END))
        return "".join(word if word in CLOSING else f" {word}" for word in known)


def tensor_shapes(config: TinyConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the target with its shape."""
    hidden = config.hidden_size
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    for index in range(config.num_hidden_layers):
        block = block_shapes(hidden, config.intermediate_size, heads, kv_heads, config.head_dim)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in block.items()}
    return shapes


def read(folder: Path) -> tuple[TinyConfig, dict[str, np.ndarray], Words]:
    """Config, tensors, every shape checked, and vocabulary. Raises UserError naming the file and what does not fit."""
    try:
        facts: Mapping[str, float] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        config = TinyConfig(**{field.name: facts[field.name] for field in fields(TinyConfig)})  # type: ignore[arg-type]
        tensors = load_file(folder / TENSOR_FILE)
        words = Words((folder / WORD_FILE).read_text(encoding="utf-8").split())
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"{folder}: the tiny target cannot be read ({type(error).__name__}: {error}).") from error
    refuse_other_shapes(folder / TENSOR_FILE, tensors, tensor_shapes(config))
    if len(words.ids) != config.vocab_size or words.words[: len(SPECIAL)] != SPECIAL:
        raise UserError(f"{folder / WORD_FILE}: has not {config.vocab_size} different words that begin with {SPECIAL}.")
    return config, tensors, words
