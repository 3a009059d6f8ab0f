"""A whole model in a folder, as a user would pass it: tiny random weights in safetensors and a small real tokenizer."""
from __future__ import annotations

import socket
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from dflash_mini_lab.artifacts import write_manifest
from dflash_mini_lab.drafters.checkpoint import save_checkpoint
from dflash_mini_lab.training.model import TrainableDrafter
from dflash_mini_lab.training.recipe import Recipe, drafter_config

WORDS = [*"abcdefghijklm", "why", "is", "the", "sky", "water"]
TOKENS = 4 + len(WORDS)
GEMMA_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


def save_tiny_model(folder: Path, positions: int = 320, layers: int = 4, family: str = "llama") -> Path:
    """`folder` with config.json, model.safetensors and a word-level tokenizer (unknown words become one token)."""
    save_tokenizer(folder)
    torch.manual_seed(5)
    config = AutoConfig.for_model(
        family, vocab_size=TOKENS, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=positions, bos_token_id=1, eos_token_id=2, initializer_range=0.3,
        tie_word_embeddings=True, head_dim=16,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))
    return folder


def save_tokenizer(folder: Path) -> None:
    ids = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", "<mask>", *WORDS])}
    words = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", mask_token="<mask>"
    )
    tokenizer.save_pretrained(str(folder))


def family_config(family: str, **changes: object) -> PreTrainedConfig:
    """A tiny model of `family`; Gemma3 with the pattern of its layers, and a window of 12 tokens, as Mistral has."""
    shape = {
        "vocab_size": TOKENS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 320, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    }  # fmt: skip
    kinds = {
        "llama": (LlamaConfig, {"tie_word_embeddings": True}),
        "qwen2": (Qwen2Config, {"tie_word_embeddings": False}),
        "qwen3": (Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
        "lfm2": (Lfm2Config, {"full_attn_idxs": [1, 3], "block_multiple_of": 32}),
        "gemma3": (Gemma3TextConfig, {"head_dim": 16, "sliding_window": 12, "layer_types": GEMMA_LAYERS}),
        "mistral": (MistralConfig, {"head_dim": 16, "sliding_window": 12}),
    }
    kind, own = kinds[family]
    return kind(**{**shape, **own, **changes})


def save_family(folder: Path, config: PreTrainedConfig, dtype: torch.dtype = torch.float32, shards: str = "1GB") -> Path:
    """Random weights large enough that answers wander. Rows of the head past the tokenizer win wherever they are let."""
    save_tokenizer(folder)
    torch.manual_seed(9)  # one at which no family says the same token over and over
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            embeds = name.endswith(("embed_tokens.weight", "lm_head.weight"))
            centre = float(parameter.dim() == 1 and config.model_type != "gemma3_text")  # Gemma's norms multiply by 1 + weight
            parameter.normal_(centre, 0.1 if embeds else 0.4)
            if embeds:
                parameter[TOKENS:] *= 10
    model.to(dtype).save_pretrained(str(folder), max_shard_size=shards)
    return folder


def save_random_drafter(folder: Path, target: str, config: PreTrainedConfig) -> Path:
    """Made as `--prepare` would make it for a target of this config, and not trained; it scores the target's whole head."""
    made_for = drafter_config(Recipe(block_size=5, layers=1, taps=2), config, target, 3, config.vocab_size)
    torch.manual_seed(1)
    folder.mkdir()
    save_checkpoint(folder, made_for, dict(TrainableDrafter(made_for).state_dict()))
    write_manifest(folder, target)
    return folder


def refuse_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **options: object) -> NoReturn:
        raise AssertionError("nothing may reach for the network")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
