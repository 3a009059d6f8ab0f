"""python run_cpu.py: makes the environment on the first run, then benchmarks on the CPU. `--help` lists the options."""

import os
import sys

if sys.version_info < (3, 10):  # Before any import: the rest is written for newer Pythons and would not even parse.
    sys.stderr.write(
        "error: DFlash Mini Lab needs Python 3.10 or newer; this is Python %d.%d (%s).\n"
        % (sys.version_info[0], sys.version_info[1], sys.executable)
    )
    sys.exit(2)
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "src"))

from dflash_mini_lab import bootstrap, cli

if __name__ == "__main__":
    settings = cli.parse(sys.argv[1:])  # --help and mistakes are answered at once, before anything is installed.
    sys.exit(bootstrap.launch(__file__, [cli.requirements(settings)], cli.main))
