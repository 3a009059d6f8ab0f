"""The study's families from text to gate: a small LFM2 and a small Qwen3 built, prepared and measured by every method.

What docs/results/small-lfm2 and small-qwen3 record was made by the same calls with the builder's own recipes.
"""
from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.commands import ROOT

from dflash_mini_lab import cli
from dflash_mini_lab.benchmark_file import read, schema_errors
from dflash_mini_lab.methods import METHODS
from dflash_mini_lab.prompts import load_prompts
from dflash_mini_lab.targets.loading import load_target

sys.path.insert(0, str(ROOT / "tools"))
import build_small
import condense

FAMILIES = ("lfm2", "qwen3")
PROMPTS, TOKENS = 20, 8
RECORDS = [ROOT / "docs" / "results" / f"small-{family}" / "record.json" for family in FAMILIES]


def short(family: str) -> build_small.Recipe:
    """The recipe's model with fewer layers and narrower, on two modules' text, for seconds of training."""
    recipe = build_small.RECIPES[family]
    layers = {"lfm2": {"num_hidden_layers": 4, "full_attn_idxs": [2]}, "qwen3": {"num_hidden_layers": 4}}[family]
    narrow = {"hidden_size": 64, "intermediate_size": 128}
    return replace(
        recipe, model={**recipe.model, **narrow, **layers}, modules="models/b*/modeling_*.py", vocabulary=512, steps=16, rows=8,
        row_tokens=96, prompts=PROMPTS,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_model_is_built_prepared_and_exact_under_every_method(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_LAB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "small"
    build_small.build(short(family), folder)
    check_what_was_built(folder, family)
    assert cli.main(["--target", str(folder), "--prepare", "--prepare-minutes", "0.2", "--cpu-threads", "1"]) == 0
    words = ["--target", str(folder), "--prompts", str(folder / "prompts.json"), "--prompt-limit", str(PROMPTS)]
    small = ["--tokens", str(TOKENS), "--repeats", "1", "--calibration-prompt-limit", "1", "--calibration-tokens", "8"]
    assert cli.main([*words, *small, "--cpu-threads", "1", "--output-dir", str(tmp_path / "out")]) == 0
    benchmark = read(tmp_path / "out" / "benchmark.json")
    assert schema_errors(benchmark) == []
    assert benchmark["gate"]["verdict"] == "exact"
    assert benchmark["target"]["path"] == "lean"
    arms = benchmark["results"]["arms"]
    assert [key for key in arms if not key.endswith("'")] == [method.key for method in METHODS]
    assert {arm["exact_runs"] for arm in arms.values()} == {PROMPTS}


def test_the_layers_are_the_real_model_s() -> None:
    import random_target

    for family, real in (("lfm2", "lfm2.5-350m"), ("qwen3", "qwen3-0.6b")):
        small, shape = build_small.RECIPES[family].model, random_target.SHAPES[real]
        for name in ("model_type", "num_hidden_layers", "full_attn_idxs"):
            assert small.get(name) == shape.get(name), name
        assert small["num_attention_heads"] / small["num_key_value_heads"] == 2
    assert small["head_dim"] * small["num_attention_heads"] != small["hidden_size"]


def check_what_was_built(folder: Path, family: str) -> None:
    """Prompts that are not in the training text, START before LFM2's and nothing before Qwen3's, and Qwen3's padded rows."""
    training, _ = build_small.modules_text(short(family))
    text = " ".join(" ".join(paragraph.split()) for module in training for paragraph in module)
    prompts = load_prompts(folder / "prompts.json")
    assert len({prompt.text for prompt in prompts}) == PROMPTS
    assert not [prompt.text for prompt in prompts if prompt.text in text]
    loaded = load_target(folder.name, folder)
    assert loaded.config.vocab_size - loaded.vocabulary == build_small.RECIPES[family].unused_rows
    assert loaded.prompt_format == "plain"
    ids = loaded.encode_prompt(prompts[0].text)
    assert (ids[0] == loaded.tokenizer.bos_token_id) == (family == "lfm2")
    assert loaded.decode_text(ids) == prompts[0].text


def test_a_second_build_is_the_same(tmp_path: Path) -> None:
    recipe = replace(short("lfm2"), steps=2)
    for name in ("one", "two"):
        build_small.build(recipe, tmp_path / name)
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "prompts.json", "provenance.json"} <= names
    assert [name for name in names if (tmp_path / "one" / name).read_bytes() != (tmp_path / "two" / name).read_bytes()] == []


@pytest.mark.parametrize("path", [path for path in RECORDS if path.exists()], ids=lambda path: path.parent.name)
def test_the_record_of_the_real_run_holds_what_the_documents_say(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["gate"]["verdict"] == "exact"
    assert record["answers"]["prompts"] >= 200
    arms = record["results"]["arms"]
    assert [key for key in arms if not key.endswith("'")] == [method.key for method in METHODS[:15]], "older than method 15"
    assert {arm["exact_runs"] for arm in arms.values()} == {record["answers"]["prompts"]}
    assert arms["01"]["tau_macro"] >= 1.5


def test_an_answer_that_goes_round_in_circles_is_seen() -> None:
    assert condense.loops([9, 8, 1, 2, 1, 2, 1, 2])
    assert condense.loops([5, 5, 5])
    assert not condense.loops([1, 2, 1, 2, 1, 3])
    assert not condense.loops(list(range(64)))
