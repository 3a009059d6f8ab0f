"""The site of several finished runs, each checked first: gate, schema, and the drafter's files.

    python tools/build_site.py smollm2-135m/benchmark.json lfm2.5-350m/benchmark.json --output-dir site

Exit status 2, and nothing written, when one of them must not be published. Run it in the lab's environment (`.venv`); of the
pinned packages jinja2, jsonschema and numpy are enough.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dflash_mini_lab.report.site import write_site
from dflash_mini_lab.types import UserError


def main() -> int:
    parser = argparse.ArgumentParser(description="Check finished runs and write the site over them.")
    parser.add_argument("benchmarks", nargs="+", type=Path, metavar="benchmark.json")
    parser.add_argument("--output-dir", type=Path, required=True, metavar="FOLDER")
    given = parser.parse_args()
    try:
        print(f"Site: {write_site(given.benchmarks, given.output_dir)}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
