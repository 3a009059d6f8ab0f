"""The loop with trees: whatever stands in them, the answer is plain greedy decoding's, and a round commits its right path."""
from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from tests.tiny_models import (
    FAMILIES,
    POSITIONS,
    VOCABULARY,
    ScriptedDrafter,
    TickingClock,
    plain_greedy,
    random_ids,
    tiny_target,
)

from dflash_mini_lab.decoding import decode
from dflash_mini_lab.methods import METHODS, by_key
from dflash_mini_lab.trees import depths
from dflash_mini_lab.types import Decoded, Draft, Method, Proposal, UserError

TREE = by_key("15")


def growing(kind: str, prompt_length: int, answer: Sequence[int], seed: int = 0) -> Method:
    """A method of random trees that knows the answer. `right`: every node holds the answer's token of its depth; `wrong`: none
    does; `mixed`: half of them do, so that right tokens stand under wrong ones and beside equal ones too; `hidden`: a wrong
    first node, and a right chain beside it."""
    order = random.Random(seed)

    def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
        done = len(draft.committed) - prompt_length
        parents = [order.randrange(-1, place) for place in range(draft.slots)]
        deep = depths(parents)
        truth = [*answer[done:], *[5] * draft.slots]
        right = {"right": [True] * draft.slots, "wrong": [False] * draft.slots}
        right["mixed"] = order.choices((True, False), k=draft.slots)
        if kind == "hidden":
            parents = [-1, -1, *range(1, draft.slots - 1)][: draft.slots]
            deep = depths(parents)
            right["hidden"] = [place > 0 for place in range(draft.slots)]
        tokens = [(truth[d] + (not fits)) % VOCABULARY for d, fits in zip(deep, right[kind], strict=True)]
        return Proposal(tuple(tokens), 1, tuple(parents))

    return Method("99", "grown", "Grown", "random trees", select, trees=True)


def answered(family: str, path: str, kind: str, prompt: list[int], block: int, budget: int = 24, **options) -> Decoded:
    answer = plain_greedy(family, prompt, 40)
    drafter = ScriptedDrafter("right", len(prompt), answer, block)
    target = tiny_target(family, path, options.pop("stops", frozenset()))
    method = growing(kind, len(prompt), answer, seed=block)
    return decode(target, prompt, method, budget, TickingClock(), drafter, **options)


@pytest.mark.parametrize("bonus", [True, False])
@pytest.mark.parametrize("kind", ["right", "wrong", "mixed", "hidden"])
@pytest.mark.parametrize("path", ["lean", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_tree_s_answer_is_plain_greedy_decoding_s(family: str, path: str, kind: str, bonus: bool) -> None:
    prompt = random_ids(6, 3)
    for block in (2, 5, 8):
        decoded = answered(family, path, kind, prompt, block, bonus=bonus)
        assert list(decoded.tokens) == plain_greedy(family, prompt, 24)
        for step in decoded.steps:
            assert step.rows == 1 + step.proposed <= block
            assert step.accepted <= (step.depth or 0) <= step.proposed
            assert len(step.path) == step.accepted
            assert step.committed == (step.accepted + 1 if bonus else max(1, step.accepted))
    assert any(step.accepted for step in decoded.steps) == (kind != "wrong")


def test_a_round_commits_its_path_not_the_first_rows() -> None:
    """`hidden`: the anchor's first child is wrong; rows 2, 3, 4 … are right."""
    decoded = answered("lfm2", "lean", "hidden", random_ids(6, 3), 5)
    assert {(step.proposed, step.depth, step.path) for step in decoded.steps[:4]} == {(4, 3, (2, 3, 4))}
    assert {step.committed for step in decoded.steps[:4]} == {4}


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_near_the_budget_the_first_nodes_are_verified_and_no_path_is_too_long(budget: int) -> None:
    prompt = random_ids(6, 0)
    for kind in ("right", "mixed", "hidden"):
        decoded = answered("qwen3", "lean", kind, prompt, 8, budget)
        assert list(decoded.tokens) == plain_greedy("qwen3", prompt, budget)
        left = budget - 1
        for step in decoded.steps:
            assert step.proposed <= left - 1
            left -= step.committed


@pytest.mark.parametrize("bonus", [True, False])
@pytest.mark.parametrize("place", range(9))
def test_a_stop_token_inside_an_accepted_path_ends_the_text_there(place: int, bonus: bool) -> None:
    prompt = random_ids(6, 4)
    answer = plain_greedy("llama", prompt, 30)
    stop = answer[place]
    for kind in ("right", "hidden"):
        decoded = answered("llama", "lean", kind, prompt, 8, 30, stops=frozenset({stop}), bonus=bonus)
        assert list(decoded.tokens) == answer[: answer.index(stop) + 1]
        assert decoded.finish == "stop"


@pytest.mark.parametrize("path", ["lean", "static"])
@pytest.mark.parametrize("left", range(1, 10))
def test_at_the_end_of_the_context_the_tree_shrinks_and_the_answer_ends(path: str, left: int) -> None:
    prompt = random_ids(POSITIONS - left, 2)
    for kind in ("right", "mixed"):
        decoded = answered("llama", path, kind, prompt, 8, 50)
        assert (list(decoded.tokens), decoded.finish) == (plain_greedy("llama", prompt, 50), "context")


@pytest.mark.parametrize("width", [2, 3, 5])
def test_a_verify_width_caps_the_nodes(width: int) -> None:
    prompt = random_ids(6, 0)
    decoded = answered("llama", "lean", "mixed", prompt, 8, verify_width=width)
    assert list(decoded.tokens) == plain_greedy("llama", prompt, 24)
    assert max(step.rows for step in decoded.steps) == width


@pytest.mark.parametrize("kind", ["right", "random"])
def test_15_of_one_candidate_goes_as_01_round_by_round(kind: str) -> None:
    prompt = random_ids(6, 0)
    answer = plain_greedy("lfm2", prompt, 30)
    target = tiny_target("lfm2", "lean")
    chains = [
        decode(target, prompt, by_key(key), 30, TickingClock(), ScriptedDrafter(kind, 6, answer, 6), values)
        for key, values in (("01", {}), ("15", {"candidates": 1, "temperature": 1.0}))
    ]
    one, tree = ([(s.rows, s.proposed, s.accepted, s.committed) for s in chain.steps] for chain in chains)
    assert one == tree
    assert chains[0].tokens == chains[1].tokens
    assert [(s.depth or 0, s.path) for s in chains[1].steps] == [(p, tuple(range(1, a + 1))) for _, p, a, _ in tree]


def test_15_accepts_a_second_choice_that_01_rejects() -> None:
    """Every slot's second candidate is the token after the first: a drafter that is one too low is right in the second."""

    class OneTooLow(ScriptedDrafter):
        def draft(self, committed: Sequence[int]):
            draft = super().draft(committed)
            draft._tokens = [(token - 1) % VOCABULARY for token in draft._tokens]
            return draft

    prompt = random_ids(6, 0)
    answer = plain_greedy("llama", prompt, 20)
    found = {
        key: decode(tiny_target("llama", "lean"), prompt, by_key(key), 20, TickingClock(), OneTooLow("right", 6, answer, 6))
        for key in ("01", "15")
    }
    assert not any(step.accepted for step in found["01"].steps)
    assert sum(step.accepted > 0 for step in found["15"].steps) > 3
    assert list(found["15"].tokens) == answer


def test_a_target_that_verifies_no_trees_refuses_the_method_by_name() -> None:
    prompt = random_ids(6, 0)
    drafter = ScriptedDrafter("right", 6, plain_greedy("llama", prompt, 20), 6)
    with pytest.raises(UserError, match=r"^Method 15 Tree proposes trees, and a model that runs through transformers'.*leave"):
        decode(tiny_target("llama", "library"), prompt, TREE, 20, TickingClock(), drafter)
    assert [method.key for method in METHODS if method.trees] == ["15"]
