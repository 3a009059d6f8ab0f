"""Commands as documents and workflows write them: found, split into words, and held to the command lines that exist."""
from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from dflash_mini_lab.cli import COMPARE, build_compare_parser, build_parser
from dflash_mini_lab.settings import CPU, GPU, from_environment

ROOT = Path(__file__).resolve().parents[1]
RUNNERS = {runner.script: runner for runner in (CPU, GPU)}
PROMPT_FILE = re.compile(r"\./[\w/-]+/prompts\.json")
"""One that an earlier command of a document makes."""


def python_commands(text: str) -> list[list[str]]:
    """The words behind `python` of each command in `text`, lines and `&&` apart; those of `python -m` are left out."""
    found = []
    for line in re.split(r"\n|&&|\|\||;", text.replace("\\\n", " ")):
        match = re.search(r"(?:^|\s|[/\\])python (?!-m )(.*)", line)
        if match:
            found.append(shlex.split(match[1].split("#")[0].replace("\\", "/")))
    return found


def mistakes(words: list[str]) -> list[str]:
    """Why the repository has no such command: the file, or a flag of it."""
    script, *arguments = words
    if not (ROOT / script).is_file():
        return [f"there is no {script}"]
    if script not in RUNNERS:
        source = (ROOT / script).read_text(encoding="utf-8")
        return [f"{script} has no {word}" for word in arguments if word.startswith("--") and f'"{word}"' not in source]
    if arguments == ["--help"]:  # answers and ends
        return []
    comparing = arguments[:1] == [COMPARE]
    parser = build_compare_parser(RUNNERS[script]) if comparing else build_parser(RUNNERS[script])
    parser.error = refuse  # type: ignore[method-assign]
    example = [re.sub(r"^\$.*MINUTES$", "60", word) for word in arguments[comparing:]]
    example = [PROMPT_FILE.sub(str(ROOT / "benchmarks" / "prompts.json"), word) for word in example]
    try:
        given = vars(parser.parse_args(example))
        if not comparing:  # the files that a comparison names are a reader's
            from_environment(given, RUNNERS[script])
    except ValueError as error:
        return [f"{' '.join(words)}: {error}"]
    return []


def refuse(message: str) -> Any:
    raise ValueError(message)


def blocks(text: str) -> list[tuple[str, str]]:
    """(language or "", commands) of every fenced block in a document."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
