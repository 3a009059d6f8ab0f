"""Numbers and names as people read them: one spelling for the page and the terminal.

Every function takes what a benchmark.json may hold, null and non-finite numbers included, and never raises on them.
"""

from __future__ import annotations

import math
import unicodedata
from datetime import datetime, timedelta
from typing import Any, TypeGuard

MISSING = "–"

# Characters that the report uses and some consoles lack, with what to print there instead.
FALLBACKS = {
    "×": "x",
    "–": "-",
    "—": "-",
    "τ": "tau",
    "✓": "yes",
    "✗": "NO",
    "·": "-",
    "…": "...",
    "±": "+/-",
    "′": "'",
    "≤": "<=",
    "“": '"',
    "”": '"',
    "’": "'",
    "\u202f": " ",
    "\u00a0": " ",
}


def dig(tree: Any, *path: str, default: Any = None) -> Any:
    """The value at a path of keys, or the default where any of it is missing or null."""
    for key in path:
        if not isinstance(tree, dict):
            return default
        tree = tree.get(key)
    return default if tree is None else tree


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def fixed(value: Any, digits: int = 2, unit: str = "") -> str:
    return f"{value:,.{digits}f}{unit}" if is_number(value) else MISSING


def percent(share: Any, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}\u202f%" if is_number(share) else MISSING


def times(factor: Any) -> str:
    return fixed(factor, 2, "×")


def interval(low: Any, high: Any) -> str:
    """ "[1.74–1.91]", or nothing where there is no interval (a single prompt has none)."""
    return f"[{low:.2f}–{high:.2f}]" if is_number(low) and is_number(high) else ""


def seconds(value: Any) -> str:
    if not is_number(value):
        return MISSING
    if abs(value) < 1:
        return milliseconds(value)
    if abs(value) < 120:
        return f"{value:.1f}\u202fs"
    return f"{int(value // 60)}\u202fmin {int(value % 60):02d}\u202fs"


def milliseconds(value: Any) -> str:
    if not is_number(value):
        return MISSING
    if value == 0:
        return "0\u202fms"
    size = abs(value) * 1000
    return f"{value * 1000:.{0 if size >= 100 else 1 if size >= 1 else 2}f}\u202fms"


def size(count: Any) -> str:
    """Bytes in powers of a thousand, as disks and wheels are sold."""
    if not is_number(count):
        return MISSING
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.{0 if unit == 'B' else 1}f}\u202f{unit}"
        count /= 1000
    return f"{count:.1f}\u202fGB"


def quantity(count: Any) -> str:
    """134515008 → "134.5 M"."""
    if not is_number(count):
        return MISSING
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if abs(count) >= scale:
            return f"{count / scale:.1f}\u202f{unit}"
    return f"{count:,}"


def plain(value: Any) -> str:
    """Any JSON value on one line, for facts whose shape this report does not know."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(plain(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} = {plain(item)}" for key, item in value.items()) or "none"
    return str(value)


def moment(stamp: Any) -> str:
    """ "2026-01-02T03:04:05Z" → "2 January 2026, 03:04 UTC"; what is no such time stays as it is."""
    try:
        when = datetime.fromisoformat(str(stamp).replace("Z", "+00:00"))
    except ValueError:
        return str(stamp)
    months = (
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    )
    zone = " UTC" if when.utcoffset() == timedelta(0) else ""
    return f"{when.day} {months[when.month - 1]} {when.year}, {when:%H:%M}{zone}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(names: list[str], limit: int = 4) -> str:
    """ "A, B and C"; a long list ends in a count."""
    if len(names) > limit:
        return f"{', '.join(names[: limit - 1])} and {len(names) - limit + 1} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def visible(text: str) -> str:
    """Text without control characters (a terminal would obey them, an HTML parser refuses them), lone surrogates
    (no encoding takes them) and bidirectional overrides (they would reorder the text around them)."""
    return "".join("\ufffd" if _hostile(char) else char for char in text.replace("\r\n", "\n"))


def _hostile(char: str) -> bool:
    if char in "\n\t":
        return False
    return unicodedata.category(char) in ("Cc", "Cs") or "\u202a" <= char <= "\u202e" or "\u2066" <= char <= "\u2069"


def console_text(text: str, encoding: str | None) -> str:
    """Text that a stream of this encoding can print: the nearest spelling of what it lacks."""
    printable = []
    for char in visible(text):
        try:
            char.encode(encoding or "ascii")
            printable.append(char)
        except UnicodeEncodeError:
            printable.append(FALLBACKS.get(char, "?"))
    return "".join(printable)
