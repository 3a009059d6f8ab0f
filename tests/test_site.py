"""The published site: what must not be shown is refused by name before a file is written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample import add_mismatch, interrupt, sample_benchmark

from dflash_mini_lab.report.site import write_site
from dflash_mini_lab.types import UserError

ROOT = Path(__file__).resolve().parents[1]
Change = Callable[[dict[str, Any]], Any]


def small(name: str = "smollm2-135m") -> dict[str, Any]:
    benchmark = sample_benchmark(prompts=1, repeats=1, methods=("01",), peers=())
    benchmark["target"]["name"] = benchmark["drafter"]["name"] = name
    return benchmark


def saved(folder: Path, benchmark: dict[str, Any]) -> Path:
    folder.mkdir()
    path = folder / "benchmark.json"
    path.write_text(json.dumps(benchmark), encoding="utf-8")
    return path


def pin(repository: Path, benchmark: dict[str, Any]) -> None:
    target = benchmark["target"]["name"]
    (repository / target).mkdir(parents=True)
    manifest = {"schema_version": 1, "target": target, "files": benchmark["drafter"]["files"]}
    (repository / target / "artifact-manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def test_the_index_leads_to_each_targets_page_and_raw_data(tmp_path: Path) -> None:
    runs = [small(), small("lfm2.5-350m")]
    pin(tmp_path / "repository", runs[0])
    paths = [saved(tmp_path / run["target"]["name"], run) for run in runs]
    index = write_site(paths, tmp_path / "site", tmp_path / "repository").read_text(encoding="utf-8")
    for run in runs:
        folder = tmp_path / "site" / run["target"]["name"]
        assert f'href="{folder.name}/index.html"' in index
        assert f'href="{folder.name}/benchmark.json"' in index
        assert (folder / "index.html").is_file()
        assert json.loads((folder / "benchmark.json").read_text(encoding="utf-8")) == run
    assert runs[0]["machine"]["cpu"] in index
    assert "<script" not in index


def in_float32_with(verdict: str) -> Change:
    return lambda run: (add_mismatch(run, "01", verdict), run["target"].update(dtype="float32"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda run: run.pop("gate"), "does not fit its schema"),
        (in_float32_with("violation"), "failed the exactness gate"),
        (in_float32_with("tie"), "failed the exactness gate"),
        (lambda run: run.update(complete=False), "not finished"),
        (lambda run: run["gate"].update(verdict="pending"), "not finished"),
        (lambda run: run.update(drafter=None), "drafter's files are not recorded"),
        (lambda run: run["drafter"].update(files=[]), "drafter's files are not recorded"),
        (lambda run: run["drafter"]["files"].pop(), "not the one that the repository pins"),
        (lambda run: run["drafter"]["files"][0].update(sha256="0" * 64), "not the one that the repository pins"),
        (lambda run: run["target"].update(name="../up"), "no folder's name"),
        (lambda run: run["target"].update(name=".."), "no folder's name"),
    ],
)
def test_a_run_that_proves_nothing_is_refused_and_nothing_is_written(tmp_path: Path, change: Change, sentence: str) -> None:
    good, bad = small("lfm2.5-350m"), small()
    pin(tmp_path / "repository", bad)
    change(bad)
    paths = [saved(tmp_path / "good", good), saved(tmp_path / "bad", bad)]
    with pytest.raises(UserError, match=r"bad.benchmark\.json: not published") as caught:
        write_site(paths, tmp_path / "site", tmp_path / "repository")
    assert sentence in str(caught.value)
    assert not (tmp_path / "site").exists()


def test_an_interrupted_run_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "run", interrupt(sample_benchmark(), 3))
    with pytest.raises(UserError, match="not finished"):
        write_site([path], tmp_path / "site", tmp_path)


def test_two_runs_of_one_target_are_refused(tmp_path: Path) -> None:
    paths = [saved(tmp_path / "a", small()), saved(tmp_path / "b", small())]
    with pytest.raises(UserError, match="two runs of smollm2-135m"):
        write_site(paths, tmp_path / "site", tmp_path)


def test_the_tool_ends_with_status_2_and_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "build_site.py"), str(tmp_path / "none.json"), "--output-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: ")
