from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema
import pytest
from sample import sample_benchmark

from dflash_mini_lab.benchmark_file import read, schema, schema_errors, write
from dflash_mini_lab.types import UserError


def test_the_schema_is_a_schema_and_strict() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    free = [path for path, part in objects(schema()) if "properties" in part and part.get("additionalProperties") is not False]
    assert free == []


def objects(part: object, path: str = "$"):
    if isinstance(part, dict):
        if part.get("type") == "object":
            yield path, part
        for key, value in part.items():
            yield from objects(value, f"{path}.{key}")


def test_a_benchmark_that_follows_the_contract_fits() -> None:
    assert schema_errors(sample_benchmark()) == []


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda b: b.pop("gate"), "$: 'gate' is a required property"),
        (lambda b: b.update(extra=1), "$: Additional properties"),
        (lambda b: b["cells"][0]["runs"][0].update(decode_seconds=-1), "$.cells[0].runs[0].decode_seconds"),
        (lambda b: b["cells"][0]["runs"][0].update(tokens=["a"]), "$.cells[0].runs[0].tokens[0]"),
        (lambda b: b["target"].update(dtype=None), "$.target.dtype"),
        (lambda b: b["gate"].update(verdict="fine"), "$.gate.verdict"),
    ],
)
def test_what_does_not_fit_is_said_with_its_place(change, where: str) -> None:
    benchmark = json.loads(json.dumps(sample_benchmark()))
    change(benchmark)
    assert any(error.startswith(where) for error in schema_errors(benchmark))


def test_free_form_parts_take_anything() -> None:
    benchmark = sample_benchmark()
    benchmark["drafter"]["provenance"] = {"anything": [1, {"deep": None}]}
    benchmark["settings"]["new"] = "thing"
    assert schema_errors(benchmark) == []


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path / "new" / "benchmark.json", sample_benchmark())
    assert read(tmp_path / "new" / "benchmark.json") == json.loads(json.dumps(sample_benchmark()))


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "benchmark.json"
    write(path, {"schema_version": 1})

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(path, {"schema_version": 1, "more": "x" * 1000})
    assert read(path) == {"schema_version": 1}
    assert os.listdir(tmp_path) == ["benchmark.json"]


def test_a_nan_is_refused_before_the_old_file_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "benchmark.json"
    write(path, {"schema_version": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(path, {"schema_version": 1, "speed": float("nan")})
    assert read(path) == {"schema_version": 1}


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such benchmark"), ("{", "cannot be read"), ('{"schema_version": 2}', "version 2"), ("[]", "None")],
)
def test_a_file_that_is_no_benchmark_is_refused_by_name(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "benchmark.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=said) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_the_old_file_stays_whole_until_the_new_one_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "benchmark.json"
    write(path, {"schema_version": 1})

    def killed(source: Path, destination: Path) -> None:
        assert read(Path(source)) == {"schema_version": 1, "more": 2}
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write(path, {"schema_version": 1, "more": 2})
    assert read(path) == {"schema_version": 1}
