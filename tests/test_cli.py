"""The command line: fast help, one line for a mistake, statuses that scripts can rely on, and consoles that know no τ."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import mistakes

from dflash_mini_lab import cli
from dflash_mini_lab.cli import build_parser
from dflash_mini_lab.methods import METHODS
from dflash_mini_lab.settings import CPU, GPU, OPTIONS, Runner, Settings
from dflash_mini_lab.types import UserError

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "numpy", "jinja2")


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("CPU_", "DFLASH_", "PYTHONIOENCODING"))}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        env={**environ, **variables},
    )


def test_importing_the_package_loads_nothing_heavy() -> None:
    path = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})"
    code = f"{path}; import dflash_mini_lab; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert run("-c", code).stdout == "[]\n"


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_needs_no_environment_and_loads_nothing_heavy(flag: str) -> None:
    code = (
        f"import sys, runpy; sys.argv = ['run_cpu.py', {flag!r}]\n"
        f"try: runpy.run_path({str(ROOT / 'run_cpu.py')!r}, run_name='__main__')\n"
        f"except SystemExit as end: print('status', end.code, [m for m in {HEAVY!r} if m in sys.modules])"
    )
    bare = run("-S", "-c", code)  # -S: no site-packages, as in a Python that has nothing but itself
    assert bare.stdout.endswith("status 0 []\n"), bare.stderr


@pytest.mark.parametrize("writable", [True, False])
def test_compiled_code_is_kept_in_the_cache_where_the_source_cannot_be_written_beside(
    writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    cli.keep_compiled_code(Settings(cache=tmp_path))
    assert os.environ.pop("NUMBA_CACHE_DIR", None) == (None if writable else str(tmp_path / "compiled"))


def test_help_names_every_flag_and_variable_and_the_canonical_study(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for option in OPTIONS:
        assert option.flag in text
        assert option.variable is None or option.variable in text
    assert "--target lfm2.5-350m" in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tokens", "0"], "--tokens: '0' is not a whole number"),
        (["--tok", "5"], "unrecognized arguments: --tok 5"),
        (["--tokens"], "argument --tokens: expected one argument"),
        (["surplus"], "unrecognized arguments: surplus"),
        (["--dtype", "int4"], "--dtype: 'int4' is not one of"),
        (["--prepare", "--download-only"], "exclude each other"),
        (["--prepare", "--dtype", "float32"], "--dtype is a benchmark's"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.parse(argv)
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith("error: ")
    assert words in message


def test_a_bad_variable_is_named_before_anything_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CPU_REPEATS", "often")
    with pytest.raises(SystemExit):
        cli.parse([])
    assert capsys.readouterr().err.startswith("error: CPU_REPEATS: 'often' is not a whole number")


def command(error: BaseException | None = None, status: int = 0) -> int:
    def body() -> int:
        if error:
            raise error
        return status

    return cli.with_exit_status(body)


def test_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(status=3) == 3
    assert command(UserError("two\nlines")) == 2
    assert capsys.readouterr().err == "error: two lines\n"
    assert command(KeyboardInterrupt()) == 130
    assert "--resume" in capsys.readouterr().err
    assert command(OSError(errno.ENOSPC, "No space left on device", "cpu-reports/benchmark.json")) == 2
    assert capsys.readouterr().err == "error: the disk is full at cpu-reports/benchmark.json; free some space and run again.\n"
    assert command(PermissionError(errno.EACCES, "Permission denied", "/root/out")) == 2
    assert capsys.readouterr().err.startswith("error: /root/out: Permission denied. Choose another place")


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        command(ZeroDivisionError())
    with pytest.raises(OSError, match="odd"):
        command(OSError(errno.EIO, "odd"))


def test_the_first_lines_name_the_target_and_the_canonical_study(capsys: pytest.CaptureFixture[str]) -> None:
    cli.announce(Settings())
    first, second = capsys.readouterr().out.splitlines()
    assert "Target: smollm2-135m" in first
    assert "Apache-2.0" in first
    assert second == "The canonical study is: python run_cpu.py --target lfm2.5-350m"
    cli.announce(Settings(target="lfm2.5-350m"))
    assert capsys.readouterr().out.count("\n") == 1


def test_an_unknown_target_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--target", "gpt-7"]) == 2
    assert "Known: smollm2-135m, lfm2.5-350m, qwen3-0.6b" in capsys.readouterr().err


def test_methods_are_taken_by_key_or_slug_in_the_tables_order_with_00_first() -> None:
    assert cli.with_known_methods(Settings()).methods == (), "which ones can run is known when the drafter is"
    every = tuple(method.key for method in METHODS)
    assert cli.with_known_methods(Settings(methods=every[::-1])).methods == every
    assert cli.with_known_methods(Settings(methods=("08", "dflash"))).methods == ("00", "01", "08")
    assert cli.with_known_methods(Settings(methods=("01",))).methods == ("00", "01")


def test_an_unknown_method_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"'99'.*00.*01.*08"):
        cli.with_known_methods(Settings(methods=("01", "99")))


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp437"])
def test_a_console_that_cannot_print_an_emoji_gets_a_question_mark(encoding: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        "from dflash_mini_lab import cli\n"
        "cli.parse([]); cli.say('exact \\u2713 \\U0001f680 done'); sys.exit(cli.fail('\\U0001f4a5 broke'))"
    )
    done = run("-c", code, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert (done.returncode, done.stdout, done.stderr) == (2, "exact ? ? done\n", "error: ? broke\n")


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        "from dflash_mini_lab import cli\n"
        "sys.exit(cli.with_exit_status(lambda: [cli.say('x' * 1000) for _ in range(10000)] and 0))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stderr:
        process.stdout.read(10)
        process.stdout.close()
        assert (process.stderr.read(), process.wait(30)) == (b"", 141)


@pytest.mark.parametrize("runner", [CPU, GPU], ids=lambda runner: runner.script)
def test_every_example_of_the_help_is_one_that_the_runner_takes(runner: Runner) -> None:
    examples = re.findall(r"^  python (\S.*?)(?: {2,}.*)?$", build_parser(runner).epilog or "", re.MULTILINE)
    assert len(examples) >= 6
    assert {example.split()[0] for example in examples} == {runner.script}
    assert [mistakes(example.split()) for example in examples] == [[]] * len(examples)
