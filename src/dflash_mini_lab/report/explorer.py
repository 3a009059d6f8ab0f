"""The mechanism explorer: recorded rounds as slots, candidates, outcomes and one sentence each. Pure; no markup, no script.

Everything is prepared as text, so that the page reads whole without a script; the script only shows one round at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dflash_mini_lab.report.format import dig, fixed, is_number, listed, plain, plural
from dflash_mini_lab.report.ranking import Benchmark, arms
from dflash_mini_lab.trees import accepted_rows, depth, depths

WORK = {
    "01": "0",
    "02": "K + (S-1)·K²",
    "03": "O(S·K)",
    "04": "O(S·K + J·K)",
    "05": "O(S·K + J·K·r)",
    "06": "S·K",
    "07": "O(S·K)",
    "08": "0",
    "09": "S·K·r",
    "10": "2 for each draw",
    "11": "O(budget·K)",
    "12": "R·S·K",
    "13": "2 for each draw",
    "14": "S",
    "15": "S·K",
}
"""Method key → its guidance work, as docs/methods.md has it (a test compares the two)."""
WORK_LETTERS = "S slots, K candidates a slot, r the rank of a head, J jump offsets, R rounds of correction"
PAIRS = (
    ("10", "13", "One policy: 10 searches all logits on the host, 13 has two candidates a slot found where the logits are."),
    ("12", "14", "A learned correction of every candidate's score, and its simplification to one switch by three numbers."),
    ("01", "08", "The whole block, and the block cut where the drafter is unsure."),
    ("01", "15", "As many tokens in one chain, and in a tree of the most probable prefixes."),
)
CONTEXT = 70
"""Characters of the answer shown before a round's own tokens, less a word that would be cut."""
BARS = 10
OUTCOMES = {
    "accepted": ("✓", "accepted"),
    "rejected": ("✗", "rejected"),
    "rolled": ("↩", "rolled back"),
    "unverified": ("·", "past the verify width"),
    "unproposed": ("–", "not proposed"),
}
"""Outcome → its sign and its words: a colour never says it alone."""


def explorer(benchmark: Benchmark) -> dict[str, Any] | None:
    """None for a run without recorded rounds, or without a method."""
    recorded = dig(benchmark, "rounds", "methods", default={})
    known = {arm["key"]: arm for arm in arms(benchmark)}
    texts = dig(benchmark, "rounds", "texts", default={})
    methods = [_method(known.get(key, {"key": key}), entry, texts) for key, entry in recorded.items() if entry.get("rounds")]
    if not methods:
        return None
    keys = [method["key"] for method in methods]
    prompt = dig(benchmark, "rounds", "prompt")
    return {
        "prompt": next((p["text"] for p in benchmark.get("prompts") or [] if p["id"] == prompt), plain(prompt)),
        "methods": methods,
        "pairs": [pair for pair in PAIRS if pair[0] in keys and pair[1] in keys],
        "names": {method["key"]: method["name"] for method in methods},
        "most": max(len(method["rounds"]) for method in methods),
        "letters": WORK_LETTERS,
        "outcomes": OUTCOMES,
    }


def shown(token: int, texts: Mapping[str, str]) -> str:
    """A token's text with its blanks and line ends made visible; its number where it has no text of its own."""
    text = texts.get(str(token), "")
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") or f"#{token}"


def said(token: int, texts: Mapping[str, str]) -> str:
    """As `shown`, without the blanks around a word: a screen reader would name their signs."""
    return texts.get(str(token), "").strip() or shown(token, texts)


def _method(arm: dict[str, Any], entry: dict[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    key, rounds, so_far = arm["key"], [], ""
    for number, known in enumerate(entry["rounds"], start=1):
        so_far = so_far or texts.get(str(known["anchor"]), "")
        rounds.append(_round(number, known, texts, so_far))
        so_far += "".join(texts.get(str(token), "") for token in _new(known))
    settings = arm.get("settings") or {}
    return {
        "key": key,
        "name": arm.get("name") or key,
        "summary": _as_sentence(str(arm.get("summary") or "")),
        "settings": ", ".join(f"{name} = {plain(value)}" for name, value in settings.items()) or "no settings",
        "width": plain(arm.get("verify_width")),
        "work": WORK.get(key, ""),
        "kept": _kept(len(rounds), entry.get("of")),
        "exact": bool(entry.get("exact")),
        "rounds": rounds,
    }


def _as_sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}{'' if words.endswith('.') or not words else '.'}"


def _kept(rounds: int, of: Any) -> str:
    return f"the first {rounds} of {of} rounds" if is_number(of) and of > rounds else f"all {plural(rounds, 'round')}"


def accepted_path(known: dict[str, Any]) -> list[int]:
    """The rows of a round's verify call that its text went through: the anchor's, 0, then those of the accepted tokens."""
    proposed = known["proposed"]
    parents = known["parents"][:proposed] if "parents" in known else range(-1, proposed - 1)
    return accepted_rows(known["proposal"][:proposed], parents, known["greedy"])


def _new(known: dict[str, Any]) -> list[int]:
    """The tokens that the answer gained: the target's own from the anchor on, cut at a stop token or the budget."""
    return [known["greedy"][row] for row in accepted_path(known)][: known["committed"]]


def _round(number: int, known: dict[str, Any], texts: Mapping[str, str], so_far: str) -> dict[str, Any]:
    path = accepted_path(known)
    slots = [_slot(index, known, path, texts) for index in range(len(known["slots"]))]
    new, accepted = _new(known), known["accepted"]
    context = so_far if len(so_far) <= CONTEXT else "…" + so_far[-CONTEXT:].split(" ", 1)[-1]
    return {
        "number": number,
        "sentence": sentence(known, texts),
        "position": known["position"],
        "anchor": shown(known["anchor"], texts),
        "context": context,
        "drafted": "".join(texts.get(str(token), "") for token in new[:accepted]),
        "own": "".join(texts.get(str(token), "") for token in new[accepted:]),
        "slots": slots,
        "tree": _branches(-1, known, path, texts) if "parents" in known else [],
        "bonus": shown(known["greedy"][path[-1]], texts),
        "bonus_slot": accepted + 1,
        "ended": known["committed"] <= accepted,
        "accepted": accepted,
        "proposed": known["proposed"],
        "committed": known["committed"],
        "work": known["work"],
        "changed": sum(slot["changed"] for slot in slots),
    }


def _slot(index: int, known: dict[str, Any], path: list[int], texts: Mapping[str, str]) -> dict[str, Any]:
    """One slot with its candidates. A chain has one choice in it; a tree as many as it has nodes so deep."""
    slot, accepted = known["slots"][index], len(path) - 1
    places = [place for place, deep in enumerate(_slots_of(known)) if deep == index]
    chosen = {known["proposal"][place] for place in places}
    best = slot["logits"][0]
    own = known["greedy"][path[index]] if index <= accepted else None
    if index < accepted:
        outcome = "accepted"
    elif not places:
        outcome = "unproposed"
    elif places[0] >= known["proposed"]:
        outcome = "unverified"
    else:
        outcome = "rejected" if index == accepted else "rolled"
    return {
        "number": index + 1,
        "outcome": outcome,
        "changed": own != slot["ids"][0] if "parents" in known and index < accepted else bool(chosen - {slot["ids"][0]}),
        "target": "" if own is None else shown(own, texts),
        "candidates": [
            {
                "text": shown(token, texts),
                "behind": "0" if place == 0 else f"−{best - logit:.2f}",
                "bar": round(BARS * math.exp(min(logit - best, 0.0))),
                "chosen": token in chosen,
                "target": token == own,
            }
            for place, (token, logit) in enumerate(zip(slot["ids"], slot["logits"], strict=True))
        ],
    }


def _slots_of(known: dict[str, Any]) -> list[int]:
    """The slot of each proposed token."""
    return depths(known["parents"]) if "parents" in known else list(range(len(known["proposal"])))


def _branches(parent: int, known: dict[str, Any], path: list[int], texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """The nodes of a tree under the one at `parent`, each with those under it."""
    nodes = []
    for place, (token, above) in enumerate(zip(known["proposal"], known["parents"], strict=True)):
        if above == parent:
            if place >= known["proposed"]:
                outcome = "unverified"
            elif place + 1 in path:
                outcome = "accepted"
            else:
                outcome = "rejected" if parent + 1 in path else "rolled"
            under = _branches(place, known, path, texts)
            nodes.append({"text": shown(token, texts), "outcome": outcome, "nodes": under})
    return nodes


def sentence(known: dict[str, Any], texts: Mapping[str, str]) -> str:
    """What happened in a round, in words that a screen reader can say by themselves."""
    proposed, accepted, path = known["proposed"], known["accepted"], accepted_path(known)
    ended = known["committed"] <= accepted
    own = "ended its answer within them" if ended else f"wrote “{said(known['greedy'][path[-1]], texts)}” itself"
    if not known["slots"]:
        return f"Nothing was drafted: the target {own}."
    if not proposed:
        return f"The method proposed nothing: a plain decoding step, in which the target {own}."
    tree = "parents" in known
    changes = [
        f"slot {index + 1} from “{said(first, texts)}” to “{said(token, texts)}”" for index, first, token in changed_slots(known)
    ]
    changed = listed(changes, 3) if changes else ""
    first = f"The method proposed {plural(proposed, 'token')}"
    if tree:
        first += f" in a tree {plural(depth(known['parents'][:proposed]), 'slot')} deep."
    else:
        first += f", changing {changed}." if changed else "."
    alternatives = f", changing {changed}" if changed and tree else ""
    if accepted == proposed:
        return f"{first} The target accepted {'it' if proposed == 1 else 'all of them'}{alternatives} and {own}."
    kept, rows = f"accepted {accepted or 'none'}{alternatives}", proposed - accepted
    back = f"{plural(rows, 'row')} of its cache {'was' if rows == 1 else 'were'} rolled back"
    return f"{first} The target {kept}, {own}, and {back}."


def changed_slots(known: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(slot from 0, the drafter's first choice, the method's) wherever they differ: of a chain among the verified tokens, of a
    tree, which holds several of a slot, among the accepted ones."""
    if "parents" in known:
        tokens = [known["proposal"][row - 1] for row in accepted_path(known)[1:]]
    else:
        tokens = known["proposal"][: known["proposed"]]
    pairs = [(slot["ids"][0], token) for slot, token in zip(known["slots"], tokens, strict=False)]
    return [(index, first, token) for index, (first, token) in enumerate(pairs) if token != first]


def parareal(benchmark: Benchmark) -> dict[str, Any] | None:
    """Method 12's rounds on held-out blocks. None where its fit reported nothing."""
    found = _diagnostics(benchmark, "parareal")
    errors, agreement = found.get("mse") or [], found.get("top1_agreement") or []
    if not errors or not all(map(is_number, errors)) or errors[0] <= 0:
        return None
    ratios = [None, *(found.get("contraction") or [])]
    words = f"After {plural(len(errors) - 1, 'round')} of correction the draft's scores are {_nearer(errors[-1] / errors[0])} "
    words += f"the target's: the squared error went from {fixed(errors[0])} to {fixed(errors[-1])}"
    if len(agreement) > 1:
        words += f", and the same token came first in {_share(agreement[-1])} of slots, {_share(agreement[0])} before"
    floored = found.get("floored_candidates")
    words += (
        f". {_share(floored)} of the target's scores were too small to have been kept; a floor stands for them."
        if (is_number(floored) and floored > 0)
        else "."
    )
    lines = [
        (
            "the draft" if index == 0 else f"round {index}",
            fixed(error, 3),
            fixed(ratios[index], 3) if index < len(ratios) else "–",
            _share(agreement[index]) if index < len(agreement) else "–",
        )
        for index, error in enumerate(errors)
    ]
    return {"words": words, "lines": lines, "slots": _count(found), "errors": errors}


def _nearer(ratio: float) -> str:
    """In words what is left of an error; a change under 5% is hardly one."""
    if ratio > 1:
        return "further from"
    return "nearer to" if ratio < 0.95 else "hardly nearer to"


def simple_parareal(benchmark: Benchmark) -> dict[str, Any] | None:
    """Method 14's estimate of the sign of the target's gap on held-out blocks. None where its fit reported nothing."""
    found = _diagnostics(benchmark, "gap")
    before, after = dig(found, "sign_accuracy", "before"), dig(found, "sign_accuracy", "after")
    if not is_number(before) or not is_number(after):
        return None
    verb = "raises" if after > before else "lowers" if after < before else "leaves"
    words = f"Of its two best tokens, the draft has the one that the target prefers first in {_share(before)} of slots; "
    words += f"the estimate {verb} that to {_share(after)}." if verb != "leaves" else "the estimate leaves that as it is."
    precision = found.get("precision")
    if is_number(precision):
        words += f" It switched a slot in {_share(found.get('switch_rate'))} of blocks, rightly in {_share(precision)} of those."
    elif found.get("switch_rate") == 0:
        words += " It never switched a slot there, so that method 14 proposes what DFlash does."
    lines = [
        ("sign right", _share(before), _share(after)),
        ("squared error of the gap", *_both(found, "gap_mse")),
        ("absolute error of the gap", *_both(found, "gap_mae")),
    ]
    switches = [
        (name, _share(found.get(key)))
        for name, key in (
            ("Blocks with a switch", "switch_rate"),
            ("Switches that were right (precision)", "precision"),
            ("Slots to switch that were found (recall)", "recall"),
        )
    ]
    return {"words": words, "lines": lines, "switches": switches, "slots": _count(found)}


def _diagnostics(benchmark: Benchmark, head: str) -> dict[str, Any]:
    found = dig(benchmark, "drafter", "heads", head, "diagnostics", default={})
    return found if isinstance(found, dict) else {}


def _count(found: dict[str, Any]) -> str:
    slots = found.get("held_out_slots")
    return f"{plural(slots, 'held-out slot')}" if isinstance(slots, int) else "held-out slots"


def _both(found: dict[str, Any], name: str) -> tuple[str, str]:
    return fixed(dig(found, name, "before"), 3), fixed(dig(found, name, "after"), 3)


def _share(value: Any) -> str:
    return f"{100 * value:.1f}\u202f%" if is_number(value) else "–"
