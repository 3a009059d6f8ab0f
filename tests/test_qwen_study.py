"""`--target qwen3-0.6b` from `--prepare` to the report, with a tiny random Qwen3 where the model would be."""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.tiny_folder import refuse_sockets, save_tiny_model

from dflash_mini_lab import artifacts, cli
from dflash_mini_lab.benchmark_file import read, schema_errors
from dflash_mini_lab.catalog import TARGETS
from dflash_mini_lab.drafters.checkpoint import load_checkpoint
from dflash_mini_lab.methods import METHODS
from dflash_mini_lab.prompts import load_prompts, training_seeds
from dflash_mini_lab.training import prepare, prompts
from dflash_mini_lab.training.recipe import RECIPES, drafter_config
from dflash_mini_lab.types import UserError

NAME = "qwen3-0.6b"
FEW_PROMPTS = ("--prompt-limit", "2", "--calibration-prompt-limit", "1", "--calibration-tokens", "6")
SMALL = ("--tokens", "12", "--repeats", "1", *FEW_PROMPTS)


def test_the_recipe_is_the_study_s() -> None:
    class Target:
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads = 1024, 3072, 28, 16, 8
        head_dim, rms_norm_eps, rope_parameters = 128, 1e-6, {"rope_theta": 1e6}

    config = drafter_config(RECIPES[NAME], Target, NAME, 151656, 151936)
    assert (config.taps, config.window, config.block_size, config.layers) == ((4, 14, 27), 16, 6, 2)
    assert (config.hidden_size, config.target_hidden_size) == (256, 1024)
    assert (config.heads, config.kv_heads, config.head_dim) == (8, 8, 32)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of a machine on which `--prepare` has run; the catalogue's entry points at the tiny model."""
    home = tmp_path_factory.mktemp("study")
    folder = save_tiny_model(home / "model", family="qwen3")
    with pytest.MonkeyPatch.context() as patch:
        refuse_sockets(patch)
        patch.setenv("DFLASH_LAB_CACHE", str(home / "cache"))
        patch.setitem(TARGETS, NAME, replace(TARGETS[NAME], kind="folder", source=str(folder)))
        small = {"tap_layers": (0, 2, 3), "width": 32, "heads": 4, "window": 4, "draft_vocabulary": 20}
        short = {"teacher_batch": 32, "answer_tokens": 24, "own_prompt_tokens": 24}
        patch.setitem(RECIPES, NAME, replace(RECIPES[NAME], **small, **short))
        ticking = SimpleNamespace(monotonic=(tick / 20 for tick in count()).__next__)
        for module in (prepare, prompts):  # as many batches of data on any machine
            patch.setattr(module, "time", ticking)
        seen: list[Path] = []
        measured = [p.text for path in (TARGETS[NAME].prompt_file, TARGETS[NAME].calibration_file) for p in load_prompts(path)]
        made, sampled = prepare.training_texts, prepare.own_prompts

        def watched(own: list[str], seeds: Path, seed: int) -> list[str]:
            seen.append(seeds)
            assert not set(own) & set(measured), "the target wrote a prompt itself, and it is not trained on"
            return made(own, seeds, seed)

        patch.setattr(prepare, "training_texts", watched)
        patch.setattr(prepare, "own_prompts", lambda *arguments: [*sampled(*arguments), *measured])
        assert cli.main(["--target", NAME, "--prepare", "--prepare-minutes", "0.2", "--cpu-threads", "1"]) == 0
        assert seen == [TARGETS[NAME].training_file]
        yield home


@pytest.mark.slow
def test_prepare_makes_the_recipe_s_drafter_from_the_target_s_own_seeds(study: Path) -> None:
    assert len(list(training_seeds(TARGETS[NAME].training_file))) == 24
    folder = artifacts.prepared_folder(study / "cache", NAME)
    config, _ = load_checkpoint(folder)
    assert (config.hidden_size, config.target_hidden_size, config.window, config.taps) == (32, 64, 4, (0, 2, 3))
    assert config.target_name == NAME
    assert config.tokenizer_sha256
    facts = json.loads((folder / "provenance.json").read_text())
    assert 0 < facts["draft_vocabulary_coverage"] <= 1
    assert facts["recipe"]["window"] == 4


@pytest.mark.slow
def test_all_sixteen_paths_are_exact_and_act_s_threshold_comes_from_the_calibration_openings(study: Path) -> None:
    """Among them the study's three arms, 00, 01 and 08. No prefill is in a decode time."""
    out = study / "report"
    assert cli.main(["--target", NAME, "--output-dir", str(out), "--cpu-threads", "1", *SMALL]) == 0
    benchmark = read(out / "benchmark.json")
    assert schema_errors(benchmark) == []
    assert benchmark["gate"]["verdict"] == "exact"
    assert [arm["key"] for arm in benchmark["arms"]] == ["00", "00'", *(method.key for method in METHODS[1:])]
    assert [prompt["id"] for prompt in benchmark["prompts"]] == [p.id for p in load_prompts(TARGETS[NAME].prompt_file)][:2]
    assert benchmark["calibration"]["prompts"] == [p.id for p in load_prompts(TARGETS[NAME].calibration_file)][:1]
    grid = [trial["settings"]["threshold"] for trial in benchmark["calibration"]["methods"]["08"]["trials"]]
    assert grid == [0.0, 0.25, 0.5, 1.0, 1.5, 2.0]
    (act,) = (arm for arm in benchmark["arms"] if arm["key"] == "08")
    assert (act["settings_source"], act["verify_width"]) == ("calibrated", 6)
    assert (benchmark["drafter"]["hidden_size"], benchmark["drafter"]["feature_window"]) == (32, 4)
    for run in (run for cell in benchmark["cells"] for run in cell["runs"]):
        phases = sum(sum(run["steps"][name]) for name in ("draft", "select", "verify", "rest"))
        assert run["prefill_seconds"] > 0
        assert run["decode_seconds"] == pytest.approx(phases)


@pytest.mark.slow
def test_a_drafter_that_is_another_s_is_refused_before_the_weights_are_read(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = artifacts.prepared_folder(study / "cache", NAME)
    facts = json.loads((prepared / "config.json").read_text())

    def refused(change: dict, sentence: str) -> None:
        for path in prepared.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / "config.json").write_text(json.dumps({**facts, **change}))
        artifacts.write_manifest(tmp_path, NAME)
        words = ["--target", NAME, "--artifact-dir", str(tmp_path), "--output-dir", str(tmp_path / "out"), "--methods", "01"]
        assert cli.main(words) == 2
        assert sentence in capsys.readouterr().err

    own, dflash = facts["dflash_lab"], facts["dflash_config"]
    refused({"dflash_lab": {**own, "tokenizer_sha256": "0" * 64}}, "made for qwen3-0.6b with another tokenizer")
    refused({"num_target_layers": 28}, "made for qwen3-0.6b of 28 layers; this target has 4")
    refused({"dflash_config": {**dflash, "mask_token_id": 2}}, "mask token 2 is a stop token")
    refused({"dflash_config": {**dflash, "mask_token_id": 23}}, "mask token 23 is not a row")
    refused({"dflash_config": {**dflash, "mask_token_id": None}}, "mask token is unset")
    refused({"vocab_size": 99}, "with a vocabulary of 99; this target has 22")
    artifacts.write_manifest(tmp_path, "smollm2-135m")
    with pytest.raises(UserError, match=f"belongs to the target smollm2-135m, not to {NAME}"):
        artifacts.read_for(tmp_path / artifacts.MANIFEST, NAME)
