"""On a real GPU: the check, a product, captured steps that equal the library, every method exact, memory and energy reported.

float64 throughout where texts are compared, so that two orders of summation cannot choose two tokens.
"""
from __future__ import annotations

import copy
import random
from functools import cache

import pytest
import torch
from tests.tables import path_to, random_parents
from tests.test_drafter import SHAPES, FixedFeatures, target_tables, trained_looking_model
from tests.test_drafter import VOCABULARY as DRAFTER_VOCABULARY
from tests.test_tree_rollback import fresh_logits
from tests.tiny_models import FAMILIES, POSITIONS, TAPS, VOCABULARY, ScriptedDrafter, plain_greedy, random_ids, tiny_model

from dflash_mini_lab import cli
from dflash_mini_lab.decoding import decode
from dflash_mini_lab.drafters.block import BlockDrafter
from dflash_mini_lab.drafters.checkpoint import DrafterConfig
from dflash_mini_lab.measurement import machine
from dflash_mini_lab.measurement.clock import clock_for
from dflash_mini_lab.measurement.energy import find_energy
from dflash_mini_lab.measurement.gpu import checked_product
from dflash_mini_lab.measurement.memory import find_memory
from dflash_mini_lab.methods import METHODS
from dflash_mini_lab.settings import GPU
from dflash_mini_lab.targets.captured_target import CapturedTarget
from dflash_mini_lab.targets.lean_build import build_lean_decoder
from dflash_mini_lab.targets.library_target import LibraryTarget

WIDTHS = (1, 2, 3, 5, 8)


@cache
def on_gpu(family: str) -> CapturedTarget:
    model = copy.deepcopy(tiny_model(family)).cuda()
    target = CapturedTarget(build_lean_decoder(model, POSITIONS), frozenset(), VOCABULARY)
    assert target.prepare_steps(WIDTHS, TAPS) == {"steps": "captured", "reason": None, "widths": sorted(WIDTHS)}
    return target


def test_check_only_names_the_gpu_and_checks_a_product(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--check-only", "--no-bootstrap"], GPU) == 0
    said = capsys.readouterr().out
    assert torch.cuda.get_device_name(0) in said
    assert "A float16 product" in said


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_product_agrees_with_float64(dtype: str) -> None:
    assert "agrees" in checked_product("cuda", dtype)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_captured_steps_equal_the_library_at_every_width_and_after_every_rollback(family: str) -> None:
    target = on_gpu(family)
    session = target.start(random_ids(6, 1), 100, TAPS)
    session.prefill()
    committed = random_ids(6, 1)
    for rows in WIDTHS:
        assert target.step(TAPS, rows)._graph is not None
        for kept in range(rows + 1):
            if len(committed) + rows > POSITIONS:
                break
            tokens = random_ids(rows, 10 * rows + kept)
            expected = tiny_model(family)(torch.tensor([committed + tokens])).logits[0, -rows:]
            assert session.verify(tokens) == expected.argmax(-1).tolist()
            torch.testing.assert_close(target.step(TAPS, rows).logits.cpu(), expected, rtol=0, atol=1e-9)
            session.keep(kept)
            committed += tokens[:kept]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_captured_steps_of_random_trees_equal_the_library_whichever_path_stays(family: str) -> None:
    target, order = on_gpu(family), random.Random(1)
    session = target.start(random_ids(6, 1), 100, TAPS)
    session.prefill()
    committed = random_ids(6, 1)
    for turn, rows in enumerate((5, 2, 8, 3, 8, 5, 8)):
        step = target.step(TAPS, rows, trees=True)
        assert step._graph is not None
        tokens, parents = random_ids(rows, turn), random_parents(rows, order)
        expected = fresh_logits(family, committed, tokens, parents)
        assert session.verify(tokens, parents) == expected.argmax(-1).tolist()
        torch.testing.assert_close(step.logits.cpu(), expected, rtol=0, atol=1e-9)
        kept = path_to(order.randrange(rows), parents)
        session.keep(kept)
        committed += [tokens[row] for row in kept]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_captured_step_equals_its_eager_twin(family: str) -> None:
    captured = on_gpu(family)
    twin = CapturedTarget(captured.decoder, frozenset(), VOCABULARY, capture=False)
    sessions = [target.start(random_ids(6, 1), 100, None) for target in (captured, twin)]
    tokens = [session.prefill() for session in sessions]
    for _ in range(20):
        assert tokens[0] == tokens[1]
        tokens = [session.decode_one(tokens[0]) for session in sessions]
        torch.testing.assert_close(captured.step(None, 1).logits, twin.step(None, 1).logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.slug)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_answers_as_plain_greedy_decoding_does(family: str, method) -> None:
    prompt = random_ids(6, 1)
    answer = plain_greedy(family, prompt, 24)
    for kind in ("right", "wrong", "random"):
        drafter = ScriptedDrafter(kind, len(prompt), answer, 8)
        decoded = decode(on_gpu(family), prompt, method, 24, clock_for("cuda"), drafter)
        assert list(decoded.tokens) == answer
        assert decoded.decode_seconds > 0


def test_the_library_s_path_runs_and_is_exact_too() -> None:
    model = copy.deepcopy(tiny_model("qwen3")).cuda()
    target = LibraryTarget(model, frozenset(), VOCABULARY)
    prompt = random_ids(6, 1)
    answer = plain_greedy("qwen3", prompt, 24)
    decoded = decode(target, prompt, METHODS[1], 24, clock_for("cuda"), ScriptedDrafter("random", 6, answer, 5))
    assert list(decoded.tokens) == answer


@SHAPES
def test_the_drafter_proposes_on_the_gpu_what_it_proposes_on_a_cpu(config: DrafterConfig) -> None:
    tensors, tables = dict(trained_looking_model(config).state_dict()), target_tables()
    features = torch.randn(6, 2 * 32, generator=torch.Generator().manual_seed(4))
    found = []
    for device in ("cpu", "cuda"):
        drafter = BlockDrafter(config, tensors, *(table.to(device) for table in tables), 64, measure=False)
        draft = drafter.start(FixedFeatures(features.to(device)).upto(6), 64).draft(list(range(10, 17)))
        ids, _ = draft.top(4)
        logits, _ = draft.logits()
        found.append((ids.tolist(), logits))
        crossed = drafter.crossings.as_json()["to_host"]
        assert crossed["bytes"] == draft.slots * (4 * (8 + 4) + DRAFTER_VOCABULARY * 4)
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(torch.tensor(found[0][1]), torch.tensor(found[1][1]), rtol=1e-4, atol=1e-3)


def test_a_round_waits_for_one_small_message_each_way() -> None:
    target = on_gpu("lfm2")
    session = target.start(random_ids(6, 1), 100, TAPS)
    session.prefill()
    before = target.crossings.as_json()
    session.verify(random_ids(5, 2))
    crossed = target.crossings.since(before)
    assert {way: (crossed[way]["count"], crossed[way]["bytes"]) for way in crossed} == {
        "to_device": (1, 8 * 7),
        "to_host": (1, 8 * 5),
    }


def test_memory_energy_and_machine_are_reported() -> None:
    on_gpu("llama")
    memory = find_memory("cuda")
    held = torch.zeros(2**20, dtype=torch.uint8, device="cuda")
    assert (memory.peak() or 0) >= (memory.before or 0) + held.numel()
    facts = machine.facts("cuda")
    assert facts["gpu"] == torch.cuda.get_device_name(0)
    assert facts["gpu_memory_bytes"] > 0
    assert facts["cuda"] == torch.version.cuda
    energy = find_energy("cuda")
    assert (energy.read() is None) == (energy.source is None)
    assert energy.source or energy.reason
