"""What benchmark.json says beside time: how steps ran, what crossed between host and device, and joules; all in a whole run."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiny_lab import run, settings, tiny_model

from dflash_mini_lab.benchmark.engine import Engine, Model
from dflash_mini_lab.benchmark_file import Benchmark, read, schema_errors
from dflash_mini_lab.measurement.energy import Energy
from dflash_mini_lab.targets.captured_target import CapturedTarget

ID = 8
"""Bytes of a token id on its way."""


def static_model() -> Model:
    """The tiny lab on the eager twin of captured steps, as a GPU run builds it."""
    plain = tiny_model(target_class=CapturedTarget)

    def build(capacity: int) -> Engine:
        engine = plain.build(capacity)
        assert isinstance(engine.target, CapturedTarget)
        return replace(engine, crossings=engine.target.crossings, decode=engine.target.prepare_steps((1, 2, 3, 4), (0,)))

    return replace(plain, build=build)


class Counter:
    """Three joules between two readings."""

    def __init__(self) -> None:
        self.readings = 0

    def __call__(self) -> float:
        self.readings += 1
        return 3.0 * self.readings


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Benchmark:
    folder = tmp_path_factory.mktemp("run")
    assert run(settings(folder), model=static_model(), energy=Energy("a counter", None, Counter())) == 0
    return read(folder / "benchmark.json")


def test_a_whole_run_on_steps_of_fixed_shape_is_exact_and_fits_the_schema(benchmark: Benchmark) -> None:
    assert schema_errors(benchmark) == []
    assert benchmark["gate"]["verdict"] == "exact"
    assert benchmark["gate"]["runs"] == benchmark["gate"]["exact"] > 0


def test_it_says_how_steps_ran_and_what_was_measured(benchmark: Benchmark) -> None:
    execution = benchmark["execution"]
    assert execution["decode"] == {"steps": "eager", "reason": "no CUDA: the eager twin of captured steps", "widths": []}
    assert execution["energy"] == {"source": "a counter", "reason": None}
    memory = execution["memory"]
    assert memory["source"].startswith("resident memory of the process")
    assert 0 < memory["before_bytes"] <= memory["loaded_bytes"] <= execution["peak_memory_bytes"]


def test_a_round_moves_its_rows_and_two_numbers_in_and_one_id_a_row_out(benchmark: Benchmark) -> None:
    texts = {prompt["id"]: prompt["prompt_tokens"] for prompt in benchmark["prompts"]}
    for cell in benchmark["cells"]:
        for answer in cell["runs"]:
            rows, prompt = answer["steps"]["rows"], texts[cell["prompt"]]
            sent, received = answer["crossings"]["to_device"], answer["crossings"]["to_host"]
            assert (sent["count"], received["count"]) == (1 + len(rows), 1 + len(rows))
            assert sent["bytes"] == ID * (prompt + sum(rows) + 2 * len(rows))
            assert received["bytes"] == ID * (1 + sum(rows))


def test_every_answer_has_its_joules_and_an_arm_its_joules_per_token(benchmark: Benchmark) -> None:
    assert {answer["joules"] for cell in benchmark["cells"] for answer in cell["runs"]} == {3.0}
    arm = benchmark["results"]["arms"]["00"]
    assert arm["joules_per_token"] == 3.0 / 12
    assert arm["crossings_per_token"]["to_host"]["bytes"] == ID


def test_without_a_counter_no_answer_has_joules_and_the_reason_is_kept(tmp_path: Path) -> None:
    assert run(settings(tmp_path), energy=Energy(None, "only root may read it")) == 0
    benchmark = read(tmp_path / "benchmark.json")
    assert benchmark["execution"]["energy"] == {"source": None, "reason": "only root may read it"}
    assert not any("joules" in answer for cell in benchmark["cells"] for answer in cell["runs"])
    assert "joules_per_token" not in benchmark["results"]["arms"]["00"]
