"""Where prompts come from, and the rule that no prompt is measured on that something was tuned or trained on."""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mini_lab.types import UserError


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    text: str


def load_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSON file (a list of texts or of {"text", "id", "category"}, or an object whose `prompts` is one) or of a
    plain text file (one prompt a line, blank lines skipped). A byte-order mark and any line ends are fine.

    Raises UserError that names the file, and the prompt where one is at fault.
    """
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: the prompts cannot be read ({error.strerror or error}).") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: the prompts are not UTF-8 text (byte {error.start}).") from error
    content = content.replace("\r\n", "\n").replace("\r", "\n")
    prompts = [_prompt(entry, number, path) for number, entry in enumerate(_entries(content, path), start=1)]
    if not prompts:
        raise UserError(f"{path}: there is no prompt in this file.")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UserError(f"{path}: two prompts have the id {prompt.id!r}.")
        seen.add(prompt.id)
    return prompts


def training_seeds(path: Path) -> Iterator[str]:
    """Every seed of a training file: each group's patterns filled with each of its values. Of a plain text, every opening of
    each line: a prompt that begins one has been seen."""
    if path.suffix == ".txt":
        for prompt in load_prompts(path):
            words = prompt.text.split()
            yield from (" ".join(words[:count]) for count in range(1, len(words) + 1))
        return
    yield from (seed for _, seed in _filled(path))


def written_requests(path: Path) -> list[str]:
    """Prompts of a training file that stand as they are: the values of its groups whose only pattern is `{x}`."""
    return [] if path.suffix == ".txt" else [seed for written, seed in _filled(path) if written]


def _filled(path: Path) -> Iterator[tuple[bool, str]]:
    """Every group's patterns filled with each of its values, and whether that value is a written request."""
    try:
        for group in json.loads(path.read_bytes().decode("utf-8-sig"))["groups"]:
            written = group["patterns"] == ["{x}"]
            for pattern in group["patterns"]:
                for value in group["values"]:
                    yield written, pattern.replace("{x}", value)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: the training seeds cannot be read ({error}).") from error


def not_held_out(texts: Sequence[str], held_out: Sequence[Prompt]) -> list[str]:
    """`texts` without those that are one of the held-out prompts, whatever their case, spacing or punctuation."""
    kept_apart = {_key(prompt.text) for prompt in held_out}
    return [text for text in texts if _key(text) not in kept_apart]


def refuse_overlap(measured: Sequence[Prompt], calibration: Sequence[Prompt], seeds: Iterator[str] | Sequence[str]) -> None:
    """Raise UserError naming the prompt when two of the three sets share one, whatever its case, spacing or punctuation."""
    tuned = {_key(prompt.text): prompt for prompt in calibration}
    for prompt in measured:
        if twin := tuned.get(_key(prompt.text)):
            raise UserError(
                f"Prompt {prompt.id!r} is also calibration prompt {twin.id!r}: settings may not be chosen on it. Change one."
            )
    held_out = {_key(prompt.text): prompt for prompt in (*calibration, *measured)}
    for seed in seeds:
        if found := held_out.get(_key(seed)):
            raise UserError(f"Prompt {found.id!r} is also a training seed ({seed!r}): the drafter has seen it. Change one.")


def encode_prompts(prompts: Sequence[Prompt], encode: Callable[[str], list[int]], max_positions: int) -> dict[str, list[int]]:
    """Token ids by prompt id. Raises UserError naming a prompt that has none, or that leaves the target no room for an answer."""
    encoded = {}
    for prompt in prompts:
        ids = list(encode(prompt.text))
        if not ids:
            raise UserError(f"Prompt {prompt.id!r} is empty: there is nothing to continue.")
        if len(ids) >= max_positions:
            raise UserError(
                f"Prompt {prompt.id!r} has {len(ids)} tokens; this target takes at most {max_positions - 1}. Shorten it."
            )
        encoded[prompt.id] = ids
    return encoded


def _entries(content: str, path: Path) -> list[Any]:
    if path.suffix.lower() != ".json" and not content.lstrip().startswith(("[", "{")):
        return [line.strip() for line in content.split("\n") if line.strip()]
    try:
        data = json.loads(content)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}).") from error
    entries = data.get("prompts") if isinstance(data, dict) else data
    if not isinstance(entries, list):
        raise UserError(f"{path}: expected a list of prompts.")
    return entries


def _prompt(entry: Any, number: int, path: Path) -> Prompt:
    fields = {"text": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or not isinstance(fields.get("text"), str):
        raise UserError(f"{path}: prompt {number} is neither a text nor an object with a \"text\".")
    name = str(fields.get("id") or f"prompt-{number}")
    if not fields["text"].strip():
        raise UserError(f"{path}: prompt {name!r} is empty.")
    return Prompt(name, str(fields.get("category") or "own"), fields["text"].strip())


def _key(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))
