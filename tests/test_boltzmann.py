"""Methods 06, 10 and 13 on tables worked out by hand, their frequencies against the stated probabilities, and a fuzz."""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from tests.tables import NEVER, Table, contexts, every_slot_has_a_candidate, propose, random_tables, slots_with_margins, table

from dflash_mini_lab.methods import METHODS, by_key

BOLTZMANN, ADVANCED, MINOP = by_key("06"), by_key("10"), by_key("13")


def share(method, row: list[float], token: int, drafts: int = 400, slots: int = 50, **settings: float) -> tuple[float, int]:
    """How often `token` is taken in slots of this `row`, over many contexts; and the number of draws."""
    taken = sum(propose(method, table([row] * slots, context), **settings).tokens.count(token) for context in contexts(drafts))
    return taken / (drafts * slots), drafts * slots


def near(found: tuple[float, int], probability: float) -> bool:
    """Within four standard deviations of that many independent draws."""
    frequency, draws = found
    return abs(frequency - probability) < 4 * math.sqrt(probability * (1 - probability) / draws)


# 06


def test_06_draws_two_close_candidates_with_the_stated_probability() -> None:
    """m = 0.1, T = 0.1·exp(-0.1) = 0.090484: the second has 1 / (1 + exp(0.1 / 0.090484)) = 0.24877."""
    assert near(share(BOLTZMANN, [0.9, 1.0, NEVER], 100, temperature=0.1), 0.24877)


def test_06_draws_three_candidates_with_softmax_probabilities() -> None:
    """m = 0.5, T = 2·exp(-0.5) = 1.213061: weights 1, exp(-0.5/T) = 0.662218, exp(-1/T) = 0.438515, of 2.100720."""
    row = [0.0, 1.0, 0.5]
    for token, probability in ((110, 0.476027), (120, 0.315228), (100, 0.208745)):
        assert near(share(BOLTZMANN, row, token, temperature=2.0), probability)


def test_06_never_cools_under_a_fiftieth_of_its_temperature() -> None:
    """T·exp(-5) = 0.67 is under 0.02·T = 2: the second has 1 / (1 + exp(5/2)) = 0.075858 and not 0.0006."""
    assert near(share(BOLTZMANN, [0.0, 5.0, -1000.0], 100, temperature=100.0), 0.075858)


def test_06_keeps_the_first_choice_where_the_drafter_is_sure() -> None:
    assert share(BOLTZMANN, [0.0, 2.0, 1.9], 110, temperature=0.35)[0] < 1, "0.1 apart"
    assert share(BOLTZMANN, [0.0, 2.0, NEVER], 110, temperature=0.35)[0] == 1, "2.0 apart: T = 0.047, odds of exp(-42)"


def test_06_chooses_among_its_candidates_alone_and_counts_their_scores() -> None:
    row = [0.3, 0.2, 0.1, 0.0]
    assert share(BOLTZMANN, row, 110, temperature=5.0, candidates=2)[0] > 0.4
    assert share(BOLTZMANN, row, 120, temperature=5.0, candidates=2)[0] == 0
    assert share(BOLTZMANN, row, 130, temperature=5.0, candidates=4)[0] > 0.2
    assert propose(BOLTZMANN, table([row] * 5), candidates=3).work == 15
    assert propose(BOLTZMANN, table([row] * 5), candidates=8).work == 20, "a draft vocabulary of four has four"


# 10 and 13


def drawn_slots(method, margins: Sequence[float], **settings: float) -> tuple[set[int], set[int]]:
    """Slots that ever took the second token, over many contexts, and the work counts seen."""
    changed, work = set(), set()
    for context in contexts(150):
        proposal = propose(method, slots_with_margins(*margins, committed=context), **settings)
        assert set(proposal.tokens) <= {100, 110}
        changed |= {slot for slot, token in enumerate(proposal.tokens) if token == 110}
        work.add(proposal.work)
    return changed, work


@pytest.mark.parametrize(
    ("margins", "budget", "expected"),
    [
        ((0.3, 0.1, 0.1, 0.2), 1, {1}),  # 0.12 comes before 0.14
        ((0.3, 0.1, 0.1, 0.2), 2, {1, 2}),
        ((0.14, 0.12, 0.3), 1, {0}),  # 0.140 before 0.144: a later slot counts for less
        ((0.14, 0.11, 0.3), 1, {1}),  # 0.132 before 0.140
        ((0.1, 0.14, 0.02), 2, {2, 0}),  # 0.028, 0.100, 0.168
        ((0.15, 0.16, 1.0), 2, set()),  # the cutoff itself is not under it (0.15 as float32 is above)
        ((0.0, 0.0, 0.0), 1, {0}),  # equal logits: the first slot
        ((0.05,), 2, {0}),
    ],
)
def test_10_draws_in_the_closest_slots_within_its_budget(margins: tuple[float, ...], budget: int, expected: set[int]) -> None:
    assert drawn_slots(ADVANCED, margins, temperature=1.0, cutoff=0.15, budget=budget) == (expected, {2 * len(expected)})


def test_13_is_10_with_a_budget_of_one() -> None:
    assert drawn_slots(MINOP, (0.3, 0.1, 0.1, 0.2), temperature=1.0, cutoff=0.15) == ({1}, {2})


@pytest.mark.parametrize(
    ("margin", "temperature", "probability"),
    [
        (0.03125, 0.0625, 0.372049),  # T' = 0.0625 / 1.046875 = 0.0597015; m/T' = 0.5234375
        (0.125, 0.125, 0.233706),  # T' = 0.125 / 1.1875; m/T' = 1.1875
        (0.0, 0.06, 0.5),
    ],
)
def test_10_takes_the_second_with_the_stated_probability(margin: float, temperature: float, probability: float) -> None:
    found = share(ADVANCED, [0.0, margin, NEVER], 100, temperature=temperature, cutoff=0.35, budget=50)
    assert near(found, 1 / (1 + math.exp(margin * (1 + 1.5 * margin) / temperature)))
    assert near(found, probability)


def test_13_takes_the_second_with_the_stated_probability_too() -> None:
    """One slot a draft, so that its one draw is there."""
    assert near(share(MINOP, [0.0, 0.125, NEVER], 100, drafts=6000, slots=1, temperature=0.125, cutoff=0.35), 0.233706)


def test_a_hotter_draw_only_adds_second_choices() -> None:
    """The noise knows neither logits nor settings: what was taken at a low probability is taken at a higher one."""
    for context in contexts(60):
        taken = [
            {
                slot
                for slot, token in enumerate(propose(ADVANCED, draft, temperature=temperature, cutoff=1.0, budget=20).tokens)
                if token == 110
            }
            for temperature in (0.1, 0.4, 3.0)
            for draft in [slots_with_margins(*[0.2] * 20, committed=context)]
        ]
        assert taken[0] <= taken[1] <= taken[2]
        assert len(taken[0]) < len(taken[2])


# All three


@pytest.mark.parametrize("method", [BOLTZMANN, ADVANCED, MINOP], ids=lambda method: method.slug)
def test_any_draft_gets_a_full_proposal_of_its_own_candidates(method) -> None:
    """A warning would be an error here: nothing overflows, nothing is NaN."""
    order = np.random.default_rng(5)
    for draft in random_tables(600):
        before = draft.rows.copy()
        settings = {name: float(order.choice(values)) for name, values in method.grid.items()}
        if method is BOLTZMANN:
            settings["candidates"] = int(order.integers(2, 12))
        proposal = propose(method, draft, **settings)
        allowed, _ = draft.top(settings.get("candidates", 2))
        assert len(proposal.tokens) == draft.slots
        assert all(type(token) is int for token in proposal.tokens)
        if every_slot_has_a_candidate(draft):
            assert all(token in row for token, row in zip(proposal.tokens, allowed.tolist(), strict=True))
        assert set(proposal.tokens) <= set(draft.ids.tolist())
        assert propose(method, draft, **settings) == proposal, "no state between rounds"
        assert np.array_equal(draft.rows, before)


def test_10_and_13_propose_the_same_tokens_with_one_setting() -> None:
    drawn = 0
    for draft in filter(every_slot_has_a_candidate, random_tables(600)):
        settings = {"temperature": 0.16, "cutoff": 0.35}
        ten, thirteen = propose(ADVANCED, draft, **settings, budget=1), propose(MINOP, draft, **settings)
        assert ten.tokens == thirteen.tokens
        drawn += ten.tokens != tuple(draft.top(1)[0][:, 0].tolist())
    assert drawn > 100, "and draws did happen"


@pytest.mark.parametrize("method", [BOLTZMANN, ADVANCED, MINOP], ids=lambda method: method.slug)
def test_noise_does_not_depend_on_dtype_or_on_the_level_of_the_logits(method) -> None:
    order = np.random.default_rng(9)
    tokens: set[tuple[int, ...]] = set()
    for context in contexts(40):
        steps = order.integers(0, 16, (7, 12)) / 64  # exact in every dtype, and so are their differences
        kinds = ((np.float64, 0), (np.float32, 4), (np.float16, 8), (np.float32, -12))
        drafts = [Table((steps + level).astype(kind), np.arange(12), context) for kind, level in kinds]
        proposals = {propose(method, draft, temperature=0.1).tokens for draft in drafts}
        assert len(proposals) == 1
        tokens |= proposals
    assert len(tokens) > 30, "and other contexts draw otherwise"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.slug)
def test_a_method_s_default_is_a_point_of_its_grid(method) -> None:
    assert all(method.settings[name] in values for name, values in method.grid.items())


def test_13_has_no_grid_and_only_settings_that_10_has() -> None:
    assert MINOP.grid == {}
    assert MINOP.settings_of == ADVANCED.key
    assert MINOP.settings == {name: ADVANCED.settings[name] for name in ("temperature", "cutoff")}
