"""15 Tree: the best prefixes of all slots' candidates, verified together (SpecInfer, arXiv 2305.09781; OPT-Tree, 2406.17276)."""
from __future__ import annotations

from collections.abc import Mapping

from dflash_mini_lab.scores import log_softmax
from dflash_mini_lab.trees import best_first
from dflash_mini_lab.types import Draft, Method, Proposal


def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
    """`candidates` K; `temperature` of the log-probabilities, which are of a slot's K candidates alone: the whole vocabulary's
    choose no better tree at the temperature that suits them (docs/lab-log.md). S·K scores."""
    ids, logits = draft.top(int(settings["candidates"]))
    scores = [log_softmax(row, settings["temperature"]) for row in logits.tolist()]
    nodes, parents = best_first(scores, draft.slots)
    tokens = ids.tolist()
    return Proposal(tuple(tokens[slot][candidate] for slot, candidate in nodes), ids.size, tuple(parents))


TREE = Method(
    "15",
    "tree",
    "Tree",
    "as many tokens as a block has slots, spent on the most probable prefixes: alternatives where the drafter is unsure",
    select,
    settings={"candidates": 4, "temperature": 2.0},
    grid={"temperature": (1.0, 1.5, 2.0, 3.0)},
    trees=True,
)
