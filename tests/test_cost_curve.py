from __future__ import annotations

from collections.abc import Sequence

import pytest

from dflash_mini_lab.measurement.cost_curve import measure_verify_cost


class CountedClock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


class CostlyTarget:
    """A verify call of W rows takes 10 + W seconds, a single-row decode 8; keeping is slow and must not be counted."""

    stop_ids: frozenset[int] = frozenset()

    def __init__(self, clock: CountedClock, max_positions: int = 1000) -> None:
        self.clock, self.max_positions = clock, max_positions
        self.started: list[tuple[int, int, Sequence[int] | None]] = []
        self.calls: list[int] = []

    def start(self, prompt_ids: Sequence[int], capacity: int, taps: Sequence[int] | None) -> CostlyTarget:
        self.started.append((len(prompt_ids), capacity, taps))
        return self

    def prefill(self) -> int:
        self.clock.time += 500
        return 0

    def decode_one(self, token: int) -> int:
        self.clock.time += 8
        self.calls.append(1)
        return 0

    def verify(self, tokens: Sequence[int]) -> list[int]:
        self.clock.time += 10 + len(tokens)
        self.calls.append(len(tokens))
        return [0] * len(tokens)

    def keep(self, rows: int) -> None:
        assert rows == 0
        self.clock.time += 77


def test_the_curve_is_the_time_of_the_call_alone_relative_to_a_single_row() -> None:
    clock = CountedClock()
    curve = measure_verify_cost(CostlyTarget(clock), [1, 2, 3], 6, (0,), clock, repeats=3)
    assert curve["rows"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert curve["median_seconds"] == [8.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0]
    assert curve["low_seconds"] == curve["high_seconds"] == curve["median_seconds"]
    assert curve["ratio"][0] == 1.0
    assert curve["ratio"][5] == pytest.approx(2.0)
    assert curve["context_tokens"] == 3


def test_a_wider_block_widens_the_curve() -> None:
    clock = CountedClock()
    assert measure_verify_cost(CostlyTarget(clock), [1], 16, (0,), clock, repeats=1)["rows"][-1] == 16


def test_single_rows_run_in_a_session_of_method_00_and_widths_are_interleaved() -> None:
    clock = CountedClock()
    target = CostlyTarget(clock)
    measure_verify_cost(target, [1, 2, 3], 4, (0, 1), clock, repeats=4)
    assert [taps for _, _, taps in target.started] == [None, (0, 1)]
    passes = [target.calls[start : start + 8] for start in range(0, len(target.calls), 8)]
    assert len(passes) == 5  # one is warm-up
    assert all(sorted(one) == [1, 2, 3, 4, 5, 6, 7, 8] for one in passes)
    assert len({tuple(one) for one in passes}) > 1


@pytest.mark.parametrize(("context", "measured_at"), [(9, 9), (12, 12), (13, 12), (20, 12)])
def test_near_the_last_position_the_curve_is_whole_and_measured_a_little_earlier(context: int, measured_at: int) -> None:
    clock = CountedClock()
    target = CostlyTarget(clock, max_positions=20)
    curve = measure_verify_cost(target, [1] * context, 6, (), clock, repeats=3)
    assert curve["rows"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert curve["context_tokens"] == measured_at
    assert all(tokens + 8 <= capacity <= 20 for tokens, capacity, _ in target.started)
