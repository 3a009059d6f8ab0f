"""benchmark.json without its texts and single times, small enough to be kept; facts, settings, verdicts and results stay.

    python tools/condense.py cpu-reports/benchmark.json docs/results/small-lfm2/record.json

What is left out is counted and pinned by its SHA-256, so that the whole file, where somebody kept it, can be held to the record.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

LEFT_OUT = ("cells", "reference", "prompts", "rounds", "linear_plans")
LONGEST_LOOP = 10
"""Tokens: an answer whose last tokens are one run of at most so many, three times over, goes round in circles."""


def condensed(benchmark: dict[str, Any], content: bytes) -> dict[str, Any]:
    """`benchmark` without LEFT_OUT and the trials of calibration. `content`: the bytes of its file."""
    answers = [entry["tokens"] for entry in benchmark["reference"]]
    kept = {name: value for name, value in benchmark.items() if name not in LEFT_OUT}
    kept["calibration"] = {
        **benchmark["calibration"],
        "methods": {key: entry["chosen"] for key, entry in benchmark["calibration"]["methods"].items()},
    }
    kept["whole_file"] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        **{f"{name}_sha256": digest(benchmark.get(name)) for name in LEFT_OUT},
    }
    kept["answers"] = {
        "prompts": len(answers),
        "tokens": sum(map(len, answers)),
        "shortest": min(map(len, answers)),
        "finish": dict(Counter(entry["finish"] for entry in benchmark["reference"])),
        "distinct": len({tuple(answer) for answer in answers}),
        "ending_in_a_loop": sum(map(loops, answers)),
    }
    return kept


def loops(tokens: list[int]) -> bool:
    """Whether the last tokens repeat with a period of at most LONGEST_LOOP, three times over."""
    return any(
        len(tokens) >= 3 * period and tokens[-3 * period : -period] == tokens[-2 * period :]
        for period in range(1, LONGEST_LOOP + 1)
    )


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmark", type=Path)
    parser.add_argument("record", type=Path)
    chosen = parser.parse_args(argv)
    content = chosen.benchmark.read_bytes()
    text = json.dumps(condensed(json.loads(content), content), indent=1, ensure_ascii=False) + "\n"
    chosen.record.parent.mkdir(parents=True, exist_ok=True)
    chosen.record.write_text(text, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
