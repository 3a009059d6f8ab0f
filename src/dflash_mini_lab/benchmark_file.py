"""benchmark.json on disk: read, checked against its schema, written whole or not at all. No torch, no measuring, no meaning.

The schema lies beside this file (`benchmark.schema.json`) and is the contract between the run and every reader.
"""
from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from dflash_mini_lab.files import replacing
from dflash_mini_lab.types import UserError

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("benchmark.schema.json")

Benchmark = dict[str, Any]


@lru_cache(maxsize=1)
def schema() -> dict[str, Any]:
    return json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))


def schema_errors(benchmark: Benchmark, limit: int = 5) -> list[str]:
    """Up to `limit` sentences of the form `where: what is wrong`; empty for a benchmark that fits the schema."""
    import jsonschema  # 60 ms, and only a finished run or a test asks

    found = jsonschema.Draft202012Validator(schema()).iter_errors(benchmark)
    return [f"{error.json_path}: {error.message}" for error, _ in zip(found, range(limit), strict=False)]


def read(path: Path) -> Benchmark:
    """The benchmark in `path`. Raises UserError when it is missing, no JSON, or of another schema version."""
    try:
        benchmark = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such benchmark.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a benchmark ({error}).") from error
    version = benchmark.get("schema_version") if isinstance(benchmark, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(f"{path}: has schema version {version}; this lab reads version {SCHEMA_VERSION}.")
    return benchmark


def write(path: Path, benchmark: Benchmark) -> None:
    """Replace `path` in one step: a reader, or a run killed at any moment, sees the old file or the new one.

    Raises ValueError for a NaN or an infinity: no metric of this lab is one.
    """
    text = json.dumps(benchmark, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
