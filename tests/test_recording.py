"""The rounds that the report's explorer shows: those of the measured answer, whole and true, and nothing that changes a run."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tables import random_heads
from tiny_lab import LyingTarget, run, settings, tiny_model

from dflash_mini_lab.benchmark import recording
from dflash_mini_lab.benchmark.arms import make_arms
from dflash_mini_lab.benchmark.engine import Engine
from dflash_mini_lab.benchmark_file import Benchmark, read, schema_errors, write
from dflash_mini_lab.drafters.numpy_block import NumpyBlockDrafter, load_arrays
from dflash_mini_lab.methods import METHODS
from dflash_mini_lab.report.explorer import accepted_path
from dflash_mini_lab.targets import tiny
from dflash_mini_lab.targets.tiny_target import TinyTarget
from dflash_mini_lab.types import Proposal

TINY = Path(__file__).resolve().parents[1] / "artifacts" / "tiny"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Benchmark:
    folder = tmp_path_factory.mktemp("recorded")
    assert run(settings(folder, tokens=24)) == 0
    return read(folder / "benchmark.json")


def test_every_method_of_the_run_is_recorded_on_the_first_prompt(finished: Benchmark) -> None:
    assert finished["rounds"]["prompt"] == finished["prompts"][0]["id"]
    assert set(finished["rounds"]["methods"]) == {"01", "08"}
    assert all(entry["exact"] for entry in finished["rounds"]["methods"].values())


def test_the_recorded_rounds_are_those_of_the_measured_answer(finished: Benchmark) -> None:
    cell = next(cell for cell in finished["cells"] if cell["prompt"] == "one" and not cell["warmup"])
    for measured in cell["runs"]:
        if entry := finished["rounds"]["methods"].get(measured["arm"]):
            assert entry["of"] == len(measured["steps"]["rows"])
            for name in ("proposed", "accepted", "committed", "work"):
                assert [r[name] for r in entry["rounds"]] == measured["steps"][name][: recording.ROUNDS]


def test_a_round_goes_on_where_the_one_before_it_ended(finished: Benchmark) -> None:
    answer = finished["reference"][0]["tokens"]
    start = finished["prompts"][0]["prompt_tokens"] + 1
    for entry in finished["rounds"]["methods"].values():
        assert len(entry["rounds"]) > 3
        place = 0
        for known in entry["rounds"]:
            accepted = known["accepted"]
            assert (known["position"], known["anchor"]) == (start + place, answer[place])
            assert len(known["greedy"]) == 1 + known["proposed"]
            assert known["proposal"][:accepted] == known["greedy"][:accepted] == answer[place + 1 : place + 1 + accepted]
            place += known["committed"]


def test_a_tree_s_rounds_keep_their_parents_and_the_path_can_be_followed(tmp_path: Path) -> None:
    assert run(settings(tmp_path, tokens=24, methods=("00", "01", "15"))) == 0
    benchmark = read(tmp_path / "benchmark.json")
    assert schema_errors(benchmark) == []
    chain, tree = (benchmark["rounds"]["methods"][key]["rounds"] for key in ("01", "15"))
    assert not any("parents" in known for known in chain)
    assert sum("parents" in known for known in tree) > 3
    answer, place = benchmark["reference"][0]["tokens"], 0
    for known in tree:
        path = accepted_path(known)
        assert len(path) == 1 + known["accepted"]
        assert [known["greedy"][row] for row in path][: known["committed"]] == answer[place + 1 : place + 1 + known["committed"]]
        place += known["committed"]
    steps = next(r["steps"] for r in benchmark["cells"][0]["runs"] if r["arm"] == "15")
    assert [len(path) for path in steps["path"]] == steps["accepted"]
    assert all(depth <= proposed for depth, proposed in zip(steps["depth"], steps["proposed"], strict=True))
    (entry,) = (arm for arm in benchmark["arms"] if arm["key"] == "15")
    assert entry["settings"]["candidates"] == 4


def test_a_choice_below_the_best_four_is_kept_after_them() -> None:
    class Table:
        slots = 2

        def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
            ids = np.array([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]])
            return ids, np.array([[5.00049, 4, 3, 2, 1, -np.inf]] * 2, dtype=np.float32)

    first, second = recording.slots_of(Table(), Proposal((6,)))  # type: ignore[arg-type]
    assert first == {"ids": [1, 2, 3, 4, 6], "logits": [5.0, 4.0, 3.0, 2.0, -1e4]}
    assert second["ids"] == [7, 8, 9, 10], "nothing was proposed for the second slot"
    first, second = recording.slots_of(Table(), Proposal((2, 5, 11, 12), 0, (-1, -1, 0, 1)))  # type: ignore[arg-type]
    assert (first["ids"], second["ids"]) == ([1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12])


def test_an_answer_that_is_not_the_references_says_so(tmp_path: Path) -> None:
    assert run(settings(tmp_path), model=tiny_model(target_class=LyingTarget), calibration_prompts=()) == 3
    benchmark = read(tmp_path / "benchmark.json")
    assert schema_errors(benchmark) == []
    assert [entry["exact"] for entry in benchmark["rounds"]["methods"].values()] == [False, False]


def test_a_continued_run_keeps_its_rounds_and_an_older_file_gets_them(tmp_path: Path, finished: Benchmark) -> None:
    older = json.loads(json.dumps(finished))
    marked = json.loads(json.dumps(finished))
    del older["rounds"]
    assert schema_errors(older) == []
    marked["rounds"]["texts"]["1"] = "kept"
    for name, before, after in (("older", older, finished), ("marked", marked, marked)):
        write(tmp_path / name / "benchmark.json", before)
        assert run(settings(tmp_path / name, tokens=24, resume=True)) == 0
        assert read(tmp_path / name / "benchmark.json")["rounds"] == after["rounds"]


def test_every_method_of_the_numpy_target_is_recorded_in_little_space() -> None:
    *weights, words = tiny.read(TINY)
    target = TinyTarget(*weights)
    config, tensors = load_arrays(TINY)
    heads = random_heads(len(words), 64, config.block_size - 1, offsets=(2,))
    drafter = NumpyBlockDrafter(config, tensors, target.embedding, target.embedding, target.max_positions, heads)
    engine = Engine(target, drafter, lambda ids: lambda tokens: target.logits(tokens), [], {})
    entries, ids = {}, words.encode("The miller ")
    for arm in make_arms([method.key for method in METHODS], [], config.block_size, None, {}):
        if arm.kind == "method":
            entries[arm.key] = recording.record(engine, arm, ids, 40, Still(), ())
    assert len(entries) == 15
    assert not any(entry["exact"] for entry in entries.values()), "the expected answer was another"
    assert all(len(entry["rounds"]) == min(recording.ROUNDS, entry["of"]) > 5 for entry in entries.values())
    texts = recording.texts(entries.values(), words.decode)
    assert texts[str(words.ids["the"])].strip() == "the"
    slots = sum(len(known["slots"]) for entry in entries.values() for known in entry["rounds"])
    assert len(json.dumps(entries, separators=(",", ":"))) / slots * len(entries) * recording.SLOTS < 200_000


def test_long_blocks_have_fewer_rounds_recorded() -> None:
    assert [recording.rounds_kept(slots) for slots in (1, 5, 10, 15, 400)] == [12, 12, 12, 8, 1]


class Still:
    def now(self) -> float:
        return 0.0
