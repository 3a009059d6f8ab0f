"""Recorded rounds and fit diagnostics for the made-up benchmark of sample.py: one round of every kind that a method can have."""

from __future__ import annotations

from typing import Any

TEXTS = {10: "There", 11: " are", 12: " two", 13: " high", 14: " tides", 15: " is", 16: " three", 17: " low", 18: "\n", 19: ""}
DIAGNOSTICS = {
    "parareal": {
        "held_out_slots": 9120,
        "mse": [4.0, 2.0, 1.5],
        "contraction": [0.5, 0.75],
        "top1_agreement": [0.5, 0.52, 0.53],
        "floored_candidates": 0.31,
    },
    "gap": {
        "held_out_slots": 8000,
        "gap_mse": {"before": 9.0, "after": 6.0},
        "gap_mae": {"before": 2.5, "after": 2.0},
        "sign_accuracy": {"before": 0.71, "after": 0.74},
        "switch_rate": 0.12,
        "precision": 0.6,
        "recall": 0.2,
    },
}


def slot(*ids: int) -> dict[str, Any]:
    """Each candidate a logit behind the one before it."""
    return {"ids": list(ids), "logits": [9.5 - place for place in range(len(ids))]}


def known(
    position: int, anchor: int, slots: list[dict[str, Any]], proposal: list[int], greedy: list[int], accepted: int, **changes: Any
) -> dict[str, Any]:
    counts = {"proposed": len(greedy) - 1, "accepted": accepted, "committed": accepted + 1, "work": 3, **changes}
    return {"position": position, "anchor": anchor, "slots": slots, "proposal": proposal, "greedy": greedy, **counts}


def rounds() -> list[dict[str, Any]]:
    """In order: two accepted, one rejected after a change, one rolled back; a cut proposal wholly accepted; nothing proposed;
    a change past the width; nothing drafted."""
    three = [slot(11, 15), slot(15, 12), slot(17, 16)]
    return [
        known(30, 10, [*three, slot(14, 18)], [11, 12, 16, 14], [11, 12, 13, 14, 18], 2),
        known(33, 13, three, [11], [11, 14], 1),
        known(35, 14, three, [], [18], 0),
        known(36, 18, three, [11, 12, 17], [12, 15], 0),
        known(37, 12, [], [], [19], 0),
    ]


def trees() -> list[dict[str, Any]]:
    """In order: the second node accepted and one under it, where the first is another's; nothing accepted; a chain, all accepted,
    whose last token is past the width."""
    three = [slot(11, 15), slot(15, 12), slot(17, 16)]
    return [
        #   11 ── 15        row 1, row 3
        #   15 ── 12 ── 17  row 2, rows 4 and 5
        known(30, 10, three, [11, 15, 15, 12, 17], [15, 14, 12, 14, 16, 14], 2, parents=[-1, -1, 0, 1, 3]),
        known(33, 16, three, [11, 15, 15], [12, 14, 14, 14], 0, parents=[-1, 0, -1]),
        known(34, 12, three, [11, 15, 17], [11, 15, 13], 2, parents=[-1, 0, 1]),
    ]


def add_rounds(benchmark: dict[str, Any]) -> dict[str, Any]:
    """The same run with recorded rounds for 01 and 08, and with what two fits reported."""
    benchmark["rounds"] = {
        "prompt": benchmark["prompts"][0]["id"],
        "texts": {str(token): text for token, text in TEXTS.items()},
        "methods": {
            "01": {"exact": True, "of": 31, "rounds": rounds()},
            "08": {"exact": False, "of": 2, "rounds": rounds()[:2]},
        },
    }
    benchmark["drafter"]["heads"] = {
        name: {"parameters": 18, "diagnostics": dict(diagnostics)} for name, diagnostics in DIAGNOSTICS.items()
    }
    return benchmark
