"""Tiny random models of every family, and drafters that are always right, always wrong or random, for tests of the loop."""
from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tests.tables import random_heads
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from dflash_mini_lab.packed_linear import PREFETCHED, LinearPlan
from dflash_mini_lab.prefetched_linear import kernel
from dflash_mini_lab.targets.captured_target import CapturedTarget
from dflash_mini_lab.targets.lean import LeanDecoder
from dflash_mini_lab.targets.lean_build import build_lean_decoder
from dflash_mini_lab.targets.lean_target import LeanTarget
from dflash_mini_lab.targets.library_target import LibraryTarget
from dflash_mini_lab.targets.lm_head import ScreenedHead
from dflash_mini_lab.types import Heads, Method

VOCABULARY, HIDDEN = 61, 32
POSITIONS = 160
FAMILIES = ("llama", "qwen2", "qwen3", "lfm2")
COMPILED = ("plain llama", "qwen2", "qwen3", "plain lfm2")
"""Whose layers run as one compiled program: queries, keys and values alone have biases. Float32, so their values are right to
`tolerance`."""
WINDOWED = ("gemma3", "mistral", "windowed qwen2")
"""Run on the library path alone, some or all of their layers with a window of WINDOW tokens."""
WINDOW = 12
TAPS = (0, 2)
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def tiny_config(family: str):
    if family == "llama":
        return LlamaConfig(**_SHAPE, head_dim=8, attention_bias=True)
    if family == "plain llama":
        return LlamaConfig(**_SHAPE, head_dim=8)
    if family == "plain lfm2":
        return Lfm2Config(**_SHAPE, full_attn_idxs=[1, 3], conv_bias=False, block_auto_adjust_ff_dim=False)
    if family == "qwen2":
        return Qwen2Config(**_SHAPE, tie_word_embeddings=True)
    if family == "qwen3":
        return Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=False)
    if family == "gemma3":
        kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
        return Gemma3TextConfig(**_SHAPE, head_dim=8, sliding_window=WINDOW, layer_types=kinds)
    if family == "mistral":
        return MistralConfig(**_SHAPE, head_dim=8, sliding_window=WINDOW)
    if family == "windowed qwen2":
        return Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)
    if family == "gpt2":
        return GPT2Config(
            vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=4, n_head=4, n_positions=POSITIONS, eos_token_id=2, bos_token_id=1
        )
    return Lfm2Config(**_SHAPE, full_attn_idxs=[1, 3], conv_bias=True, block_auto_adjust_ff_dim=False)


@cache
def tiny_model(family: str, dtype: torch.dtype = torch.float64):
    """Random weights large enough that greedy answers wander instead of repeating one token."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and family != "gemma3" else 0.0, 0.3)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
    return model


def _norm(module, x: torch.Tensor) -> torch.Tensor:
    """The library computes its norms in float32 whatever the dtype, which would hide differences under 1e-7."""
    if hasattr(module, "eps"):  # Gemma's
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), 1 + module.weight, module.eps)
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


@cache
def tiny_target(family: str, path: str, stop_ids: frozenset[int] = frozenset(), full_logits: bool = False):
    """`path`: `lean`, `static` (the eager twin of captured steps), `library`, in float64, so that two orders of summation cannot
    choose two tokens; or `compiled`, which float32 alone has: layers, drafts and the screened head as programs of their own."""
    if path == "compiled":
        return LeanTarget(compiled_decoder(family), stop_ids, VOCABULARY, full_logits=full_logits)
    model = tiny_model(family)
    if path in ("lean", "static"):
        kind = LeanTarget if path == "lean" else CapturedTarget
        return kind(build_lean_decoder(model, POSITIONS, measure=False), stop_ids, VOCABULARY, full_logits=full_logits)
    return LibraryTarget(model, stop_ids, VOCABULARY, measure=False, full_logits=full_logits)


def compiled_decoder(family: str) -> LeanDecoder:
    """Skips the test where the machine has nothing to compile with."""
    if kernel() is None:
        pytest.skip("no LLVM, fused multiply-add or OpenMP here")

    def plan(weights: list[torch.Tensor]) -> LinearPlan:
        return LinearPlan(*weights[0].shape, PREFETCHED)

    def screen(_: list[torch.Tensor], found: LinearPlan, storage: str) -> LinearPlan:
        return replace(found, storage=storage)

    with patch.multiple("dflash_mini_lab.targets.lean_build", measure_plan=plan, rounded_plan=screen):
        decoder = build_lean_decoder(deepcopy(tiny_model(family)).float(), POSITIONS)
    assert decoder.compiled is not None
    assert isinstance(decoder.head, ScreenedHead)
    return decoder


def tolerance(path: str) -> float:
    """Of values that are compared with the library's in float64."""
    return 2e-4 if path == "compiled" else 1e-9


def paths_of(method: Method) -> tuple[str, ...]:
    """The paths of `tiny_target` on which a method runs: the library's modules verify no trees."""
    return ("lean", "static") if method.trees else ("lean", "static", "library")


def random_ids(count: int, seed: int) -> list[int]:
    order = random.Random(seed)
    return [order.randrange(3, VOCABULARY) for _ in range(count)]


def plain_greedy(family: str, prompt: Sequence[int], budget: int) -> list[int]:
    """Greedy decoding without a cache: the whole sequence is run again for every token. Ends at the last position."""
    return _plain_greedy(family, tuple(prompt), budget)


@cache
@torch.inference_mode()
def _plain_greedy(family: str, prompt: tuple[int, ...], budget: int) -> list[int]:
    ids, new = list(prompt), []
    while len(new) < budget and len(ids) <= POSITIONS:
        new.append(int(tiny_model(family)(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        ids.append(new[-1])
    return new


class ScriptedDraft:
    def __init__(self, committed: Sequence[int], tokens: Sequence[int], heads: Heads) -> None:
        self.committed, self.anchor, self.slots, self._tokens = committed, committed[-1], len(tokens), tokens
        self.heads, self._order = heads, np.random.default_rng(len(committed))

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        logits, _ = self.logits()
        ids = np.argsort(-logits, axis=1)[:, :k]
        return ids, np.take_along_axis(logits, ids, 1)

    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        """The token, then the ids after it; odd tokens have so small a margin that a method which draws takes the second too."""
        tokens, ids = np.array(self._tokens)[:, None], np.arange(VOCABULARY)
        rank = (ids - tokens) % VOCABULARY
        return np.where(rank == 0, np.where(tokens % 2, 0.01, 1.0), 1.0 - rank).astype(np.float32), ids

    def context(self) -> np.ndarray:
        return self._normal(HIDDEN)

    def states(self) -> np.ndarray:
        return self._normal(self.slots, HIDDEN)

    def jump(self, ids: np.ndarray) -> np.ndarray:
        return self._normal(*ids.shape)

    def embeddings(self, ids: np.ndarray) -> np.ndarray:
        return self._normal(*ids.shape, HIDDEN)

    def prefix_embedding(self) -> np.ndarray:
        return self._normal(HIDDEN)

    def _normal(self, *shape: int) -> np.ndarray:
        return self._order.normal(size=shape).astype(np.float32)


class ScriptedDrafter:
    """Drafts from the known answer. `kind`: `right`, `wrong`, or `random` (each slot right with probability 0.6)."""

    taps = TAPS

    def __init__(self, kind: str, prompt_length: int, answer: Sequence[int], block_size: int, seed: int = 0) -> None:
        self.kind, self.block_size, self.features_read = kind, block_size, 0
        self.heads = random_heads(VOCABULARY, HIDDEN, block_size - 1, seed=seed)
        self._prompt_length, self._answer, self._order = prompt_length, [*answer, *[5] * block_size], random.Random(seed)

    def start(self, session, capacity: int, needs: Sequence[str] = ()) -> ScriptedDrafter:
        self._session, self.features_read = session, 0
        return self

    def draft(self, committed: Sequence[int]) -> ScriptedDraft:
        features = self._session.take_features()
        self.features_read += len(features)
        assert self.features_read == len(committed) - 1, "the context must end right before the anchor"
        assert features.shape[1] == len(TAPS) * HIDDEN
        done = len(committed) - self._prompt_length
        tokens = self._answer[done : done + self.block_size - 1]
        if self.kind == "wrong":
            tokens = [(token + 1) % VOCABULARY for token in tokens]
        elif self.kind == "random":
            tokens = [token if self._order.random() < 0.6 else (token + 1) % VOCABULARY for token in tokens]
        return ScriptedDraft(committed, tokens, self.heads)


class TickingClock:
    """Every reading is one second after the last."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        self.seconds += 1.0
        return self.seconds
