"""From an empty folder to a running lab, with real venvs and a real pip, but a package index of tiny wheels on this machine."""

from __future__ import annotations

import errno
import functools
import http.server
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_mini_lab import bootstrap, bootstrap_install
from dflash_mini_lab.bootstrap import Environment, is_ready, locked, make, pins, read_stamp, unmet, write_stamp
from dflash_mini_lab.bootstrap_install import BootstrapError, explain, install, reachable, translate

ROOT = Path(__file__).resolve().parents[1]
RUNNER = """
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "src"))
from dflash_mini_lab import bootstrap

def run(argv):
    print("RUN", sys.prefix, argv, flush=True)
    if "--sleep" in argv:
        time.sleep(60)
    return int(argv[-1]) if argv else 0

if __name__ == "__main__":
    sys.exit(bootstrap.launch(__file__, ["requirements.txt"], run))
"""


def quiet(line: str) -> None: ...


# A clone, an index, and a person who types.


def tiny_wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        info = f"{name}-{version}.dist-info"
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{name}/__init__.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`/simple` is the default index, `/cpu` stands for PyTorch's; a directory listing is a valid index page."""
    folder = tmp_path_factory.mktemp("index")
    tiny_wheel(folder / "simple" / "lab-tiny", "lab_tiny", "1.0")
    tiny_wheel(folder / "simple" / "lab-more", "lab_more", "2.0")
    tiny_wheel(folder / "simple" / "torch", "torch", "99.1")
    tiny_wheel(folder / "cpu" / "torch", "torch", "99.1+cpu")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def clone(folder: Path) -> Path:
    package = folder / "src" / "dflash_mini_lab"
    package.mkdir(parents=True)
    for name in ("__init__.py", "bootstrap.py", "bootstrap_install.py"):
        shutil.copy(ROOT / "src" / "dflash_mini_lab" / name, package)
    (folder / "run.py").write_text(RUNNER)
    (folder / "requirements.txt").write_text("torch==99.1\nlab-tiny==1.0\n")
    return folder


def variables(index: str, **more: str) -> dict[str, str]:
    """This process's environment without the configuration of pip, uv and the lab, but with the index of the test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "DFLASH_"))}
    path = os.pathsep.join(part for part in kept["PATH"].split(os.pathsep) if not shutil.which("uv", path=part))
    ours = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": f"{index}/simple",
        "DFLASH_TORCH_INDEX": f"{index}/cpu",
        "PIP_RETRIES": "1",
    }
    return {**kept, "PATH": path, "no_proxy": "127.0.0.1", **ours, **more}


def start(folder: Path, environ: dict[str, str], *argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(folder / "run.py"), *argv]
    return subprocess.Popen(command, env=environ, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def both(index: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, str, str]]]:
    """A bare clone in which two runs were started at the same moment, and how they ended."""
    folder = clone(tmp_path_factory.mktemp("a folder with blanks") / "clone")
    runs = [start(folder, variables(index), f"--number={n}", "0") for n in range(2)]
    return folder, [finish(run) for run in runs]


@pytest.mark.slow
def test_two_first_runs_at_once_make_one_environment_and_both_run_in_it(both: tuple[Path, list[tuple[int, str, str]]]) -> None:
    folder, runs = both
    for number, (status, out, err) in enumerate(runs):
        assert status == 0, err
        assert f"RUN {folder / '.venv'} ['--number={number}', '0']" in out
    messages = "".join(err for _, _, err in runs)
    assert messages.count("Making ") == 1
    assert messages.count("waiting for it") <= 1
    site = Environment(folder, ()).site_packages
    assert bootstrap.installed("lab-tiny", site) == "1.0"
    assert list(Path(site[0]).glob("torch-99.1+cpu.dist-info")), "PyTorch's own index comes first"


@pytest.mark.slow
def test_the_second_run_starts_at_once_and_passes_the_exit_status_on(both: tuple[Path, object], index: str) -> None:
    folder, _ = both
    status, out, err = finish(start(folder, variables("http://127.0.0.1:1"), "--what", "7"))
    assert (status, err) == (7, "")
    assert "['--what', '7']" in out


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
def test_ctrl_c_in_the_restarted_run_ends_with_130(both: tuple[Path, object], index: str) -> None:
    folder, _ = both
    process = start(folder, variables(index), "--sleep", "0")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("RUN")
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process)
    assert (status, err) == (130, "Interrupted.\n")


@pytest.mark.slow
def test_a_new_pin_and_a_lost_package_are_installed_into_what_is_there(both: tuple[Path, object], index: str) -> None:
    folder, _ = both
    environment = Environment(folder, (folder / "requirements.txt",))
    (folder / "requirements.txt").write_text("torch==99.1\nlab-tiny==1.0\nlab-more==2.0\n")
    shutil.rmtree(Path(environment.site_packages[0]) / "lab_tiny-1.0.dist-info")
    status, _, err = finish(start(folder, variables(index), "0"))
    assert status == 0, err
    assert "Making " not in err
    assert unmet({"lab-tiny": "1.0", "lab-more": "2.0"}, environment.site_packages) == []


@pytest.mark.slow
def test_without_a_network_the_run_ends_in_one_sentence_and_the_next_one_repairs(both: tuple[Path, object], index: str) -> None:
    folder, _ = both
    (folder / "requirements.txt").write_text("torch==99.1\nlab-tiny==1.0\nlab-more==2.0\n# changed\n")
    shutil.rmtree(Path(Environment(folder, ()).site_packages[0]) / "torch-99.1+cpu.dist-info")
    status, out, err = finish(start(folder, variables("http://127.0.0.1:1"), "0"))
    assert (status, out.count("RUN")) == (2, 0)
    assert [line for line in err.splitlines() if line.startswith("error: ")] == [err.splitlines()[-1]]
    assert "index cannot be reached" in err.splitlines()[-1]
    assert "PyTorch's own index (http://127.0.0.1:1/cpu) cannot be reached" in err
    status, out, err = finish(start(folder, variables(index), "0"))
    assert (status, out.count("RUN")) == (0, 1), err
    assert "making it anew" in err


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
def test_an_install_killed_half_way_is_repaired_by_the_next_run(index: str, tmp_path: Path) -> None:
    folder = clone(tmp_path / "clone")
    process = start(folder, variables(index), "0")
    stamp = folder / ".venv" / "dflash-lab.json"
    deadline = time.monotonic() + 60
    while not stamp.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    process.kill()
    finish(process)
    assert not is_ready(Environment(folder, (folder / "requirements.txt",)))
    status, out, err = finish(start(folder, variables(index), "0"))
    assert (status, out.count("RUN")) == (0, 1), err
    assert "making it anew" in err


# Pins.


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_every_requirement_file_of_the_lab_is_understood() -> None:
    for file in ROOT.glob("requirements*.txt"):
        assert pins([file]), file


def test_a_marker_chooses_by_python_version(tmp_path: Path) -> None:
    file = write(tmp_path / "r.txt", 'a==1 ; python_version < "3.10"\na==2 ; python_version >= "3.10"  # newer\n\n# b==3\n')
    assert pins([file]) == {"a": "2"}


@pytest.mark.parametrize("line", ["a>=1", "a", "-r other.txt", 'a==1 ; sys_platform == "win32"', "a @ https://x/a.whl"])
def test_a_line_that_is_no_pin_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(BootstrapError, match="r.txt line 2 is not a pin"):
        pins([write(tmp_path / "r.txt", "b==1\n" + line)])


def test_a_list_of_bare_names_takes_its_versions_from_another_file(tmp_path: Path) -> None:
    write(tmp_path / "all.txt", 'a==1 ; python_version < "3.10"\na==2 ; python_version >= "3.10"\nb==3\n')
    assert pins([write(tmp_path / "few.txt", "-c all.txt\na\n")]) == {"a": "2"}
    with pytest.raises(BootstrapError, match=r"few.txt line 2 is not a pin"):
        pins([write(tmp_path / "few.txt", "-c all.txt\nc\n")])


def test_a_local_build_meets_its_pin_and_another_version_does_not(tmp_path: Path) -> None:
    (tmp_path / "torch-2.13.0+cpu.dist-info").mkdir()
    (tmp_path / "torch-2.13.0+cpu.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n")
    assert unmet({"torch": "2.13.0"}, [str(tmp_path)]) == []
    assert unmet({"torch": "2.13.1", "jax": "1"}, [str(tmp_path)]) == ["torch==2.13.1", "jax==1"]


# Where it runs.


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path, (write(tmp_path / "requirements.txt", "surely-not-installed==1.0\n"),))


def test_an_interpreter_that_meets_the_pins_is_used_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "requirements.txt", f"pytest=={pytest.__version__}\n")
    status = bootstrap.launch(str(tmp_path / "run.py"), ["requirements.txt"], lambda argv: len(argv), ["a", "b"])
    assert status == 2
    assert not (tmp_path / ".venv").exists()


def test_no_bootstrap_names_what_is_missing(environment: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    status = bootstrap.launch(str(environment.root / "run.py"), ["requirements.txt"], lambda argv: 0, ["--no-bootstrap"])
    assert status == 2
    assert "lacks surely-not-installed==1.0" in capsys.readouterr().err
    assert not environment.folder.exists()


def test_no_bootstrap_with_another_version_says_so_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "requirements.txt", "pytest==0.1\n")
    assert bootstrap.launch(str(tmp_path / "run.py"), ["requirements.txt"], lambda argv: 5, ["--no-bootstrap"]) == 5
    assert "differ from the pinned pytest==0.1" in capsys.readouterr().err


def pretend_venv(environment: Environment) -> None:
    environment.python.parent.mkdir(parents=True)
    environment.python.write_text("")
    (environment.folder / "lib" / "python3.x" / "site-packages").mkdir(parents=True)


def pretend_installed(environment: Environment, name: str, version: str) -> None:
    info = Path(environment.site_packages[0]) / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_the_users_own_venv_is_used_if_it_fits_and_never_changed(environment: Environment) -> None:
    pretend_venv(environment)
    with pytest.raises(BootstrapError, match="was not made by the lab and lacks surely-not-installed==1.0"):
        make(environment, "")
    assert environment.python.exists()
    pretend_installed(environment, "surely_not_installed", "1.0")
    assert is_ready(environment)


def test_only_a_finished_environment_of_this_python_and_these_pins_is_ready(environment: Environment) -> None:
    pretend_venv(environment)
    pretend_installed(environment, "surely_not_installed", "1.0")
    write_stamp(environment, "installing", {})
    assert not is_ready(environment)
    write_stamp(environment, "ready", bootstrap.digests(environment))
    assert is_ready(environment)
    for change in ({"python": "cpython-2.7-linux"}, {"interpreter": "/gone"}, {"requirements": {}}, {"state": "installing"}):
        environment.stamp.write_text(bootstrap.json.dumps({**(read_stamp(environment) or {}), **change}))
        assert not is_ready(environment), change
        write_stamp(environment, "ready", bootstrap.digests(environment))
    environment.stamp.write_text("{ torn")
    assert not is_ready(environment)
    write_stamp(environment, "ready", bootstrap.digests(environment))
    environment.requirements[0].write_text("surely-not-installed==1.0 # edited\n")
    assert not is_ready(environment)


def test_a_lock_is_waited_for_and_is_gone_with_its_holder(tmp_path: Path) -> None:
    holder = (
        f"import sys, time; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        "from pathlib import Path; from dflash_mini_lab.bootstrap import locked\n"
        "with locked(Path(sys.argv[1])):\n print('held', flush=True); time.sleep(60)"
    )
    path = tmp_path / "lock"
    process = subprocess.Popen([sys.executable, "-c", holder, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with path.open("a+b") as handle:
        assert not bootstrap.try_lock(handle.fileno())
    process.kill()
    process.communicate()
    with locked(path):
        pass


# What goes wrong, in one sentence.


@pytest.mark.parametrize("runner", ["run_cpu.py", "run_tests.py"])
def test_an_old_python_is_told_which_one_is_needed(runner: str) -> None:
    old = "import sys, runpy; sys.version_info = (3, 9, 0, 'final', 0)"
    code = f"{old}; runpy.run_path({str(ROOT / runner)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert re.fullmatch(r"error: DFlash Mini Lab needs Python 3\.10 or newer; this is Python 3\.9 \(.*\)\.\n", done.stderr)


@pytest.mark.parametrize("runner", ["run_cpu.py", "run_tests.py"])
@pytest.mark.parametrize("old", ["python2.7", "python3.6", "python3.8", "python3.9"])
def test_a_really_old_python_can_parse_the_runner(runner: str, old: str) -> None:
    if not shutil.which(old) or subprocess.run([old, "--version"], capture_output=True).returncode:
        pytest.skip(f"no {old} here")
    done = subprocess.run([old, str(ROOT / runner)], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "needs Python 3.10" in done.stderr


def test_a_python_without_venv_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "The virtual environment was not created successfully because ensurepip is not available."
    monkeypatch.setattr(bootstrap_install, "call", lambda command: (1, said))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BootstrapError, match=r"cannot make virtual environments.*-venv\)"):
        bootstrap_install.create(tmp_path, tmp_path / "bin/python", quiet)


def test_a_full_disk_gives_its_space_back(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, python: Path, say: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(python))

    monkeypatch.setattr(bootstrap, "create", full)
    with pytest.raises(BootstrapError, match="the disk is full at .*free about 2 GB"):
        make(environment, "")
    assert not environment.folder.exists()


@pytest.mark.skipif(os.name == "nt" or getattr(os, "geteuid", lambda: 1)() == 0, reason="root may write everywhere")
def test_a_clone_that_cannot_be_written_is_one_sentence(environment: Environment) -> None:
    environment.root.chmod(0o500)
    with pytest.raises(BootstrapError, match="cannot write to"), locked(environment.root / ".venv.lock"):
        pass


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk became full"),
        ("error: failed to write to file: No space left on device (os error 28)", "disk became full"),
        (
            "WARNING: Retrying (...) NewConnectionError('...')\nERROR: No matching distribution found for torch==2.13.0",
            "index cannot be reached",
        ),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] ...", "certificate was not accepted"),
        ("ERROR: No matching distribution found for torch==2.13.0", "offers no torch==2.13.0 for Python"),
    ],
)
def test_an_installers_message_becomes_one_sentence(tmp_path: Path, log: str, sentence: str) -> None:
    assert sentence in (explain(log, tmp_path / "gone") or "")


def test_an_unknown_failure_keeps_the_last_error_and_the_whole_log(tmp_path: Path) -> None:
    log = "line\nERROR: odd thing\nhint"
    assert explain(log, tmp_path) is None
    assert "ERROR: odd thing" in bootstrap_install.unexplained(log, tmp_path)
    assert (tmp_path / "install.log").read_text() == log


# pip, uv, and the indexes.


class Calls:
    """Stands for `bootstrap_install.call`: keeps the commands, fails those that a word of `failing` is in."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str]) -> tuple[int, str]:
        self.commands.append([str(part) for part in command])
        return (1, "error: no") if any(word in self.commands[-1] for word in self.failing) else (0, "")


def installed_with(
    monkeypatch: pytest.MonkeyPatch, calls: Calls, uv: str | None, reached: bool, package: str = "torch"
) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(bootstrap_install, "call", calls)
    monkeypatch.setattr(bootstrap_install, "reachable", lambda index: reached)
    monkeypatch.setattr(bootstrap_install, "uv_flags", lambda python: ["--no-index"])
    monkeypatch.setattr(shutil, "which", lambda name: uv)
    install(Path("v/bin/python"), [Path("r.txt")], {package: "1.0"}, "http://cpu", said.append)
    return said


def test_torch_comes_from_pytorchs_index_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    installed_with(monkeypatch, calls, uv=None, reached=True)
    pip = [str(Path("v/bin/python")), "-m", "pip", "install"]
    assert calls.commands == [[*pip, "--index-url", "http://cpu", "--no-deps", "torch==1.0"], [*pip, "-r", "r.txt"]]


def test_an_unreachable_or_failing_index_leaves_torch_to_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    said = installed_with(monkeypatch, calls, uv=None, reached=False)
    assert len(calls.commands) == 1
    assert "cannot be reached" in said[-2]
    failing = Calls("--index-url")
    said = installed_with(monkeypatch, failing, uv=None, reached=True)
    assert "could not be installed" in said[-2]
    assert "from the default index" in said[-1]
    assert "-r" in failing.commands[-1]


def test_where_torch_is_not_wanted_nothing_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    said = installed_with(monkeypatch, calls, uv=None, reached=False, package="numpy")
    assert not [line for line in said if "torch" in line.lower()]
    assert len(calls.commands) == 1


def test_uv_is_used_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    installed_with(monkeypatch, calls, uv="/bin/uv", reached=True)
    uv = ["/bin/uv", "pip", "install", "--python", str(Path("v/bin/python")), "--no-index"]
    assert calls.commands == [[*uv, "--index", "http://cpu", "--no-deps", "torch==1.0"], [*uv, "-r", "r.txt"]]


def test_pip_takes_over_when_uv_fails_with_one_line_said(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("/bin/uv")
    said = installed_with(monkeypatch, calls, uv="/bin/uv", reached=False)
    assert [command[0] for command in calls.commands] == ["/bin/uv", str(Path("v/bin/python"))]
    assert said[-1] == "note: uv did not manage (error: no); trying pip."


def test_pips_configuration_is_told_to_uv() -> None:
    listing = "\n".join([
        "global.index-url='https://mirror/simple'", "global.extra-index-url='file:///a file:///b'", ":env:.find-links='/wheels'",
        "install.constraint='/c.txt'", ":env:.index-url='https://other/simple'", "global.timeout='60'",
    ])  # fmt: skip
    flags = translate(listing)
    assert flags is not None
    pairs = list(zip(flags[::2], flags[1::2], strict=True))
    assert ("--default-index", "https://other/simple") in pairs
    assert ("--default-index", "https://mirror/simple") not in pairs
    assert [value for flag, value in pairs if flag == "--index"] == ["file:///a", "file:///b"]
    assert ("--find-links", "/wheels") in pairs
    assert ("--constraint", "/c.txt") in pairs
    assert ("--index-strategy", "unsafe-best-match") in pairs


def test_what_uv_cannot_be_told_means_pip() -> None:
    assert translate("global.proxy='http://proxy:8080'") is None
    assert translate("") == []
    assert translate("global.no-index='true'") == ["--no-index"]


def test_reachable_is_answered_by_the_index_and_refused_by_a_closed_port(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert reachable(f"{index}/cpu")
    assert not reachable(f"{index}/nothing-here")
    assert not reachable("http://127.0.0.1:1")
    assert not reachable("not an address")
