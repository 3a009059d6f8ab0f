"""What holds of every method whatever the drafter says: a legal proposal, for every number of slots and candidates."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.tables import Table, propose, random_heads, random_tables, slots_of, with_heads

from dflash_mini_lab.methods import METHODS

SLOTS, CANDIDATES, HIDDEN, VOCABULARY = range(1, 10), range(2, 10), 6, 200
SELECTING = [method for method in METHODS if method.select]


def drafts(candidates: int) -> list[Table]:
    """Finite ones of every number of slots, of no fewer draft tokens than candidates are asked for."""
    heads = random_heads(VOCABULARY, HIDDEN, max(SLOTS), seed=candidates)
    assert heads.parareal
    heads = replace(heads, parareal=replace(heads.parareal, candidates=candidates))
    wide = [draft for draft in random_tables(72, SLOTS, VOCABULARY) if len(draft.ids) >= max(CANDIDATES)]
    return with_heads([draft for draft in wide if np.isfinite(draft.rows).all()], heads, HIDDEN, VOCABULARY)


@pytest.mark.parametrize("method", SELECTING, ids=lambda method: method.slug)
def test_every_number_of_slots_and_candidates_gives_a_legal_proposal(method) -> None:
    for candidates in CANDIDATES:
        found = drafts(candidates)
        assert {draft.slots for draft in found} == set(SLOTS)
        for draft in found:
            asked = {"candidates": candidates} if "candidates" in method.settings else {}
            before = draft.rows.copy()
            proposal = propose(method, draft, **asked)
            allowed = draft.top(candidates if asked or "parareal" in method.needs else 2)[0].tolist()
            assert len(proposal.tokens) <= draft.slots
            assert all(type(token) is int for token in proposal.tokens)
            assert all(token in allowed[slot] for token, slot in zip(proposal.tokens, slots_of(proposal), strict=True))
            assert len(proposal.tokens) == draft.slots or method.key in ("08", "09"), "only these cut"
            assert proposal.work >= 0
            assert propose(method, draft, **asked) == proposal, "no state between rounds"
            assert np.array_equal(draft.rows, before), "the draft is left as it was"
