"""The step of fixed shape: what it computes, what crosses to and from it, and that it can be recorded and replayed.

That it rolls back and decodes as every other path does is tested with them (test_rollback.py, test_decoding.py).
"""
from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.tables import path_to, random_parents
from tests.test_tree_rollback import fresh_logits
from tests.tiny_models import FAMILIES, POSITIONS, TAPS, VOCABULARY, plain_greedy, random_ids, tiny_model, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflash_mini_lab.crossings import Crossings
from dflash_mini_lab.targets.captured_target import WIDEST, CapturedSession, CapturedTarget
from dflash_mini_lab.targets.graphs import CapturedStep, StaticState
from dflash_mini_lab.targets.lean_build import build_lean_decoder


def new_target(family: str, capture: bool | None = None) -> CapturedTarget:
    decoder = build_lean_decoder(tiny_model(family), POSITIONS, measure=False)
    return CapturedTarget(decoder, frozenset(), VOCABULARY, capture=capture)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_the_logits_of_every_width_equal_the_library_s(family: str) -> None:
    target = tiny_target(family, "static")
    session = target.start(random_ids(6, 1), 100, TAPS)
    session.prefill()
    committed = random_ids(6, 1)
    for rows, kept in ((1, 1), (5, 2), (8, 8), (2, 0), (4, 3), (1, 0), (7, 1)):
        tokens = random_ids(rows, 50 + rows)
        session.verify(tokens)
        expected = tiny_model(family)(torch.tensor([committed + tokens])).logits[0, -rows:]
        torch.testing.assert_close(target.step(TAPS, rows).logits, expected, rtol=0, atol=1e-9)
        session.keep(kept)
        committed += tokens[:kept]


class Recorded(TorchDispatchMode):
    """A step's kernels as they ran once, with every tensor where it was then: all that a CUDA graph knows."""

    def __init__(self, step: CapturedStep) -> None:
        super().__init__()
        self.kernels: list[tuple[Any, Any, Any, Any]] = []
        windows = {index: window.clone() for index, window in step.state.windows.items()}
        with self:
            step._body()
        for index, window in windows.items():
            step.state.windows[index].copy_(window)

    def __torch_dispatch__(self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = kernel(*args, **(kwargs or {}))
        self.kernels.append((kernel, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        for kernel, args, kwargs, made in self.kernels:
            for there, again in zip(tensors(made), tensors(kernel(*args, **kwargs)), strict=True):
                if there.data_ptr() != again.data_ptr():  # neither in place nor a view: the result belongs where it was
                    there.copy_(again)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_step_that_was_recorded_once_replays_at_every_length_and_after_every_rollback(family: str) -> None:
    """A length, or a count of kept rows, that had been read on the host would be frozen into the recording."""
    target = new_target(family)
    for rows in (1, 3, 5):
        step: Any = target.step(TAPS, rows)
        step._graph = Recorded(step)
        step._body = None
    session = target.start(random_ids(6, 1), 100, TAPS)
    session.prefill()
    committed = random_ids(6, 1)
    for turn, (rows, kept) in enumerate(((3, 1), (3, 3), (1, 1), (5, 2), (3, 0), (5, 5), (1, 1))):
        tokens = random_ids(rows, turn)
        expected = tiny_model(family)(torch.tensor([committed + tokens])).logits[0, -rows:]
        assert session.verify(tokens) == expected.argmax(-1).tolist()
        torch.testing.assert_close(target.step(TAPS, rows).logits, expected, rtol=0, atol=1e-9)
        session.keep(kept)
        committed += tokens[:kept]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_step_for_trees_that_was_recorded_once_replays_for_every_tree(family: str) -> None:
    """Of one recording: other trees, other lengths, other rows kept; chains in between."""
    target, order = new_target(family), random.Random(4)
    for rows in (3, 6):
        step: Any = target.step(TAPS, rows, trees=True)
        step._graph = Recorded(step)
        step._body = None
    session = target.start(random_ids(6, 1), 100, TAPS)
    session.prefill()
    committed = random_ids(6, 1)
    for turn, rows in enumerate((6, 3, 6, 6, 3, 6)):
        tokens, parents = random_ids(rows, turn), random_parents(rows, order)
        expected = fresh_logits(family, committed, tokens, parents)
        assert session.verify(tokens, parents) == expected.argmax(-1).tolist()
        torch.testing.assert_close(target.step(TAPS, rows, trees=True).logits, expected, rtol=0, atol=1e-9)
        kept = path_to(order.randrange(rows), parents)
        session.keep(kept)
        committed += [tokens[row] for row in kept]
        chain = random_ids(2, 50 + turn)
        assert session.verify(chain) == fresh_logits(family, committed, chain, [-1, 0]).argmax(-1).tolist()
        session.keep(1)
        committed += chain[:1]


def test_what_a_capture_finds_in_the_buffer_is_a_tree_whose_rows_see_something() -> None:
    """Attention over nothing may give NaN, and NaN in the state outlives any mask: it counts zero times, which is NaN."""
    step = new_target("lfm2").step(TAPS, 4, trees=True)
    assert step.tree is not None
    assert (step.tree.hidden(step.decoder.embedding) == 0).any(dim=1).all()


def test_a_round_sends_its_tokens_and_two_numbers_and_receives_one_token_a_row() -> None:
    target = new_target("lfm2")
    session = target.start(random_ids(6, 1), 100, TAPS)
    session.prefill()
    before = target.crossings.as_json()
    session.verify(random_ids(5, 2))
    after = target.crossings.as_json()
    counted = {way: (after[way]["count"] - before[way]["count"], after[way]["bytes"] - before[way]["bytes"]) for way in after}
    assert counted == {"to_device": (1, 8 * (5 + 2)), "to_host": (1, 8 * 5)}
    assert after["to_host"]["seconds"] > before["to_host"]["seconds"] > 0


def test_a_round_of_a_tree_sends_its_table_as_well_and_then_the_rows_that_stay_unless_they_are_the_first() -> None:
    target = new_target("lfm2")
    session = target.start(random_ids(6, 1), 100, TAPS)
    session.prefill()
    table = 3 * (1 + target.decoder.history + 3)
    for kept, rows in (([0, 2], 8 * 2), ([0, 1], 0)):
        before = target.crossings.as_json()
        session.verify(random_ids(3, 2), [-1, 0, 0])
        session.keep(kept)
        found = target.crossings.since(before)
        assert (found["to_device"]["count"], found["to_device"]["bytes"]) == (2 if rows else 1, 8 * (3 + 2 + table) + rows)
        assert (found["to_host"]["count"], found["to_host"]["bytes"]) == (1, 8 * 3)


def test_a_newer_session_takes_the_state_over_and_the_older_one_says_so() -> None:
    target = new_target("lfm2")
    older = target.start(random_ids(6, 1), 100, TAPS)
    older.prefill()
    other = target.start(random_ids(6, 1), 100, None)
    other.prefill()
    older.verify([4, 5])
    target.start(random_ids(6, 1), 100, TAPS)
    for use in (lambda: older.verify([4]), lambda: older.keep(1), older.prefill):
        with pytest.raises(RuntimeError, match="taken over"):
            use()
    other.decode_one(4)


def test_a_second_prompt_sees_nothing_of_the_first() -> None:
    target = new_target("lfm2")
    for seed, length in ((1, 30), (2, 4)):
        prompt = random_ids(length, seed)
        session = target.start(prompt, 100, None)
        tokens = [session.prefill()]
        while len(tokens) < 12:
            tokens.append(session.decode_one(tokens[-1]))
        assert tokens == plain_greedy("lfm2", prompt, 12)


@torch.inference_mode()
def test_a_step_that_does_not_fit_is_refused() -> None:
    target = new_target("llama")
    with pytest.raises(ValueError, match=f"at most {WIDEST}"):
        target.step(TAPS, WIDEST + 1)
    state = StaticState(target.decoder, 4, 3)
    step = CapturedStep(target.decoder, state, 3, (), VOCABULARY, capture=False)
    step.run([4, 5, 6], Crossings())
    with pytest.raises(ValueError, match="3 \\+ 3 tokens do not fit a cache of 4"):
        step.run([4, 5, 6], Crossings())


@pytest.mark.skipif(torch.cuda.is_available(), reason="here CUDA captures")
def test_where_a_capture_is_impossible_the_target_says_so_and_decodes_eagerly() -> None:
    target = new_target("qwen3", capture=True)
    entry = target.prepare_steps((2, 3), TAPS)
    assert (entry["steps"], entry["widths"]) == ("eager", [])
    assert entry["reason"].startswith("CUDA refused a capture: ")
    prompt = random_ids(6, 1)
    session = target.start(prompt, 100, None)
    assert not isinstance(session, CapturedSession)
    assert session.prefill() == plain_greedy("qwen3", prompt, 1)[0]
