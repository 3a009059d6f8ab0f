"""A whole model in a folder, as a user would pass it: a tiny random Llama or Qwen3 in safetensors and a small real tokenizer."""
from __future__ import annotations

import socket
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

WORDS = [*"abcdefghijklm", "why", "is", "the", "sky", "water"]


def save_tiny_model(folder: Path, positions: int = 320, layers: int = 4, family: str = "llama") -> Path:
    """`folder` with config.json, model.safetensors and a word-level tokenizer (unknown words become one token)."""
    ids = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", "<mask>", *WORDS])}
    words = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", mask_token="<mask>"
    )
    tokenizer.save_pretrained(str(folder))
    torch.manual_seed(5)
    config = AutoConfig.for_model(
        family, vocab_size=len(ids), hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=positions, bos_token_id=1, eos_token_id=2, initializer_range=0.3,
        tie_word_embeddings=True, head_dim=16,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))
    return folder


def refuse_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **options: object) -> NoReturn:
        raise AssertionError("nothing may reach for the network")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
