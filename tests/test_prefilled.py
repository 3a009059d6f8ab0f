"""Sessions that begin as copies of a prefilled one: what a fresh one answers and holds, and no copy feels another."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tests.tiny_models import COMPILED, FAMILIES, TAPS, ScriptedDrafter, TickingClock, plain_greedy, random_ids, tiny_target

from dflash_mini_lab.benchmark.prefilled import PrefilledOnce
from dflash_mini_lab.decoding import decode
from dflash_mini_lab.methods import by_key
from dflash_mini_lab.types import Session, Target

PATHS = [*((family, path) for family in FAMILIES for path in ("lean", "library")), *((family, "compiled") for family in COMPILED)]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[Target], list[int]]:
    """Of a target: the capacities of the sessions that it starts from now on."""

    def counted(target: Target) -> list[int]:
        capacities: list[int] = []
        start = target.start

        def heard(prompt_ids: Sequence[int], capacity: int, taps: Sequence[int] | None) -> Session:
            capacities.append(capacity)
            return start(prompt_ids, capacity, taps)

        monkeypatch.setattr(target, "start", heard)
        return capacities

    return counted


@pytest.mark.parametrize(("family", "path"), PATHS)
def test_answers_are_those_of_fresh_sessions_and_a_prompt_is_read_once(
    family: str, path: str, started: Callable[[Target], list[int]]
) -> None:
    prompts = [random_ids(length, length) for length in (5, 9)]
    answers = [plain_greedy(family, prompt, 24) for prompt in prompts]
    own = tiny_target(family, path)
    sessions, target = started(own), PrefilledOnce(own)
    for turn, kind in enumerate(("random", "right", "wrong")):
        for prompt, answer in zip(prompts, answers, strict=True):
            drafter = ScriptedDrafter(kind, len(prompt), answer, 6, turn)
            decoded = decode(target, prompt, by_key("01"), 24, TickingClock(), drafter)
            assert list(decoded.tokens) == answer
    assert len(sessions) == len(prompts)


@pytest.mark.parametrize(("family", "path"), PATHS)
def test_a_copy_hands_over_the_prompts_features_and_keeps_its_own_state(family: str, path: str) -> None:
    prompt = random_ids(7, 1)
    fresh = tiny_target(family, path).start(prompt, 40, TAPS)
    first = fresh.prefill()
    target = PrefilledOnce(tiny_target(family, path))
    one, two = (target.start(prompt, 40, TAPS) for _ in range(2))
    assert one.prefill() == two.prefill() == first
    one.verify([first, 3, 4])
    one.keep(3)
    assert (one.length, two.length) == (10, 7)
    features = fresh.take_features()
    torch.testing.assert_close(two.take_features(), features, rtol=0, atol=0)
    assert len(one.take_features()) == len(features) + 3
    assert two.verify([first, 5]) == fresh.verify([first, 5])


def test_more_room_than_the_kept_session_has_is_another_prefill(started: Callable[[Target], list[int]]) -> None:
    own, prompt = tiny_target("llama", "lean"), random_ids(6, 2)
    sessions, target = started(own), PrefilledOnce(own)
    answer = plain_greedy("llama", prompt, 30)
    for budget, expected in ((10, 1), (30, 2), (20, 2)):
        decoded = decode(target, prompt, by_key("01"), budget, TickingClock(), ScriptedDrafter("right", 6, answer, 8))
        assert list(decoded.tokens) == answer[:budget]
        assert len(sessions) == expected
