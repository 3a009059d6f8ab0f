"""Makes `.venv` in the clone, once, and restarts the runner inside it.

Standard library only and no sibling is imported: this runs in whatever Python the user has, before anything is installed.
Nothing is installed outside `.venv`, and the user's pip configuration (indexes, certificates, constraints) stays in force.
How one environment is made, by pip or uv, is in `bootstrap_install.py`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_mini_lab.bootstrap_install import BootstrapError, create, install

GUARD = "DFLASH_LAB_ENVIRONMENT"
"""Set for the restarted process to the environment it was started in: it must never try to make it again."""
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
WITHOUT = "with a Python that has the requirements, --no-bootstrap needs none"
LONGEST_WAIT_S = 3600.0
CTRL_C_ON_WINDOWS = 0xC000013A
PIN = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)\s*(?:;\s*python_version\s*(?P<operator><|>=)\s*\"3\.(?P<minor>\d+)\")?"
)


@dataclass(frozen=True)
class Environment:
    """`.venv` (or `.venv-gpu`) of the clone at `root`, for the requirement files of one runner."""

    root: Path
    requirements: tuple[Path, ...]
    cuda: bool = False
    """Asks for a PyTorch that is built for CUDA, in a folder of its own: a CPU build meets the same pin."""

    @property
    def folder(self) -> Path:
        return self.root / (".venv-gpu" if self.cuda else ".venv")

    @property
    def python(self) -> Path:
        return self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    @property
    def stamp(self) -> Path:
        return self.folder / "dflash-lab.json"

    @property
    def site_packages(self) -> list[str]:
        return [str(path) for pattern in ("lib/*/site-packages", "Lib/site-packages") for path in self.folder.glob(pattern)]


def launch(
    runner: str,
    requirements: Sequence[str],
    run: Callable[[list[str]], int],
    argv: Sequence[str] | None = None,
    torch_index: str | Callable[[], str] = TORCH_INDEX,
    cuda: bool = False,
) -> int:
    """Call `run(argv)` where the pinned requirements are met, making that place first if need be; returns the exit status.

    That place is this interpreter if it meets them or `--no-bootstrap` is given, else `.venv` beside `runner`, in which the
    runner is started again. `torch_index`: addresses separated by blanks, or a function that finds them (and may raise
    BootstrapError) when they are needed. `DFLASH_TORCH_INDEX` replaces them; empty, it leaves torch to the default index.
    `cuda`: a PyTorch with CUDA, in `.venv-gpu`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    root = Path(runner).resolve().parent
    environment = Environment(root, tuple(root / name for name in requirements), cuda)
    try:
        if "--no-bootstrap" in arguments:
            require(environment)
            return run(arguments)
        if is_inside(environment):
            if os.environ.get(GUARD) == str(environment.folder) or is_ready(environment):
                return run(arguments)
            return restart(sys._base_executable, runner, arguments, environment)  # type: ignore[attr-defined]
        if not lacking(environment):
            return run(arguments)
        if not is_ready(environment):
            with locked(environment.root / ".venv.lock"):
                if not is_ready(environment):  # another run may have made it while this one waited
                    make(environment, chosen_index(torch_index))
        return restart(str(environment.python), runner, arguments, environment)
    except BootstrapError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        say("Interrupted.")
        return 130


def chosen_index(torch_index: str | Callable[[], str]) -> str:
    found = torch_index if isinstance(torch_index, str) else torch_index()
    return os.environ.get("DFLASH_TORCH_INDEX", found)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def fail(sentence: str) -> int:
    say("error: " + " ".join(sentence.split()))
    return 2


# What is pinned, and is it met?


def pins(files: Sequence[Path]) -> dict[str, str]:
    """Name → version of the pins that apply to this Python. `-c FILE` takes the versions of bare names from the pins there.

    Raises BootstrapError for a line it does not understand.
    """
    found = {}
    for file in files:
        elsewhere: dict[str, str] = {}
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            text = line.split("#")[0].strip()
            if not text:
                continue
            if text.startswith("-c "):
                elsewhere |= pins([file.with_name(text[3:].strip())])
                continue
            if text in elsewhere:
                found[text] = elsewhere[text]
                continue
            pin = PIN.fullmatch(text)
            if pin is None:
                raise BootstrapError(f"{file.name} line {number} is not a pin that the lab understands: {text}")
            minor, here = pin["minor"], sys.version_info >= (3, int(pin["minor"] or 0))
            if minor is None or here == (pin["operator"] == ">="):
                found[pin["name"]] = pin["version"]
    return found


def unmet(wanted: dict[str, str], path: list[str] | None = None) -> list[str]:
    """The pins that the distributions on `path` (default: this interpreter's) do not meet. `2.13.0+cpu` meets `2.13.0`."""
    return [f"{name}=={version}" for name, version in wanted.items() if installed(name, path) != version]


def installed(name: str, path: list[str] | None) -> str | None:
    search = sys.path if path is None else path
    for distribution in importlib.metadata.distributions(name=name, path=search):
        version: str | None = distribution.version
        return version and version.split("+")[0]
    return None


def lacking(environment: Environment, path: list[str] | None = None) -> list[str]:
    """What `path` (default: this interpreter's) lacks of the environment's pins, and of CUDA where that is asked for."""
    wanted = pins(environment.requirements)
    found = unmet(wanted, path)
    if environment.cuda and not found and not has_cuda(full_version("torch", path)):
        found.append(f"torch=={wanted['torch']} built for CUDA")
    return found


def full_version(name: str, path: list[str] | None) -> str:
    for distribution in importlib.metadata.distributions(name=name, path=sys.path if path is None else path):
        return distribution.version or ""
    return ""


def has_cuda(version: str, platform: str = sys.platform) -> bool:
    """Whether the torch distribution of this version is built for CUDA: `+cu130`, or PyPI's own, which is one on Linux only."""
    _, _, build = version.partition("+")
    return build.startswith("cu") if build else platform == "linux"


def require(environment: Environment) -> None:
    """`--no-bootstrap`: other versions are the user's choice, missing packages cannot work."""
    wanted = pins(environment.requirements)
    different = unmet(wanted)
    missing = [pin for pin in different if installed(pin.split("==")[0], None) is None]
    files = " ".join(f"-r {file.name}" for file in environment.requirements)
    if missing:
        raise BootstrapError(
            f"--no-bootstrap: {sys.executable} lacks {', '.join(missing)}; leave the flag out, or: "
            f"{sys.executable} -m pip install {files}"
        )
    if different:
        say(f"note: --no-bootstrap: this Python's versions differ from the pinned {', '.join(different)}.")


# Is `.venv` there, whole, and ours?


def python_key() -> str:
    return f"{sys.implementation.name}-{sys.version_info[0]}.{sys.version_info[1]}-{sys.platform}"


def is_inside(environment: Environment) -> bool:
    return sys.prefix != sys.base_prefix and Path(sys.prefix).resolve() == environment.folder.resolve()


def is_ready(environment: Environment) -> bool:
    """True when `.venv` holds what is asked for. A `.venv` that someone else made counts too, if it meets every pin."""
    if not environment.python.exists():
        return False
    stamp = read_stamp(environment)
    if stamp is not None:
        asked = digests(environment)
        if stamp.get("state") != "ready" or not made_by_this_python(environment, stamp):
            return False
        if {name: stamp.get("requirements", {}).get(name) for name in asked} != asked:
            return False
    return not lacking(environment, environment.site_packages)


def made_by_this_python(environment: Environment, stamp: dict) -> bool:
    """False after an upgrade of the system's Python under `.venv`, or when the runner was started with another Python."""
    return stamp.get("python") == python_key() and stamp.get("interpreter") == os.path.realpath(environment.python)


def digests(environment: Environment) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in environment.requirements}


def read_stamp(environment: Environment) -> dict | None:
    """The record of what was installed; None when there is none; an unreadable one counts as an unfinished install."""
    try:
        stamp = json.loads(environment.stamp.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(environment: Environment, state: str, requirements: dict[str, str]) -> None:
    interpreter = os.path.realpath(environment.python) if environment.python.exists() else None
    stamp = {"state": state, "python": python_key(), "interpreter": interpreter, "requirements": requirements}
    temporary = environment.stamp.with_suffix(".tmp")
    temporary.write_text(json.dumps(stamp, indent=1), encoding="utf-8")
    os.replace(temporary, environment.stamp)


# Make it.


def make(environment: Environment, torch_index: str) -> None:
    """Make `.venv`, or add to it what a changed requirement file asks. An unfinished one is thrown away first.

    Raises BootstrapError, one sentence, for everything that can go wrong on the user's machine.
    """
    stamp = read_stamp(environment)
    asked = digests(environment)
    try:
        if environment.folder.exists():
            if stamp is None and any(environment.folder.iterdir()):
                lacks = ", ".join(lacking(environment, environment.site_packages))
                raise BootstrapError(
                    f"{environment.folder} was not made by the lab and lacks {lacks}; "
                    "move it away, or activate it, install the requirements and pass --no-bootstrap."
                )
            if stamp is not None and (stamp.get("state") != "ready" or not made_by_this_python(environment, stamp)):
                say(f"{environment.folder} is unfinished or belongs to another Python: making it anew.")
                shutil.rmtree(environment.folder)
                stamp = None
        environment.folder.mkdir(exist_ok=True)
        write_stamp(environment, "installing", {})  # first: whatever happens from here on, the next run knows that it is ours
        started = time.monotonic()
        if not environment.python.exists():
            create(environment.folder, environment.python, say)
        install(environment.python, environment.requirements, pins(environment.requirements), torch_index, say)
        still = lacking(environment, environment.site_packages)
        if still:
            raise BootstrapError(f"the installer ended well, yet {environment.folder} lacks {', '.join(still)}.")
        kept = {
            name: digest
            for name, digest in (stamp or {}).get("requirements", {}).items()
            if digest_of(environment.root / name) == digest
        }
        write_stamp(environment, "ready", {**kept, **asked})
        say(f"The environment is ready ({time.monotonic() - started:.0f} s).")
    except OSError as error:
        raise BootstrapError(explain_os_error(error, environment)) from error


def digest_of(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def explain_os_error(error: OSError, environment: Environment) -> str:
    where = error.filename or environment.folder
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        shutil.rmtree(environment.folder, ignore_errors=True)
        name, space = environment.folder.name, 8 if environment.cuda else 2
        return f"the disk is full at {where}; the unfinished {name} was removed: free about {space} GB and run again."
    return f"cannot make the environment: {error.strerror or error} ({where}); {WITHOUT}."


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold `path` against other processes. The system drops the lock with its holder, so a stale one cannot exist.

    Installers inherit it: a killed run whose pip still writes keeps the next run waiting rather than fighting it.
    """
    try:
        handle = path.open("a+b")
    except OSError as error:
        raise BootstrapError(f"cannot write to {path.parent}: {error.strerror}; {WITHOUT}.") from error
    with handle:
        deadline = time.monotonic() + LONGEST_WAIT_S
        told = False
        while not try_lock(handle.fileno()):
            if not told:
                say("Another run is making the environment; waiting for it.")
                told = True
            if time.monotonic() > deadline:
                raise BootstrapError(f"another run has held {path} for an hour; end it and run again.")
            time.sleep(0.2)
        yield


def try_lock(descriptor: int) -> bool:
    """True when the lock is held now, or when this file system knows no locks (then nothing can be done)."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, 0, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.set_inheritable(descriptor, True)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
    return True


# Start again inside.


def restart(python: str, runner: str, argv: Sequence[str], environment: Environment) -> int:
    """Run the runner under `python`. On POSIX this process becomes that one, so status and signals need no passing on."""
    command = [python, str(Path(runner).resolve()), *argv]
    variables = {**os.environ, GUARD: str(environment.folder)} if Path(python) == environment.python else dict(os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "posix":
        try:
            os.execve(python, command, variables)
        except OSError as error:
            raise BootstrapError(
                f"cannot start {python}: {error.strerror}; remove {environment.folder} and run again."
            ) from error
    process = subprocess.Popen(command, env=variables)
    while True:
        try:
            status = process.wait()
            return 130 if status == CTRL_C_ON_WINDOWS else status
        except KeyboardInterrupt:
            continue  # the console sent it to the child as well, which ends in its own way
