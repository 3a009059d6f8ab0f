"""The loop: whatever the drafter proposes, the answer is plain greedy decoding's, at every budget and every end."""
from __future__ import annotations

import pytest
from tests.tiny_models import (
    COMPILED,
    FAMILIES,
    POSITIONS,
    ScriptedDrafter,
    TickingClock,
    paths_of,
    plain_greedy,
    random_ids,
    tiny_target,
)

from dflash_mini_lab.decoding import decode
from dflash_mini_lab.methods import METHODS, by_key
from dflash_mini_lab.types import UserError

DRAFTERS = ("right", "wrong", "random")


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.slug)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("family", [*FAMILIES, "plain llama", "plain lfm2"])
def test_every_method_answers_as_plain_greedy_decoding_does(family: str, kind: str, method) -> None:
    for seed, path in enumerate([*paths_of(method), *(["compiled"] if family in COMPILED else [])]):
        prompt = random_ids(5 + seed, seed)
        answer = plain_greedy(family, prompt, 24)
        for block in (2, 5, 8):
            drafter = ScriptedDrafter(kind, len(prompt), answer, block, seed)
            decoded = decode(tiny_target(family, path), prompt, method, 24, TickingClock(), drafter)
            assert list(decoded.tokens) == answer
            assert len(decoded.tokens) == 1 + sum(step.committed for step in decoded.steps)


def test_an_always_right_drafter_fills_every_block_and_an_always_wrong_one_none() -> None:
    prompt = random_ids(6, 0)
    answer = plain_greedy("llama", prompt, 25)
    target, dflash = tiny_target("llama", "lean"), by_key("dflash")
    right = decode(target, prompt, dflash, 25, TickingClock(), ScriptedDrafter("right", 6, answer, 7))
    wrong = decode(target, prompt, dflash, 25, TickingClock(), ScriptedDrafter("wrong", 6, answer, 7))
    assert [step.committed for step in right.steps] == [7, 7, 7, 3]
    assert [step.accepted for step in wrong.steps] == [0] * 24
    assert [step.rows for step in wrong.steps[-3:]] == [3, 2, 1], "near the budget a proposal shrinks to what can be committed"


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_a_budget_smaller_than_the_block_gives_exactly_that_many_tokens(budget: int) -> None:
    prompt = random_ids(6, 0)
    answer = plain_greedy("qwen3", prompt, 3)
    drafter = ScriptedDrafter("right", 6, answer, 8)
    decoded = decode(tiny_target("qwen3", "lean"), prompt, by_key("01"), budget, TickingClock(), drafter)
    assert list(decoded.tokens) == answer[:budget]
    assert decoded.finish == "budget"


@pytest.mark.parametrize("place", range(9))
def test_a_stop_token_inside_an_accepted_block_ends_the_text_there(place: int) -> None:
    prompt = random_ids(6, 4)
    answer = plain_greedy("llama", prompt, 30)
    stop = answer[place]
    expected = answer[: answer.index(stop) + 1]
    target = tiny_target("llama", "lean", frozenset({stop}))
    decoded = decode(target, prompt, by_key("01"), 30, TickingClock(), ScriptedDrafter("right", 6, answer, 8))
    assert list(decoded.tokens) == expected
    assert decoded.finish == "stop"
    assert sum(step.committed for step in decoded.steps) == len(expected) - 1


@pytest.mark.parametrize("path", ["lean", "library"])
@pytest.mark.parametrize("left", range(1, 10))
def test_at_the_end_of_the_context_the_block_shrinks_and_the_answer_ends(path: str, left: int) -> None:
    prompt = random_ids(POSITIONS - left, 2)
    answer = plain_greedy("llama", prompt, 50)
    drafter = ScriptedDrafter("right", len(prompt), answer, 8)
    decoded = decode(tiny_target("llama", path), prompt, by_key("01"), 50, TickingClock(), drafter)
    assert list(decoded.tokens) == answer
    assert decoded.finish == "context"
    assert len(answer) == left + 1, "the last position's own prediction still counts"


def test_a_second_shorter_prompt_on_the_same_target_equals_a_fresh_one() -> None:
    target = tiny_target("lfm2", "lean")
    long, short = random_ids(40, 0), random_ids(4, 1)
    decode(target, long, by_key("01"), 20, TickingClock(), ScriptedDrafter("random", 40, plain_greedy("lfm2", long, 20), 6))
    answer = plain_greedy("lfm2", short, 20)
    decoded = decode(target, short, by_key("01"), 20, TickingClock(), ScriptedDrafter("random", 4, answer, 6))
    assert list(decoded.tokens) == answer


@pytest.mark.parametrize("width", [2, 3, 5])
def test_a_verify_width_caps_the_rows_of_every_call(width: int) -> None:
    prompt = random_ids(6, 0)
    answer = plain_greedy("llama", prompt, 20)
    drafter = ScriptedDrafter("right", 6, answer, 8)
    decoded = decode(tiny_target("llama", "lean"), prompt, by_key("01"), 20, TickingClock(), drafter, verify_width=width)
    assert list(decoded.tokens) == answer
    assert max(step.rows for step in decoded.steps) == width


def test_phases_of_every_round_sum_to_the_decode_time() -> None:
    prompt = random_ids(6, 0)
    answer = plain_greedy("llama", prompt, 20)
    clock = TickingClock()
    decoded = decode(tiny_target("llama", "lean"), prompt, by_key("01"), 20, clock, ScriptedDrafter("random", 6, answer, 5))
    assert decoded.prefill_seconds + decoded.decode_seconds == clock.seconds - 1.0


def test_an_empty_prompt_a_missing_budget_and_an_over_long_prompt_are_one_sentence_each() -> None:
    target, normal = tiny_target("llama", "lean"), by_key("00")
    with pytest.raises(UserError, match="prompt is empty"):
        decode(target, [], normal, 5, TickingClock())
    with pytest.raises(UserError, match="budget is 0"):
        decode(target, [4], normal, 0, TickingClock())
    with pytest.raises(UserError, match=f"at most {POSITIONS - 1}"):
        decode(target, random_ids(POSITIONS, 0), normal, 5, TickingClock())
    with pytest.raises(UserError, match="--prepare"):
        decode(target, [4], by_key("01"), 5, TickingClock())
