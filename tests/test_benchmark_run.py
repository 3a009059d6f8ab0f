"""The whole run on a tiny real model: what it leaves, its exit statuses, its gate, and that an interruption changes nothing."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_lab import PROMPTS, KnowingDrafter, LyingTarget, greedy, run, settings, tiny_model

from dflash_mini_lab.benchmark_file import Benchmark, read, schema_errors, write
from dflash_mini_lab.methods import by_key
from dflash_mini_lab.prompts import Prompt
from dflash_mini_lab.types import UserError


def measured(folder: Path, **changes: Any) -> Benchmark:
    assert run(settings(folder, **changes)) == 0
    return read(folder / "benchmark.json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Benchmark:
    return measured(tmp_path_factory.mktemp("finished"))


def test_a_run_fits_the_schema_and_is_exact(finished: Benchmark) -> None:
    assert schema_errors(finished) == []
    assert finished["complete"]
    assert finished["finished"]
    assert finished["gate"] == {"verdict": "exact", "runs": 20, "exact": 20, "mismatches": []}


def test_every_save_on_the_way_fits_the_schema(tmp_path: Path) -> None:
    saves = []

    def checked(path: Path, benchmark: Benchmark) -> None:
        saves.append(schema_errors(benchmark))
        write(path, benchmark)

    assert run(settings(tmp_path), save=checked) == 0
    assert len(saves) > 5
    assert not any(saves)


def test_the_report_lies_beside_the_benchmark(tmp_path: Path) -> None:
    measured(tmp_path)
    assert (tmp_path / "index.html").read_bytes() == (tmp_path / "report.html").read_bytes()


def test_every_cell_runs_every_arm_once_and_the_reference_is_the_librarys(finished: Benchmark) -> None:
    for cell in finished["cells"]:
        assert sorted(run["arm"] for run in cell["runs"]) == ["00", "00'", "01", "08"]
        assert [run["arm"] for run in cell["runs"]] == cell["order"]
    prompts = {prompt.id: [ord(letter) % 67 for letter in prompt.text] for prompt in PROMPTS}
    for entry in finished["reference"]:
        assert entry["tokens"] == greedy(prompts[entry["prompt"]], 12)


def test_warm_up_cells_are_kept_and_excluded(finished: Benchmark) -> None:
    assert [cell["warmup"] for cell in finished["cells"]] == [True, False, False, False, False]
    assert finished["cells"][0]["repeat"] == -1
    assert all(result["runs"] == 4 for result in finished["results"]["arms"].values())


def test_the_times_of_a_warm_up_change_no_result(finished: Benchmark) -> None:
    from dflash_mini_lab.benchmark.results import results

    slowed = json.loads(json.dumps(finished))
    for warm in slowed["cells"][0]["runs"]:
        warm["decode_seconds"] *= 1000
    assert results(slowed) == finished["results"]


def test_phases_sum_to_the_decode_time_to_the_microsecond(finished: Benchmark) -> None:
    for cell in finished["cells"]:
        for entry in cell["runs"]:
            steps = entry["steps"]
            total = sum(sum(steps[phase]) for phase in ("draft", "select", "verify", "rest"))
            assert total == pytest.approx(entry["decode_seconds"], abs=1e-6)
            assert len(entry["tokens"]) == 1 + sum(steps["committed"])
    result = finished["results"]["arms"]["01"]
    decoded = [entry["decode_seconds"] for cell in finished["cells"][1:] for entry in cell["runs"] if entry["arm"] == "01"]
    assert sum(result["phase_seconds"].values()) == pytest.approx(sum(decoded), abs=1e-6)


def test_results_are_those_of_the_raw_cells(finished: Benchmark) -> None:
    """Recomputed here without the lab's code: every round of the fake clock takes the same, so method 00's ratio is known."""
    arms = finished["results"]["arms"]
    assert arms["00"]["tau_macro"] == arms["00"]["tau_micro"] == 1.0
    runs = [entry for cell in finished["cells"][1:] for entry in cell["runs"] if entry["arm"] == "01"]
    committed = sum(sum(entry["steps"]["committed"]) for entry in runs)
    rounds = sum(len(entry["steps"]["rows"]) for entry in runs)
    assert arms["01"]["tau_micro"] == pytest.approx(committed / rounds)
    assert arms["01"]["tau_micro"] > 1.5
    assert arms["01"]["acceptance_rate"] == pytest.approx(arms["01"]["accepted"] / arms["01"]["proposed"])
    assert arms["00'"]["speedup"]["mean"] == pytest.approx(1.0)
    assert finished["results"]["noise_floor"] == {"low": 1.0, "high": 1.0, "wide": False}


def test_settings_are_calibrated_and_their_source_is_recorded(finished: Benchmark) -> None:
    calibration = finished["calibration"]["methods"]
    assert set(calibration) == {"08"}, "a method without a grid has nothing to choose"
    arms = {arm["key"]: arm for arm in finished["arms"]}
    assert arms["08"]["settings_source"] == "calibrated"
    assert arms["08"]["settings"] == {"threshold": calibration["08"]["chosen"]["threshold"]}
    assert arms["08"]["verify_width"] == 4, "the whole block"
    assert all(trial["exact"] for trial in calibration["08"]["trials"])


def test_without_calibration_prompts_the_defaults_are_kept_and_said(tmp_path: Path) -> None:
    benchmark = measured_without_calibration(tmp_path)
    arms = {arm["key"]: arm for arm in benchmark["arms"]}
    assert benchmark["calibration"]["methods"] == {}
    assert (arms["08"]["settings_source"], arms["08"]["verify_width"]) == ("default", 4)
    results = benchmark["results"]["arms"]
    assert results["08"]["acceptance_rate"] > results["01"]["acceptance_rate"], "its default cuts the unsure tokens"


def measured_without_calibration(folder: Path, **changes: Any) -> Benchmark:
    assert run(settings(folder, **changes), calibration_prompts=()) == 0
    return read(folder / "benchmark.json")


def test_one_measurement_has_a_ratio_and_claims_nothing(tmp_path: Path) -> None:
    assert run(settings(tmp_path, repeats=1), prompts=PROMPTS[:1]) == 0
    benchmark = read(tmp_path / "benchmark.json")
    assert schema_errors(benchmark) == []
    speedup = benchmark["results"]["arms"]["01"]["speedup"]
    assert speedup["mean"] > 0
    assert speedup["low"] is speedup["high"] is None
    assert benchmark["results"]["arms"]["01"]["verdict"] == "no difference"


# The gate and the exit status.


def test_a_violation_ends_with_status_3_gets_no_speedup_and_is_written_first(tmp_path: Path) -> None:
    assert run(settings(tmp_path), model=tiny_model(target_class=LyingTarget), calibration_prompts=()) == 3
    benchmark = read(tmp_path / "benchmark.json")
    assert schema_errors(benchmark) == []
    assert benchmark["gate"]["verdict"] == "violation"
    assert (tmp_path / "index.html").exists()
    wrong, right = benchmark["results"]["arms"]["01"], benchmark["results"]["arms"]["00"]
    assert wrong["speedup"] is None
    assert wrong["verdict"] == "inexact"
    assert (wrong["exact_runs"], right["exact_runs"]) == (0, 4)
    mismatches = [m for m in benchmark["gate"]["mismatches"] if m["arm"] == "01"]
    assert len(mismatches) == 5  # warm-ups are proved too
    assert all(m["verdict"] == "violation" and len(m["reference_top2"]) == 2 for m in mismatches)


def judged_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mismatch is within rounding: as if the two paths differed by as much as the tokens."""
    import dflash_mini_lab.exactness as exactness

    monkeypatch.setattr(exactness, "TIE_FACTOR", 1e12)


@pytest.mark.parametrize(("dtype", "status"), [("float32", 3), ("bfloat16", 0), ("float16", 0)])
def test_ties_fail_a_float32_run_and_are_counted_in_narrower_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, status: int
) -> None:
    judged_ties(monkeypatch)
    assert run(settings(tmp_path), model=tiny_model(target_class=LyingTarget, dtype=dtype), calibration_prompts=()) == status
    benchmark = read(tmp_path / "benchmark.json")
    assert benchmark["gate"]["verdict"] == "ties"
    assert benchmark["results"]["arms"]["01"]["speedup"] is not None
    assert benchmark["results"]["arms"]["01"]["exact_runs"] == 0


def test_an_inexact_trial_cannot_win_the_calibration(tmp_path: Path) -> None:
    run(settings(tmp_path), model=tiny_model(target_class=LyingTarget))
    calibration = read(tmp_path / "benchmark.json")["calibration"]["methods"]
    assert not any(trial["exact"] for trial in calibration["08"]["trials"])
    assert calibration["08"]["chosen"] == by_key("08").settings


# Interruption and resuming.


class Killed(BaseException):
    """The process is gone: nothing after the last save happened."""


def comparable(benchmark: Benchmark) -> Benchmark:
    """Without dates, load, memory, and the warm-up cells that a resumed process runs again."""
    calm = json.loads(json.dumps(benchmark))
    calm["cells"] = [cell for cell in calm["cells"] if not cell["warmup"]]
    assert calm["gate"]["runs"] == calm["gate"]["exact"]
    del calm["gate"]["runs"], calm["gate"]["exact"]
    calm["created"] = calm["finished"] = None
    calm["execution"]["memory"] = calm["execution"]["peak_memory_bytes"] = None
    calm["machine"]["load_average"] = calm["machine"]["load_average_after"] = None
    calm["execution"]["peak_memory_bytes"] = calm["execution"]["memory"] = None
    return calm


@pytest.mark.parametrize("saves", range(1, 10))
def test_a_run_killed_after_any_save_resumes_to_the_same_result(tmp_path: Path, finished: Benchmark, saves: int) -> None:
    left = [saves]

    def dying(path: Path, benchmark: Benchmark) -> None:
        write(path, benchmark)
        left[0] -= 1
        if not left[0]:
            raise Killed

    with pytest.raises(Killed):
        run(settings(tmp_path), save=dying)
    assert run(settings(tmp_path, resume=True)) == 0
    assert comparable(read(tmp_path / "benchmark.json")) == comparable(finished)


def test_a_resumed_process_warms_up_again_and_keeps_what_it_ran(tmp_path: Path, finished: Benchmark) -> None:
    other = json.loads(json.dumps(finished))
    other["cells"], other["complete"], other["finished"] = other["cells"][:3], False, None
    write(tmp_path / "benchmark.json", other)
    assert run(settings(tmp_path, resume=True)) == 0
    cells = read(tmp_path / "benchmark.json")["cells"]
    assert [(cell["prompt"], cell["repeat"], cell["warmup"]) for cell in cells] == [
        ("one", -1, True), ("one", 0, False), ("two", 0, False),
        ("one", -2, True), ("one", 1, False), ("two", 1, False),
    ]  # fmt: skip


def test_ctrl_c_ends_with_130_and_leaves_a_report_of_what_there_is(tmp_path: Path, finished: Benchmark) -> None:
    def interrupting(path: Path, benchmark: Benchmark) -> None:
        write(path, benchmark)
        if len(benchmark["cells"]) == 3 and not benchmark["results"]:
            benchmark["results"] = {}
            raise KeyboardInterrupt

    assert run(settings(tmp_path), save=interrupting) == 130
    benchmark = read(tmp_path / "benchmark.json")
    assert schema_errors(benchmark) == []
    assert not benchmark["complete"]
    assert benchmark["finished"] is None
    assert benchmark["results"]["arms"]["01"]["runs"] == 2
    assert (tmp_path / "index.html").exists()
    assert run(settings(tmp_path, resume=True)) == 0
    assert comparable(read(tmp_path / "benchmark.json")) == comparable(finished)


def test_an_interrupted_run_claims_no_speedup_for_an_arm_that_was_not_judged(tmp_path: Path) -> None:
    def interrupting(path: Path, benchmark: Benchmark) -> None:
        write(path, benchmark)
        if len(benchmark["cells"]) == 3 and not benchmark["results"]:
            benchmark["results"] = {}
            raise KeyboardInterrupt

    assert run(settings(tmp_path), model=tiny_model(target_class=LyingTarget), calibration_prompts=(), save=interrupting) == 130
    benchmark = read(tmp_path / "benchmark.json")
    assert benchmark["gate"]["verdict"] == "pending"
    assert benchmark["results"]["arms"]["01"]["speedup"] is None


def test_resuming_a_finished_run_measures_nothing(tmp_path: Path, finished: Benchmark) -> None:
    measured(tmp_path)
    before = (tmp_path / "benchmark.json").read_bytes()
    assert run(settings(tmp_path, resume=True), model=None, clock=None) == 0
    assert (tmp_path / "benchmark.json").read_bytes() == before, "load and memory are those of the process that measured"


@pytest.mark.parametrize("earlier", [1, None, 2**60])
def test_a_continued_run_has_the_largest_of_its_processes_peaks(
    tmp_path: Path, finished: Benchmark, earlier: int | None
) -> None:
    other = json.loads(json.dumps(finished))
    other["cells"], other["complete"], other["finished"] = other["cells"][:3], False, None
    other["execution"]["peak_memory_bytes"] = earlier
    write(tmp_path / "benchmark.json", other)
    assert run(settings(tmp_path, resume=True)) == 0
    execution = read(tmp_path / "benchmark.json")["execution"]
    assert execution["peak_memory_bytes"] >= max(earlier or 0, execution["memory"]["loaded_bytes"])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokens": 13}, "settings.tokens is 12 there and 13 here"),
        ({"repeats": 3}, "settings.repeats"),
        ({"seed": 8}, "settings.seed"),
        ({"methods": ("00", "01")}, "settings.methods"),
        ({"cpu_threads": 97}, "settings.threads"),
        ({"dtype": "bfloat16"}, "settings.dtype"),
    ],
)
def test_other_settings_refuse_to_resume_and_are_named(
    tmp_path: Path, finished: Benchmark, changes: dict[str, Any], named: str
) -> None:
    write(tmp_path / "benchmark.json", finished)
    with pytest.raises(UserError, match=named):
        run(settings(tmp_path, resume=True, **changes))


def test_other_prompts_refuse_to_resume(tmp_path: Path, finished: Benchmark) -> None:
    write(tmp_path / "benchmark.json", finished)
    with pytest.raises(UserError, match=r"prompts\.two\.text"):
        run(settings(tmp_path, resume=True), prompts=(PROMPTS[0], Prompt("two", "own", "a lONGER text")))


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("drafter", "files", 0, "sha256"), "2" * 64, r"drafter\.files\.model\.safetensors"),
        (("target", "weights_sha256"), "3" * 64, r"target\.weights_sha256"),
        (("target", "dtype"), "float16", r"target\.dtype"),
        (("target", "device"), "cuda", r"target\.device"),
        (("machine", "threads"), 99, r"machine\.threads"),
        (("machine", "cpu"), "another", r"machine\.cpu"),
    ],
)
def test_other_files_or_another_machine_refuse_to_resume(
    tmp_path: Path, finished: Benchmark, path: tuple[Any, ...], value: Any, named: str
) -> None:
    other = json.loads(json.dumps(finished))
    place = other
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    write(tmp_path / "benchmark.json", other)
    with pytest.raises(UserError, match=named):
        run(settings(tmp_path, resume=True))


def test_a_reference_that_comes_out_differently_refuses_to_resume(tmp_path: Path, finished: Benchmark) -> None:
    other = json.loads(json.dumps(finished))
    other["complete"] = False
    other["reference"][1]["tokens"][3] += 1
    write(tmp_path / "benchmark.json", other)
    with pytest.raises(UserError, match="the reference for prompt 'two'"):
        run(settings(tmp_path, resume=True))


def test_resuming_nothing_starts_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(settings(tmp_path, resume=True)) == 0
    assert "nothing to resume" in capsys.readouterr().out


def test_only_method_00_needs_no_drafter_and_no_calibration(tmp_path: Path) -> None:
    benchmark = measured(tmp_path, methods=("00",))
    assert [arm["key"] for arm in benchmark["arms"]] == ["00", "00'"]
    assert schema_errors(benchmark) == []


def test_a_prompt_that_fills_the_context_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'long' has 96 tokens"):
        run(settings(tmp_path), prompts=(Prompt("long", "own", "x" * 96),))


def test_peers_are_arms_of_the_same_schedule_through_the_same_gate(tmp_path: Path) -> None:
    benchmark = measured(tmp_path, peers=("generate", "prompt-lookup"), methods=("00", "01"))
    assert schema_errors(benchmark) == []
    assert benchmark["gate"]["exact"] == benchmark["gate"]["runs"] == 25
    assert all(set(cell["order"]) == {"00", "00'", "01", "generate", "prompt-lookup"} for cell in benchmark["cells"])
    peer = benchmark["results"]["arms"]["generate"]
    assert peer["runs"] == 4
    assert peer["speedup"]["mean"] > 0
    assert peer["tau_macro"] is None


def test_a_drafter_that_is_always_wrong_is_shown_as_it_is(tmp_path: Path) -> None:
    assert run(settings(tmp_path), model=tiny_model(KnowingDrafter(wrong_every=1)), calibration_prompts=()) == 0
    result = read(tmp_path / "benchmark.json")["results"]["arms"]["01"]
    assert result["tau_micro"] == 1.0
    assert result["accepted"] == 0
    assert result["verdict"] == "slower"
