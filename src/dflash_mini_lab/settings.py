"""Every default, every flag, every environment variable, and which of them wins. Nothing below this file reads the environment.

One literal table (`OPTIONS`) serves the parser of the command line and the resolution here. Standard library only: the
runner reads it before anything is installed. What a method or a target is called is not known here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

DEFAULT_TARGET = "smollm2-135m"
CANONICAL_TARGET = "lfm2.5-350m"
TINY_TARGET = "tiny"
DTYPES = ("float32", "bfloat16", "float16")
PEERS = ("generate", "prompt-lookup")
FULL_LOGITS, NO_BONUS, FULL_VOCABULARY, EXACT_DRAFTER, STOCK_LINEAR = ABLATIONS = (
    "full-logits",
    "no-bonus",
    "full-vocabulary",
    "exact-drafter",
    "stock-linear",
)
"""What a run can leave out of what makes it fast (docs/performance.md). The text stays the same."""
AXES = ("lab", "target", "path", "dtype", "device", "drafter", "machine", "threads", "software", "prompts", "ablations")
"""What `compare --across` may name, beside the name of any setting."""


@dataclass(frozen=True)
class Settings:
    """What one run does. Made by `resolve`, changed only by `dataclasses.replace`."""

    target: str = DEFAULT_TARGET
    """A name of the catalogue, a folder, a GGUF file, or a hub id."""
    cache: Path = Path()
    """Folder for what is fetched or prepared once; `resolve` fills it in."""
    artifact_dir: Path | None = None
    artifact_base_url: str | None = None
    artifact_release_tag: str | None = None
    refresh_artifacts: bool = False
    download_only: bool = False
    prepare: bool = False
    prepare_minutes: float | None = None
    """None: as long as the target's recipe asks."""
    smoke: bool = False
    tokens: int = 64
    repeats: int = 3
    prompt_limit: int = 6
    prompts: Path | None = None
    """The user's own prompts instead of the lab's."""
    warmup_cells: int = 1
    calibration_tokens: int = 24
    calibration_prompt_limit: int = 4
    tune: bool = False
    tuning_repeats: int = 2
    methods: tuple[str, ...] = ()
    """Keys or slugs as given; empty: all. The command line turns them into keys."""
    peers: tuple[str, ...] = ()
    verify_width: int | None = None
    """Rows per verifier call, anchor included; None: tuned, or the drafter's block size."""
    ablate: tuple[str, ...] = ()
    """Of ABLATIONS, in its order."""
    seed: int = 7
    cpu_threads: int | None = None
    """None: one per physical core that this process may use."""
    dtype: str = "float32"
    device: str = "cpu"
    """`cpu` or `cuda`: the runner's, not the user's."""
    check_only: bool = False
    resume: bool = False
    output_dir: Path = Path("cpu-reports")
    no_bootstrap: bool = False


@dataclass(frozen=True)
class CompareSettings:
    """What `compare` is asked for: two files, and the differences between their runs that are meant."""

    one: Path
    other: Path
    across: tuple[str, ...] = ()
    output_dir: Path = Settings.output_dir


SMOKE: Mapping[str, Any] = {
    "tokens": 16,
    "repeats": 1,
    "prompt_limit": 1,
    "calibration_tokens": 4,
    "calibration_prompt_limit": 1,
}


OF_TARGET: Mapping[str, Mapping[str, Any]] = {TINY_TARGET: {"tokens": 24, "prompt_limit": 8, "cpu_threads": 1}}
"""Targets whose defaults differ."""

# How a word becomes a value. Each raises ValueError that says what would have been right.


def whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,12}", text.strip()) or not low <= int(text) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(text)

    return parse


def minutes(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text.strip()) or float(text) <= 0:
        raise ValueError("a number of minutes above 0")
    return float(text)


def filled(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError("some text")
    return text.strip()


def folder(text: str) -> Path:
    return Path(filled(text)).expanduser()


def existing_file(text: str) -> Path:
    path = folder(text)
    if not path.is_file():
        raise ValueError("a file that exists")
    return path


def address(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/]+\S*", text.strip()):
        raise ValueError("an address that starts with https:// or http:// (for a folder there is --artifact-dir)")
    return text.strip().rstrip("/")


def tag(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text.strip()):
        raise ValueError("a release's tag: letters, digits, dots, dashes")
    return text.strip()


def one_of(*known: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip() not in known:
            raise ValueError("one of " + ", ".join(known))
        return text.strip()

    return parse


def words(text: str) -> tuple[str, ...]:
    """`00,01, act` → the words in order, each once."""
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise ValueError("names separated by commas")
    return found


def ablations(text: str) -> tuple[str, ...]:
    """In the order of ABLATIONS, so that the same ones are the same experiment."""
    return tuple(sorted(words_of(*ABLATIONS)(text), key=ABLATIONS.index))


def words_of(*known: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        found = words(text)
        if not set(found) <= set(known):
            raise ValueError("names separated by commas, of " + ", ".join(known))
        return found

    return parse


@dataclass(frozen=True)
class Option:
    """One setting: its flag, the variable that the flag beats, and what a word of the user's becomes. No `parse`: a switch."""

    flag: str
    help: str
    group: str
    parse: Callable[[str], Any] | None = None
    variable: str | None = None
    metavar: str | None = None

    @property
    def field(self) -> str:
        return self.flag.lstrip("-").replace("-", "_")


MODEL, STUDY, ARTIFACTS, MACHINE = "the model", "what is measured", "the drafter's files", "the machine"
OPTIONS = (
    Option(
        "--target",
        f"the model: a name ({DEFAULT_TARGET}, {CANONICAL_TARGET}, ...), a folder, a GGUF file, or a hub id",
        MODEL,
        filled,
        "DFLASH_TARGET",
        "NAME|FOLDER|HUB-ID",
    ),
    Option("--dtype", "number format of a benchmark's weights: " + ", ".join(DTYPES), MODEL, one_of(*DTYPES), metavar="TYPE"),
    Option("--smoke", "the smallest real run: 1 prompt, 16 tokens, 1 repeat", STUDY),
    Option("--tokens", "new tokens per answer", STUDY, whole(1, 100_000), "CPU_TOKENS", "N"),
    Option("--repeats", "how often each prompt is answered by each method", STUDY, whole(1, 1000), "CPU_REPEATS", "N"),
    Option("--prompt-limit", "use the first N prompts", STUDY, whole(1, 100_000), "CPU_PROMPT_LIMIT", "N"),
    Option(
        "--prompts",
        "your own prompts instead of the lab's: JSON, or text with one prompt a line",
        STUDY,
        existing_file,
        metavar="FILE",
    ),
    Option("--methods", "only these methods (method 00 is always measured), such as 00,01,08", STUDY, words, metavar="LIST"),
    Option("--peers", "other implementations to measure as well: " + ", ".join(PEERS), STUDY, words_of(*PEERS), metavar="LIST"),
    Option(
        "--verify-width",
        "rows per verifier call, anchor included (default: the block; beats --tune)",
        STUDY,
        whole(2, 64),
        metavar="N",
    ),
    Option(
        "--calibration-tokens",
        "new tokens per answer while settings are chosen",
        STUDY,
        whole(1, 100_000),
        "CPU_CALIBRATION_TOKENS",
        "N",
    ),
    Option(
        "--calibration-prompt-limit",
        "prompts used to choose settings; 0: keep the defaults",
        STUDY,
        whole(0, 100_000),
        "CPU_CALIBRATION_PROMPT_LIMIT",
        "N",
    ),
    Option("--tune", "choose each method's verify width on the calibration prompts, beside the cost model's choice", STUDY),
    Option("--tuning-repeats", "how often --tune tries each width on each prompt", STUDY, whole(1, 1000), metavar="N"),
    Option("--ablate", "run without what makes it fast: " + ", ".join(ABLATIONS), STUDY, ablations, "CPU_ABLATE", "LIST"),
    Option("--seed", "seed of the schedule and of every random choice", STUDY, whole(0, 2**31 - 1), metavar="N"),
    Option("--resume", "continue the interrupted run in the output folder", STUDY),
    Option("--prepare", "train a drafter and its heads for the target, instead of a benchmark", ARTIFACTS),
    Option(
        "--prepare-minutes",
        "how long to prepare, answers and heads included (default: the target's recipe)",
        ARTIFACTS,
        minutes,
        metavar="N",
    ),
    Option("--download-only", "fetch and verify the model and the drafter, then stop", ARTIFACTS),
    Option("--artifact-dir", "folder with the drafter's files", ARTIFACTS, folder, metavar="FOLDER"),
    Option(
        "--artifact-base-url",
        "where the drafter's files are downloaded from",
        ARTIFACTS,
        address,
        "DFLASH_ARTIFACT_BASE_URL",
        "URL",
    ),
    Option("--artifact-release-tag", "release under that address", ARTIFACTS, tag, metavar="TAG"),
    Option("--refresh-artifacts", "download the drafter's files again", ARTIFACTS),
    Option("--cpu-threads", "threads of the linear algebra", MACHINE, whole(1, 4096), "CPU_THREADS", "N"),
    Option("--output-dir", "folder for benchmark.json and the report", MACHINE, folder, metavar="FOLDER"),
    Option("--no-bootstrap", "use this Python as it is; make no .venv", MACHINE),
)


@dataclass(frozen=True)
class Runner:
    """One of the two commands: its options, and the settings in which it starts out differently."""

    script: str
    options: tuple[Option, ...]
    start: Mapping[str, Any]


def on_gpu(option: Option) -> Option:
    """The GPU runner's: `GPU_TOKENS` for `CPU_TOKENS`; threads stay the processor's."""
    if option.flag == "--dtype":
        return replace(option, variable="LFM_GPU_DTYPE")
    if option.variable and option.variable.startswith("CPU_") and option.variable != "CPU_THREADS":
        return replace(option, variable=option.variable.replace("CPU_", "GPU_", 1))
    return option


CPU = Runner("run_cpu.py", OPTIONS, {})
GPU = Runner(
    "run_gpu.py",
    (
        *map(on_gpu, OPTIONS),
        Option("--check-only", "say which GPU and CUDA are here, check one product on them, and stop", MACHINE),
    ),
    {"device": "cuda", "dtype": "float16", "output_dir": Path("gpu-reports")},
)


def resolve(given: Mapping[str, str | bool | None], environ: Mapping[str, str], runner: Runner = CPU) -> Settings:
    """Settings from the words on the command line (by field name; None or False: not given) and the environment.

    A flag beats `--smoke`, which beats a variable, which beats the default. An empty variable counts as unset. What is asked
    for decides whose defaults they are: the target's own, where it has any.
    Raises ValueError, one line that names the flag or variable with the bad value and says what would have been right.
    """
    from_variables = {
        option.field: convert(option, environ[option.variable], option.variable)
        for option in runner.options
        if option.variable and environ.get(option.variable, "").strip() and given.get(option.field) is None
    }
    from_flags = {
        option.field: True if option.parse is None else convert(option, str(given[option.field]), option.flag)
        for option in runner.options
        if given.get(option.field) not in (None, False)
    }
    smoke = SMOKE if from_flags.get("smoke") else {}
    asked = {**from_variables, **smoke, **from_flags}
    if asked.get("prepare") and "dtype" in from_flags:
        raise ValueError("--dtype is a benchmark's: --prepare takes bfloat16 where that is faster, else float32; leave it out.")
    settings = Settings(**{**runner.start, **OF_TARGET.get(asked.get("target", DEFAULT_TARGET), {}), **asked})
    refuse_contradictions(settings)
    return replace(settings, cache=cache_folder(environ))


def resolve_comparison(given: Mapping[str, Any], runner: Runner = CPU) -> CompareSettings:
    """The words of `compare`'s command line as settings. Raises ValueError, one line that names the bad one."""
    one, other = (convert(Option(name, "", "", existing_file), given[name], name) for name in ("A.json", "B.json"))
    across, output = given["across"], given["output_dir"]
    meant = () if across is None else convert(Option("--across", "", "", words), across, "--across")
    usual = defaults(runner)["output_dir"]
    where = usual if output is None else convert(Option("--output-dir", "", "", folder), output, "--output-dir")
    return CompareSettings(one, other, tuple(word.replace("_", "-") for word in meant), where)


def convert(option: Option, text: str, name: str) -> Any:
    assert option.parse is not None
    try:
        return option.parse(text)
    except ValueError as error:
        raise ValueError(f"{name}: {text!r} is not {error}.") from None


def refuse_contradictions(settings: Settings) -> None:
    if settings.target == TINY_TARGET and settings.device != "cpu":
        raise ValueError(f"--target {TINY_TARGET}: it runs on NumPy alone; python run_cpu.py --target {TINY_TARGET} measures it.")
    if settings.device != "cpu":
        for name in sorted({STOCK_LINEAR, EXACT_DRAFTER} & set(settings.ablate)):
            raise ValueError(f"--ablate {name}: on a GPU every linear layer is the stock one already; leave it out.")
    if settings.prepare and settings.download_only:
        raise ValueError("--prepare and --download-only exclude each other.")
    if settings.tune and not settings.calibration_prompt_limit:
        raise ValueError("--tune needs calibration prompts, and --calibration-prompt-limit is 0.")
    if settings.artifact_release_tag and not settings.artifact_base_url:
        raise ValueError("--artifact-release-tag needs --artifact-base-url or DFLASH_ARTIFACT_BASE_URL.")
    if settings.refresh_artifacts and not settings.artifact_base_url:
        raise ValueError("--refresh-artifacts needs --artifact-base-url or DFLASH_ARTIFACT_BASE_URL.")


def cache_folder(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """`DFLASH_LAB_CACHE`, else the user's cache folder as this system has it."""
    if environ.get("DFLASH_LAB_CACHE", "").strip():
        return Path(environ["DFLASH_LAB_CACHE"].strip()).expanduser()
    if platform == "win32":
        parent = Path(environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif platform == "darwin":
        parent = Path.home() / "Library" / "Caches"
    else:
        parent = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return parent / "dflash-mini-lab"


def defaults(runner: Runner = CPU) -> dict[str, Any]:
    """Field → default, for the help text."""
    return {field.name: field.default for field in fields(Settings)} | dict(runner.start)


def from_environment(given: Mapping[str, str | bool | None], runner: Runner = CPU) -> Settings:
    """`resolve` with this process's environment."""
    return resolve(given, os.environ, runner)
