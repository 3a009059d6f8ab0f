"""Methods 09, 12 and 14: their rules worked by hand, their formulas against plain Python."""
from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from tests.tables import Table, propose, random_heads, random_tables, slots_with_margins, table, with_heads

from dflash_mini_lab.methods import by_key
from dflash_mini_lab.methods.m12_parareal import FEATURES
from dflash_mini_lab.types import GapFit, Heads, MarkovHead, PararealFit

DSPARK, PARAREAL, SIMPLE = by_key("09"), by_key("12"), by_key("14")
HIDDEN = 6


def learned(count: int, seed: int = 0) -> list[Table]:
    """Finite drafts of 1 to 5 slots, with random heads of a 200-token vocabulary."""
    heads = random_heads(200, HIDDEN, 5, seed=seed)
    return with_heads(random_tables(count, range(1, 6), 200)[::2], heads, HIDDEN, 200)


# 09


def markov_draft(confidences: list[float], bias: dict[tuple[int, int], float] | None = None, scale: float = 1.0) -> Table:
    """Every slot: token 100 (logit 0) or 110 (-0.5). Confidence is read off the slot's state alone: one dimension, its logit."""
    draft = table([[0.0, -0.5]] * len(confidences), committed=(4, 5, 6))
    one_hot, following = np.eye(120, 16, dtype=np.float32), np.zeros((120, 16), np.float32)
    places = {6: 0, 100: 1, 110: 2}
    previous = np.zeros((120, 16), np.float32)
    for token, place in places.items():
        previous[token] = one_hot[place]
    for (left, right), score in (bias or {}).items():
        following[right, places[left]] = np.sqrt(16) * score
    scales = np.full(len(confidences), scale, np.float32)
    weight = np.array([1.0, *[0.0] * 16], np.float32)
    draft.heads = Heads(markov=MarkovHead(previous, following, scales, weight, np.zeros(1, np.float32)))
    draft.h = np.array([[math.log(c / (1 - c))] for c in confidences], np.float32)
    return draft


def test_09_picks_each_token_after_the_one_before() -> None:
    """6 → 110 flips slot 0, 110 → 110 keeps it so, and without 6 → 110 nothing starts."""
    surely = [0.999] * 4
    assert propose(DSPARK, markov_draft(surely, {(6, 110): 1.0, (110, 110): 1.0}), floor=0.1).tokens == (110,) * 4
    assert propose(DSPARK, markov_draft(surely, {(110, 110): 1.0}), floor=0.1).tokens == (100,) * 4
    assert propose(DSPARK, markov_draft(surely, {(6, 110): 1.0}), floor=0.1).tokens == (110, 100, 100, 100)
    assert propose(DSPARK, markov_draft(surely, {(6, 110): 1.0, (110, 110): 1.0}, scale=0.25), floor=0.1).tokens == (100,) * 4
    assert propose(DSPARK, markov_draft(surely), floor=0.1).work == 4 * 2 * 16


@pytest.mark.parametrize(
    ("confidences", "floor", "length"),
    [
        ([0.9, 0.9, 0.9, 0.9], 0.7, 3),  # 0.9, 0.81, 0.729, 0.656
        ([0.9, 0.9, 0.9, 0.9], 0.5, 4),
        ([0.9, 0.5, 0.99, 0.99], 0.5, 1),  # 0.9, 0.45: later confidence does not bring it back
        ([0.1, 0.9, 0.9], 0.2, 1),  # at least one token
        ([0.1], 0.7, 1),
        ([0.1, 0.1, 0.1], 0.0, 3),
    ],
)
def test_09_ends_where_survival_falls_under_the_floor(confidences: list[float], floor: float, length: int) -> None:
    assert len(propose(DSPARK, markov_draft(confidences), floor=floor).tokens) == length


def test_09_is_its_formula_on_learned_heads() -> None:
    changed, lengths = 0, set()
    for draft in learned(120):
        ids, z = draft.top(4)
        head, token, survival, expected = draft.heads.markov, draft.anchor, 1.0, []
        for slot in range(draft.slots):
            before = token
            scores = [
                float(z[slot, k]) + float(head.scale[slot]) / 2 * float(head.previous[before] @ head.next[candidate])
                for k, candidate in enumerate(ids[slot])
            ]
            token = int(ids[slot, int(np.argmax(scores))])
            inside = np.concatenate([draft.h[slot], head.previous[before]])
            survival *= 1 / (1 + math.exp(-float(head.confidence_weight @ inside) - float(head.confidence_bias[0])))
            if survival < 0.5 and slot:
                break
            expected.append(token)
            if survival < 0.5:
                break
        assert propose(DSPARK, draft, candidates=4, floor=0.5).tokens == tuple(expected)
        changed += expected[0] != int(ids[0, 0])
        lengths.add(len(expected))
    assert changed > 5
    assert lengths == {1, 2, 3, 4, 5}


# 12


def plain_parareal(draft: Table, fit: PararealFit) -> list[int]:
    """Straight from the specification, one number at a time."""
    ids, z = draft.top(fit.candidates)
    slots, count = ids.shape
    last = draft.embedding[draft.anchor]
    prefix = np.mean([draft.embedding[token] for token in draft.committed], axis=0)
    coarse = [[float(x) - sum(map(float, row)) / count for x in row] for row in z]
    current = coarse
    for _ in range(fit.rounds):
        following = []
        for i in range(slots):
            position = i / (slots - 1) if slots > 1 else 0.0
            row = []
            for k in range(count):
                values = [
                    current[i][k],
                    coarse[i][k],
                    k / (count - 1),
                    position,
                    float(z[i, 0]) - float(z[i, 1]),
                    float(draft.embedding[ids[i, k]] @ last) / math.sqrt(HIDDEN),
                    float(draft.embedding[ids[i, k]] @ prefix) / math.sqrt(HIDDEN),
                    current[i][k] * position,
                ]
                standard = [(x - m) / s for x, m, s in zip(values, fit.mean, fit.scale, strict=True)]
                correction = sum(w * x for w, x in zip(fit.weights, standard, strict=True)) + fit.intercept
                row.append(current[i][k] + fit.omega * min(max(correction, -fit.clip), fit.clip))
            following.append([x - sum(row) / count for x in row])
        current = following
    return [int(ids[i, max(range(count), key=lambda k, i=i: current[i][k])]) for i in range(slots)]


def test_12_is_its_formula() -> None:
    assert len(FEATURES) == 8
    changed = 0
    for seed in range(4):
        for draft in learned(50, seed):
            fit = draft.heads.parareal
            proposal = propose(PARAREAL, draft)
            assert list(proposal.tokens) == plain_parareal(draft, fit)
            assert proposal.work == 2 * draft.slots * min(6, len(draft.ids))
            changed += proposal.tokens != tuple(draft.top(1)[0][:, 0].tolist())
    assert changed > 30


def test_12_with_nothing_learned_is_01() -> None:
    for draft in learned(20):
        fit = replace(draft.heads.parareal, weights=np.zeros(8))
        draft.heads = Heads(parareal=fit)
        assert propose(PARAREAL, draft).tokens == tuple(draft.top(1)[0][:, 0].tolist())


def test_12_clips_a_correction_before_it_counts() -> None:
    """The rank alone, weight 100: unclipped the second of two would gain 75 logits; clipped it gains 6·0.75 = 4.5."""
    rank_only = PararealFit(np.zeros(8), np.ones(8), np.array([0, 0, 100.0, 0, 0, 0, 0, 0]), 0.0, 0.75, 1, 6.0, 2, {})
    for margin, expected in ((4.25, 110), (4.75, 100)):
        draft = table([[margin, 0.0]])
        draft.heads, draft.embedding = Heads(parareal=rank_only), np.zeros((200, 3), np.float32)
        assert propose(PARAREAL, draft).tokens == (expected,)


# 14


def gap_draft(*margins: float, fit: tuple[float, float, float]) -> Table:
    draft = slots_with_margins(*margins)
    draft.heads = Heads(gap=GapFit(*fit, {}))
    return draft


@pytest.mark.parametrize(
    ("margins", "fit", "switched"),
    [
        ((1.0, 0.25, 0.5), (-0.75, 1.0, 0.0), 1),  # gaps 0.25, -0.5, -0.25: the most negative, and only it
        ((1.0, 0.25, 0.25), (-0.75, 1.0, -0.5), 2),  # the last slot's is half a logit lower
        ((1.0, 0.75, 0.8), (-0.75, 1.0, 0.0), None),  # 0 itself is not under the threshold
        ((0.25, 0.25), (-0.75, 1.0, 0.0), 0),  # equal: the first
        ((0.25,), (-0.75, 1.0, 9.0), 0),  # a single slot is slot 0 of 1
    ],
)
def test_14_switches_the_slot_of_the_most_negative_gap(
    margins: tuple[float, ...], fit: tuple[float, float, float], switched: int | None
) -> None:
    proposal = propose(SIMPLE, gap_draft(*margins, fit=fit))
    assert proposal.tokens == tuple(110 if slot == switched else 100 for slot in range(len(margins)))
    assert proposal.work == len(margins)


def test_14_goes_as_far_towards_the_estimate_as_omega_says() -> None:
    """G = 1, F̂ = -1: half-way is 0."""
    draft = gap_draft(1.0, fit=(-1.0, 0.0, 0.0))
    assert propose(SIMPLE, draft, omega=0.5).tokens == (100,)
    assert propose(SIMPLE, draft, omega=0.625).tokens == (110,)
    assert propose(SIMPLE, draft, omega=0.5, threshold=0.1).tokens == (110,)
    assert propose(SIMPLE, draft, omega=1.0, threshold=-1.0).tokens == (100,)
