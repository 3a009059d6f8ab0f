"""The Qwen3 study's drafter in miniature on a real tiny Qwen3: three taps, a width of its own, a window on the features.

Round after round its context is what a fresh session would have, wherever a draft is rejected; and every method's text is exact.
"""
from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from tests.tables import random_heads
from tests.tiny_models import (
    HIDDEN,
    POSITIONS,
    VOCABULARY,
    TickingClock,
    paths_of,
    plain_greedy,
    random_ids,
    tiny_model,
    tiny_target,
)

from dflash_mini_lab.decoding import decode
from dflash_mini_lab.drafters.block import BlockDrafter
from dflash_mini_lab.drafters.checkpoint import DRAFT_TO_TARGET, DrafterConfig
from dflash_mini_lab.drafters.layout import tensor_shapes
from dflash_mini_lab.methods import METHODS

WIDTH, BLOCK, WINDOW = 16, 6, 4
PATHS = ("lean", "static", "library")


@cache
def drafter_for(path: str, window: int | None = WINDOW) -> BlockDrafter:
    """Random float64 weights, so that a feature more or less in the context shows in every score."""
    taps = (0, 1, 2) if path == "library" else (0, 1, 3)  # the library norms its last layer's output
    config = DrafterConfig(
        WIDTH, 32, 2, 8, 8, 2, BLOCK, taps, 7, 4, VOCABULARY, target_name="tiny", target_hidden_size=HIDDEN, window=window
    )
    generator = torch.Generator().manual_seed(4)
    tensors = {
        name: ("norm" in name) + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in tensor_shapes(config).items()
    }
    tensors[DRAFT_TO_TARGET] = torch.arange(0, VOCABULARY, 2, dtype=torch.int32)
    embedding = tiny_target("qwen3", path).embedding
    head = tiny_model("qwen3").get_output_embeddings().weight.detach()
    heads = random_heads(VOCABULARY, WIDTH, BLOCK - 1, offsets=(2, 4), seed=1)
    return BlockDrafter(config, tensors, embedding, head, POSITIONS, measure=False, heads=heads)


def fresh_scores(path: str, committed: list[int]) -> np.ndarray:
    """What a new session that has read `committed[:-1]` as its prompt drafts after `committed[-1]`."""
    drafter = drafter_for("library" if path == "library" else "lean")
    session = tiny_target("qwen3", "library" if path == "library" else "lean").start(committed[:-1], POSITIONS, drafter.taps)
    session.prefill()
    return drafter.start(session, POSITIONS).draft(committed).logits()[0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("prompt_length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_rounds_deep_a_draft_is_a_fresh_session_s_wherever_a_rejection_was(path: str, prompt_length: int) -> None:
    prompt = random_ids(prompt_length, 3)
    answer = plain_greedy("qwen3", prompt, 60)
    target, drafter = tiny_target("qwen3", path), drafter_for(path)
    session = target.start(prompt, POSITIONS, drafter.taps)
    drafting = drafter.start(session, POSITIONS)
    committed = [*prompt, session.prefill()]
    for accepted in (0, 5, 1, 4, 2, 3, 0, 0, 5, 5, 1, 0):
        scores = drafting.draft(committed).logits()[0]
        np.testing.assert_allclose(scores, fresh_scores(path, committed), rtol=0, atol=1e-5)
        done = len(committed) - prompt_length
        wrong = [(token + 1) % VOCABULARY for token in answer[done + accepted :]]
        proposal = [*answer[done : done + accepted], *wrong][: BLOCK - 1]
        greedy = session.verify([committed[-1], *proposal])
        session.keep(accepted + 1)
        committed += greedy[: accepted + 1]
        assert committed[prompt_length:] == answer[: len(committed) - prompt_length]


def test_the_window_is_what_a_draft_depends_on() -> None:
    drafter, everything = drafter_for("lean"), drafter_for("lean", window=None)

    def scores(of: BlockDrafter, features: torch.Tensor) -> np.ndarray:
        class Session:
            def take_features(self) -> torch.Tensor:
                return features

        return of.start(Session(), POSITIONS).draft(list(range(9))).logits()[0]  # type: ignore[arg-type]

    features = torch.randn(8, 3 * HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    other = features.clone()
    other[: 8 - WINDOW] = 0
    assert np.array_equal(scores(drafter, features), scores(drafter, other))
    assert not np.allclose(scores(everything, features), scores(everything, other))
    other[8 - WINDOW] = 0
    assert not np.allclose(scores(drafter, features), scores(drafter, other))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.slug)
def test_every_method_answers_as_plain_greedy_decoding_does(method) -> None:
    for path, (seed, length) in product(paths_of(method), enumerate((2, 11))):
        prompt = random_ids(length, seed)
        decoded = decode(tiny_target("qwen3", path), prompt, method, 24, TickingClock(), drafter_for(path))
        assert list(decoded.tokens) == plain_greedy("qwen3", prompt, 24)
        if method.key not in ("00", "08"):
            assert max(step.proposed for step in decoded.steps) > 0
