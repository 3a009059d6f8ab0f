"""A whole benchmark in milliseconds: a tiny random Llama as target and library model, a drafter that knows part of the answer,
and a clock that moves by itself. For tests of everything around decoding."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_mini_lab.benchmark.engine import Engine, Model
from dflash_mini_lab.benchmark.run import measure
from dflash_mini_lab.exactness import reference_greedy
from dflash_mini_lab.prompts import Prompt
from dflash_mini_lab.settings import Settings
from dflash_mini_lab.targets.lean_build import build_lean_decoder
from dflash_mini_lab.targets.lean_target import LeanSession, LeanTarget
from dflash_mini_lab.types import Heads

torch.set_num_threads(1)  # products this small are slower on two, and far slower beside other tests
VOCABULARY, POSITIONS, BLOCK = 67, 96, 4
PROMPTS = (Prompt("one", "own", "abc"), Prompt("two", "own", "a longer text"))
CALIBRATION = (Prompt("tune", "own", "hello"),)


class FakeClock:
    """Every reading is a tick after the last one. Ticks are binary fractions, so sums of differences are exact."""

    def __init__(self, tick: float = 2.0**-10) -> None:
        self.tick, self.readings = tick, 0

    def now(self) -> float:
        self.readings += 1
        return self.readings * self.tick


@lru_cache(maxsize=1)
def stock_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=POSITIONS, eos_token_id=None, bos_token_id=None, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def encode(text: str) -> list[int]:
    return [ord(letter) % VOCABULARY for letter in text]


@cache
def continuation(prompt_ids: tuple[int, ...], budget: int) -> tuple[int, ...]:
    return reference_greedy(stock_model(), prompt_ids, budget, frozenset(), POSITIONS).tokens


def greedy(prompt_ids: Sequence[int], budget: int) -> list[int]:
    return list(continuation(tuple(prompt_ids), budget))


@dataclass(frozen=True)
class TableDraft:
    """Two candidates a slot: `tokens` first, with `margins` to the second."""

    committed: Sequence[int]
    tokens: list[int]
    margins: list[float]

    @property
    def anchor(self) -> int:
        return self.committed[-1]

    @property
    def slots(self) -> int:
        return len(self.tokens)

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        ids = np.array([[token, (token + 1) % VOCABULARY] for token in self.tokens])
        scores = np.array([[margin, 0.0] for margin in self.margins], dtype=np.float32)
        return ids[:, :k], scores[:, :k]

    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        ids, scores = self.top(2)
        logits = np.full((self.slots, VOCABULARY), -9.0, dtype=np.float32)
        np.put_along_axis(logits, ids, scores, 1)
        return logits, np.arange(VOCABULARY)


@dataclass
class KnowingDrafter:
    """Drafts the true continuation, with a wrong and unsure token wherever the position divides by `wrong_every`."""

    wrong_every: int = 3
    block_size: int = BLOCK
    taps: tuple[int, ...] = (0,)
    heads: Heads = field(default_factory=Heads)

    def start(self, session: Any, capacity: int, needs: Sequence[str] = ()) -> KnowingDrafter:
        return self

    def draft(self, committed: Sequence[int]) -> TableDraft:
        slots = self.block_size - 1
        wrong = [(len(committed) + slot) % self.wrong_every == 0 for slot in range(slots)]
        padded = (greedy(committed, slots) + [0] * slots)[:slots]
        tokens = [(token + 1) % VOCABULARY if bad else token for token, bad in zip(padded, wrong, strict=True)]
        return TableDraft(committed, tokens, [0.1 if bad else 3.0 for bad in wrong])


class LyingTarget(LeanTarget):
    """Gives a wrong token in every verify call from the second on: the bug that the gate is there for."""

    def start(self, prompt_ids: Sequence[int], capacity: int, taps: Sequence[int] | None) -> LeanSession:
        return LyingSession(self, prompt_ids, capacity, taps)


class LyingSession(LeanSession):
    calls = 0

    def verify(self, tokens: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        self.calls += 1
        honest, lies = super().verify(tokens, parents), self.calls >= 2
        return [(token + 1) % VOCABULARY for token in honest] if lies else honest


def tiny_model(
    drafter: KnowingDrafter | None = None, target_class: type[LeanTarget] = LeanTarget, dtype: str = "float32"
) -> Model:
    drafter = drafter or KnowingDrafter()
    stops: frozenset[int] = frozenset()

    @contextmanager
    def stock() -> Iterator[Any]:
        yield stock_model()

    def build(capacity: int) -> Engine:
        target = target_class(build_lean_decoder(stock_model(), capacity, measure=False), stops, VOCABULARY)

        def path_logits(prompt_ids: Sequence[int]) -> Any:
            return lambda tokens: target.logits([*prompt_ids, *tokens])[len(prompt_ids) - 1 :].numpy()

        return Engine(target, drafter, path_logits, [plan.as_json() for plan in target.plans], {})  # type: ignore[arg-type]

    facts = {
        "name": "tiny", "source": "random", "license": None, "family": "llama", "parameters": 1000, "layers": 2,
        "hidden_size": 32, "vocabulary": VOCABULARY, "dtype": dtype, "device": "cpu", "prompt_format": "plain",
        "chat_template_sha256": None, "weights_sha256": "0" * 64, "weights_bytes": 4000,
        "path": "lean", "path_reason": None, "max_positions": POSITIONS,
    }  # fmt: skip
    drafter_facts = {
        "name": "tiny", "files": [{"name": "model.safetensors", "sha256": "1" * 64, "bytes": 10}], "block_size": BLOCK,
        "taps": [0], "layers": 1, "draft_vocabulary": VOCABULARY, "parameters": 10, "provenance": {"made": "for a test"},
    }  # fmt: skip
    return Model(
        stop_ids=stops, max_positions=POSITIONS, block_size=BLOCK, encode_prompt=encode, decode_text=lambda ids: str(list(ids)),
        stock=stock, build=build, target_facts=facts, drafter_facts=drafter_facts,
    )  # fmt: skip


def settings(folder: Path, **changes: Any) -> Settings:
    small: dict[str, Any] = {
        "tokens": 12, "repeats": 2, "methods": ("00", "01", "08"), "calibration_tokens": 8,
        "output_dir": folder,
    }  # fmt: skip
    return Settings(**{**small, **changes})


def run(options: Settings, model: Model | None = None, **changes: Any) -> int:
    """`measure` on the tiny lab; `changes` replace its arguments."""
    arguments: dict[str, Any] = {
        "model": model or tiny_model(), "prompts": PROMPTS, "calibration_prompts": CALIBRATION, "clock": FakeClock(),
    }  # fmt: skip
    return measure(options, ["run_cpu.py"], **{**arguments, **changes})
