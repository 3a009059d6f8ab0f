from __future__ import annotations

import math

import pytest

from dflash_mini_lab.measurement.statistics import Floor, Ratio, geometric_mean_ratio, noise_floor, spread, verdict

FLOOR = Floor(0.98, 1.02)


@pytest.mark.parametrize(
    ("speedup", "floor", "exact", "expected"),
    [
        (Ratio(1.8, 1.7, 1.9), FLOOR, True, "faster"),
        (Ratio(1.03, 1.021, 1.04), FLOOR, True, "faster"),
        (Ratio(1.03, 1.02, 1.04), FLOOR, True, "no difference"),
        (Ratio(1.05, 1.01, 1.09), FLOOR, True, "no difference"),
        (Ratio(0.5, 0.4, 0.6), FLOOR, True, "slower"),
        (Ratio(0.96, 0.94, 0.981), FLOOR, True, "no difference"),
        (Ratio(1.5, 0.5, 2.5), FLOOR, True, "no difference"),
        (Ratio(1.8, None, None), FLOOR, True, "no difference"),
        (Ratio(1.8, 1.7, 1.9), Floor(None, None), True, "no difference"),
        (Ratio(1.8, 1.7, 1.9), FLOOR, False, "inexact"),
    ],
)
def test_verdict(speedup: Ratio, floor: Floor, exact: bool, expected: str) -> None:
    assert verdict(speedup, floor, exact) == expected


def test_the_mean_is_geometric_over_all_cells() -> None:
    assert geometric_mean_ratio({"a": [1.0, 4.0], "b": [2.0]}).mean == pytest.approx(2.0)


def test_the_interval_is_deterministic_and_brackets_the_mean() -> None:
    ratios = {"a": [1.5, 1.6], "b": [2.0, 2.1], "c": [1.1, 1.2]}
    first = geometric_mean_ratio(ratios, seed=7)
    assert first == geometric_mean_ratio(ratios, seed=7)
    assert first.low is not None
    assert first.high is not None
    assert first.low < first.mean < first.high


def test_prompts_are_resampled_with_all_their_repeats() -> None:
    # Two prompts that differ, repeats that do not: with repeats as units the interval would shrink with their number.
    few = geometric_mean_ratio({"a": [1.0], "b": [4.0]})
    many = geometric_mean_ratio({"a": [1.0] * 50, "b": [4.0] * 50})
    assert (few.low, few.high) == pytest.approx((1.0, 4.0))
    assert (many.low, many.high) == pytest.approx((1.0, 4.0))


def test_one_prompt_resamples_its_repeats() -> None:
    ratio = geometric_mean_ratio({"a": [1.0, 2.0, 4.0]})
    assert ratio.mean == pytest.approx(2.0)
    assert (ratio.low, ratio.high) == pytest.approx((1.0, 4.0))


def test_one_measurement_has_no_interval() -> None:
    assert geometric_mean_ratio({"a": [1.7]}) == Ratio(pytest.approx(1.7), None, None)


def test_no_measurement_is_an_error() -> None:
    with pytest.raises(ValueError, match="no ratios"):
        geometric_mean_ratio({"a": []})


def test_the_floor_contains_one_and_does_not_depend_on_which_arm_is_called_a() -> None:
    floor = noise_floor(Ratio(1.03, 1.02, 1.04))
    swapped = noise_floor(Ratio(1 / 1.03, 1 / 1.04, 1 / 1.02))
    assert floor.low == pytest.approx(1 / 1.04)
    assert floor.high == pytest.approx(1.04)
    assert (floor.low, floor.high) == pytest.approx((swapped.low, swapped.high))


@pytest.mark.parametrize(("high", "wide"), [(1.01, False), (1.049, False), (1.06, True)])
def test_a_floor_past_five_percent_is_wide(high: float, wide: bool) -> None:
    assert noise_floor(Ratio(1.0, 1 / high, high)).wide is wide


def test_a_floor_that_was_not_measured_is_unknown_and_not_called_wide() -> None:
    floor = noise_floor(Ratio(1.01, None, None))
    assert floor == Floor(None, None)
    assert not floor.wide


def test_spread_is_median_and_quartiles() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == (3.0, 2.0, 4.0)
    assert not any(math.isnan(value) for value in spread([1.0]))
