"""When are two benchmarks one experiment? Pure. Asked before a run is resumed, and by whoever compares or merges two."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash_mini_lab.benchmark_file import Benchmark

TARGET_FACTS = ("name", "weights_sha256", "weights_bytes", "dtype", "device", "path", "prompt_format", "chat_template_sha256")
MACHINE_FACTS = ("cpu", "isa", "cores", "threads", "gpu", "python", "torch", "transformers", "blas")


def differing_field(one: Benchmark, other: Benchmark) -> str | None:
    """The first field that makes them different experiments, with both values; None when they may be merged."""
    for name, (left, right) in _compared(one, other):
        if left != right:
            return f"{name} is {_short(left)} there and {_short(right)} here"
    return None


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
        for field in ("text", "prompt_tokens"):
            yield f"prompts.{name}.{field}", (prompt[field], prompts[1][name][field])


def _short(value: Any, limit: int = 60) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
