"""What breaks on Windows or macOS and never here: names, encodings, and modules that only one system has."""
from __future__ import annotations

import ast
import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.commands import ROOT

from dflash_mini_lab import files
from dflash_mini_lab.cli import is_closed_pipe

SOURCES = sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("run_*.py"), *ROOT.glob("tools/*.py")])
POSIX_ONLY = {"fcntl", "resource", "pwd", "grp", "termios", "pty", "tty"}
WINDOWS_ONLY = {"msvcrt", "winreg", "_winapi"}
NOT_EVERYWHERE = {"fork", "kill", "killpg", "symlink", "symlink_to", "mkfifo", "setsid", "chown", "preexec_fn", "getuid"}
RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10))}


def traps(source: str) -> list[str]:
    """Module-level imports of one system's modules, calls that not every system has, and text without an encoding."""
    tree, found = ast.parse(source), []
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"imports {name}" for name in names if name.split(".")[0] in POSIX_ONLY | WINDOWS_ONLY]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = {keyword.arg for keyword in call.keywords}
        if name in NOT_EVERYWHERE or given & NOT_EVERYWHERE:
            found.append(f"{name} is not everywhere")
        reads_text = name in ("read_text", "write_text") and not any(isinstance(value, ast.Starred) for value in call.args)
        modes = [value.value for value in call.args if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        opens_text = name == "open" and isinstance(call.func, ast.Attribute) and any(mode in ("r", "w", "a") for mode in modes)
        if (reads_text or opens_text) and "encoding" not in given:
            found.append(f"{name} without an encoding")
        if {"text", "universal_newlines"} & given and not {"encoding", "errors"} & given:
            found.append(f"{name} reads text in the console's encoding")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_source_relies_on_one_system(path: Path) -> None:
    assert traps(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import fcntl",
        "from resource import getrusage",
        "import os\nos.kill(1, 9)",
        "path.read_text()",
        "path.open('w')",
        "import subprocess\nsubprocess.run(['a'], text=True)",
    ],
)
def test_the_check_sees_a_trap(source: str) -> None:
    assert traps(source)


def test_every_name_in_the_repository_can_be_checked_out_everywhere() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("no git here")
    listing = subprocess.run([git, "-C", str(ROOT), "ls-files", "--stage"], capture_output=True, encoding="utf-8", check=True)
    entries = [line.split(maxsplit=3) for line in listing.stdout.splitlines()]
    names = [name for _, _, _, name in entries]
    assert len({name.lower() for name in names}) == len(names)
    assert [name for mode, _, _, name in entries if mode == "120000"] == [], "Windows needs a privilege for a link"
    for name in names:
        assert not set(name) & set('<>:"|?*\\'), name
        assert not {part.split(".")[0].lower() for part in name.split("/")} & RESERVED, name
        assert len(name) < 120, name


def test_a_file_that_someone_reads_is_replaced_when_they_have_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, refusals = os.replace, [PermissionError(13, "in use"), PermissionError(13, "in use")]

    def replace(source: Path, destination: Path) -> None:
        if refusals:
            raise refusals.pop()
        honest(source, destination)

    monkeypatch.setattr(files.os, "replace", replace)
    (tmp_path / "new").write_text("new", encoding="utf-8")
    files.replace_patiently(tmp_path / "new", tmp_path / "old", patience=60)
    assert (tmp_path / "old").read_text(encoding="utf-8") == "new"
    refusals.append(PermissionError(13, "not yours"))
    with pytest.raises(PermissionError):
        files.replace_patiently(tmp_path / "old", tmp_path / "new", patience=0)


def test_a_reader_that_left_is_known_by_each_system_s_error() -> None:
    assert is_closed_pipe(BrokenPipeError(errno.EPIPE, "Broken pipe"), windows=False)
    assert is_closed_pipe(OSError(errno.EINVAL, "Invalid argument"), windows=True)
    assert not is_closed_pipe(OSError(errno.EINVAL, "Invalid argument"), windows=False)
    assert not is_closed_pipe(OSError(errno.EINVAL, "Invalid argument", "a:b"), windows=True)
