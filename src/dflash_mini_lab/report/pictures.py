"""A method's picture in docs/methods.md: which recorded round it shows, that round's address on the page, and its words. Pure.

tools/picture_methods.py takes the pictures; here nothing draws, so that the documents' words are made where no browser is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dflash_mini_lab.report.explorer import changed_slots, sentence
from dflash_mini_lab.report.format import dig, plural
from dflash_mini_lab.report.ranking import Benchmark, arms

_MARKUP = re.compile(r"([\\`*_\[\]<>|!&])")


@dataclass(frozen=True)
class Picture:
    """One round of one method, counted from 1 as on the page."""

    key: str
    name: str
    round: int
    of: int  # recorded rounds
    acted: int  # rounds among them in which the method did more than hand on the drafter's first choices
    tree: bool  # its proposals are trees: it acted where another than a first choice was accepted
    words: str  # what is seen, in sentences

    @property
    def address(self) -> str:
        """Opens the page's explorer at this round."""
        return f"#explorer-{self.key}-round-{self.round}"

    @property
    def file(self) -> str:
        return f"{self.key}.png"


def picture(key: str, benchmark: Benchmark) -> Picture | None:
    """The first of the rounds in which most is seen; None where the run recorded none of this method's."""
    rounds = dig(benchmark, "rounds", "methods", key, "rounds", default=[])
    if not rounds:
        return None
    shown = max(range(len(rounds)), key=lambda index: telling(rounds[index]))  # the first of equals
    texts = dig(benchmark, "rounds", "texts", default={})
    name = next((arm["name"] for arm in arms(benchmark) if arm["key"] == key), key)
    tree = any("parents" in known for known in rounds)
    return Picture(key, name, shown + 1, len(rounds), sum(map(acted, rounds)), tree, sentence(rounds[shown], texts))


def telling(known: dict[str, Any]) -> tuple[int, bool, int]:
    """Compares rounds by what a reader sees of the method in them: changes that the target accepted, a proposal ended just
    where it would have failed counted as one; any other change or cut; accepted tokens."""
    fitting = was_cut(known) and known["accepted"] == known["proposed"] > 0
    accepted = sum(slot < known["accepted"] for slot, _, _ in changed_slots(known))
    return accepted + fitting, acted(known), known["accepted"]


def acted(known: dict[str, Any]) -> bool:
    return was_cut(known) or bool(changed_slots(known))


def was_cut(known: dict[str, Any]) -> bool:
    """Whether the method itself ended its proposal before the block's end; the verify width is another matter."""
    return len(known["proposal"]) < len(known["slots"])


def markdown(key: str, benchmark: Benchmark) -> str:
    """The picture in a document of docs/, with its words as the alternative text, and a line below it."""
    found = picture(key, benchmark)
    if not found:
        return "The committed run recorded no round of this method."
    alternative = _MARKUP.sub(r"\\\1", f"Method {found.key} {found.name}, round {found.round}. {found.words}")
    rounds = plural(found.of, "recorded round")
    if found.tree:
        told = f"In {found.acted or 'none'} of {rounds} it had a token accepted that was not the drafter's first choice."
        return f"![{alternative}](methods/{found.file})\n\n`{found.address}`. {told}"
    often = f"In {found.acted} of {rounds} it changed a verified token or ended its proposal early"
    never = f"In none of {rounds} did it change a verified token or end its proposal early: it proposed first choices"
    return f"![{alternative}](methods/{found.file})\n\n`{found.address}`. {often if found.acted else never}."
