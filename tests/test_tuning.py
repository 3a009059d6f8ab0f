"""The tuned width and the cost model's, on hand-made rounds whose answer is worked out in the comments."""
from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_lab import LyingTarget, run, settings, tiny_model

from dflash_mini_lab.benchmark_file import Benchmark, read, schema_errors, write
from dflash_mini_lab.measurement.step_log import columns
from dflash_mini_lab.tuning import agreement, predict, tune, widths
from dflash_mini_lab.types import Decoded, Step, UserError

PROMPTS = {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}


def curve(*ratio: float, single: float = 2.0) -> dict[str, Any]:
    return {"rows": list(range(1, len(ratio) + 1)), "ratio": list(ratio), "median_seconds": [single * r for r in ratio]}


def rounds(width: int, accepted: Sequence[int], verify: float = 0.0) -> Decoded:
    """Rounds of `width` rows. Each takes 0.5 s to draft, 0.25 s to select, 0.25 s for the rest: one second beside `verify`."""
    steps = [Step(width, width - 1, a, a + 1, 0, draft=0.5, select=0.25, verify=verify, rest=0.25) for a in accepted]
    return Decoded((0,) * (1 + sum(a + 1 for a in accepted)), "budget", 0.1, tuple(steps))


# Four rounds of a block of 4 accept 3, 1, 0 and 1 drafts: a_1 = 3/4, a_2 = a_3 = 1/4, so E(2) = 1.75, E(3) = 2, E(4) = 2.25.
# One second beside the verifier and two for a single row: c = 0.5.
LOGS = [columns(rounds(4, [3, 1])), columns(rounds(4, [0, 1]))]


@pytest.mark.parametrize(
    ("verify", "speedups", "chosen"),
    [
        ((1.0, 1.0, 1.5, 1.0), (1.75 / 1.5, 2 / 2, 2.25 / 1.5), 4),  # a step down at 4 rows
        ((1.0, 1.0, 1.25, 2.5), (1.75 / 1.5, 2 / 1.75, 2.25 / 3), 2),
        ((1.0, 2.0, 1.0, 2.5), (1.75 / 2.5, 2 / 1.5, 2.25 / 3), 3),
        ((1.0, 1.25, 1.5, 1.75), (1.0, 1.0, 1.0), 2),  # all equal: the narrowest
    ],
)
def test_the_cost_model_names_the_width_where_tokens_over_cost_are_most(
    verify: tuple[float, ...], speedups: tuple[float, ...], chosen: int
) -> None:
    found = predict(LOGS, [2, 3, 4], curve(*verify))
    assert found is not None
    assert found["chosen"] == chosen
    assert (found["draft_cost"], found["slot_joint"]) == (0.5, [0.75, 0.25, 0.25])
    assert [line["tokens_per_round"] for line in found["widths"]] == [1.75, 2.0, 2.25]
    assert [line["verify_cost"] for line in found["widths"]] == list(verify[1:])
    assert [line["speedup"] for line in found["widths"]] == pytest.approx(speedups)


def test_a_trees_width_is_predicted_from_the_rows_of_its_accepted_path() -> None:
    # Three rounds of a block of 4: rows 2 and 3 accepted, row 1 alone, none. In two rows one draft of three rounds, in three two.
    steps = [
        Step(4, 3, len(path), len(path) + 1, 0, draft=0.5, select=0.25, verify=0.0, rest=0.25, depth=3, path=path)
        for path in ((2, 3), (1,), ())
    ]
    log = columns(Decoded((0,) * 7, "budget", 0.1, tuple(steps)))
    found = predict([log], [2, 3, 4], curve(1.0, 1.0, 1.0, 1.0))
    assert found is not None
    assert [line["tokens_per_round"] for line in found["widths"]] == pytest.approx([4 / 3, 5 / 3, 2.0])
    assert found["slot_joint"] == pytest.approx([2 / 3, 1 / 3, 0.0])
    bare = predict([log], [2, 3, 4], curve(1.0, 1.0, 1.0, 1.0), bonus=False)
    assert bare is not None
    assert [line["tokens_per_round"] for line in bare["widths"]] == pytest.approx([1.0, 1.0, 4 / 3])


def test_slots_that_were_never_proposed_add_no_token_and_no_rounds_give_no_prediction() -> None:
    found = predict([columns(rounds(2, [1, 0]))], [2, 4], curve(1.0, 1.0, 1.0, 1.0))
    assert found is not None
    assert [line["tokens_per_round"] for line in found["widths"]] == [1.5, 1.5]
    assert predict([columns(rounds(4, []))], [2, 3, 4], curve(1.0, 1.0, 1.0, 1.0)) is None


def test_every_width_up_to_eight_and_powers_of_two_beyond() -> None:
    assert widths(2) == [2]
    assert widths(8) == [2, 3, 4, 5, 6, 7, 8]
    assert widths(9) == [2, 4, 8, 9]
    assert widths(16) == [2, 4, 8, 16]


class Table:
    """Answers of one round with the reference's tokens. `verify(width)`: seconds of its call; `wrong`: widths of another text."""

    def __init__(self, verify: Callable[[int], float], wrong: Sequence[int] = ()) -> None:
        self.verify, self.wrong = verify, wrong
        self.asked: list[tuple[int, str]] = []

    def __call__(self, width: int, prompt: str) -> Decoded:
        self.asked.append((width, prompt))
        cold = 100.0 if len(self.asked) == 1 else 0.0  # the first answer must not count
        step = Step(width, width - 1, 1, 2, 0, draft=0.25, select=0.125, verify=self.verify(width) + cold, rest=0.125)
        return Decoded(tuple([0] * 3 if width in self.wrong else PROMPTS[prompt]), "budget", 0.1, (step,))


def test_the_fastest_width_is_measured_and_the_models_stands_beside_it() -> None:
    # Two tokens in 0.5 + verify seconds: 2/2.5, 2/2, 2/3.5 tokens a second. Every round accepts one draft: E = 2 for all widths,
    # c = 0.5/2 = 0.25; on this curve 4 rows are the cheapest, so the model is wrong.
    found = tune(Table({2: 2.0, 3: 1.5, 4: 3.0}.__getitem__), 4, PROMPTS, curve(1.0, 1.25, 1.25, 1.0), repeats=2, seed=7)
    every = [(prompt, repeat) for repeat in range(2) for prompt in PROMPTS]
    for trial, (width, speed, seconds, cells) in zip(
        found["trials"], [(2, 0.8, 2.5, every), (3, 1.0, 2.0, every), (4, 2 / 3.5, 3.5, every[:3])], strict=True
    ):
        assert (trial["width"], trial["tokens_per_second"], trial["tau"]) == (width, pytest.approx(speed), 2.0)
        assert [tuple(cell.values()) for cell in trial["cells"]] == [(*cell, seconds) for cell in cells]
        assert trial["exact"]
    assert (found["chosen"], found["analytic"]["chosen"], found["agree"]) == (3, 4, False)
    assert found["analytic"]["draft_cost"] == 0.25
    assert [line["speedup"] for line in found["analytic"]["widths"]] == pytest.approx([2 / 1.5, 2 / 1.5, 2 / 1.25])
    agreeing = tune(Table({2: 2.0, 3: 1.5, 4: 3.0}.__getitem__), 4, PROMPTS, curve(1.0, 1.25, 1.0, 1.25), repeats=2, seed=7)
    assert (agreeing["chosen"], agreeing["analytic"]["chosen"], agreeing["agree"]) == (3, 3, True)


def asked_by_cell(table: Table, block: int, repeats: int) -> list[list[int]]:
    """The widths asked in each cell of one tuning, after its warm-up answer."""
    tune(table, block, PROMPTS, curve(*[1.0] * block), repeats=repeats, seed=7)
    assert table.asked[0] == (block, "a"), "the warm-up"
    cells: list[list[int]] = []
    for place, (width, prompt) in enumerate(table.asked[1:]):
        if place == 0 or prompt != table.asked[place][1]:
            cells.append([])
        cells[-1].append(width)
    return cells


def test_the_slower_half_is_out_after_each_cell_and_the_whole_block_stays_for_its_acceptance() -> None:
    cells = [sorted(cell) for cell in asked_by_cell(Table(float), 8, repeats=2)]  # the narrower, the faster
    assert cells == [[2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 8], [2, 3, 8], [2, 3], [2, 3], [2, 3]]
    cells = [sorted(cell) for cell in asked_by_cell(Table(lambda width: 9.0 - width), 8, repeats=1)]
    assert cells == [[2, 3, 4, 5, 6, 7, 8], [5, 6, 7, 8], [7, 8]]


def test_widths_rotate_from_cell_to_cell() -> None:
    cells = asked_by_cell(Table(lambda width: 1.0), 3, repeats=4)
    assert all(sorted(cell) == [2, 3] for cell in cells)
    assert Counter(cell[0] for cell in cells) == {2: 6, 3: 6}, "each is the first equally often"


def test_an_inexact_width_cannot_win_however_fast() -> None:
    found = tune(Table(float, wrong=(2,)), 4, PROMPTS, curve(1.0, 1.0, 1.0, 1.0), repeats=1, seed=7)
    assert [trial["exact"] for trial in found["trials"]] == [False, True, True]
    assert found["chosen"] == 3
    all_wrong = tune(Table(float, wrong=(2, 3, 4)), 4, PROMPTS, curve(1.0, 1.0, 1.0, 1.0), repeats=1, seed=7)
    assert (all_wrong["chosen"], all_wrong["analytic"], all_wrong["agree"]) == (None, None, None)


def test_a_text_that_is_wrong_in_the_warm_up_alone_is_wrong() -> None:
    table = Table(float)

    def answer(width: int, prompt: str) -> Decoded:
        table.wrong = (4,) if not table.asked else ()
        return table(width, prompt)

    table.verify = lambda width: 9.0 - width
    assert tune(answer, 4, PROMPTS, curve(1.0, 1.0, 1.0, 1.0), repeats=1, seed=7)["chosen"] == 3


def entry(chosen: int | None, expected: int | None, seconds: dict[int, list[float]]) -> dict[str, Any]:
    """Trials that answered prompts a, a, b, b, … in repeats 0, 1, 0, 1, …"""
    places = [(prompt, repeat) for prompt in PROMPTS for repeat in range(2)]
    trials = []
    for width, times in seconds.items():
        cells = [{"prompt": p, "repeat": r, "seconds": time} for (p, r), time in zip(places, times, strict=False)]
        trials.append({"width": width, "cells": cells})
    agree = chosen == expected if chosen and expected else None
    return {"chosen": chosen, "analytic": expected and {"chosen": expected}, "agree": agree, "trials": trials}


def test_choices_that_differ_are_told_apart_by_the_noise_of_repeated_answers() -> None:
    """Two repeats 4% apart: deviations of ±2% in logarithms, one degree of freedom a pair, so σ = √2 · 2% = 2.83%. Four answers
    of each of two widths: 1.96 · σ · √(2/4) = 3.92%."""
    low, high = math.exp(-0.02), math.exp(0.02)
    calm = {3: [low, high, low, high]}
    methods = {
        "01": entry(3, 3, calm),
        "02": entry(3, 4, {**calm, 4: [1.03 * low, 1.03 * high, 1.03 * low, 1.03 * high]}),
        "03": entry(3, 4, {**calm, 4: [1.05 * low, 1.05 * high, 1.05 * low, 1.05 * high]}),
        "04": entry(3, 4, {**calm, 4: [1.05 * low]}),  # one answer: 7.84%
        "05": entry(None, 4, calm),
        "06": entry(3, None, calm),
    }
    found = agreement(methods)
    assert found["noise"] == pytest.approx(0.02 * math.sqrt(2))
    verdicts = {key: line["verdict"] for key, line in found["methods"].items()}
    assert verdicts == {
        "01": "same", "02": "within noise", "03": "differ", "04": "within noise", "05": "unknown", "06": "unknown"
    }
    assert found["methods"]["03"] == {
        "verdict": "differ", "cells": 4, "difference": pytest.approx(0.05), "noise": pytest.approx(1.96 * 0.02)
    }
    assert found["methods"]["04"]["noise"] == pytest.approx(1.96 * 0.04)


def test_one_repeat_shows_no_noise_so_nothing_is_said_to_lie_within_it() -> None:
    found = agreement({"01": entry(3, 4, {3: [1.0], 4: [1.5]})})
    assert found == {"noise": None, "methods": {"01": {"verdict": "unknown", "cells": 1, "difference": None, "noise": None}}}


def test_methods_tuned_before_answers_were_kept_are_not_compared_when_their_run_goes_on() -> None:
    earlier = entry(3, 4, {3: [], 4: []})
    for trial in earlier["trials"]:
        del trial["cells"]
    found = agreement({"01": earlier, "02": entry(3, 3, {3: [1.0, 1.1]})})
    assert [line["verdict"] for line in found["methods"].values()] == ["unknown", "same"]


# In a run.


def measured(folder: Path, **changes: Any) -> Benchmark:
    assert run(settings(folder, tune=True, **changes)) == 0
    return read(folder / "benchmark.json")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Benchmark:
    return measured(tmp_path_factory.mktemp("tuned"), methods=("00", "01", "08"))


def test_a_tuned_run_fits_the_schema_and_uses_the_widths_it_chose(tuned: Benchmark) -> None:
    assert schema_errors(tuned) == []
    methods = tuned["tuning"]["methods"]
    assert list(methods) == ["01", "08"], "a method without settings has a width all the same"
    assert tuned["tuning"]["seconds"] > 0
    assert tuned["gate"]["exact"] == tuned["gate"]["runs"]
    assert tuned["tuning"]["agreement"] == agreement(methods)
    for arm in tuned["arms"]:
        if arm["kind"] == "method":
            entry = methods[arm["key"]]
            assert [trial["width"] for trial in entry["trials"]] == [2, 3, 4]
            assert all(trial["exact"] for trial in entry["trials"])
            assert (arm["verify_width"], arm["verify_width_source"]) == (entry["chosen"], "tuned")
            assert entry["agree"] == (entry["chosen"] == entry["analytic"]["chosen"])
            curve_ratio = dict(zip(tuned["verify_cost"]["rows"], tuned["verify_cost"]["ratio"], strict=True))
            assert all(line["verify_cost"] == curve_ratio[line["width"]] for line in entry["analytic"]["widths"])
    rows = [row for cell in tuned["cells"] for entry in cell["runs"] if entry["arm"] == "01" for row in entry["steps"]["rows"]]
    assert max(rows) == methods["01"]["chosen"]


def test_every_save_on_the_way_fits_the_schema(tmp_path: Path) -> None:
    saves = []

    def checked(path: Path, benchmark: Benchmark) -> None:
        saves.append(schema_errors(benchmark))
        write(path, benchmark)

    assert run(settings(tmp_path, tune=True, tuning_repeats=1), save=checked) == 0
    assert len(saves) > 7
    assert not any(saves)


def comparable(benchmark: Benchmark) -> Benchmark:
    """Without dates, load, and the warm-up cells that a resumed process runs again."""
    calm = json.loads(json.dumps(benchmark))
    calm["cells"] = [cell for cell in calm["cells"] if not cell["warmup"]]
    calm["created"] = calm["finished"] = calm["gate"] = None
    calm["machine"]["load_average"] = calm["machine"]["load_average_after"] = None
    calm["execution"]["peak_memory_bytes"] = calm["execution"]["memory"] = None
    return calm


class Killed(BaseException):
    """The process is gone: nothing after the last save happened."""


@pytest.mark.parametrize("tuned_methods", [0, 1, 2])
def test_a_run_killed_before_amid_and_after_tuning_resumes_to_the_same_result(
    tmp_path: Path, tuned: Benchmark, tuned_methods: int
) -> None:
    def dying(path: Path, benchmark: Benchmark) -> None:
        write(path, benchmark)
        if benchmark["verify_cost"] and len(benchmark["tuning"]["methods"]) == tuned_methods:
            raise Killed

    with pytest.raises(Killed):
        run(settings(tmp_path, tune=True), save=dying)
    assert run(settings(tmp_path, tune=True, resume=True)) == 0
    assert comparable(read(tmp_path / "benchmark.json")) == comparable(tuned)


def test_a_tuned_run_is_not_resumed_as_an_untuned_one(tmp_path: Path, tuned: Benchmark) -> None:
    write(tmp_path / "benchmark.json", tuned)
    with pytest.raises(UserError, match=r"settings\.tuning_repeats is 2 there and absent here"):
        run(settings(tmp_path, resume=True))


def test_without_tune_every_width_is_the_block(tmp_path: Path) -> None:
    assert run(settings(tmp_path, repeats=1)) == 0
    benchmark = read(tmp_path / "benchmark.json")
    assert schema_errors(benchmark) == []
    assert benchmark["tuning"] is None
    assert benchmark["settings"]["tuning_repeats"] is None
    found = {(arm["verify_width"], arm["verify_width_source"]) for arm in benchmark["arms"] if arm["kind"] == "method"}
    assert found == {(4, "block")}


def test_a_run_begun_before_there_was_tuning_is_resumed(tmp_path: Path) -> None:
    assert run(settings(tmp_path, repeats=1)) == 0
    older = read(tmp_path / "benchmark.json")
    older["cells"], older["complete"], older["finished"] = older["cells"][:2], False, None
    del older["tuning"], older["settings"]["tuning_repeats"]
    for arm in older["arms"]:
        del arm["verify_width_source"]
    write(tmp_path / "benchmark.json", older)
    assert run(settings(tmp_path, repeats=1, resume=True)) == 0


def test_a_users_width_beats_tuning_and_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = measured(tmp_path, verify_width=3, repeats=1)
    assert "No width is tuned" in capsys.readouterr().out
    assert benchmark["tuning"] is None
    found = {(arm["verify_width"], arm["verify_width_source"]) for arm in benchmark["arms"] if arm["kind"] == "method"}
    assert found == {(3, "given")}


def test_a_method_that_follows_another_takes_its_width(tmp_path: Path) -> None:
    benchmark = measured(tmp_path, methods=("00", "10", "13"), repeats=1, tuning_repeats=1)
    assert schema_errors(benchmark) == []
    assert list(benchmark["tuning"]["methods"]) == ["10"]
    ten, thirteen = (arm for arm in benchmark["arms"] if arm["kind"] == "method")
    assert ten["verify_width"] == thirteen["verify_width"]
    assert thirteen["verify_width_source"] == "tuned (method 10)"


def test_where_every_text_is_wrong_the_block_stays(tmp_path: Path) -> None:
    assert run(settings(tmp_path, tune=True, methods=("00", "01")), model=tiny_model(target_class=LyingTarget)) == 3
    benchmark = read(tmp_path / "benchmark.json")
    assert schema_errors(benchmark) == []
    assert benchmark["tuning"]["methods"]["01"]["chosen"] is None
    arm = next(arm for arm in benchmark["arms"] if arm["key"] == "01")
    assert (arm["verify_width"], arm["verify_width_source"]) == (4, "block")
