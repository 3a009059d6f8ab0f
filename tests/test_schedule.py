from __future__ import annotations

from collections import Counter

import pytest

from dflash_mini_lab.measurement.schedule import plan, rotated_orders

ARMS = ("00", "00'", "01", "08")


def test_every_arm_takes_every_place_equally_often() -> None:
    orders = rotated_orders(ARMS, 12, seed=7)
    for place in range(len(ARMS)):
        assert Counter(order[place] for order in orders) == dict.fromkeys(ARMS, 3)


@pytest.mark.parametrize("count", [1, 3, 18, 19])
def test_places_differ_by_one_at_most_where_cells_are_no_multiple_of_the_arms(count: int) -> None:
    orders = rotated_orders(ARMS, count, seed=7)
    assert len(orders) == count
    assert all(sorted(order) == sorted(ARMS) for order in orders)
    for place in range(len(ARMS)):
        times = Counter(dict.fromkeys(ARMS, 0))
        times.update(order[place] for order in orders)
        assert max(times.values()) - min(times.values()) <= 1


def test_neighbours_change_between_blocks() -> None:
    orders = rotated_orders(ARMS, 40, seed=7)
    followers = {order[place + 1] for order in orders for place in range(3) if order[place] == "01"}
    assert followers == {"00", "00'", "08"}


def test_the_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    assert plan(["a", "b"], 4, ARMS, 1, 7) == plan(["a", "b"], 4, ARMS, 1, 7)
    assert plan(["a", "b"], 4, ARMS, 1, 7) != plan(["a", "b"], 4, ARMS, 1, 8)


def test_warm_ups_come_first_are_marked_and_share_no_key_with_measured_cells() -> None:
    cells = plan(["a", "b"], 2, ARMS, 3, 7)
    assert [(cell.prompt, cell.repeat, cell.warmup) for cell in cells] == [
        ("a", -1, True), ("b", -1, True), ("a", -2, True),
        ("a", 0, False), ("b", 0, False), ("a", 1, False), ("b", 1, False),
    ]  # fmt: skip


def test_warm_ups_do_not_move_the_orders_of_measured_cells() -> None:
    with_warmup, without = plan(["a"], 5, ARMS, 2, 7), plan(["a"], 5, ARMS, 0, 7)
    assert with_warmup[2:] == without


def test_no_arms_still_have_a_plan() -> None:
    assert rotated_orders((), 3, seed=7) == [(), (), ()]
