"""Whatever the logits and heads are: legal tokens, few enough, the same ones again, and the draft is left as it was."""
from __future__ import annotations

import numpy as np
import pytest
from tests.tables import every_slot_has_a_candidate, propose, random_heads, random_tables, slots_of, with_heads

from dflash_mini_lab.methods import METHODS

CASES, VOCABULARY, HIDDEN, MOST_SLOTS = 180, 5_000, 8, 15
DRAFTING = [method for method in METHODS if method.select]
SHORTER = {"08": 0, "09": 1}
"""Methods that may end a proposal early, and the fewest tokens that they propose."""


@pytest.mark.parametrize("method", DRAFTING, ids=lambda method: method.slug)
def test_any_draft_gets_a_legal_proposal(method) -> None:
    """A warning would be an error here: nothing overflows, nothing is NaN."""
    order = np.random.default_rng(5)
    for seed, offsets in enumerate([(2, 4, 6, 8, 10, 12, 14), (1,), (3, 15), (16,)]):
        heads = random_heads(VOCABULARY, HIDDEN, MOST_SLOTS, seed=seed, offsets=offsets)
        drafts = with_heads(random_tables(CASES // 4, range(1, MOST_SLOTS + 1), VOCABULARY), heads, HIDDEN, VOCABULARY)
        for draft in drafts:
            before = draft.rows.copy()
            settings = {name: float(order.choice(values)) for name, values in method.grid.items()}
            if "candidates" in method.settings:
                settings["candidates"] = int(order.integers(2, 13))
            if "passes" in method.settings:
                settings["passes"] = int(order.integers(0, 3))
            proposal = propose(method, draft, **settings)
            fewest = SHORTER.get(method.key, draft.slots)
            assert fewest <= len(proposal.tokens) <= draft.slots
            assert all(type(token) is int for token in proposal.tokens)
            assert type(proposal.work) is int
            assert set(proposal.tokens) <= set(draft.ids.tolist())
            k = settings.get("candidates", heads.parareal.candidates if method.key == "12" else 2)
            if every_slot_has_a_candidate(draft):
                rows = draft.top(k)[0].tolist()
                assert all(token in rows[slot] for token, slot in zip(proposal.tokens, slots_of(proposal), strict=True))
            assert propose(method, draft, **settings) == proposal, "no state between rounds"
            assert np.array_equal(draft.rows, before)
