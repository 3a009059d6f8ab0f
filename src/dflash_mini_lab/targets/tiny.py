"""The tiny reference on disk: two Llama layers over ASCII characters, and how text becomes ids and ids text.

`target.json` and `target.safetensors` (the Llama tensor names), beside the drafter in its published layout. Reading and checking
only; NumPy and safetensors are all that it needs.
"""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from dflash_mini_lab.types import UserError

CONFIG_FILE, TENSOR_FILE = "target.json", "target.safetensors"
MASK, START, END = 0, 2, 3
"""ASCII's own control characters: NUL is the drafter's mask token, STX opens every text, ETX ends it."""
FIRST_LETTER, LAST_LETTER, UNKNOWN = 32, 126, "?"


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


def encode(text: str) -> list[int]:
    """STX, then a character an id: ASCII's own codes. White space is a blank, anything else that ASCII cannot write a `?`."""
    blanks = "".join(" " if letter.isspace() else letter for letter in text)
    known = (letter if FIRST_LETTER <= ord(letter) <= LAST_LETTER else UNKNOWN for letter in blanks)
    return [START, *map(ord, known)]


def decode(ids: Sequence[int]) -> str:
    """The letters of `ids`; control characters are not shown."""
    return "".join(chr(identity) for identity in ids if FIRST_LETTER <= identity <= LAST_LETTER)


def tensor_shapes(config: TinyConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the target with its shape."""
    hidden, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}."
        shapes |= {
            layer + "self_attn.q_proj.weight": (config.num_attention_heads * d, hidden),
            layer + "self_attn.k_proj.weight": (config.num_key_value_heads * d, hidden),
            layer + "self_attn.v_proj.weight": (config.num_key_value_heads * d, hidden),
            layer + "self_attn.o_proj.weight": (hidden, config.num_attention_heads * d),
            layer + "mlp.gate_proj.weight": (inner, hidden),
            layer + "mlp.up_proj.weight": (inner, hidden),
            layer + "mlp.down_proj.weight": (hidden, inner),
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
        }
    return shapes


def read(folder: Path) -> tuple[TinyConfig, dict[str, np.ndarray]]:
    """Config and tensors, every shape checked. Raises UserError naming the file and what does not fit."""
    try:
        facts: Mapping[str, float] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        config = TinyConfig(**{field.name: facts[field.name] for field in fields(TinyConfig)})  # type: ignore[arg-type]
        tensors = load_file(folder / TENSOR_FILE)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"{folder}: the tiny target cannot be read ({type(error).__name__}: {error}).") from error
    for name, shape in tensor_shapes(config).items():
        found = tensors[name].shape if name in tensors else "absent"
        if found != shape:
            raise UserError(f"{folder / TENSOR_FILE}: tensor {name} is {found}, the config says {shape}.")
    return config, tensors
