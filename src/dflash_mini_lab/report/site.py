"""The published site: an index over the runs of several targets, each with its page and its benchmark.json.

A run is checked before it is shown: whole, exact, true to its schema, with the drafter that the repository pins. Never torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_mini_lab import __version__, artifacts, benchmark_file
from dflash_mini_lab.artifacts import Manifest
from dflash_mini_lab.files import replace_file
from dflash_mini_lab.report import fill, write_report
from dflash_mini_lab.report.format import dig, moment, plural, quantity
from dflash_mini_lab.report.verdict import gate_failed, verdict
from dflash_mini_lab.types import UserError

Benchmark = benchmark_file.Benchmark


def write_site(paths: Sequence[Path], folder: Path, repository: Path = artifacts.COMMITTED) -> Path:
    """Write the index and a folder for each target; returns the index.

    Raises UserError that names the file and what is wrong with it, before anything is written.
    """
    runs: dict[str, Benchmark] = {}
    for path in paths:
        benchmark = benchmark_file.read(path)
        found = problems(benchmark, None)
        manifest = None if found else pinned(benchmark["target"]["name"], repository)
        for problem in found or problems(benchmark, manifest):
            raise UserError(f"{path}: not published: {problem}.")
        if benchmark["target"]["name"] in runs:
            raise UserError(f"{path}: not published: there are two runs of {benchmark['target']['name']}.")
        runs[benchmark["target"]["name"]] = benchmark
    for name, benchmark in runs.items():
        write_report(benchmark, folder / name)
        benchmark_file.write(folder / name / "benchmark.json", benchmark)
    index = folder / "index.html"
    replace_file(index, fill("site.html.j2", page(list(runs.values()))).encode("utf-8"))
    return index


def problems(benchmark: Benchmark, manifest: Manifest | None) -> list[str]:
    """Why this run must not be published: its schema, its state, the gate, and its drafter's files; empty when it may be."""
    wrong = benchmark_file.schema_errors(benchmark)
    if wrong:
        return [f"it does not fit its schema ({error})" for error in wrong]
    found = []
    name = benchmark["target"]["name"]
    if not artifacts.NAME.fullmatch(name):
        found.append(f"the target's name {name!r} is no folder's name")
    if not benchmark["complete"] or benchmark["gate"]["verdict"] == "pending":
        found.append("the run is not finished")
    if gate_failed(benchmark):
        found.append("it failed the exactness gate")
    used = {(file["name"], file["bytes"], file["sha256"]) for file in dig(benchmark, "drafter", "files", default=[])}
    if not used:
        found.append("its drafter's files are not recorded")
    if manifest and used != {(file.name, file.bytes, file.sha256) for file in manifest.files}:
        found.append("its drafter is not the one that the repository pins")
    return found


def pinned(target: str, repository: Path) -> Manifest | None:
    path = repository / target / artifacts.MANIFEST
    return artifacts.read_manifest(path) if path.is_file() else None


def page(runs: Sequence[Benchmark]) -> dict[str, Any]:
    return {"lab_version": __version__, "runs": [entry(benchmark) for benchmark in runs]}


def entry(benchmark: Benchmark) -> dict[str, Any]:
    """One run's lines in the index."""
    target, machine = benchmark["target"], benchmark["machine"]
    found = verdict(benchmark)
    return {
        "name": target["name"],
        "tone": found.tone,
        "sentence": found.sentence,
        "warnings": found.warnings,
        "facts": [
            ("Model", f"{target['source']}, {quantity(target['parameters'])} parameters, {target['dtype']}"),
            ("Machine", f"{dig(machine, 'cpu', default='unknown CPU')}, {plural(benchmark['settings']['threads'], 'thread')}"),
            ("Measured", moment(benchmark["created"])),
        ],
    }
