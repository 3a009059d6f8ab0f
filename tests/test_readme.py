"""The README's figures are those of the committed benchmark.json. `python tests/test_readme.py` writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from dflash_mini_lab.report.markdown import with_results  # noqa: E402 - run as a script, it must find the package itself

README, RESULTS = ROOT / "README.md", ROOT / "docs" / "results" / "smollm2-135m" / "benchmark.json"


def expected() -> str:
    return with_results(README.read_text(encoding="utf-8"), json.loads(RESULTS.read_text(encoding="utf-8")))


def test_the_figures_of_the_readme_are_those_of_the_committed_benchmark() -> None:
    assert README.read_text(encoding="utf-8") == expected(), "run: python tests/test_readme.py"


def test_another_run_gives_another_block() -> None:
    benchmark = json.loads(RESULTS.read_text(encoding="utf-8"))
    benchmark["settings"]["tokens"] += 1
    assert with_results(README.read_text(encoding="utf-8"), benchmark) != expected()


if __name__ == "__main__":
    README.write_text(expected(), encoding="utf-8")
