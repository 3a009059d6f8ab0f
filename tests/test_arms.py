"""Which settings an arm runs with, and what benchmark.json says about where they came from."""
from __future__ import annotations

from pathlib import Path

from tiny_lab import run, settings

from dflash_mini_lab.benchmark.arms import make_arms
from dflash_mini_lab.benchmark_file import read, schema_errors
from dflash_mini_lab.methods import by_key

CHOSEN = {"10": {"temperature": 0.16, "cutoff": 0.35, "budget": 2}}


def test_13_takes_over_what_was_chosen_for_10_but_its_budget() -> None:
    arms = {arm.key: arm for arm in make_arms(("00", "10", "13"), (), 4, None, CHOSEN)}
    assert (arms["10"].settings, arms["10"].settings_source) == (CHOSEN["10"], "calibrated")
    assert arms["13"].settings == {"temperature": 0.16, "cutoff": 0.35}
    assert arms["13"].settings_source == "calibrated (method 10)"


def test_13_keeps_its_defaults_where_10_was_not_calibrated() -> None:
    for methods in (("00", "13"), ("00", "10", "13")):
        arm = make_arms(methods, (), 4, None, {"08": {"threshold": 1.0}})[-1]
        assert (arm.key, arm.settings, arm.settings_source) == ("13", dict(by_key("13").settings), "default")


def test_a_users_width_beats_a_tuned_one_and_that_the_block() -> None:
    def widths(given: int | None, tuned: dict[str, int]) -> dict[str, tuple[int | None, str | None]]:
        arms = make_arms(("00", "01", "10", "13"), ("generate",), 8, given, {}, tuned)
        return {arm.key: (arm.verify_width, arm.verify_width_source) for arm in arms}

    assert widths(None, {})["01"] == (8, "block")
    assert widths(5, {"01": 3, "10": 3})["01"] == widths(5, {"10": 3})["13"] == (5, "given")
    assert widths(9, {})["01"] == (8, "given")
    tuned = widths(None, {"10": 3})
    assert (tuned["01"], tuned["10"], tuned["13"]) == ((8, "block"), (3, "tuned"), (3, "tuned (method 10)"))
    assert tuned["00"] == (1, None)
    assert tuned["generate"] == (None, None)


def test_a_run_calibrates_10_and_records_that_13_follows_it(tmp_path: Path) -> None:
    assert run(settings(tmp_path, methods=("00", "10", "13"), repeats=1)) == 0
    benchmark = read(tmp_path / "benchmark.json")
    assert schema_errors(benchmark) == []
    assert list(benchmark["calibration"]["methods"]) == ["10"]
    chosen = benchmark["calibration"]["methods"]["10"]["chosen"]
    arm = next(arm for arm in benchmark["arms"] if arm["key"] == "13")
    assert arm["settings_source"] == "calibrated (method 10)"
    assert arm["settings"] == {"temperature": chosen["temperature"], "cutoff": chosen["cutoff"]}
    assert benchmark["gate"]["exact"] == benchmark["gate"]["runs"]
