"""Workflows and containers: pinned, least in permissions, bounded in time, and true to the command line they call.

What only GitHub or Docker can tell is not tested here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.commands import ROOT, mistakes, python_commands

from dflash_mini_lab.settings import CANONICAL_TARGET, CPU, DEFAULT_TARGET, GPU, TINY_TARGET, Runner

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))

WRITES = {
    ("evidence.yml", "publish"): {"pages": "write", "id-token": "write"},
    ("prepare-artifacts.yml", "propose"): {"contents": "write", "pull-requests": "write"},
}
"""The only jobs that may do more than read, and what each may do. None of them runs the repository's code."""

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def workflow(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def unpinned(text: str) -> list[str]:
    """The `uses:` lines that are not a commit of 40 hexadecimal digits with its release behind it."""
    pinned = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    found = re.findall(r"^\s*(?:- )?uses:\s*(.*)$", text, re.MULTILINE)
    return [line for line in found if not pinned.fullmatch(line.strip())]


def scripts(path: Path) -> Iterator[tuple[str, str]]:
    """(job, shell text) of every step that runs something."""
    for name, job in workflow(path)["jobs"].items():
        for step in job["steps"]:
            if "run" in step:
                yield name, step["run"]


# Workflows.


def test_the_three_workflows_are_there() -> None:
    assert {path.name for path in WORKFLOWS} == {"evidence.yml", "prepare-artifacts.yml", "tests.yml"}


@each_workflow
def test_every_action_is_pinned_by_commit_with_its_release_in_a_comment(path: Path) -> None:
    assert unpinned(path.read_text(encoding="utf-8")) == []


def test_the_check_sees_what_is_not_pinned() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert unpinned(f"  - uses: actions/checkout@{commit} # v6.0.3") == []
    for line in ("actions/checkout@v6", f"actions/checkout@{commit}", f"actions/checkout@{commit[:12]} # v6.0.3", "./local"):
        assert unpinned(f"  - uses: {line}") == [line]


def test_one_action_has_one_commit_everywhere() -> None:
    found = {line for path in WORKFLOWS for line in re.findall(r"uses:\s*(\S+@\S+ # \S+)", path.read_text(encoding="utf-8"))}
    assert len(found) == len({line.split("@")[0] for line in found})


@each_workflow
def test_permissions_are_to_read_except_where_a_job_must_write(path: Path) -> None:
    content = workflow(path)
    assert content["permissions"] == {"contents": "read"}
    for name, job in content["jobs"].items():
        assert job.get("permissions", {}) == WRITES.get((path.name, name), {}), name


@each_workflow
def test_a_job_that_may_write_runs_no_code_of_the_repository(path: Path) -> None:
    for job, text in scripts(path):
        if (path.name, job) in WRITES:
            assert "python" not in text, job


@each_workflow
def test_every_job_ends_in_time_on_a_named_system(path: Path) -> None:
    for name, job in workflow(path)["jobs"].items():
        assert 0 < job["timeout-minutes"] <= 350, name  # GitHub ends a job after 360
        assert "latest" not in str(job["runs-on"]) + str(job.get("strategy")), name


@each_workflow
def test_runs_do_not_pile_up(path: Path) -> None:
    assert set(workflow(path)["concurrency"]) == {"group", "cancel-in-progress"}


@each_workflow
def test_no_checkout_leaves_its_token_behind_and_no_script_is_pasted_together(path: Path) -> None:
    for job in workflow(path)["jobs"].values():
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
            assert "${{" not in step.get("run", "")


@each_workflow
def test_the_commands_of_the_workflows_exist(path: Path) -> None:
    found = [words for _, text in scripts(path) for words in python_commands(text)]
    assert found
    for words in found:
        words = [word.replace("$CANONICAL", CANONICAL_TARGET).replace("$TARGET", CANONICAL_TARGET) for word in words]
        assert mistakes(words) == []


def test_the_check_sees_a_command_that_does_not_exist() -> None:
    assert mistakes(["run_all.py"]) == ["there is no run_all.py"]
    assert mistakes(["run_cpu.py", "--quick"])
    assert mistakes(["run_cpu.py", "--tokens", "none"])
    assert mistakes(["tools/build_site.py", "--folder"])


def test_the_tests_workflow_runs_what_a_person_runs_on_three_systems_and_two_pythons() -> None:
    job = workflow(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["tests"]
    assert [step["run"] for step in job["steps"] if "run" in step] == ["python run_tests.py"]
    assert sorted(name.split("-")[0] for name in job["strategy"]["matrix"]["os"]) == ["macos", "ubuntu", "windows"]
    supported = re.search(r"Python \(3\.10 to (3\.\d+)", (ROOT / "src/dflash_mini_lab/bootstrap_install.py").read_text("utf-8"))
    assert supported is not None
    assert job["strategy"]["matrix"]["python"] == ["3.10", supported[1]]


def test_the_site_waits_for_every_run_and_for_the_checks() -> None:
    content = workflow(ROOT / ".github" / "workflows" / "evidence.yml")
    jobs = content["jobs"]
    assert content["env"]["CANONICAL"] == CANONICAL_TARGET
    assert (jobs["site"]["needs"], jobs["publish"]["needs"]) == (["embedded", "canonical"], "site")
    for name in ("embedded", "canonical", "site", "publish"):
        assert "always()" not in str(jobs[name])
        assert not any(step.get("continue-on-error") for step in jobs[name]["steps"])
    assert "cancelled" not in str(jobs["site"]) + str(jobs["publish"])
    assert "needs" not in jobs["embedded"]  # evidence that needs no hub
    assert jobs["embedded"]["strategy"]["matrix"]["target"] == [DEFAULT_TARGET, TINY_TARGET]


# Steps that need nothing of GitHub's, run as they stand.


def step(path: str, job: str, name: str) -> str:
    steps = workflow(ROOT / ".github" / "workflows" / path)["jobs"][job]["steps"]
    (found,) = [step["run"] for step in steps if step.get("name") == name]
    return found


def run_step(script: str, folder: Path, **variables: str) -> tuple[int, dict[str, str]]:
    """The exit status of `script` in GitHub's shell, and what it leaves in $GITHUB_ENV or $GITHUB_OUTPUT."""
    written = folder.parent / "written"
    written.write_text("")
    given = {**os.environ, **variables, "GITHUB_ENV": str(written), "GITHUB_OUTPUT": str(written)}
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    done = subprocess.run(shell, cwd=folder, env=given, capture_output=True)
    return done.returncode, dict(line.split("=", 1) for line in written.read_text().splitlines())


PROGRAMS = ("bash", "jq", "sha256sum")
needs_jq = pytest.mark.skipif(
    sys.platform == "win32" or not all(map(shutil.which, PROGRAMS)), reason="a step of GitHub's Linux, which has these programs"
)


@needs_jq
def test_the_drafter_s_files_are_checked_before_they_are_released(tmp_path: Path) -> None:
    script, prepared = step("prepare-artifacts.yml", "propose", "Check the files against their manifest"), tmp_path / "prepared"
    shutil.copytree(ROOT / "artifacts" / "tiny", prepared)
    digest = hashlib.sha256((prepared / "model.safetensors").read_bytes()).hexdigest()[:12]
    assert run_step(script, prepared, TARGET="tiny") == (0, {"TAG": f"artifacts-tiny-{digest}"})
    assert run_step(script, prepared, TARGET="qwen3-0.6b")[0] != 0, "the drafter of another target"
    with (prepared / "model.safetensors").open("ab") as file:
        file.write(b"0")
    assert run_step(script, prepared, TARGET="tiny")[0] != 0


@needs_jq
def test_a_pinned_drafter_is_taken_from_the_release_that_its_proposal_named(tmp_path: Path) -> None:
    name = "Is it pinned? Then it lies in a release, named after its weights"
    script, clone = step("evidence.yml", "drafter", name), tmp_path / "clone"
    clone.mkdir()
    assert run_step(script, clone, CANONICAL="tiny") == (0, {})
    shutil.copytree(ROOT / "artifacts" / "tiny", clone / "artifacts" / "tiny")
    proposed = run_step(step("prepare-artifacts.yml", "propose", "Check the files against their manifest"),
                        clone / "artifacts" / "tiny", TARGET="tiny")  # fmt: skip
    assert run_step(script, clone, CANONICAL="tiny") == (0, {"release": proposed[1]["TAG"]})


# Containers.


@dataclass(frozen=True)
class Container:
    """One of the two, with everything that describes it."""

    kind: str
    runner: Runner

    @property
    def service(self) -> dict[str, Any]:
        return COMPOSE["services"][f"test-{self.kind}"]

    @property
    def dockerfile(self) -> str:
        return (ROOT / f"Dockerfile.{self.kind}").read_text(encoding="utf-8")

    @property
    def guide(self) -> str:
        return (ROOT / "docs" / f"{self.kind}.md").read_text(encoding="utf-8")


each_container = pytest.mark.parametrize("container", [Container("cpu", CPU), Container("gpu", GPU)], ids=lambda one: one.kind)


@each_container
def test_every_variable_of_the_lab_reaches_the_container(container: Container) -> None:
    wanted = {option.variable for option in container.runner.options if option.variable}
    wanted |= {"DFLASH_LAB_CACHE", "HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN"}
    assert set(container.service["environment"]) == wanted
    for name in wanted:
        assert f"`{name}`" in container.guide, name


@each_container
def test_the_containers_command_is_the_canonical_study(container: Container) -> None:
    words = [word.replace("${DFLASH_TARGET:-", "").rstrip("}") for word in container.service["command"]]
    assert words == ["python", container.runner.script, "--no-bootstrap", "--target", CANONICAL_TARGET]
    assert mistakes(words[1:]) == []
    assert f"CMD {words}".replace("'", '"') in container.dockerfile


@each_container
def test_the_container_runs_as_the_caller_with_nothing_to_gain(container: Container) -> None:
    service = container.service
    assert service["profiles"] == [container.kind]
    assert service["image"] == f"dflash-mini-lab:{container.kind}"
    assert service["build"]["dockerfile"] == f"Dockerfile.{container.kind}"
    assert service["user"] == "${UID:-1000}:${GID:-1000}"
    assert service["cap_drop"] == ["ALL"]
    assert not {"privileged", "cap_add", "ports", "network_mode"} & set(service)


def test_only_the_gpu_s_container_reserves_a_device() -> None:
    devices = COMPOSE["services"]["test-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    assert "deploy" not in COMPOSE["services"]["test-cpu"]


@each_container
def test_what_is_mounted_exists_in_every_clone_and_is_never_made_by_docker(container: Container) -> None:
    git = shutil.which("git")
    tracked = subprocess.run([git, "-C", str(ROOT), "ls-files"], capture_output=True, encoding="utf-8").stdout if git else ""
    assert len(container.service["volumes"]) == 3
    for volume in container.service["volumes"]:
        folder = volume["target"].removeprefix("/lab/")
        assert re.fullmatch(rf"(\$\{{\w+:-)?\./{folder}\}}?", volume["source"])
        assert volume["bind"] == {"create_host_path": False}
        assert (ROOT / folder / ".gitignore").is_file()
        assert not tracked or f"{folder}/.gitignore" in tracked.splitlines()
        assert f"`{folder}/`" in container.guide
        assert folder in container.dockerfile
    inside = {str(value) for value in container.service["environment"].values()}
    assert {f"/lab/{container.kind}-artifacts", "/lab/hf-cache"} <= inside


@each_container
def test_the_image_is_pinned_unprivileged_and_keeps_its_layers_when_code_changes(container: Container) -> None:
    dockerfile = container.dockerfile
    bases = re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)
    stages = re.findall(r"^FROM \S+ AS (\S+)", dockerfile, re.MULTILINE)
    assert all(re.search(r"@sha256:[0-9a-f]{64}$", base) for base in bases if base not in stages)
    assert "imagetools inspect" in dockerfile
    users = re.findall(r"^USER (\S+)", dockerfile, re.MULTILINE)
    assert users[-1:] == ["1000:1000"]
    slow, code = dockerfile.index("pip install -r"), dockerfile.index("COPY . .")
    assert slow < code
    assert "apt-get" not in dockerfile
    assert dockerfile.index("--index-url") < slow
    installed = re.findall(r"/tmp/(requirements-\S+\.txt)", dockerfile[slow:])
    assert installed == ["requirements-cpu.txt", "requirements-gpu.txt"][: 1 + (container.kind == "gpu")]
    index = container.service["build"]["args"]["DFLASH_TORCH_INDEX"].removeprefix("${DFLASH_TORCH_INDEX-").rstrip("}")
    assert f"ARG DFLASH_TORCH_INDEX={index}\n" in dockerfile


def test_only_what_a_run_needs_enters_the_image() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {line[1:] for line in rules if line.startswith("!")} == {
        "requirements-cpu.txt",
        "requirements-gpu.txt",
        "requirements-tiny.txt",
        "run_cpu.py",
        "run_gpu.py",
        "src",
        "benchmarks",
        "qwen_benchmarks",
        "artifacts",
        "LICENSE",
    }
