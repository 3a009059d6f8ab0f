"""One environment made by `venv` and filled by uv or pip: the commands, and what their failures mean in one sentence.

Part of the bootstrap: standard library only. No state here; when to install and whether it is whole is `bootstrap.py`'s.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

Say = Callable[[str], None]
REACH_S = 5.0
ENTRY = re.compile(r"^([\w.:-]+)\.([\w-]+)=(.+)$")
UV_FLAGS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
"""pip's settings that say where packages come from, as uv names them: uv does not read pip's configuration."""
HARMLESS = {
    "timeout",
    "default-timeout",
    "retries",
    "disable-pip-version-check",
    "cache-dir",
    "no-cache-dir",
    "progress-bar",
    "quiet",
    "verbose",
    "require-virtualenv",
    "user",
    "break-system-packages",
    "no-input",
    "root-user-action",
    "no-color",
    "log",
    "config-file",
}
"""pip's settings that uv can do without."""


class BootstrapError(Exception):
    """Why there is no environment, in one sentence."""


def create(folder: Path, python: Path, say: Say) -> None:
    """Make a virtual environment with pip in `folder`, which may exist. Raises BootstrapError."""
    say(f"Making {folder} with Python {version()} (only this folder is touched) ...")
    status, log = call([sys.executable, "-m", "venv", str(folder)])
    if status == 0 and python.exists():
        return
    uv = shutil.which("uv")
    if uv:
        status, log = call(
            [uv, "venv", "--seed", "--allow-existing", "--python", sys.executable, str(folder)],
        )
        if status == 0 and python.exists():
            return
    raise BootstrapError(
        explain(log, folder)
        or (
            f"this Python ({sys.executable}) cannot make virtual environments; install its venv module "
            f"(Debian and Ubuntu: apt install python{version()}-venv), or put uv on the PATH, and run again."
        )
    )


def install(python: Path, files: Sequence[Path], pins: Mapping[str, str], torch_index: str, say: Say) -> None:
    """Install the requirement files into `python`'s environment: torch first, from the first of the addresses in `torch_index`
    (separated by blanks) that can be reached and has it.

    Raises BootstrapError. Whatever an installer prints as progress goes to the terminal.
    """
    say(f"Installing {len(pins)} pinned packages and what they need; the first time takes a few minutes ...")
    installers = [pip_installer(python)]
    uv = shutil.which("uv")
    if uv:
        flags = uv_flags(python)
        if flags is None:
            say("note: pip is configured here in a way that uv does not know; installing with pip.")
        else:
            installers.insert(0, [uv, "pip", "install", "--python", str(python), *flags])
    for index in torch_index.split() if "torch" in pins else ():
        torch = [index, "--no-deps", f"torch=={pins['torch']}"]
        if not reachable(index):
            say(f"PyTorch's own index ({index}) cannot be reached.")
        elif attempt([[*installer, index_flag(installer), *torch] for installer in installers], say) is None:
            break
        else:
            say(f"note: torch could not be installed from PyTorch's own index ({index}).")
    else:
        if "torch" in pins:
            say("torch comes from the default index.")
    wanted = [part for file in files for part in ("-r", str(file))]
    log = attempt([[*installer, *wanted] for installer in installers], say)
    if log is not None:
        raise BootstrapError(explain(log, python.parent.parent) or unexplained(log, python.parent.parent))


def pip_installer(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "install"]


def index_flag(installer: Sequence[str]) -> str:
    return "--index-url" if "-m" in installer else "--index"


def attempt(commands: Sequence[Sequence[str]], say: Say) -> str | None:
    """Try the commands in order until one ends well; returns None, or what the last one wrote to stderr."""
    log = None
    for number, command in enumerate(commands):
        status, log = call(command)
        if status == 0:
            return None
        if number + 1 < len(commands):
            say(f"note: uv did not manage ({last_error(log)}); trying pip.")
    return log


def call(command: Sequence[str]) -> tuple[int, str]:
    """Run; returns the exit status and what it wrote to stderr. A terminal shows the latest line and the seconds meanwhile."""
    drop = ("PIP_TARGET", "PIP_PREFIX", "__PYVENV_LAUNCHER__")
    variables = {name: value for name, value in os.environ.items() if name not in drop}
    variables["PIP_USER"] = "0"  # a user's `--user` default would fail in, or escape from, the environment
    variables.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    inherit = sys.platform != "win32"  # the lock: see bootstrap.locked
    output: list[str] = []
    errors: list[str] = []
    started = time.monotonic()
    with subprocess.Popen(
        command, env=variables, close_fds=not inherit, text=True, encoding="utf-8", errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        pairs = ((process.stdout, output), (process.stderr, errors))
        readers = [threading.Thread(target=follow, args=(stream, lines), daemon=True) for stream, lines in pairs]
        for reader in readers:
            reader.start()
        try:
            while process.poll() is None:
                show((output or errors or [""])[-1], time.monotonic() - started)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
            for reader in readers:
                reader.join()
        except BaseException:
            process.terminate()
            raise
        finally:
            show(None, 0.0)
    return process.returncode, "".join(errors)


def follow(stream: Iterable[str], lines: list[str]) -> None:
    for line in stream:
        lines.append(line)  # one by one: the newest is shown meanwhile


def show(line: str | None, seconds: float) -> None:
    """The last line of a terminal; None wipes it. Where stderr is a file or a pipe, nothing."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        text = "" if line is None else f"  {seconds:4.0f} s  {' '.join(line.split())}"
        sys.stderr.write("\r" + text[:width].ljust(width) + "\r")
        sys.stderr.flush()


def reachable(index: str) -> bool:
    """Whether `index` answers within REACH_S: an unreachable host can otherwise cost pip minutes of retries."""
    answers: list[bool] = []

    def ask() -> None:
        import urllib.request  # 40 ms that a second run need not spend

        try:
            with urllib.request.urlopen(index.rstrip("/") + "/torch/", timeout=REACH_S) as answer:
                answers.append(bool(answer.read(1)))
        except (OSError, ValueError):
            answers.append(False)

    thread = threading.Thread(target=ask, daemon=True)  # name look-ups know no time-out, so the wait is bounded here
    thread.start()
    thread.join(REACH_S + 1)
    return answers == [True]


def uv_flags(python: Path) -> list[str] | None:
    """pip's configuration as flags of uv; None when it says something that uv could not follow."""
    if any(name.startswith("UV_") and "INDEX" in name for name in os.environ):
        return []  # the user told uv itself
    found = subprocess.run(
        [str(python), "-m", "pip", "config", "list"], capture_output=True, text=True, encoding="utf-8", errors="replace"
    )
    return translate(found.stdout) if found.returncode == 0 else []


def translate(listing: str) -> list[str] | None:
    """`pip config list` → flags of uv. A later section (`install`, then `:env:`) beats an earlier one, as in pip."""
    settings: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in listing.splitlines():
            entry = ENTRY.match(line)
            if entry and entry[1] == section:
                settings[entry[2]] = str(ast.literal_eval(entry[3]))
    flags: list[str] = []
    for name, value in settings.items():
        if name == "cert":
            if os.environ.get("SSL_CERT_FILE") is None:
                return None
        elif name == "no-index":
            flags += ["--no-index"] if value.lower() in ("1", "true", "yes", "on") else []
        elif name in UV_FLAGS:
            flags += [part for item in value.split() for part in (UV_FLAGS[name], item)]
        elif name not in HARMLESS:
            return None
    if "extra-index-url" in settings:
        flags += ["--index-strategy", "unsafe-best-match"]  # pip's own way: the best version of all indexes
    return flags


def last_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["it said nothing"])[-1][:300]


NETWORK = (
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|timed out|ProxyError|Network is unreachable|"
    r"name resolution|getaddrinfo|Connection refused|Connection aborted|Connection reset|dns error|Failed to fetch"
)


def explain(log: str, folder: Path) -> str | None:
    """One sentence for the failures that people meet; None for any other. On a full disk, `folder` is given back first."""
    if re.search(r"No space left on device|[Ee]rrno 28|os error 28|Disk quota exceeded|not enough space on the disk", log):
        shutil.rmtree(folder, ignore_errors=True)
        return (
            f"the disk became full while installing; the unfinished {folder} was removed: free about 2 GB (with CUDA 8 GB) "
            "(the temporary folder counts too) and run again."
        )
    if re.search(r"CERTIFICATE_VERIFY_FAILED|SSLError|invalid peer certificate", log):
        return (
            "the package index's certificate was not accepted; set PIP_CERT to your network's certificate file, "
            "or check the clock, and run again."
        )
    if re.search(NETWORK, log):
        return (
            "the package index cannot be reached; check the network (or PIP_INDEX_URL, HTTPS_PROXY) and run again: "
            "what was downloaded is kept by pip."
        )
    missing = re.search(r"No matching distribution found for (\S+)", log)
    if missing:
        return (
            f"the package index offers no {missing[1].rstrip('.')} for Python {version()} on {sys.platform}; "
            "check the network and pip's index, or try another Python (3.10 to 3.14, 64 bit)."
        )
    return None


def unexplained(log: str, folder: Path) -> str:
    file = folder / "install.log"
    file.write_text(log, encoding="utf-8")
    return f"installing failed ({last_error(log)}); the whole message is in {file}."


def version() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"
