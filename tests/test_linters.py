"""The linters of what no interpreter here reads: workflows, Dockerfiles and the compose file. Each was seen to find a fault."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.commands import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DOCKERFILES = sorted(ROOT.glob("Dockerfile.*"))
not_for_310 = pytest.mark.skipif(sys.version_info < (3, 11), reason="has no build for this Python")


def linted(program: str, *arguments: object, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    found = shutil.which(program, path=str(Path(sys.executable).parent)) or shutil.which(program)
    assert found, f"{program} is not installed: see requirements-dev.txt"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DFLASH_", "HF_", "UID", "GID", "COMPOSE"))}
    return subprocess.run(
        [found, *map(str, arguments)], env={**kept, **(variables or {})}, capture_output=True, text=True, encoding="utf-8"
    )


def schema(*paths: Path) -> subprocess.CompletedProcess[str]:
    return linted("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *paths)


def hadolint(*paths: Path) -> subprocess.CompletedProcess[str]:
    return linted("hadolint", "--no-color", "--failure-threshold", "style", *paths)


def compose(file: Path, profile: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The model as `docker compose` itself makes it, without the caller's .env."""
    words = ("--env-file", os.devnull, "--file", file, "--profile", profile, "config", "--format", "json")
    return linted("docker-compose", *words, variables=variables)


@not_for_310
def test_the_security_linter_finds_nothing() -> None:
    done = linted("zizmor", "--offline", "--no-progress", "--quiet", "--persona", "pedantic", ROOT / ".github")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_workflows_are_of_github_s_form() -> None:
    done = schema(*WORKFLOWS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_step_that_github_does_not_know_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    right = WORKFLOWS[0].read_text(encoding="utf-8")
    wrong.write_text(right.replace("timeout-minutes:", "timeout-in-minutes:"), encoding="utf-8")
    assert schema(wrong).returncode != 0


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    assert "hadolint ignore" not in path.read_text(encoding="utf-8")
    done = hadolint(path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_sees_an_image_without_a_version(tmp_path: Path) -> None:
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM python\nRUN cd /tmp && pip install numpy\n", encoding="utf-8")
    done = hadolint(wrong)
    assert done.returncode != 0
    assert "DL3006" in done.stdout


@not_for_310
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_compose_makes_the_model_that_the_guide_describes(kind: str) -> None:
    given = {"UID": "1234", "GID": "99", "DFLASH_LAB_CACHE": "./elsewhere", f"{kind.upper()}_TOKENS": "7"}
    done = compose(ROOT / "docker-compose.yml", kind, **given)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "a variable without a default, for one"
    model: dict[str, Any] = json.loads(done.stdout)
    assert list(model["services"]) == [f"test-{kind}"]
    service = model["services"][f"test-{kind}"]
    assert service["user"] == "1234:99"
    mounted = {volume["target"]: Path(volume["source"]) for volume in service["volumes"]}
    assert mounted == {
        f"/lab/{kind}-reports": ROOT / f"{kind}-reports",
        f"/lab/{kind}-artifacts": ROOT / "elsewhere",
        "/lab/hf-cache": ROOT / "hf-cache",
    }
    inside = service["environment"]
    assert inside[f"{kind.upper()}_TOKENS"] == "7"
    assert (inside["DFLASH_LAB_CACHE"], inside["HF_HOME"]) == (f"/lab/{kind}-artifacts", "/lab/hf-cache")
    assert inside["DFLASH_TARGET"] is None, "as it is outside: unset"


@not_for_310
def test_compose_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    wrong = tmp_path / "docker-compose.yml"
    right = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    wrong.write_text(right.replace("cap_drop:", "cap_drops:"), encoding="utf-8")
    assert compose(wrong, "cpu").returncode != 0
