from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from dflash_mini_lab.calibration import calibrate
from dflash_mini_lab.methods import by_key
from dflash_mini_lab.types import Decoded, Method, Proposal, Step

PROMPTS = {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}


class Speeds:
    """Answers whose time is decided by `cost(values)`; counts what was asked. `wrong` values give another text."""

    def __init__(self, cost: Any, wrong: Any = lambda values: False) -> None:
        self.cost, self.wrong = cost, wrong
        self.asked: Counter[tuple[tuple[tuple[str, float], ...], str]] = Counter()
        self.order: list[tuple[float, str]] = []

    def __call__(self, method: Method, values: Mapping[str, float], prompt: str) -> Decoded:
        self.asked[tuple(sorted(values.items())), prompt] += 1
        tokens = [0, 0, 0] if self.wrong(values) else PROMPTS[prompt]
        step = Step(2, 1, 1, 2, work=0, draft=0.0, select=0.0, verify=self.cost(values), rest=0.0)
        return Decoded(tuple(tokens), "budget", 0.1, (step,))


def test_the_fastest_setting_is_chosen() -> None:
    found = calibrate(by_key("08"), Speeds(lambda values: 1 + abs(values["threshold"] - 1.5)), PROMPTS, seed=7)
    assert found is not None
    assert found["chosen"] == {"threshold": 1.5}
    assert len(found["trials"]) == 6
    best = next(trial for trial in found["trials"] if trial["settings"] == found["chosen"])
    assert best == {"settings": found["chosen"], "tokens_per_second": 2.0, "tau": 2.0, "exact": True, "prompts": 3}


def test_an_inexact_trial_cannot_win_however_fast() -> None:
    speeds = Speeds(lambda values: 3 - values["threshold"], wrong=lambda values: values["threshold"] >= 1.0)
    found = calibrate(by_key("08"), speeds, PROMPTS, seed=7)
    assert found is not None
    assert found["chosen"] == {"threshold": 0.5}
    assert [trial["settings"]["threshold"] for trial in found["trials"] if not trial["exact"]] == [1.0, 1.5, 2.0]


def test_where_every_text_is_wrong_the_default_stays() -> None:
    found = calibrate(by_key("08"), Speeds(lambda values: 1.0, wrong=lambda values: True), PROMPTS, seed=7)
    assert found is not None
    assert found["chosen"] == {"threshold": 0.5}


def test_after_each_prompt_the_slower_half_is_out() -> None:
    speeds = Speeds(lambda values: 1 + values["threshold"])
    found = calibrate(by_key("08"), speeds, PROMPTS, seed=7)
    assert found is not None
    assert [trial["prompts"] for trial in found["trials"]] == [3, 3, 2, 1, 1, 1], "six, three, two of them"
    assert sum(speeds.asked.values()) == 6 + 3 + 2 + 1, "and one answer that warms up"


def test_nothing_to_choose_is_no_calibration() -> None:
    assert calibrate(by_key("01"), Speeds(lambda values: 1.0), PROMPTS, seed=7) is None
    assert calibrate(by_key("00"), Speeds(lambda values: 1.0), PROMPTS, seed=7) is None
    assert calibrate(by_key("08"), Speeds(lambda values: 1.0), {}, seed=7) is None


def test_a_large_grid_is_halved_and_its_cost_stays_bounded() -> None:
    grid = {"x": tuple(map(float, range(6))), "y": tuple(map(float, range(4)))}
    method = Method("99", "large", "Large", "", lambda draft, settings: Proposal(()), {"x": 0.0, "y": 0.0}, grid)
    speeds = Speeds(lambda values: 1 + abs(values["x"] - 4) + abs(values["y"] - 2))
    found = calibrate(method, speeds, PROMPTS, seed=7)
    assert found is not None
    assert found["chosen"] == {"x": 4.0, "y": 2.0}
    assert sum(speeds.asked.values()) == 24 + 12 + 6 + 1
