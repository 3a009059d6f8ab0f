"""Workflows and containers: pinned, least in permissions, bounded in time, and true to the command line they call.

What only GitHub or Docker can tell is not tested here.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_mini_lab.cli import build_parser
from dflash_mini_lab.settings import CANONICAL_TARGET, OPTIONS, from_environment

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICE = COMPOSE["services"]["test-cpu"]
DOCKERFILE = (ROOT / "Dockerfile.cpu").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "cpu.md").read_text(encoding="utf-8")

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


def python_commands(text: str) -> list[list[str]]:
    """The words behind `python` of each command in `text`, lines and `&&` apart; those of `python -m` are left out."""
    found = []
    for line in re.split(r"\n|&&|;", text.replace("\\\n", " ")):
        match = re.search(r"(?:^|\s|[/\\])python (?!-m )(.*)", line)
        if match:
            found.append(shlex.split(match[1].split("#")[0]))
    return found


def mistakes(words: list[str]) -> list[str]:
    """Why the repository has no such command: the file, or a flag of it."""
    script, *arguments = words
    if not (ROOT / script).is_file():
        return [f"there is no {script}"]
    if script != "run_cpu.py":
        source = (ROOT / script).read_text(encoding="utf-8")
        return [f"{script} has no {word}" for word in arguments if word.startswith("--") and f'"{word}"' not in source]
    parser = build_parser()
    parser.error = refuse  # type: ignore[method-assign]
    example = [re.sub(r"^\$.*MINUTES$", "60", word) for word in arguments]
    try:
        from_environment(vars(parser.parse_args(example)))
    except ValueError as error:
        return [f"{' '.join(words)}: {error}"]
    return []


def refuse(message: str) -> Any:
    raise ValueError(message)


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


def test_the_site_waits_for_both_runs_and_for_the_checks() -> None:
    content = workflow(ROOT / ".github" / "workflows" / "evidence.yml")
    jobs = content["jobs"]
    assert content["env"]["CANONICAL"] == CANONICAL_TARGET
    assert (jobs["site"]["needs"], jobs["publish"]["needs"]) == (["embedded", "canonical"], "site")
    for name in ("embedded", "canonical", "site", "publish"):
        assert "always()" not in str(jobs[name])
        assert not any(step.get("continue-on-error") for step in jobs[name]["steps"])
    assert "cancelled" not in str(jobs["site"]) + str(jobs["publish"])
    assert "needs" not in jobs["embedded"]  # evidence that needs no hub


@pytest.mark.skipif(sys.version_info < (3, 11), reason="zizmor has no build for this Python")
def test_the_security_linter_finds_nothing() -> None:
    zizmor = shutil.which("zizmor", path=str(Path(sys.executable).parent)) or shutil.which("zizmor")
    assert zizmor, "zizmor is not installed: see requirements-dev.txt"
    command = [zizmor, "--offline", "--no-progress", "--quiet", "--persona", "pedantic", str(ROOT / ".github")]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr


# Containers.


def passed_variables(service: dict[str, Any]) -> set[str]:
    return set(service["environment"])


def test_every_variable_of_the_lab_reaches_the_container() -> None:
    wanted = {option.variable for option in OPTIONS if option.variable}
    wanted |= {"DFLASH_LAB_CACHE", "HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN"}
    assert passed_variables(SERVICE) == wanted
    for name in wanted:
        assert f"`{name}`" in GUIDE, name


def test_the_containers_command_is_the_canonical_study() -> None:
    words = [word.replace("${DFLASH_TARGET:-", "").rstrip("}") for word in SERVICE["command"]]
    assert words == ["python", "run_cpu.py", "--no-bootstrap", "--target", CANONICAL_TARGET]
    assert mistakes(words[1:]) == []
    assert f"CMD {words}".replace("'", '"') in DOCKERFILE


def test_the_container_runs_as_the_caller_with_nothing_to_gain() -> None:
    assert SERVICE["profiles"] == ["cpu"]
    assert SERVICE["user"] == "${UID:-1000}:${GID:-1000}"
    assert SERVICE["cap_drop"] == ["ALL"]
    assert not {"privileged", "cap_add", "ports", "network_mode"} & set(SERVICE)


def test_what_is_mounted_exists_in_every_clone_and_is_never_made_by_docker() -> None:
    git = shutil.which("git")
    tracked = subprocess.run([git, "-C", str(ROOT), "ls-files"], capture_output=True, encoding="utf-8").stdout if git else ""
    for volume in SERVICE["volumes"]:
        folder = volume["target"].removeprefix("/lab/")
        assert re.fullmatch(rf"(\$\{{\w+:-)?\./{folder}\}}?", volume["source"])
        assert volume["bind"] == {"create_host_path": False}
        assert (ROOT / folder / ".gitignore").is_file()
        assert not tracked or f"{folder}/.gitignore" in tracked.splitlines()
        assert f"`{folder}/`" in GUIDE
    assert {"/lab/cpu-artifacts", "/lab/hf-cache"} <= {str(value) for value in SERVICE["environment"].values()}


def test_the_image_is_pinned_unprivileged_and_keeps_its_layers_when_code_changes() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    stages = re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.MULTILINE)
    assert all(re.search(r"@sha256:[0-9a-f]{64}$", base) for base in bases if base not in stages)
    assert "imagetools inspect" in DOCKERFILE
    users = re.findall(r"^USER (\S+)", DOCKERFILE, re.MULTILINE)
    assert users[-1:] == ["1000:1000"]
    slow, code = DOCKERFILE.index("pip install -r"), DOCKERFILE.index("COPY . .")
    assert slow < code
    assert "apt-get" not in DOCKERFILE
    assert DOCKERFILE.index("--index-url") < slow


def test_only_what_a_run_needs_enters_the_image() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {line[1:] for line in rules if line.startswith("!")} == {
        "requirements-cpu.txt",
        "requirements-tiny.txt",
        "run_cpu.py",
        "src",
        "benchmarks",
        "artifacts",
        "LICENSE",
    }


# Words.


def blocks(text: str) -> list[tuple[str, str]]:
    return re.findall(r"```(sh|powershell)\n(.*?)```", text, re.DOTALL)


def test_the_commands_of_the_guide_exist_in_both_shells() -> None:
    found = [words for _, text in blocks(GUIDE) for words in python_commands(text)]
    assert len(found) >= 5
    for words in found:
        assert mistakes(words) == []
    assert {shell for shell, _ in blocks(GUIDE)} == {"sh", "powershell"}
    for _, text in blocks(GUIDE):
        for service in re.findall(r"run --rm (\S+)", text):
            assert service in COMPOSE["services"]
