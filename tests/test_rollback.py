"""Rollback: after any rejection, the next logits are those of a fresh prefill of the committed tokens."""
from __future__ import annotations

import pytest
import torch
from tests.tiny_models import (
    COMPILED,
    FAMILIES,
    POSITIONS,
    TAPS,
    VOCABULARY,
    WINDOW,
    WINDOWED,
    random_ids,
    tiny_model,
    tiny_target,
    tolerance,
)
from transformers import MambaConfig, MambaForCausalLM

from dflash_mini_lab.targets.library_target import LibraryTarget
from dflash_mini_lab.types import UserError


def features_of(family: str, ids: list[int]) -> torch.Tensor:
    hidden = tiny_model(family)(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([hidden[tap + 1][0] for tap in TAPS], dim=-1)


def expected_rows(family: str, ids: list[int], rows: int) -> list[int]:
    return tiny_model(family)(torch.tensor([ids])).logits[0, -rows:].argmax(-1).tolist()


PATHS = [(family, path) for family in FAMILIES for path in ("lean", "static", "library")]
PATHS += [(family, "library") for family in (*WINDOWED, "gpt2")] + [(family, "compiled") for family in COMPILED]


@pytest.mark.parametrize(("family", "path"), PATHS)
@torch.inference_mode()
def test_every_rejection_point_at_every_block_size_equals_a_fresh_prefill(family: str, path: str) -> None:
    """A windowed family's sequences begin inside the window, cross its edge at every place, or begin far past it."""
    target = tiny_target(family, path)
    for block in range(2, 9):
        for first_kept in range(block + 1):
            length = 9 + (first_kept % 3) * WINDOW if family in WINDOWED else 9
            prompt = random_ids(length, seed=block)
            session = target.start(prompt, 100, TAPS)
            session.prefill()
            committed = list(prompt)
            session.take_features()
            for deep in range(3):
                rows = random_ids(block, seed=100 * block + 10 * first_kept + deep)
                assert session.verify(rows) == expected_rows(family, committed + rows, block)
                kept = (first_kept + deep * 3) % (block + 1)
                session.keep(kept)
                taken = session.take_features()
                committed += rows[:kept]
                assert session.length == len(committed)
                expected = features_of(family, committed)[len(committed) - kept :].to(taken.dtype)
                torch.testing.assert_close(taken, expected, rtol=0, atol=tolerance(path))


@pytest.mark.parametrize(("family", "path"), PATHS)
def test_the_single_row_path_equals_the_verify_path(family: str, path: str) -> None:
    prompt = random_ids(7, seed=1)
    plain, checked = tiny_target(family, path).start(prompt, 60, None), tiny_target(family, path).start(prompt, 60, TAPS)
    one, other = plain.prefill(), checked.prefill()
    for _ in range(30):
        assert one == other
        one, (other,) = plain.decode_one(one), checked.verify([other])
        checked.keep(1)


def test_the_library_path_refuses_to_verify_on_a_session_that_records_nothing() -> None:
    session = tiny_target("lfm2", "library").start(random_ids(5, 0), 20, None)
    session.prefill()
    with pytest.raises(RuntimeError, match="cannot be rolled back"):
        session.verify([4, 5])


def test_a_cache_that_keeps_no_history_is_refused_at_the_prefill() -> None:
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=4, state_size=4)
    config.max_position_embeddings = POSITIONS
    target = LibraryTarget(MambaForCausalLM(config).eval(), frozenset(), VOCABULARY, measure=False)
    with pytest.raises(UserError, match="cannot be rolled back: LinearAttentionLayer of transformers keeps no history"):
        target.start(random_ids(5, 0), 20, TAPS).prefill()


@pytest.mark.parametrize("path", ["lean", "static", "library"])
@pytest.mark.parametrize("rows", [-1, 4])
def test_keeping_rows_that_the_call_did_not_have_is_refused(path: str, rows: int) -> None:
    session = tiny_target("llama", path).start(random_ids(5, 0), 20, TAPS)
    session.prefill()
    session.verify([4, 5, 6])
    with pytest.raises(ValueError, match="3 rows"):
        session.keep(rows)
