"""python run_tests.py [pytest options]: linter, type checker and tests, in an environment that it makes itself."""

import os
import sys

if sys.version_info < (3, 10):  # Before any import: the rest is written for newer Pythons and would not even parse.
    sys.stderr.write(
        "error: DFlash Mini Lab needs Python 3.10 or newer; this is Python %d.%d (%s).\n"
        % (sys.version_info[0], sys.version_info[1], sys.executable)
    )
    sys.exit(2)
ROOT = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(ROOT, "src"))

from dflash_mini_lab import bootstrap


def check(argv):  # type: (list[str]) -> int
    """Runs every check even when an earlier one fails; the exit status is the first failure's."""
    import subprocess

    # One test a core, each with one thread: the tests' models are too small to share.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    spread = ["-n", "auto", "--dist", "worksteal", "--durations", "15"]
    commands = [["ruff", "check", "."], ["mypy"], ["pytest"] + spread + [word for word in argv if word != "--no-bootstrap"]]
    failures = []
    for command in commands:
        print("$ " + " ".join(command), flush=True)
        status = subprocess.call([sys.executable, "-m"] + command, cwd=ROOT)
        if status:
            failures.append(status)
    return failures[0] if failures else 0


if __name__ == "__main__":
    sys.exit(bootstrap.launch(__file__, ["requirements-cpu.txt", "requirements-dev.txt"], check))
