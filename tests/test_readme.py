"""The figures of the documents are those of the committed benchmark.json. `python tests/test_readme.py` writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from dflash_mini_lab.report.markdown import BLOCKS, MARK, block, with_blocks  # noqa: E402 - as a script, it must find it itself

RESULTS = ROOT / "docs" / "results" / "smollm2-135m" / "benchmark.json"
ELSEWHERE = sorted(ROOT.glob("docs/results/smollm2-135m-*/record.json"))
"""Runs of other machines, condensed."""
EVERY = (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
DOCUMENTS = [path for path in EVERY if MARK.search(path.read_text(encoding="utf-8"))]


def committed() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def elsewhere() -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in ELSEWHERE]


def test_the_figures_of_every_document_are_those_of_the_committed_benchmark() -> None:
    assert {path.name for path in DOCUMENTS} >= {"README.md", "performance.md"}
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert text == with_blocks(text, committed(), elsewhere()), f"{path.name}: run python tests/test_readme.py"


def test_another_run_gives_other_blocks() -> None:
    benchmark = committed()
    benchmark["settings"]["tokens"] += 1
    for name in ("results", "run"):
        assert block(name, benchmark) != block(name, committed())
    for name in ("cost", "machines", "economics", "phases", "plans", "head"):
        assert block(name, slower(committed())) != block(name, committed()), name


def slower(benchmark: dict[str, Any]) -> dict[str, Any]:
    """The same run with every figure doubled that a table of costs is made of."""
    for name in ("median_seconds", "low_seconds", "high_seconds", "ratio"):
        benchmark["verify_cost"][name] = [2 * value for value in benchmark["verify_cost"][name]]
    for plan in benchmark["linear_plans"]:
        plan["gigabytes_per_second"] = {rows: 2 * rate for rows, rate in plan["gigabytes_per_second"].items()}
    for arm in benchmark["results"]["arms"].values():
        arm["draft_cost"] = 2 * (arm["draft_cost"] or 0)
        arm["phase_seconds"] = {phase: 2 * time for phase, time in (arm["phase_seconds"] or {}).items()}
    return benchmark


def test_every_block_is_shown_somewhere() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    assert [name for name in BLOCKS if f"<!-- {name}: begin -->" not in text] == []


if __name__ == "__main__":
    for document in DOCUMENTS:
        text = with_blocks(document.read_text(encoding="utf-8"), committed(), elsewhere())
        document.write_text(text, encoding="utf-8", newline="\n")
