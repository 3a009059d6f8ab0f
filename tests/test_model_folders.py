"""Every family and format that a folder may hold, from the files on disk to the gate's verdict."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.tiny_folder import TOKENS, family_config, save_family, save_random_drafter
from transformers import PreTrainedConfig

from dflash_mini_lab import packed_linear
from dflash_mini_lab.benchmark.run import run_benchmark
from dflash_mini_lab.benchmark_file import Benchmark, read, schema_errors
from dflash_mini_lab.catalog import resolve
from dflash_mini_lab.drafters import block
from dflash_mini_lab.settings import Settings
from dflash_mini_lab.targets import lean_build, library_target
from dflash_mini_lab.targets.loading import load_target

PROMPT = "why is the sky " + " ".join("abcdefghijklm")  # longer than a window of 12
LEAN = ("llama", "qwen2", "qwen3", "lfm2")


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts.txt").write_text(PROMPT)
    for module in (lean_build, library_target, block):  # nobody needs these products' rates
        monkeypatch.setattr(module, "measure_plan", lambda weights: packed_linear.stock_plan(weights[0]))


def run(folder: Path, tmp_path: Path, config: PreTrainedConfig, **changes: object) -> Benchmark:
    """A run with an untrained drafter of the shape that `--prepare` gives it."""
    settings = {
        "target": str(folder), "artifact_dir": save_random_drafter(tmp_path / "drafter", resolve(str(folder)).name, config),
        "methods": ("00", "01"), "prompts": tmp_path / "prompts.txt", "tokens": 16, "repeats": 1, "warmup_cells": 0,
        "calibration_prompt_limit": 0, "cpu_threads": 1, "cache": tmp_path / "cache", "output_dir": tmp_path / "out",
    }  # fmt: skip
    assert run_benchmark(Settings(**{**settings, **changes}), ["run_cpu.py"]) == 0  # type: ignore[arg-type]
    benchmark = read(tmp_path / "out" / "benchmark.json")
    assert schema_errors(benchmark) == []
    return benchmark


def emitted(benchmark: Benchmark) -> set[int]:
    runs = [run["tokens"] for cell in benchmark["cells"] for run in cell["runs"]]
    return {token for tokens in [*runs, *(entry["tokens"] for entry in benchmark["reference"])] for token in tokens}


def proposed(benchmark: Benchmark) -> set[int]:
    slots = [slot for entry in benchmark["rounds"]["methods"].values() for known in entry["rounds"] for slot in known["slots"]]
    return {token for slot in slots for token in slot["ids"]}


@pytest.mark.parametrize("family", [*LEAN, "gemma3", "mistral"])
def test_every_family_in_bfloat16_shards_with_a_padded_head_is_exact_and_never_emits_padding(
    family: str, tmp_path: Path
) -> None:
    config = family_config(family, vocab_size=TOKENS + 18)
    folder = save_family(tmp_path / "model", config, torch.bfloat16, shards="60KB")
    assert (folder / "model.safetensors.index.json").exists()
    benchmark = run(folder, tmp_path, config, peers=("generate", "prompt-lookup"))
    assert benchmark["gate"]["verdict"] == "exact"
    assert set(benchmark["results"]["arms"]) == {"00", "00'", "01", "generate", "prompt-lookup"}
    assert benchmark["target"]["path"] == ("lean" if family in LEAN else "library")
    vocabulary = benchmark["target"]["vocabulary"]
    assert TOKENS <= vocabulary == benchmark["drafter"]["draft_vocabulary"] <= TOKENS + 1  # Qwen2's tokenizer adds an end of text
    assert max(emitted(benchmark) | proposed(benchmark)) < vocabulary
    assert len(emitted(benchmark)) > 3, "the answers wander"
    stock = load_target("m", folder).stock_model()
    choices = stock(torch.tensor([benchmark["reference"][0]["tokens"]])).logits[0].argmax(-1)
    assert (choices >= vocabulary).float().mean() > 0.2, "left to itself, the model would say padded rows"


@pytest.mark.parametrize(
    ("family", "dtype"), [("lfm2", "float32"), ("lfm2", "float16"), ("lfm2", "bfloat16"), ("gemma3", "bfloat16")]
)
def test_a_run_in_any_number_format_obeys_the_gate(family: str, dtype: str, tmp_path: Path) -> None:
    config = family_config(family)
    folder = save_family(tmp_path / "model", config, torch.float16)
    benchmark = run(folder, tmp_path, config, dtype=dtype)
    assert benchmark["target"]["dtype"] == dtype
    assert benchmark["gate"]["verdict"] in ("exact", "ties")
