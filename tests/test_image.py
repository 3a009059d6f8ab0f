"""What the image holds, run as the container runs it, but for the kernel between: the same files, folders and variables."""
from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import ROOT

from dflash_mini_lab.catalog import TARGETS

MOUNTED = ("cpu-reports", "cpu-artifacts", "hf-cache")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """`COPY . .` of what .dockerignore lets in, and the three folders that the caller owns."""
    lab = tmp_path / "lab"
    lab.mkdir()
    for rule in (ROOT / ".dockerignore").read_text(encoding="utf-8").split():
        source = ROOT / rule.removeprefix("!")
        if rule.startswith("!") and source.is_dir():
            shutil.copytree(source, lab / source.name, ignore=shutil.ignore_patterns("__pycache__", "*.part"))
        elif rule.startswith("!"):
            shutil.copy(source, lab)
    for name in MOUNTED:
        (lab / name).mkdir()
    return lab


def variables(lab: Path, kind: str = "cpu") -> dict[str, str]:
    """The image's ENV with its paths here, and nothing of the caller's but what an interpreter needs to start at all."""
    text = (ROOT / f"Dockerfile.{kind}").read_text(encoding="utf-8").replace("\\\n", " ")
    words = [word for line in re.findall(r"^ENV (.*)$", text, re.MULTILINE) for word in shlex.split(line)]
    given = dict(word.split("=", 1) for word in words)
    given["HOME"] = str(lab.parent / "home")
    Path(given["HOME"]).mkdir()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    needed = {name: os.environ[name] for name in ("SYSTEMROOT", "LD_LIBRARY_PATH") if name in os.environ}
    return {**{name: value.replace("/lab/", f"{lab}{os.sep}") for name, value in given.items()}, **needed, "PATH": path}


def files_of(lab: Path) -> set[str]:
    return {path.relative_to(lab).as_posix() for path in lab.rglob("*") if path.is_file()}


def test_a_command_behind_the_service_s_name_writes_into_the_mounted_folders_alone(image: Path) -> None:
    """As `docker compose --profile cpu run --rm test-cpu python run_cpu.py --tune`: no --no-bootstrap, and nothing is made."""
    before = files_of(image)
    study = "--target tiny --methods 00,01 --tokens 4 --repeats 1 --prompt-limit 1"
    choosing = "--tune --tuning-repeats 1 --calibration-tokens 3 --calibration-prompt-limit 1"
    done = subprocess.run(
        [sys.executable, "run_cpu.py", *study.split(), *choosing.split()],
        cwd=image, env=variables(image), capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    new = files_of(image) - before
    assert {"cpu-reports/benchmark.json", "cpu-reports/index.html"} <= new
    assert {name.split("/")[0] for name in new} <= set(MOUNTED)
    benchmark = json.loads((image / "cpu-reports" / "benchmark.json").read_text(encoding="utf-8"))
    assert benchmark["tuning"]["methods"]["01"]["chosen"]
    assert not any((image.parent / "home").iterdir())


def test_the_image_has_every_target_s_prompts_and_artifacts(image: Path) -> None:
    for entry in TARGETS.values():
        folder = image / entry.prompts
        assert {"prompts.json", "calibration_prompts.json", Path(entry.training_texts).name} <= {p.name for p in folder.iterdir()}
    manifests = {path.relative_to(ROOT) for path in (ROOT / "artifacts").glob("*/artifact-manifest.json")}
    assert manifests
    assert all((image / path).is_file() for path in manifests)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_image_s_home_is_writable_and_the_lab_s_folders_are_its_mounts(kind: str) -> None:
    text = (ROOT / f"Dockerfile.{kind}").read_text(encoding="utf-8")
    assert re.search(r"\bHOME=/tmp\b", text)
    for variable, folder in (("DFLASH_LAB_CACHE", f"{kind}-artifacts"), ("HF_HOME", "hf-cache")):
        assert f"{variable}=/lab/{folder}" in text
        assert f"/lab/{folder}" in text.split("install -d", 1)[1].splitlines()[0]
