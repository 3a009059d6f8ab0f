"""Every command in the documents: one that the lab has is held to its parser, any other has a reason why no test runs it."""
from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tests.commands import ROOT, blocks, mistakes, python_commands

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
GUIDES = [path for path in DOCUMENTS if path.name in ("cpu.md", "gpu.md", "CONTRIBUTING.md")]
"""Whose blocks come in pairs, one for each shell."""
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]

LAB = re.compile(r"(?:[\w./\\-]*[/\\])?python (?:run_(?:cpu|gpu|tests)|tools[/\\]\w+)\.py\b.*")
"""Its parser, and what it does on a tiny model, are tested; a whole study takes minutes or hours and is the workflows' affair."""
COMPOSE = re.compile(r"docker compose --profile (\w+) (?:run --rm (\S+)(?: (python .*))?|build|config --quiet)")
NOT_RUN = {
    r"git clone <this repository> && cd <its folder>": "placeholders, for a person to fill in",
    r"printf 'UID=%s\\nGID=%s\\n' .* > \.env": "writes into the clone; the tests workflow runs it before its container",
    r".*python -m pip install -r requirements-dev\.txt": "downloads; run_tests.py installs the same file",
    r".*python -m pytest tests[/\\]gpu": "needs a GPU; the suite itself is collected, and skipped, by every test run",
}
"""Pattern → why no test runs the command."""
ASSIGNMENTS = re.compile(r"^(?:\w+=\S* )+|^(?:\$env:\w+ = \"[^\"]*\"; )+")


def commands(path: Path) -> list[str]:
    """Each command of the document's blocks, without what it sets before and says behind."""
    text = "\n".join(body for language, body in blocks(path.read_text(encoding="utf-8")) if language in ("", "sh", "powershell"))
    lines = [line.split(" #")[0].strip() for line in text.replace("\\\n", " ").splitlines()]
    return [ASSIGNMENTS.sub("", line) for line in lines if line and not line.startswith("#")]


def complaint(command: str) -> str | None:
    """What is wrong with a command of a document; None for one that exists, or whose absence from the tests has a reason."""
    if LAB.fullmatch(command):
        return "; ".join(wrong for words in python_commands(command) for wrong in mistakes(words)) or None
    if found := COMPOSE.fullmatch(command):
        profile, service, inside = found.groups()
        if not any(profile in entry["profiles"] for entry in SERVICES.values()):
            return f"there is no profile {profile}"
        if service and profile not in SERVICES.get(service, {}).get("profiles", []):
            return f"{service} is no service of the profile {profile}"
        return complaint(inside) if inside else None
    if any(re.fullmatch(pattern, command) for pattern in NOT_RUN):
        return None
    return "no test knows this command: give NOT_RUN its reason"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_of_a_document_exists_or_has_a_reason_not_to_be_run(path: Path) -> None:
    assert [f"{command}: {wrong}" for command in commands(path) if (wrong := complaint(command))] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_inside_sentences_exist_too(path: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    inline = [text for text in re.findall(r"`([^`\n]+)`", prose) if LAB.fullmatch(text)]
    assert [wrong for text in inline for words in python_commands(text) for wrong in mistakes(words)] == []


def test_no_reason_is_left_over() -> None:
    everything = [command for path in DOCUMENTS for command in commands(path)]
    assert len(everything) > 20
    for pattern in NOT_RUN:
        assert any(re.fullmatch(pattern, command) for command in everything), pattern


@pytest.mark.parametrize(
    "command",
    [
        "python run_cpu.py --quick",
        "python run_gpu.py --prepare --dtype float16",
        "python run_all.py",
        "docker compose --profile tpu build",
        "docker compose --profile cpu run --rm test-gpu",
        "docker compose --profile gpu run --rm test-gpu python run_gpu.py --dtype int3",
        "docker compose --profile gpu run --rm test-gpu rm -r /",
        "make install",
    ],
)
def test_the_check_sees_a_command_that_does_not_exist(command: str) -> None:
    assert complaint(command)


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_every_shell_block_has_its_powershell_twin(path: Path) -> None:
    """The same commands in the same order; what only one of them needs (`.env` on Linux) may be missing in the other."""
    shells = [(language, body) for language, body in blocks(path.read_text(encoding="utf-8")) if language]
    assert [language for language, _ in shells] == ["sh", "powershell"] * (len(shells) // 2)
    for (_, shell), (_, powershell) in zip(shells[::2], shells[1::2], strict=True):
        ours = [re.sub(r"^printf .*\n", "", shell, flags=re.MULTILINE), powershell]
        plain = [
            [ASSIGNMENTS.sub("", line).replace("\\", "/").replace("Scripts/", "bin/") for line in text.strip().splitlines()]
            for text in ours
        ]
        assert plain[0] == plain[1]


def test_what_a_run_installs_is_in_the_notices() -> None:
    notices = (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8")
    for file in ROOT.glob("requirements-*.txt"):
        for name in re.findall(r"^([\w.-]+)==", file.read_text(encoding="utf-8"), re.MULTILINE):
            assert re.search(rf"^\| {re.escape(name)} \| ", notices, re.MULTILINE), name


def test_the_citation_names_this_version() -> None:
    import dflash_mini_lab

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == dflash_mini_lab.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
    assert f"## {dflash_mini_lab.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
