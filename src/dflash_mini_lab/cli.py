"""The command line: one parser, and one short function for each command. Importing it loads neither torch nor numpy."""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from dflash_mini_lab import __version__
from dflash_mini_lab.settings import (
    AXES,
    CANONICAL_TARGET,
    CPU,
    DEFAULT_TARGET,
    GPU,
    TINY_TARGET,
    CompareSettings,
    Option,
    Runner,
    Settings,
    defaults,
    from_environment,
    resolve_comparison,
)

EPILOG = f"""examples (run_cpu.py measures on the CPU, run_gpu.py on a CUDA GPU):
  python run_cpu.py                                the default study: {DEFAULT_TARGET}, PyPI is all it needs
  python run_cpu.py --smoke                        the same in miniature
  python run_cpu.py --target {TINY_TARGET}                  a two-layer reference in NumPy: everything in a minute
  python run_cpu.py --target {CANONICAL_TARGET}           the canonical study
  python run_cpu.py --methods 00,01 --peers generate,prompt-lookup
  python run_cpu.py --ablate no-bonus              without a part of what makes it fast: docs/performance.md
  python run_cpu.py --target ./my-model --prepare --prepare-minutes 60
  python run_cpu.py --resume                       continue after an interruption
  python run_cpu.py compare A.json B.json --across threads      two finished runs, method by method

environment:
  DFLASH_LAB_CACHE        folder for models and prepared drafters (default: in your cache folder)
  DFLASH_TORCH_INDEX      index that PyTorch is taken from; empty: the default index
  HF_HOME, HF_HUB_OFFLINE and the other variables of huggingface_hub work as usual;
  so does pip's configuration. A flag beats its variable.

exit status: 0 well; 2 usage or environment; 3 the output was not proved unchanged; 130 interrupted"""


ON_A_CPU_ONLY = (f"--target {TINY_TARGET} ",)
"""Examples that `run_gpu.py` would refuse."""
NUMPY_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the whole usage."""
        self.exit(2, f"error: {message.rstrip('.')}. (--help lists all options.)\n")


def build_parser(runner: Runner = CPU) -> Parser:
    parser = Parser(
        prog=runner.script,
        description="Is speculative decoding worth it for this model on this machine? With proof that the output is unchanged.",
        epilog=examples_of(runner),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"DFlash Mini Lab {__version__}")
    known_defaults = defaults(runner)
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(option.group for option in runner.options)}
    for option in runner.options:
        text = describe(option, known_defaults[option.field])
        if option.parse is None:
            groups[option.group].add_argument(option.flag, action="store_true", help=text)
        else:
            groups[option.group].add_argument(option.flag, metavar=option.metavar, help=text)
    return parser


def examples_of(runner: Runner) -> str:
    """EPILOG in the runner's own name, without what only a CPU does."""
    lines = [line for line in EPILOG.splitlines() if runner is CPU or not any(word in line for word in ON_A_CPU_ONLY)]
    return "\n".join(lines).replace("python run_cpu.py", f"python {runner.script}")


COMPARE = "compare"
COMPARE_EPILOG = f"""example:
  python run_cpu.py compare cpu-reports/benchmark.json other/benchmark.json --across machine,threads

Two runs that differ in more than how much they measured are two experiments, and refused; the refusal names the fields.
--across takes {", ".join(AXES)},
or the name of a setting, such as tokens or verify-width. With prompts, those that both asked in the same words are compared.

exit status: 0 well; 2 refused, or a file that cannot be read"""


def build_compare_parser(runner: Runner = CPU) -> Parser:
    parser = Parser(
        prog=f"{runner.script} {COMPARE}",
        description="Per method, run A's decode time per token over run B's, with its interval; or the fields that forbid it.",
        epilog=COMPARE_EPILOG.replace("run_cpu.py", runner.script),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("A.json", help="benchmark.json of a run")
    parser.add_argument("B.json", help="benchmark.json of another")
    parser.add_argument("--across", metavar="LIST", help="what the two runs differ in on purpose")
    place = defaults(runner)["output_dir"]
    parser.add_argument("--output-dir", metavar="FOLDER", help=f"folder for compare.html (default {place})")
    parser.add_argument("--no-bootstrap", action="store_true", help="use this Python as it is; make no .venv")
    return parser


def describe(option: Option, default: object) -> str:
    notes = [f"default {default}"] if default not in (None, False, (), "") else []
    if option.variable:
        notes.append(option.variable)
    text = f"{option.help} ({'; '.join(notes)})" if notes else option.help
    return text.replace("%", "%%")


def parse(argv: Sequence[str], runner: Runner = CPU) -> Settings | CompareSettings:
    """Settings from `argv` and the environment. A mistake ends the process: one line on stderr, exit status 2."""
    make_printable()
    comparing = list(argv[:1]) == [COMPARE]
    parser = build_compare_parser(runner) if comparing else build_parser(runner)
    given = vars(parser.parse_args(argv[1:] if comparing else argv))
    try:
        return resolve_comparison(given, runner) if comparing else from_environment(given, runner)
    except ValueError as error:
        parser.error(str(error))


def main(argv: Sequence[str], runner: Runner = CPU) -> int:
    """Run the command that `argv` asks for; returns the exit status."""
    settings = parse(argv, runner)
    return with_exit_status(lambda: compare(settings) if isinstance(settings, CompareSettings) else run(settings, argv))


def requirements(settings: Settings | CompareSettings) -> str:
    """The file of the packages that this command needs."""
    tiny = isinstance(settings, Settings) and settings.target == TINY_TARGET
    return "requirements-tiny.txt" if tiny else "requirements-cpu.txt"


def limit_numpy_threads(settings: Settings) -> None:
    """NumPy reads its number of threads when it is loaded and cannot be told later, so this comes before anything loads it."""
    if settings.target == TINY_TARGET:
        os.environ.update(dict.fromkeys(NUMPY_THREADS, str(settings.cpu_threads or 1)))


def keep_compiled_code(settings: Settings) -> None:
    """Numba keeps what it compiled beside the source; where nothing can be written there, it is told so before it is loaded."""
    if not os.access(os.path.dirname(__file__), os.W_OK):
        os.environ.setdefault("NUMBA_CACHE_DIR", str(settings.cache / "compiled"))


def run(settings: Settings, argv: Sequence[str]) -> int:
    limit_numpy_threads(settings)
    keep_compiled_code(settings)
    if settings.device != "cpu":
        from dflash_mini_lab.measurement.gpu import check

        check(say, settings.dtype)
    if settings.check_only:
        return 0
    announce(settings)
    if settings.download_only:
        return download(settings)
    if settings.prepare:
        return prepare(settings)
    return benchmark(settings, argv)


def benchmark(settings: Settings, argv: Sequence[str]) -> int:
    from dflash_mini_lab.benchmark import run_benchmark

    return run_benchmark(with_known_methods(settings), argv)


def compare(settings: CompareSettings) -> int:
    from dflash_mini_lab.benchmark import comparison
    from dflash_mini_lab.report import write_comparison
    from dflash_mini_lab.report.comparison import summary
    from dflash_mini_lab.types import UserError

    one, other = (comparison.read_whole(path) for path in (settings.one, settings.other))
    found = comparison.compare((str(settings.one), str(settings.other)), one, other, settings.across)
    try:
        page = write_comparison(found, settings.output_dir)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{settings.output_dir}: the page cannot be written there ({error.strerror}).") from error
    say(summary(found, shutil.get_terminal_size().columns, sys.stdout.encoding))
    say(f"Page: {page}")
    return 0


def prepare(settings: Settings) -> int:
    if settings.target == TINY_TARGET:
        return fail(f"{TINY_TARGET} is not prepared, it is built: python tools/build_tiny.py")
    from dflash_mini_lab.training.prepare import prepare as train

    folder = train(settings)
    say(f"The drafter is in {folder}")
    return 0


def download(settings: Settings) -> int:
    from dflash_mini_lab.artifacts import locate
    from dflash_mini_lab.catalog import resolve
    from dflash_mini_lab.targets.weights import fetch

    entry = resolve(settings.target)
    if entry.kind != "repository":
        say(f"The model is in {fetch(entry, settings.cache, say)}")
    artifacts = locate(settings, entry.name, say)
    say(f"The drafter is in {artifacts}" if artifacts else "No drafter is published for this target: a run will train one first.")
    return 0


def with_known_methods(settings: Settings) -> Settings:
    """Methods as keys in the table's order, method 00 always first; none stays none, which is every one that can run.

    Raises UserError that lists the known ones.
    """
    from dflash_mini_lab.methods import METHODS, by_key

    asked = {by_key(word).key for word in settings.methods}
    return replace(settings, methods=tuple(method.key for method in METHODS if asked and method.key in asked | {"00"}))


def announce(settings: Settings) -> None:
    """The first lines of every run: which target this is, and which one the canonical study is."""
    from dflash_mini_lab.catalog import resolve

    entry = resolve(settings.target)
    say(f"DFlash Mini Lab {__version__}. Target: {entry.name} ({entry.source}, licence: {entry.license or 'see its card'}).")
    if entry.name != CANONICAL_TARGET:
        script = (CPU if settings.device == "cpu" else GPU).script
        say(f"The canonical study is: python {script} --target {CANONICAL_TARGET}")


def with_exit_status(command: Callable[[], int]) -> int:
    """A user's mistake is one line on stderr and status 2, an interrupt 130; anything else is a bug and keeps its traceback."""
    from dflash_mini_lab.types import UserError

    try:
        return command()
    except UserError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        say_error("Interrupted. What was done is kept: --resume continues a benchmark, the same command goes on with --prepare.")
        return 130
    except OSError as error:
        if is_closed_pipe(error):  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return fail(f"the disk is full{f' at {error.filename}' if error.filename else ''}; free some space and run again.")
        if error.errno in CANNOT_WRITE and error.filename:
            places = "--output-dir, --artifact-dir, DFLASH_LAB_CACHE"
            return fail(f"{error.filename}: {error.strerror}. Choose another place ({places}).")
        raise


def is_closed_pipe(error: OSError, windows: bool = sys.platform == "win32") -> bool:
    """Whether nobody reads what is printed any more. Windows says that an argument is invalid."""
    return isinstance(error, BrokenPipeError) or (windows and error.errno == errno.EINVAL and error.filename is None)


def fail(sentence: str) -> int:
    say_error("error: " + " ".join(sentence.split()))
    return 2


def say(line: str) -> None:
    print(line, flush=True)


def say_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def make_printable() -> None:
    """A console that cannot show a character shows `?` in its place; it never ends the run."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
