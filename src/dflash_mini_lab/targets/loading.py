"""From a catalogue entry to a verifier: tokenizer, stock model, and the target built from its weights.

The stock model is the gate's reference and is loaded as the library loads it; the target takes the weights over afterwards.
Hub ids go through huggingface_hub with its own cache and environment variables (`HF_HOME`, `HF_HUB_OFFLINE`).
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import logging as library_logging

from dflash_mini_lab.targets.captured_target import CapturedTarget
from dflash_mini_lab.targets.lean import LeanDecoder
from dflash_mini_lab.targets.lean_build import build_lean_decoder, unsupported_reason
from dflash_mini_lab.targets.lean_target import LeanTarget
from dflash_mini_lab.targets.library_target import LibraryDecoder, LibraryTarget
from dflash_mini_lab.targets.reading import read_model, refuse_missing
from dflash_mini_lab.targets.suitability import refuse_unsuitable
from dflash_mini_lab.types import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class LoadedTarget:
    """A target's parts, loaded when first asked for. `where`: a folder or a hub id, as `from_pretrained` takes it."""

    name: str
    where: str
    dtype: torch.dtype
    config: Any
    tokenizer: Any
    prompt_format: str
    stop_ids: frozenset[int]
    path_reason: str | None
    """Why the library path is used instead of the lean decoder; None on the lean path."""
    vocabulary: int
    """Ids that may be emitted: rows of a padded embedding beyond the tokenizer's last id are not among them."""
    device: str = "cpu"
    _stock: Any = field(default=None, repr=False)

    def stock_model(self) -> Any:
        """The library's model, loaded once and kept until `release_stock`."""
        if self._stock is None:
            self._stock = self._read()
        return self._stock

    def _read(self) -> Any:
        with _explained(self.where):
            model, missing = read_model(self.where, self.config, self.dtype)
        refuse_missing(self.where, missing)
        return model.eval().to(self.device)

    def release_stock(self) -> None:
        self._stock = None

    def build(
        self, capacity: int, measure: bool = True, keep_stock: bool = False, full_logits: bool = False
    ) -> LeanTarget | LibraryTarget:
        """The verifier, for sequences of up to `capacity` tokens. Unless `keep_stock`, its weights are taken from the stock
        model, which is then gone. `measure=False`: stock products; `full_logits`: every logit of every row."""
        if self.path_reason is None:
            stock = self.stock_model()
            decoder = build_lean_decoder(stock, capacity, measure, consume=not keep_stock, screen=not full_logits)
            kind = LeanTarget if self.device == "cpu" else CapturedTarget
            target: LeanTarget | LibraryTarget = kind(decoder, self.stop_ids, self.vocabulary, full_logits=full_logits)
        else:
            model = self._read() if keep_stock else self.stock_model()
            target = LibraryTarget(model, self.stop_ids, self.vocabulary, measure, full_logits=full_logits)
        if not keep_stock:
            self.release_stock()
        return target

    def decoder(self, capacity: int) -> LeanDecoder | LibraryDecoder:
        """What continues batches of prompts, for training data, which needs every logit; the stock model's weights go into it."""
        stock = self.stock_model()
        self.release_stock()
        return LibraryDecoder(stock) if self.path_reason else build_lean_decoder(stock, capacity, consume=True, screen=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a user's prompt, inside the chat template where the target has one. Raises UserError if empty."""
        return self.encode_prompts([text])[0]

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_prompt` of each; the tokenizer takes many at once several times faster."""
        if not all(text.strip() for text in texts):
            raise UserError("A prompt is empty: there is nothing to continue.")
        if self.prompt_format == "chat":
            texts = [self._in_template(text) for text in texts]
        special = self.prompt_format != "chat"  # a template writes its own
        return self.tokenizer(list(texts), add_special_tokens=special)["input_ids"] if texts else []

    def _in_template(self, text: str) -> str:
        turns = [{"role": "user", "content": text}]
        try:
            return self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise UserError(f"{self.where}: its chat template refuses a user's turn ({error}).") from error

    def decode_text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def facts(self) -> dict[str, Any]:
        """What benchmark.json records of the model itself."""
        template = self.tokenizer.chat_template if self.prompt_format == "chat" else None
        return {
            "family": self.config.model_type,
            "layers": self.config.num_hidden_layers,
            "hidden_size": self.config.hidden_size,
            "vocabulary": self.vocabulary,
            "max_positions": self.config.max_position_embeddings,
            "prompt_format": self.prompt_format,
            "chat_template_sha256": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
            "path": "lean" if self.path_reason is None else "library",
            "path_reason": self.path_reason,
        }


def load_target(
    name: str, where: str | Path, dtype: str = "float32", prompt_format: str | None = None, device: str = "cpu"
) -> LoadedTarget:
    """Config, tokenizer and stop tokens of the model at `where` (a folder or a hub id); the weights wait until needed.

    `prompt_format`: `chat`, `plain`, or None for chat where the tokenizer has a template. Raises UserError where the model
    cannot be read, is none that the lab can run, or `chat` is asked for without a template.
    """
    if dtype not in DTYPES:
        raise UserError(f"Unknown dtype {dtype!r}; known: {', '.join(DTYPES)}.")
    where = str(where)
    library_logging.disable_progress_bar()
    config = _from_pretrained(AutoConfig, where)
    refuse_unsuitable(where, config)
    tokenizer = _from_pretrained(AutoTokenizer, where)
    if prompt_format == "chat" and not tokenizer.chat_template:
        raise UserError(f"{where}: no chat template, so its prompts must be plain text.")
    loaded = LoadedTarget(
        name=name,
        where=where,
        dtype=DTYPES[dtype],
        config=config,
        tokenizer=tokenizer,
        prompt_format=prompt_format or ("chat" if tokenizer.chat_template else "plain"),
        stop_ids=_stop_ids(where, config),
        path_reason=unsupported_reason(config),
        vocabulary=min(config.vocab_size, 1 + max(tokenizer.get_vocab().values(), default=-1)),  # len() would miss ids after gaps
        device=device,
    )
    loaded.encode_prompt("A template that fails should fail now.")
    return loaded


def _stop_ids(where: str, config: Any) -> frozenset[int]:
    try:
        stops = GenerationConfig.from_pretrained(where).eos_token_id
    except OSError:
        stops = None
    if stops is None:
        stops = config.eos_token_id
    return frozenset(() if stops is None else [stops] if isinstance(stops, int) else stops)


def _from_pretrained(loader: Any, where: str) -> Any:
    with _explained(where):
        return loader.from_pretrained(where)


@contextmanager
def _explained(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library raises anything for a file that is not as it should be: the user's news
        reason = " ".join(str(error).split())
        raise UserError(f"{where}: cannot be loaded ({reason[:300]}).") from error
