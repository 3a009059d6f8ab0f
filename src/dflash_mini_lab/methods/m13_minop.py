"""13 V13 MinOp: method 10 with one draw a round, its two best candidates found where the logits are.

Only S×2 ids and scores reach the host. Never calibrated by itself: 10 against 13 measures the transfer, so both run one setting.
"""
from __future__ import annotations

from collections.abc import Mapping

from dflash_mini_lab.methods.m10_advanced_boltzmann import ADVANCED_BOLTZMANN, propose
from dflash_mini_lab.types import Draft, Method, Proposal


def select(draft: Draft, settings: Mapping[str, float]) -> Proposal:
    """`temperature` and `cutoff` as in method 10; its budget is 1."""
    ids, scores = draft.top(2)
    return propose(draft, ids, scores, settings["temperature"], settings["cutoff"], budget=1)


MINOP = Method(
    "13",
    "minop",
    "V13 MinOp",
    "method 10 with one draw; only the two best candidates of a slot come to the host",
    select,
    settings={name: ADVANCED_BOLTZMANN.settings[name] for name in ("temperature", "cutoff")},
    settings_of=ADVANCED_BOLTZMANN.key,
)
