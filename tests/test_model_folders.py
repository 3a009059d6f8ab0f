"""Every family and format that a folder may hold, from the files on disk to the gate's verdict."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.tiny_folder import TOKENS, family_config, save_family, save_random_drafter
from transformers import AutoConfig, PreTrainedConfig

from dflash_mini_lab import cli, packed_linear
from dflash_mini_lab.benchmark.loading import unpadded
from dflash_mini_lab.benchmark.run import run_benchmark
from dflash_mini_lab.benchmark_file import Benchmark, read, schema_errors
from dflash_mini_lab.catalog import resolve
from dflash_mini_lab.drafters import block
from dflash_mini_lab.drafters.checkpoint import DRAFT_TO_TARGET
from dflash_mini_lab.settings import Settings
from dflash_mini_lab.targets import lean_build, library_target
from dflash_mini_lab.targets.loading import load_target
from dflash_mini_lab.training.recipe import Recipe, drafter_config
from dflash_mini_lab.types import UserError

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


@pytest.mark.slow
def test_a_drafter_is_trained_for_a_model_that_runs_through_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_LAB_CACHE", str(tmp_path / "cache"))
    folder = save_family(tmp_path / "model", family_config("gemma3", vocab_size=TOKENS + 18))
    assert cli.main(["--target", str(folder), "--prepare", "--prepare-minutes", "0.15", "--cpu-threads", "1"]) == 0
    words = ["--target", str(folder), "--methods", "01,02", "--prompts", str(tmp_path / "prompts.txt"), "--tokens", "16"]
    words += ["--repeats", "1", "--calibration-prompt-limit", "0", "--cpu-threads", "1"]
    assert cli.main([*words, "--output-dir", str(tmp_path / "out")]) == 0
    benchmark = read(tmp_path / "out" / "benchmark.json")
    assert benchmark["gate"]["verdict"] == "exact"
    assert benchmark["drafter"]["draft_vocabulary"] == TOKENS
    assert max(emitted(benchmark) | proposed(benchmark)) < TOKENS


def test_a_drafter_s_own_padded_columns_are_left_out() -> None:
    config = drafter_config(Recipe(), family_config("llama"), "m", 3, 40)
    for ids, kept in (([1, 5, 21, 22, 30], [1, 5, 21]), ([0, 2], [0, 2])):
        _, tensors = unpadded((config, {DRAFT_TO_TARGET: torch.tensor(ids)}), TOKENS)
        assert tensors[DRAFT_TO_TARGET].tolist() == kept


# What is refused, by name.


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (AutoConfig.for_model("mamba"), "type 'mamba' cannot be rolled back: its layers fold every token into a recurrent state"),
        (AutoConfig.for_model("jamba"), "type 'jamba' cannot be rolled back.* It would need the state after each row"),
        (AutoConfig.for_model("rwkv"), "type 'rwkv' cannot be rolled back"),
        (AutoConfig.for_model("qwen3_next"), "type 'qwen3_next' cannot be rolled back"),
        (AutoConfig.for_model("t5"), "type 't5' is an encoder-decoder"),
        (AutoConfig.for_model("bart"), "type 'bart' is an encoder-decoder"),
        (AutoConfig.for_model("gemma3"), r"type 'gemma3' is multimodal \(vision beside text\).* \(type 'gemma3_text'\) may run"),
        (AutoConfig.for_model("lfm2_vl"), r"type 'lfm2_vl' is multimodal \(vision beside text\)"),
        (AutoConfig.for_model("bert"), "type 'bert' is an encoder: its tokens see those after them"),
        (AutoConfig.for_model("vit"), "type 'vit' is no causal language model"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_what_cannot_be_run_is_refused_before_its_weights_are_read(config: PreTrainedConfig, words: str, tmp_path: Path) -> None:
    config.save_pretrained(str(tmp_path))
    with pytest.raises(UserError, match=f"a model of {words}"):
        load_target("m", tmp_path)
