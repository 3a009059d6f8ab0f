"""The lean decoder equals the library's logits, and the packed linear equals a plain one."""
from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.tiny_models import FAMILIES, HIDDEN, POSITIONS, tiny_config, tiny_model
from transformers import AutoModelForCausalLM

from dflash_mini_lab.packed_linear import (
    MEASURED_ROWS,
    ONEDNN,
    PLAIN,
    PREPACKED,
    WAYS,
    LinearPlan,
    PackedLinear,
    measure_plan,
    padded_rows,
    stock_plan,
    storage_works,
)
from dflash_mini_lab.targets.lean_build import build_lean_decoder, unsupported_reason
from dflash_mini_lab.targets.lean_target import LeanTarget
from dflash_mini_lab.types import UserError


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_and_taps_equal_the_library_s_in_any_split_into_calls(family: str, dtype: torch.dtype, tolerance: float) -> None:
    model = tiny_model(family, dtype)
    ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(0))
    library = model(ids, output_hidden_states=True)
    decoder = build_lean_decoder(model, POSITIONS, measure=False)
    cache = decoder.new_cache(64, batch=2)
    logits, taps, place = [], [], 0
    for rows in (9, 1, 5, 1, 8, 16):
        hidden, features = decoder.forward(ids[:, place : place + rows], cache, (1, 2))
        logits.append(decoder.logits(hidden.flatten(0, 1)).view(2, rows, -1))
        taps.append(features)
        place += rows
    torch.testing.assert_close(torch.cat(logits, 1), library.logits, rtol=0, atol=tolerance)
    expected = torch.cat([library.hidden_states[2], library.hidden_states[3]], dim=-1)
    torch.testing.assert_close(torch.cat(taps, 1), expected, rtol=0, atol=tolerance)


def test_consuming_a_model_leaves_its_linear_layers_empty_and_the_decoder_whole() -> None:
    model = type(tiny_model("llama"))(tiny_config("llama")).eval()
    ids = torch.tensor([[5, 6, 7]])
    expected = model(ids).logits
    decoder = build_lean_decoder(model, POSITIONS, measure=False, consume=True)
    hidden, _ = decoder.forward(ids, decoder.new_cache(8))
    torch.testing.assert_close(decoder.logits(hidden[0])[None], expected, rtol=0, atol=1e-4)
    linears = [module for layer in model.model.layers for module in layer.modules() if isinstance(module, torch.nn.Linear)]
    assert len(linears) == 7 * len(model.model.layers)
    assert sum(linear.weight.numel() for linear in linears) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"layer_types": ["sliding_attention"]}, "sliding"),
    ],
)
def test_what_cannot_be_reproduced_is_named(change: dict, reason: str) -> None:
    config = tiny_config("llama")
    for name, value in change.items():
        object.__setattr__(config, name, value)
    assert reason in (unsupported_reason(config) or "")


def test_a_sequence_past_the_cache_or_the_position_table_is_refused() -> None:
    decoder = build_lean_decoder(tiny_model("llama"), 32, measure=False)
    with pytest.raises(ValueError, match="33 positions"):
        decoder.new_cache(33)
    with pytest.raises(ValueError, match="do not fit"):
        decoder.forward(torch.zeros(1, 5, dtype=torch.long), decoder.new_cache(4))


@pytest.mark.parametrize("storage", PREPACKED)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 16, 33])
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 64), (960, 576)])
def test_every_way_to_run_a_packed_weight_equals_the_plain_product(
    outputs: int, inputs: int, rows: int, bias: bool, storage: str
) -> None:
    if not storage_works(storage, torch.float32, torch.device("cpu")):
        pytest.skip(f"this machine's PyTorch has no {storage} product")
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(outputs, inputs, generator=generator), torch.randn(1, rows, inputs, generator=generator)
    b = torch.randn(outputs, generator=generator) if bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    for plan in (stock_plan(weight), LinearPlan(outputs, inputs, storage)):
        torch.testing.assert_close(PackedLinear(weight, b, plan)(x).double(), exact, rtol=0, atol=1e-4)


def test_a_plan_says_what_it_chose_and_reached_at_every_measured_row_count() -> None:
    weight = torch.randn(96, 64)
    plan = measure_plan([weight], repeats=1)
    facts = plan.as_json()
    usable = [storage for storage in PREPACKED if storage_works(storage, torch.float32, weight.device)]
    assert facts["storage"] in (PLAIN, *usable)
    measured = {str(rows) for rows in MEASURED_ROWS} if usable else set()
    assert set(facts["gigabytes_per_second"]) == set(facts["stock_gigabytes_per_second"]) == measured


@pytest.mark.parametrize("fastest", [PLAIN, *PREPACKED])
def test_the_storage_with_the_smallest_summed_time_is_kept(fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_mini_lab.packed_linear.storage_works", lambda *_: True)
    named, asked = {id(WAYS[storage][1]): storage for storage in (PLAIN, *PREPACKED)}, Counter[str]()

    def seconds(product: Any, x: torch.Tensor, weights: list[torch.Tensor]) -> float:
        asked[named[id(product)]] += 1
        return 1.0 if named[id(product)] == fastest else 2.0

    monkeypatch.setattr("dflash_mini_lab.packed_linear._seconds", seconds)
    identical = {storage: (lambda weight: weight, product) for storage, (_, product) in WAYS.items()}
    monkeypatch.setattr("dflash_mini_lab.packed_linear.WAYS", identical)
    plan = measure_plan([torch.zeros(8, 4)])
    assert plan.storage == fastest
    turns = 3 if fastest == PLAIN else 1
    assert asked[PLAIN] == turns * len(MEASURED_ROWS), "one that is far behind after a turn gets no other"
    assert plan.gigabytes_per_second[1] == pytest.approx(plan.stock_gigabytes_per_second[1] * (1 if fastest == PLAIN else 2))


def test_a_row_count_is_padded_where_the_summed_products_are_faster() -> None:
    slow_single = dict.fromkeys(MEASURED_ROWS, 20.0) | {4: 40.0}
    even = dict.fromkeys(MEASURED_ROWS, 20.0)
    plans = [(LinearPlan(100, 100, ONEDNN, slow_single, even), 3), (LinearPlan(10, 10, ONEDNN, even, even), 1)]
    assert padded_rows(plans) == {1: 4, 2: 4, 3: 4}
    assert padded_rows([(LinearPlan(100, 100, ONEDNN, even, even), 1)]) == {}
    assert padded_rows([*plans, (stock_plan(torch.zeros(4, 4)), 1)]) == {}, "nothing measured, nothing padded"


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_padded_calls_give_the_same_logits_taps_and_state(family: str) -> None:
    model, ids = tiny_model(family), torch.randint(3, 60, (1, 30), generator=torch.Generator().manual_seed(1))
    library = model(ids).logits
    decoder = replace(build_lean_decoder(model, 32, measure=False), padded_rows={1: 4, 2: 4, 3: 6, 5: 6})
    cache, logits, place = decoder.new_cache(31), [], 0
    calls = "33 11 52 20 22 11 31 77 55 33 22 11 11 11"
    for rows, kept in (map(int, call) for call in calls.split()):
        hidden, features = decoder.forward(ids[:, place : place + rows], cache, (2,))
        assert features.shape == (1, rows, HIDDEN)
        logits.append(decoder.logits(hidden[0])[:kept])
        cache.keep(kept)
        place += kept
    assert place == 30, "the last calls have no room to pad in the position table"
    torch.testing.assert_close(torch.cat(logits), library[0], rtol=0, atol=1e-9)


def test_where_the_prepacked_product_does_not_exist_stock_is_the_answer() -> None:
    plan = measure_plan([torch.randn(8, 16, dtype=torch.float64)])
    assert plan.storage == "plain"


@torch.inference_mode()
def test_a_batch_is_never_padded_for_it_has_rows_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = replace(build_lean_decoder(tiny_model("llama"), 32, measure=False), padded_rows={1: 4})
    rows_seen: list[int] = []
    honest = PackedLinear.__call__
    monkeypatch.setattr(PackedLinear, "__call__", lambda self, x: (rows_seen.append(x.shape[-2]), honest(self, x))[1])
    decoder.forward(torch.zeros(3, 1, dtype=torch.long), decoder.new_cache(4, batch=3))
    assert set(rows_seen) == {1}
    decoder.forward(torch.zeros(1, 1, dtype=torch.long), decoder.new_cache(4))
    assert set(rows_seen) == {1, 4}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_narrow_numbers_run_and_stay_near_the_library_s(family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=dtype).eval()
    ids = torch.randint(3, 60, (1, 12), generator=torch.Generator().manual_seed(0))
    decoder = build_lean_decoder(model, 32)
    cache = decoder.new_cache(16)
    first, _ = decoder.forward(ids[:, :7], cache, (0, 2))
    second, _ = decoder.forward(ids[:, 7:], cache, (0, 2))
    logits = decoder.logits(torch.cat([first, second], 1)[0])
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float(), model(ids).logits[0].float(), rtol=0.05, atol=0.05)


def test_a_layer_that_the_target_does_not_have_is_refused() -> None:
    target = LeanTarget(build_lean_decoder(tiny_model("llama"), 32, measure=False), frozenset(), 61)
    with pytest.raises(UserError, match=r"reads layers \(1, 4\); this target's layers are 0 … 3"):
        target.start([5, 6], 16, (1, 4))
