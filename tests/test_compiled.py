"""Compiled layers: the single operations' values, one row's bits alone and in a block, and nothing where they cannot run."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tests.test_drafter import trained_looking_model
from tests.test_heads import CONFIG, HEADS, Features
from tests.tiny_models import COMPILED, HIDDEN, POSITIONS, TAPS, VOCABULARY, compiled_decoder, random_ids, tiny_model

from dflash_mini_lab import compiled
from dflash_mini_lab.calls import MOST_ROWS
from dflash_mini_lab.compiled import (
    CANDIDATES,
    AttentionLayer,
    compiled_context,
    compiled_head,
    compiled_layers,
    compiled_scores,
)
from dflash_mini_lab.drafters.block import BlockDrafter
from dflash_mini_lab.drafters.layout import DrafterConfig
from dflash_mini_lab.norms import RMSNorm
from dflash_mini_lab.packed_linear import PREFETCHED, ROUNDED, LinearPlan, PackedLinear, stock_plan
from dflash_mini_lab.prefetched_linear import in_bytes, kernel
from dflash_mini_lab.scores import best
from dflash_mini_lab.types import NO_HEADS

pytestmark = pytest.mark.skipif(kernel() is None, reason="no LLVM, fused multiply-add or OpenMP here")


def packed(outputs: int, inputs: int, bias: bool = False) -> PackedLinear:
    weight = torch.randn(outputs, inputs)
    return PackedLinear(weight, torch.randn(outputs) if bias else None, LinearPlan(outputs, inputs, PREFETCHED))


def layer(bias: bool = False, inner: int = 32, eps: float = 1e-5) -> AttentionLayer:
    norms = (RMSNorm(torch.ones(32), eps), RMSNorm(torch.ones(32), 1e-5))
    return AttentionLayer(packed(64, 32, bias), packed(32, 32), packed(2 * inner, 32), packed(32, inner), *norms, None)


@pytest.mark.parametrize("family", COMPILED)
@pytest.mark.parametrize("threads", [1, 2, 3])
@torch.inference_mode()
def test_a_row_has_the_same_bits_alone_and_in_a_block_and_in_any_number_of_threads(family: str, threads: int) -> None:
    decoder, before = compiled_decoder(family), torch.get_num_threads()
    ids = torch.tensor([random_ids(40, 5)])
    whole, features = decoder.forward(ids[:, :MOST_ROWS], decoder.new_cache(64), TAPS)
    try:
        torch.set_num_threads(threads)
        for rows in (1, 2, 5, 8):
            cache, hidden, tapped = decoder.new_cache(64), [], []
            for place in range(0, MOST_ROWS, rows):
                found, tap = decoder.forward(ids[:, place : min(place + rows, MOST_ROWS)], cache, TAPS)
                hidden.append(found)
                tapped.append(tap)
            assert torch.equal(torch.cat(hidden, 1), whole)
            assert torch.equal(torch.cat(tapped, 1), features)
    finally:
        torch.set_num_threads(before)


def test_fewer_threads_than_were_asked_for_leave_nothing_out() -> None:
    """As in a container that limits OpenMP."""
    code = (
        "import sys; sys.path[:0] = ['src', '.']; import torch; torch.set_num_threads(4); torch.set_grad_enabled(False)\n"
        "from tests.tiny_models import *\n"
        "decoder, ids = compiled_decoder('plain lfm2'), torch.tensor([random_ids(6, 5)])\n"
        "hidden, _ = decoder.forward(ids, decoder.new_cache(64), TAPS)\n"
        "print(hidden.double().sum().item(), decoder.greedy(hidden[0], VOCABULARY).tolist())"
    )
    root = Path(__file__).resolve().parents[1]
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=root, env={**os.environ, **limit}, capture_output=True, text=True, check=True
        ).stdout
        for limit in ({}, {"OMP_THREAD_LIMIT": "1"}, {"OMP_THREAD_LIMIT": "3"})
    }
    assert len(printed) == 1


@torch.inference_mode()
def test_taps_come_in_the_order_that_they_are_asked_in() -> None:
    decoder, ids = compiled_decoder("qwen3"), torch.tensor([[4, 5, 6]])
    first, third = decoder.forward(ids, decoder.new_cache(8), (0, 2))[1].chunk(2, -1)
    again, second, once_more, twice = decoder.forward(ids, decoder.new_cache(8), (2, 1, 0, 2))[1].chunk(4, -1)
    assert torch.equal(again, third)
    assert torch.equal(once_more, first)
    assert torch.equal(twice, third)
    assert not torch.equal(second, first)


@torch.inference_mode()
def test_a_longer_call_runs_as_single_operations_and_fits_on_to_the_program() -> None:
    decoder = compiled_decoder("qwen3")
    plain = replace(decoder, compiled=None)
    ids = torch.tensor([random_ids(MOST_ROWS + 20, 1)])
    mixed, single = decoder.new_cache(80), plain.new_cache(80)
    for rows in (ids[:, : MOST_ROWS + 1], ids[:, MOST_ROWS + 1 : -3], ids[:, -3:]):
        found, wanted = decoder.forward(rows, mixed)[0], plain.forward(rows, single)[0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)


@torch.inference_mode()
def test_a_batch_that_becomes_one_sequence_again_runs_with_what_it_has_read_meanwhile() -> None:
    decoder = compiled_decoder("qwen3")
    plain = replace(decoder, compiled=None)
    caches = decoder.new_cache(40), plain.new_cache(40)
    last = []
    for one, cache in zip((decoder, plain), caches, strict=True):
        one.forward(torch.tensor([[4, 5, 6]]), cache)
        cache.select(torch.tensor([0, 0]))
        one.forward(torch.tensor([[7], [8]]), cache)
        cache.select(torch.tensor([1]))
        last.append(one.forward(torch.tensor([[9]]), cache)[0])
    torch.testing.assert_close(*last, rtol=0, atol=2e-4)


def in_steps(weight: torch.Tensor) -> torch.Tensor:
    """Of 8 bits, as the float32 weight that they stand for."""
    whole, scales = in_bytes(weight)
    return whole * scales[:, None]


WIDER = replace(CONFIG, hidden_size=2 * HIDDEN, target_hidden_size=HIDDEN)
WINDOWED = replace(CONFIG, window=42)
"""The second draft is the last whose context is shorter."""
COMPILED_DRAFTERS = pytest.mark.parametrize(
    ("config", "needs"),
    [(CONFIG, ()), (CONFIG, ("jump",)), (WIDER, ()), (WINDOWED, ())],
    ids=["published", "with jumps", "own width", "windowed"],
)


@contextmanager
def everything(storage: str) -> Iterator[None]:
    """Every drafter's weight is stored so, but those that 8 bits do not take."""
    with patch.multiple(
        "dflash_mini_lab.drafters.block",
        measure_plan=lambda weights: LinearPlan(*weights[0].shape, PREFETCHED),
        rounded_plan=lambda _, plan: plan if plan.in_features % 2 else replace(plan, storage=storage),
    ):
        yield


@torch.inference_mode()
@pytest.mark.parametrize("storage", [PREFETCHED, ROUNDED])
@COMPILED_DRAFTERS
def test_a_compiled_draft_is_that_of_the_single_operations(config: DrafterConfig, needs: tuple[str, ...], storage: str) -> None:
    model, tensors = tiny_model("llama"), dict(trained_looking_model(config).state_dict())
    embedding, head = (table.weight.detach().float() for table in (model.get_input_embeddings(), model.get_output_embeddings()))
    heads = NO_HEADS if config is WIDER else HEADS
    with everything(storage):
        drafter = BlockDrafter(config, tensors, embedding, head, POSITIONS, heads=heads)
        exact = BlockDrafter(config, tensors, embedding, head, POSITIONS, exact=True, heads=heads)
    assert {plan.storage for plan in drafter.plans if plan.in_features % 2 == 0} == {storage}
    assert {plan.storage for plan in exact.plans} == {PREFETCHED}
    scoring = head @ tensors["output.weight"] if config is WIDER else head
    if storage == ROUNDED:
        tensors = {name: in_steps(tensor) if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
        scoring = in_steps(scoring)
        if heads.jump:
            heads = replace(heads, jump=replace(heads.jump, up=in_steps(torch.from_numpy(heads.jump.up)).numpy()))
    plain = BlockDrafter(config, tensors, embedding, head, POSITIONS, measure=False, heads=heads)
    plain.head = PackedLinear(scoring, None, stock_plan(scoring))
    near = 1 if storage == PREFETCHED else 20  # states are rounded, too
    assert plain.compiled is plain.compiled_context is plain.compiled_scores is None
    assert drafter.compiled
    assert drafter.compiled_context
    assert drafter.compiled_scores
    rows = torch.randn(60, len(TAPS) * HIDDEN, generator=torch.Generator().manual_seed(2))
    sessions = [(one.start(features, 80, needs), features) for one in (plain, drafter) for features in [Features(rows)]]
    ids, committed = random_ids(61, 3), []
    for length in (40, 41, 43, 48, 61):
        committed += ids[len(committed) : length]
        drafts = []
        for session, features in sessions:
            features.upto = length - 1
            drafts.append(session.draft(committed))
        for part in ("context", "states"):
            np.testing.assert_allclose(getattr(drafts[0], part)(), getattr(drafts[1], part)(), rtol=0, atol=near * 1e-4)
        logits = drafts[1].logits()[0]
        np.testing.assert_allclose(drafts[0].logits()[0], logits, rtol=0, atol=near * 1e-3)
        if needs and heads.jump:
            asked = drafter.draft_ids[[[1, 4, 9]] * int((heads.jump.offsets < config.block_size).sum())]
            np.testing.assert_allclose(drafts[0].jump(asked), drafts[1].jump(asked), rtol=0, atol=near * 1e-3)
        for k in (1, CANDIDATES, CANDIDATES + 1):  # those kept on the way, and one more, which is searched for
            columns, scores = best(logits, k)
            for found, wanted in zip(drafts[1].top(k), (drafter.draft_ids[columns], scores), strict=True):
                assert np.array_equal(found, wanted)


def test_a_compiled_drafter_begins_no_session_longer_than_its_positions() -> None:
    model = tiny_model("llama")
    tables = [table.weight.detach().float() for table in (model.get_input_embeddings(), model.get_output_embeddings())]
    with everything(ROUNDED):
        drafter = BlockDrafter(CONFIG, dict(trained_looking_model(CONFIG).state_dict()), *tables, 40)
    drafter.start(Features(torch.zeros(0, 2 * HIDDEN)), 40)
    with pytest.raises(ValueError, match="rotation"):
        drafter.start(Features(torch.zeros(0, 2 * HIDDEN)), 60)


@pytest.mark.parametrize("family", COMPILED)
@torch.inference_mode()
def test_sessions_of_one_decoder_take_turns_and_a_step_is_a_pass_and_its_greedy_tokens(family: str) -> None:
    """They share the programs' scratch, which grows for the second and for more threads."""
    decoder, before = compiled_decoder(family), torch.get_num_threads()
    ids = random_ids(24, 5)
    try:
        torch.set_num_threads(1)
        small, stepped = decoder.new_cache(24), []
        for turn, place in enumerate(range(0, 24, 3)):
            tokens = ids[place : place + 3]
            stepped.append(decoder.step(tokens, small, VOCABULARY, TAPS))
            if turn == 2:
                torch.set_num_threads(3)
            decoder.step(tokens[::-1], decoder.new_cache(100), VOCABULARY)
    finally:
        torch.set_num_threads(before)
    hidden, features = decoder.forward(torch.tensor([ids]), decoder.new_cache(64), TAPS)
    assert [token for tokens, _ in stepped for token in tokens] == decoder.greedy(hidden[0], VOCABULARY).tolist()
    assert torch.equal(torch.cat([rows for _, rows in stepped]), features[0])


@pytest.mark.parametrize("family", COMPILED)
@torch.inference_mode()
def test_a_copy_of_a_session_goes_its_own_way(family: str) -> None:
    decoder, ids = compiled_decoder(family), random_ids(12, 5)
    one = decoder.new_cache(40)
    decoder.step(ids[:4], one, VOCABULARY)
    paths = [(one, ids[:4]), (deepcopy(one), ids[:4])]
    for turn in range(4, 8):
        paths = [(cache, [*path, token]) for (cache, path), token in zip(paths, (ids[turn], ids[-turn]), strict=True)]
        found = [decoder.step(path[-1:], cache, VOCABULARY)[0] for cache, path in paths]
        fresh = [decoder.step(path, decoder.new_cache(40), VOCABULARY)[0][-1:] for _, path in paths]
        assert found == fresh


@torch.inference_mode()
def test_an_id_without_an_embedding_is_refused() -> None:
    decoder = compiled_decoder("qwen3")
    for token in (VOCABULARY, -1):
        with pytest.raises(IndexError, match="of an embedding with"):
            decoder.forward(torch.tensor([[4, token]]), decoder.new_cache(8))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("vocabulary", [3, 8, 64, 65, 1000, 5000])
def test_the_best_candidates_are_those_of_the_plain_search(vocabulary: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-3, 4, (vocabulary, 16), generator=generator).float()  # so that scores are exact, and many are equal
    hidden = torch.randint(-3, 4, (7, 16), generator=generator).float()
    head = PackedLinear(weight, None, LinearPlan(*weight.shape, PREFETCHED))
    program = compiled_scores(head, np.arange(vocabulary) * 10)
    assert program is not None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        scores, ids, found = program(hidden)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(scores, hidden @ weight.T)
    columns, wanted = best(scores.numpy(), min(CANDIDATES, vocabulary))
    assert np.array_equal(ids, columns * 10)
    assert np.array_equal(found, wanted)
    assert ids.dtype == np.int64


def test_layers_that_the_program_does_not_cover_are_left_to_single_operations() -> None:
    final = RMSNorm(torch.ones(32), 1e-5)
    assert compiled_layers([layer()], final, 4, 2, 8) is not None
    assert compiled_layers([], final, 4, 2, 8) is None
    assert compiled_layers([layer(bias=True)], final, 4, 2, 8) is not None
    assert compiled_layers([layer(), layer(bias=True)], final, 4, 2, 8) is None, "a bias in one layer alone"
    assert compiled_layers([replace(layer(), out=packed(32, 32, bias=True))], final, 4, 2, 8) is None, "a bias behind the mixer"
    assert compiled_layers([layer(), layer(inner=24)], final, 4, 2, 8) is None, "no whole tiles"
    assert compiled_layers([layer(eps=1e-6)], final, 4, 2, 8) is None
    assert compiled_layers([layer(), layer(inner=64)], final, 4, 2, 8) is None, "two sizes of MLP"
    normed = replace(layer(), qk_norm=RMSNorm(torch.ones(6, 8), 1e-5))
    assert compiled_layers([normed], final, 4, 2, 8) is not None
    assert compiled_layers([normed, layer()], final, 4, 2, 8) is None, "norms in one layer alone"
    plain = AttentionLayer(**{**vars(layer()), "out": PackedLinear(torch.ones(32, 32), None, LinearPlan(32, 32, "plain"))})
    assert compiled_layers([plain], final, 4, 2, 8) is None


def test_too_many_rows_or_positions_are_refused() -> None:
    found = compiled_layers([layer()], RMSNorm(torch.ones(32), 1e-5), 4, 2, 8)
    assert found is not None
    memory, rotation, table = torch.zeros(1, 2, 2, 50, 8), torch.ones(50, 4, dtype=torch.complex64), torch.zeros(9, 32)
    for rows, past in ((0, 0), (MOST_ROWS + 1, 0), (2, 49)):
        with pytest.raises(ValueError, match="at most 32 at once, and 50 in all"):
            found.bind(memory, table, rotation).tell(rows, past)
    for start in (torch.zeros(9, 16), table.double()):
        with pytest.raises(ValueError, match="do not fit these layers"):
            found.bind(memory, start, rotation)
    for turn in (rotation[:49], torch.ones(50, 3, dtype=torch.complex64), rotation.to(torch.complex128)):
        with pytest.raises(ValueError, match="rotation"):
            found.bind(memory, table, turn)
    for apart in ((memory[..., ::2], table, rotation), (memory, table.T, rotation), (memory, table, rotation[:, ::2])):
        with pytest.raises(ValueError, match="must lie together"):
            found.bind(*apart)


def test_a_machine_without_a_kernel_or_numba_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    final = RMSNorm(torch.ones(32), 1e-5)
    fc, context, k_norm = packed(32, 64), packed(64, 32), RMSNorm(torch.ones(4, 8), 1e-5)
    assert compiled_context(fc, final, context, k_norm, 2) is not None
    for part in ("kernel", "_programs"):
        with monkeypatch.context() as without:
            without.setattr(compiled, part, lambda *_: None)
            assert compiled_layers([layer()], final, 4, 2, 8) is None
            assert compiled_context(fc, final, context, k_norm, 2) is None
            assert compiled_head(torch.zeros(8, 4)) is None
            assert compiled_scores(packed(8, 4), np.arange(8)) is None


@pytest.mark.parametrize("size", [8, 16, 32, 48, 64, 576])
def test_values_do_not_depend_on_where_in_memory_they_lie(size: int) -> None:
    """A vectorised loop is left for a plain one where its arrays may overlap: both must round alike."""
    assert compiled.can_compile()
    from dflash_mini_lab.programs import add, gate, normalise, rotate

    x, y, far = (np.random.default_rng(seed).normal(0, 2, size).astype(np.float32) for seed in range(3))
    eps, one = np.float32(1e-5), np.float32(0.125)
    ways = {
        "normalise": lambda x, y, out: normalise(x, y, eps, out),
        "rotate": lambda x, y, out: rotate(x, y, one, out),
        "gate": gate,
    }
    for name, run in ways.items():
        run(x, y, far)
        for gap in (0, 1, 4, 8, 16):
            room = np.zeros(3 * size + 2 * gap, np.float32)
            places = [room[start : start + size] for start in (0, size + gap, 2 * (size + gap))]
            for first, second, out in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
                places[first][:], places[second][:] = x, y
                run(places[first], places[second], places[out])
                assert np.array_equal(places[out], far), name
        alone = x.copy()
        run(alone, y, alone)
        assert np.array_equal(alone, far), f"{name}, in place"
    total = x.copy()
    add(total, y)
    assert np.array_equal(total, x + y)
