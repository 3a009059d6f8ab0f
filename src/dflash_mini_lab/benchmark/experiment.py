"""When are two benchmarks one experiment? Pure. Asked before a run is resumed, and by whoever compares or merges two."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dflash_mini_lab.benchmark_file import Benchmark
from dflash_mini_lab.settings import AXES
from dflash_mini_lab.types import UserError

TARGET_FACTS = ("name", "weights_sha256", "weights_bytes", "dtype", "device", "path", "prompt_format", "chat_template_sha256")
MACHINE_FACTS = ("cpu", "isa", "cores", "threads", "gpu", "python", "torch", "transformers", "blas", "driver", "cuda")
AXIS_OF = {
    "lab_version": "lab",
    "target.dtype": "dtype",
    "target.device": "device",
    "target.path": "path",
    "machine.threads": "threads",
    **{f"machine.{name}": "software" for name in ("python", "torch", "transformers", "blas", "driver", "cuda")},
    "settings.dtype": "dtype",
    "settings.threads": "threads",
    "settings.prompt_limit": "prompts",
}
"""Fields whose axis is not simply where they stand (`target`, `drafter`, `machine`, `prompts`) or their setting's name."""
EFFORT = ("methods", "peers", "repeats", "warmup-cells")
"""Settings that change how much was measured, and not what: a comparison tells of them and goes on."""
LONGEST_LIST = 8


@dataclass(frozen=True)
class Difference:
    """A field that differs. `axis`: the word by which `compare --across` names it."""

    field: str
    axis: str
    one: Any
    other: Any

    @property
    def words(self) -> str:
        return f"{self.field} is {short(self.one)} in A and {short(self.other)} in B"


def differing_field(one: Benchmark, other: Benchmark) -> str | None:
    """The first field that makes them different experiments, with both values; None when they may be merged."""
    for name, (left, right) in _compared(one, other):
        if left != right:
            return f"{name} is {short(left)} there and {short(right)} here"
    return None


def differences(one: Benchmark, other: Benchmark) -> list[Difference]:
    """Every field that differs."""
    return [
        Difference(name, axis_of(name), left, right) for name, (left, right) in _compared(one, other) if left != right
    ]


def axis_of(field: str) -> str:
    """`machine.torch` → software, `settings.verify_width` → verify-width, `drafter.files.model.safetensors` → drafter."""
    if field in AXIS_OF:
        return AXIS_OF[field]
    if field.startswith("prompts.") and field.endswith(".prompt_tokens"):
        return "target"  # the same text in another number of tokens: another tokenizer
    where, _, name = field.partition(".")
    return name.replace("_", "-") if where == "settings" else where


def refuse_unnamed(one: Benchmark, other: Benchmark, across: Iterable[str]) -> None:
    """Raises UserError, one sentence, where they differ in more than `across` names, or where it names nothing known."""
    across = tuple(across)
    if (one["target"]["path"] == "numpy") != (other["target"]["path"] == "numpy"):
        raise UserError("one of these two runs recomputes its sequence at every call: its times stand beside no cached target's.")
    settings = {axis_of(f"settings.{name}") for name in one["settings"].keys() | other["settings"].keys()}
    if unknown := [word for word in across if word not in {*AXES, *settings}]:
        others = ", ".join(sorted(settings - {*AXES, *EFFORT}))
        raise UserError(f"--across knows no {unknown[0]!r}; it names {', '.join(AXES)}, or a setting ({others}).")
    fatal = [found for found in differences(one, other) if found.axis not in (*across, *EFFORT)]
    if not fatal:
        return
    told = "; ".join(found.words for found in fatal[:LONGEST_LIST])
    more = f"; and {len(fatal) - LONGEST_LIST} more" if len(fatal) > LONGEST_LIST else ""
    flag = ",".join(dict.fromkeys([*across, *(found.axis for found in fatal)]))
    raise UserError(f"these are two experiments: {told}{more} (to compare across that on purpose: --across {flag}).")


def shared_prompts(one: Benchmark, other: Benchmark) -> list[str]:
    """Ids of the prompts that both asked in the same words, in the order of `one`."""
    texts = {prompt["id"]: prompt["text"] for prompt in other["prompts"]}
    return [prompt["id"] for prompt in one["prompts"] if texts.get(prompt["id"]) == prompt["text"]]


def _compared(one: Benchmark, other: Benchmark) -> Iterator[tuple[str, tuple[Any, Any]]]:
    yield "lab_version", (one["lab_version"], other["lab_version"])
    for fact in TARGET_FACTS:
        yield f"target.{fact}", (one["target"].get(fact), other["target"].get(fact))
    for fact in MACHINE_FACTS:
        yield f"machine.{fact}", (one["machine"].get(fact), other["machine"].get(fact))
    drafters = [benchmark["drafter"] or {} for benchmark in (one, other)]
    for fact in ("name", "block_size"):
        yield f"drafter.{fact}", (drafters[0].get(fact), drafters[1].get(fact))
    digests = [{file["name"]: file["sha256"] for file in drafter.get("files", ())} for drafter in drafters]
    for name in sorted(digests[0].keys() | digests[1].keys()):
        yield f"drafter.files.{name}", (digests[0].get(name), digests[1].get(name))
    for name in sorted(one["settings"].keys() | other["settings"].keys()):
        yield f"settings.{name}", (one["settings"].get(name), other["settings"].get(name))
    prompts = [{prompt["id"]: prompt for prompt in benchmark["prompts"]} for benchmark in (one, other)]
    yield "prompts", (list(prompts[0]), list(prompts[1]))
    for name, prompt in prompts[0].items():
        for field in ("text", "prompt_tokens") if name in prompts[1] else ():
            yield f"prompts.{name}.{field}", (prompt[field], prompts[1][name][field])


def short(value: Any, limit: int = 60) -> str:
    """A value of benchmark.json in a few words; None is "absent"."""
    text = "absent" if value is None else str(value)
    limit = 13 if len(text) == 64 and text.isalnum() else limit  # a digest
    return text if len(text) <= limit else text[: limit - 1] + "…"
