"""Methods 02, 03, 04, 05, 07 and 11: worked by hand where pair scores are given, and against plain Python where they are learned.

In the hand-written drafts slot i's candidates are tokens 2i (best) and 2i + 1, the anchor is token 15.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise, product

import numpy as np
import pytest
from tests.tables import Table, contexts, every_slot_has_a_candidate, propose, random_heads, random_tables, with_heads

from dflash_mini_lab.methods import by_key
from dflash_mini_lab.methods.m05_fused_jump import residual
from dflash_mini_lab.scores import fingerprint, hashed
from dflash_mini_lab.types import FusedHead, Heads, JumpHead, PairHead

DFLASH2, MOBS, JUMP, FUSED, BMOBS, GATED = (by_key(key) for key in ("02", "03", "04", "05", "07", "11"))
TOKENS, ANCHOR = 16, 15
Pairs = Mapping[tuple[int, int], float]


def head_of(pairs: Pairs) -> PairHead:
    """A head of rank 16 that gives exactly these scores: one-hot left tokens, and a gate that is 1 for the context 0."""
    scores = np.zeros((TOKENS, TOKENS), dtype=np.float32)
    for (left, right), score in pairs.items():
        scores[left, right] = score
    one_hot = np.eye(TOKENS, dtype=np.float32)
    return PairHead(one_hot, np.sqrt(16) * scores.T, np.zeros((16, 2), np.float32), np.full(16, 30.0, np.float32))


def draft_of(*margins: float, pairs: Pairs | None = None, committed: tuple[int, ...] = (3, ANCHOR), **more: object) -> Table:
    rows = np.full((len(margins), TOKENS), -50.0, dtype=np.float32)
    for slot, margin in enumerate(margins):
        rows[slot, 2 * slot], rows[slot, 2 * slot + 1] = 0.0, -margin
    heads = Heads(pair=head_of(pairs or {}), **more)
    return Table(rows, np.arange(TOKENS), committed, heads, c=np.zeros(2, np.float32), h=np.zeros((len(margins), 2), np.float32))


def tokens(choices: str) -> tuple[int, ...]:
    return tuple(2 * slot + int(choice) for slot, choice in enumerate(choices))


# 02


def test_02_takes_a_worse_token_where_the_whole_path_gains() -> None:
    """Alone, slot 0 keeps token 0; but 1 → 3 is worth 2, and costs 0.5 + 0.5."""
    draft = draft_of(0.5, 0.5, 0.5, pairs={(1, 3): 2.0, (ANCHOR, 0): 0.25})
    proposal = propose(DFLASH2, draft, candidates=2)
    assert proposal.tokens == tokens("110")
    assert proposal.work == 2 + 2 * 2 * 2, "K + (S-1)·K²"
    assert propose(DFLASH2, draft_of(0.5, 0.5, pairs={(1, 3): 0.9}), candidates=2).tokens == tokens("00")


def plain_pair(head: PairHead, c: np.ndarray, u: int, v: int) -> float:
    rank = len(head.gate_bias)
    total = 0.0
    for j in range(rank):
        gate = math.tanh(sum(float(w) * float(x) for w, x in zip(head.gate_weight[j], c, strict=True)) + float(head.gate_bias[j]))
        total += float(head.previous[u, j]) * gate * float(head.next[v, j])
    return total / math.sqrt(rank)


def learned(count: int, slots: range = range(1, 6)) -> list[Table]:
    heads = random_heads(200, 5, 15, offsets=(2, 4))
    return with_heads(random_tables(count, slots, 200), heads, 5, 200)[::2]  # the finite ones


def test_02_is_the_best_of_all_paths_of_every_draft() -> None:
    changed = 0
    for draft in learned(60, range(1, 5)):
        ids, z = draft.top(3)
        head, k = draft.heads.pair, ids.shape[1]

        def total(path, draft=draft, ids=ids, z=z, head=head) -> float:
            chosen = [draft.anchor, *(int(ids[i, c]) for i, c in enumerate(path))]
            links = sum(plain_pair(head, draft.c, u, v) for u, v in pairwise(chosen))
            return links + sum(float(z[i, c]) for i, c in enumerate(path))

        found = propose(DFLASH2, draft, candidates=3).tokens
        best = max(map(total, product(range(k), repeat=draft.slots)))
        places = [ids[slot].tolist().index(token) for slot, token in enumerate(found)]
        assert total(places) == pytest.approx(best, abs=1e-4)
        changed += any(places)
    assert changed > 10


# 03


def test_03_starts_in_the_centre_and_works_outwards() -> None:
    """Slot 2 first, heard after the anchor: 15 → 5 makes it 1. Then 1 before it (3 → 5), 3 after it (5 → 7), 0 and 4 last or
    alone. Slot 1's own left neighbour is not known yet: 0 → 2 would have kept token 2."""
    pairs = {(ANCHOR, 5): 1.0, (3, 5): 1.0, (0, 2): 9.0, (5, 7): 1.0, (7, 9): 1.0}
    proposal = propose(MOBS, draft_of(0.5, 0.5, 0.5, 0.5, 0.5, pairs=pairs), candidates=2)
    assert proposal.tokens == tokens("01111")
    assert proposal.work == 2 + 4 * 2


def test_03_takes_one_of_two_centres_by_the_parity_of_context_and_anchor() -> None:
    """Of slots 1 and 2 the middle alone hears the anchor."""
    seen = set()
    for context in contexts(20):
        committed = (*context, ANCHOR)
        proposal = propose(MOBS, draft_of(0.5, 0.5, 0.5, 0.5, pairs={(ANCHOR, 3): 1.0, (ANCHOR, 5): 1.0}, committed=committed))
        parity = hashed(fingerprint(committed), ANCHOR) % 2
        assert proposal.tokens == tokens(("0100", "0010")[parity])
        seen.add(parity)
    assert seen == {0, 1}


def test_03_refines_even_slots_first_and_then_odd_ones() -> None:
    """After the fill all are 0, slot 0 having heard only the anchor. The pass hears 1 → 2 in slot 0, and then 1 → 3 in slot 1."""
    pairs = {(1, 2): 2.0, (1, 3): 3.0}
    draft = draft_of(1.0, 0.5, 1.0, 1.0, 1.0, pairs=pairs)
    assert propose(MOBS, draft, candidates=2).tokens == tokens("00000")
    refined = propose(MOBS, draft, candidates=2, passes=1)
    assert refined.tokens == tokens("11000")
    assert refined.work == 2 + 4 * 2 + (2 + 2 + 1) * 2 + (2 + 2) * 2


@pytest.mark.parametrize("slots", [1, 2])
def test_03_of_one_or_two_slots(slots: int) -> None:
    assert len(propose(MOBS, draft_of(*[0.5] * slots), passes=2).tokens) == slots


# 04


def jump_of(*offsets: int) -> JumpHead:
    nothing = np.zeros((len(offsets), 2), np.float32)
    return JumpHead(np.array(offsets), nothing, nothing[0], nothing, nothing)


def jumping(*margins: float, jumps: list[dict[int, float]], offsets: tuple[int, ...], pairs: Pairs | None = None) -> Table:
    """`jumps`: per offset, token → score; other tokens have 0."""
    draft = draft_of(*margins, pairs=pairs, jump=jump_of(*offsets))
    draft.jump_logits = np.zeros((len(offsets), TOKENS), np.float32)
    for row, scores in zip(draft.jump_logits, jumps, strict=True):
        for token, score in scores.items():
            row[token] = score
    return draft


def test_04_anchors_every_second_slot_by_half_the_jump_score_and_fills_the_others_between() -> None:
    """Slot 1 (offset 2): 0 - 0.5·2 against -0.5 + 0: token 3. Slot 3: 0 - 0.5·0.9 against -0.5: token 6 stays. Slot 2 hears both
    neighbours: 3 → 5 (0.3) and 5 → 6 (0.3) outweigh 0.5; slot 4 hears slot 3 (6 → 9)."""
    pairs = {(3, 5): 0.3, (5, 6): 0.3, (6, 9): 1.0, (1, 3): 0.6}
    draft = jumping(0.5, 0.5, 0.5, 0.5, 0.5, jumps=[{3: 2.0}, {7: 0.9}], offsets=(2, 4), pairs=pairs)
    proposal = propose(JUMP, draft, candidates=2)
    assert proposal.tokens == tokens("11101")
    assert proposal.work == 2 * 2 + (2 + 2 + 1) * 2, "J·K jump scores; slots 0 and 2 hear two neighbours, slot 4 one"


def test_04_counts_only_differences_to_the_best_jump_score() -> None:
    for level in (0.0, 100.0):
        draft = jumping(0.5, 0.5, jumps=[{2: level, 3: level + 0.9}], offsets=(2,))
        assert propose(JUMP, draft, candidates=2).tokens == tokens("00")
        draft = jumping(0.5, 0.5, jumps=[{2: level, 3: level + 1.5}], offsets=(2,))
        assert propose(JUMP, draft, candidates=2).tokens == tokens("01")


@pytest.mark.parametrize("offsets", [(2, 4), (3,)])
def test_04_without_a_usable_offset_is_03(offsets: tuple[int, ...]) -> None:
    pairs = {(ANCHOR, 1): 1.0}
    draft = jumping(0.5, pairs=pairs, jumps=[{} for _ in offsets], offsets=offsets)
    assert propose(JUMP, draft, candidates=2) == propose(MOBS, draft, candidates=2)
    assert propose(JUMP, draft, candidates=2).tokens == tokens("1")


# 05


def fused_of(offsets: tuple[int, ...], residual: dict[tuple[int, int], float]) -> FusedHead:
    """A head of rank 16 whose residual for (offset's place, token) is given: each offset opens one gate."""
    token = np.zeros((TOKENS, 16), np.float32)
    for (place, which), score in residual.items():
        token[which, place] = np.sqrt(16) * score
    gates = 30.0 * np.eye(16, dtype=np.float32)[: len(offsets)]
    return FusedHead(np.array(offsets), np.zeros((16, 2), np.float32), gates, token)


def test_05_anchors_by_logits_and_residual_and_fills_the_rest() -> None:
    """Slot 1: 0 against -0.5 + 1: token 3, sure by 0.5. Slot 3: 0 against -0.5 + 0.45: a margin of 0.05, so it is left to the
    fill, where 5 → 7 makes it 7."""
    pairs = {(3, 5): 0.6, (5, 7): 0.6}
    draft = draft_of(0.5, 0.5, 0.5, 0.5, pairs=pairs, fused=fused_of((2, 4), {(0, 3): 1.0, (1, 7): 0.45}))
    proposal = propose(FUSED, draft, candidates=2, min_margin=0.1)
    assert proposal.tokens == tokens("0111")
    assert proposal.work == 2 * 2 * 16 + (2 + 1 + 1) * 2, "J·K·r, and slot 0 with two neighbours, 2 and 3 with one"
    assert propose(FUSED, draft, candidates=2, min_margin=0.0).tokens == tokens("0110")
    assert propose(FUSED, draft, candidates=2, min_margin=0.1, omega=0.0).tokens == tokens("0000")


def test_05_is_03_where_no_anchor_is_sure_and_where_it_has_no_offset() -> None:
    pairs = {(ANCHOR, 5): 1.0, (5, 7): 1.0}
    for margins in ((0.5,) * 5, (0.5,)):
        draft = draft_of(*margins, pairs=pairs, fused=fused_of((2, 4), {(0, 3): 0.45, (1, 7): 0.5}))
        found, plain = propose(FUSED, draft, candidates=2), propose(MOBS, draft, candidates=2)
        assert found.tokens == plain.tokens
        assert found.work - plain.work == (2 * 2 * 16 if len(margins) > 1 else 0)


def test_05_residual_of_a_learned_head_is_the_formula() -> None:
    for draft in learned(30, range(2, 6)):
        head, ids = draft.heads.fused, draft.top(4)[0]
        slots = [offset - 1 for offset in head.offsets if offset <= draft.slots]
        found = residual(head, draft.h[slots], ids[slots])
        for j, slot in enumerate(slots):
            for k, token in enumerate(ids[slot]):
                inside = [float(head.slot[r] @ draft.h[slot]) + float(head.offset_embedding[j, r]) for r in range(4)]
                expected = sum(math.tanh(x) * float(head.token[token, r]) for r, x in enumerate(inside)) / math.sqrt(4)
                assert found[j, k] == pytest.approx(expected, abs=1e-4)


# 07


@pytest.mark.parametrize(
    ("margins", "outcomes", "work"),
    [
        ((0.5, 0.5, 0.5, 0.5), {"0000", "1111"}, 5 * 2),  # of equal margins the first centre, slot 1: 0 hears two, 2 and 3 one
        ((0.5, 0.75, 0.5, 0.5), {"0000", "0111"}, 4 * 2),  # slot 2: 0 hears the anchor alone, 1 and 3 hear 2
        ((0.5, 0.5, 0.5), {"000", "111"}, 4 * 2),
        ((0.5, 9.0, 0.5), {"000", "111"}, 4 * 2),  # an odd block has one centre, whatever its margin: 0.02·T is still 6
    ],
)
def test_07_draws_once_in_the_middle_and_fills_outwards(margins: tuple[float, ...], outcomes: set[str], work: int) -> None:
    """Hot enough that the middle token is a coin's throw; the pair scores make the others follow it."""
    pairs = {(1, 3): 1.0, (3, 5): 1.0, (5, 7): 1.0}
    drafts = [draft_of(*margins, pairs=pairs, committed=(*context, ANCHOR)) for context in contexts(60)]
    proposals = [propose(BMOBS, draft, candidates=2, temperature=300.0) for draft in drafts]
    assert {proposal.tokens for proposal in proposals} == {tokens(outcome) for outcome in outcomes}
    assert {proposal.work for proposal in proposals} == {work}


def test_07_draws_as_06_does_with_noise_of_its_own() -> None:
    """One slot: m = 0.1, T = 0.1·exp(-0.1): the second has 0.24877; and not the same draws as 06's."""
    boltzmann = by_key("06")
    drafts = [draft_of(0.1, committed=(*context, ANCHOR)) for context in contexts(1200)]
    seven = [propose(BMOBS, draft, candidates=2, temperature=0.1).tokens[0] for draft in drafts]
    six = [propose(boltzmann, draft, candidates=2, temperature=0.1).tokens[0] for draft in drafts]
    for drawn in (six, seven):
        assert abs(sum(drawn) / 1200 - 0.24877) < 4 * math.sqrt(0.25 * 0.75 / 1200)
    assert six != seven


# 11


@pytest.mark.parametrize(
    ("margins", "settings", "expected"),
    [
        # T = 1: u(0.1) = 0.475, u(1) = 0.269, u(3) = 0.047; a pair score flips whatever is looked at again
        ((0.1, 1.0, 3.0, 1.0, 0.1), {"floor": 0.1, "budget": 9}, "11011"),
        ((0.1, 1.0, 3.0, 1.0, 0.1), {"floor": 0.3, "budget": 9}, "10001"),
        ((0.1, 1.0, 3.0, 1.0, 0.1), {"floor": 0.01, "budget": 1}, "10000"),
        # 0.475/1.6 = 0.297 in slot 4 against 0.269/1.15 = 0.234 in slot 1
        ((3.0, 1.0, 3.0, 3.0, 0.1), {"floor": 0.01, "budget": 1}, "00001"),
        # 0.401/1.6 = 0.251 in slot 4 against 0.310/1.15 = 0.270 in slot 1
        ((3.0, 0.8, 3.0, 3.0, 0.4), {"floor": 0.01, "budget": 1}, "01000"),
        ((3.0,) * 5, {"floor": 0.08, "budget": 9}, "00000"),
    ],
)
def test_11_looks_again_at_the_slots_of_most_uncertainty(margins: tuple[float, ...], settings: dict, expected: str) -> None:
    pairs = {(left, 2 * slot + 1): 5.0 for slot in range(5) for left in (ANCHOR, 2 * slot - 2, 2 * slot - 1) if left >= 0}
    proposal = propose(GATED, draft_of(*margins, pairs=pairs), temperature=1.0, candidates=2, **settings)
    assert proposal.tokens == tokens(expected)
    neighbours = sum(1 if slot == 4 else 2 for slot in range(5) if expected[slot] == "1")
    assert proposal.work == 2 * neighbours


def test_11_works_from_the_centre_outwards_and_each_slot_hears_what_was_picked_before() -> None:
    """Slot 2 becomes 5 after 2 (1.0 - 0.5). Then slot 1 becomes 3 before 5 (2.0 - 0.5 against 1.0), and slot 3 becomes 7 after 5.
    In another order, or all at once, slots 1 and 3 would hear token 4 and stay."""
    pairs = {(2, 5): 1.0, (3, 5): 2.0, (5, 7): 1.0}
    draft = draft_of(2.0, 0.5, 0.5, 0.5, 2.0, pairs=pairs)
    assert propose(GATED, draft, temperature=1.0, floor=0.3, budget=3, candidates=2).tokens == tokens("01110")


# All of them, against plain Python


def plain_fill(draft: Table, ids: np.ndarray, z: np.ndarray, chosen: dict[int, int]) -> list[int]:
    """Tokens, from those of the slots in `chosen`."""
    head = draft.heads.pair
    while len(chosen) < draft.slots:
        snapshot = dict(chosen)
        for slot in range(draft.slots):
            left, right = snapshot.get(slot - 1, draft.anchor if slot == 0 else None), snapshot.get(slot + 1)
            if slot in snapshot or (left is None and right is None):
                continue

            def score(k: int, slot=slot, left=left, right=right) -> float:
                total, token = float(z[slot, k]), int(ids[slot, k])
                total += plain_pair(head, draft.c, left, token) if left is not None else 0.0
                return total + (plain_pair(head, draft.c, token, right) if right is not None else 0.0)

            chosen[slot] = int(ids[slot, max(range(ids.shape[1]), key=score)])
    return [chosen[slot] for slot in range(draft.slots)]


def test_03_04_and_05_are_their_formulas_on_learned_heads() -> None:
    changed = 0
    for draft in learned(80):
        if not every_slot_has_a_candidate(draft):
            continue
        ids, z = draft.top(4)
        middle = draft.slots // 2
        if draft.slots % 2 == 0:
            middle -= 1 - hashed(fingerprint(draft.committed), draft.anchor) % 2
        after = [plain_pair(draft.heads.pair, draft.c, draft.anchor, int(token)) for token in ids[middle]] + z[middle]
        centre = plain_fill(draft, ids, z, {middle: int(ids[middle, int(np.argmax(after))])})
        assert propose(MOBS, draft, candidates=4).tokens == tuple(centre)

        slots = [offset - 1 for offset in draft.heads.jump.offsets if offset <= draft.slots]
        jump = draft.jump(ids[slots])
        anchors = {slot: int(ids[slot, np.argmax(z[slot] + 0.5 * (jump[j] - jump[j].max()))]) for j, slot in enumerate(slots)}
        expected = plain_fill(draft, ids, z, anchors) if slots else centre
        assert propose(JUMP, draft, candidates=4).tokens == tuple(expected)
        changed += tuple(expected) != tuple(ids[:, 0])
    assert changed > 10
