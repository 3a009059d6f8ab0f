"""A whole run as `run_gpu.py` makes it, from a model's folder to benchmark.json, on the CPU under another of its names.

What only CUDA can do (capture, synchronise, count memory) is tests/gpu's; that everything is asked of the right device is here.
"""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.tiny_folder import WORDS, save_tiny_model

from dflash_mini_lab import artifacts
from dflash_mini_lab.artifacts import write_manifest
from dflash_mini_lab.benchmark.run import run_benchmark
from dflash_mini_lab.benchmark_file import Benchmark, read, schema_errors
from dflash_mini_lab.catalog import resolve
from dflash_mini_lab.drafters.block import BlockDrafter
from dflash_mini_lab.drafters.checkpoint import DrafterConfig, save_checkpoint
from dflash_mini_lab.measurement import gpu
from dflash_mini_lab.packed_linear import stock_plan
from dflash_mini_lab.settings import GPU, Settings
from dflash_mini_lab.settings import resolve as resolve_settings
from dflash_mini_lab.targets import lean_build, loading
from dflash_mini_lab.training import prepare as preparation
from dflash_mini_lab.training.model import TrainableDrafter
from dflash_mini_lab.training.prepare import ANSWERS, prepare
from dflash_mini_lab.training.shards import have_features
from dflash_mini_lab.training.train import STATE_FILE
from dflash_mini_lab.types import UserError

DEVICE = "cpu:0"
BLOCK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, str]]:
    """No time is spent on measuring products, and CUDA is not asked for its memory; what it was to be asked is kept."""
    found: list[tuple[str, int, str]] = []
    monkeypatch.setattr(lean_build, "measure_plan", lambda weights: stock_plan(weights[0]))
    monkeypatch.setattr("dflash_mini_lab.drafters.block.measure_plan", lambda weights: stock_plan(weights[0]))
    monkeypatch.setattr(gpu, "require_memory", lambda *words: found.append(words))
    return found


def settings(folder: Path, tmp_path: Path, **changes: object) -> Settings:
    return Settings(
        **{
            "target": str(folder), "device": DEVICE, "cache": tmp_path / "cache", "tokens": 10, "repeats": 1, "prompt_limit": 1,
            "calibration_prompt_limit": 0, "warmup_cells": 0, "output_dir": tmp_path / "out", **changes,
        }  # type: ignore[arg-type]
    )  # fmt: skip


def save_random_drafter(folder: Path, target: str) -> Path:
    config = DrafterConfig(64, 96, 1, 4, 2, 16, BLOCK, (0, 2), 3, 4, 4 + len(WORDS), target_name=target)
    torch.manual_seed(1)
    folder.mkdir()
    save_checkpoint(folder, config, dict(TrainableDrafter(config).state_dict()))
    write_manifest(folder, target)
    return folder


def test_target_drafter_and_steps_are_on_the_device_and_every_method_is_exact(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[str, int, str]]
) -> None:
    moved, drafters = [], []
    honest_to, honest_start = torch.nn.Module.to, BlockDrafter.start
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *words: (moved.append(words), honest_to(self, *words))[1])
    monkeypatch.setattr(BlockDrafter, "start", lambda self, *words: (drafters.append(self), honest_start(self, *words))[1])
    name = resolve(str(folder)).name
    options = settings(
        folder, tmp_path, methods=("00", "01", "10", "13"), artifact_dir=save_random_drafter(tmp_path / "drafter", name)
    )
    assert run_benchmark(options, ["run_gpu.py"]) == 0
    benchmark: Benchmark = read(tmp_path / "out" / "benchmark.json")
    assert schema_errors(benchmark) == []
    assert (benchmark["target"]["device"], benchmark["gate"]["verdict"]) == (DEVICE, "exact")
    assert benchmark["execution"]["decode"]["reason"] == "no CUDA: the eager twin of captured steps"
    assert (DEVICE,) in moved
    assert asked == [(name, benchmark["target"]["parameters"], "float32")]
    crossed = {arm: entry["crossings_per_token"]["to_host"] for arm, entry in benchmark["results"]["arms"].items()}
    assert crossed["10"]["bytes"] > crossed["13"]["bytes"] > crossed["00"]["bytes"] > 0, "full logits, two candidates, one id"
    assert drafters, "the drafter counts where its target counts"


@pytest.mark.slow
def test_a_drafter_is_prepared_on_the_device_without_features_on_disk_and_a_cpu_takes_it_up(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preparation, "FEWEST_SEQUENCES", 1)  # a busy machine answers one batch in this time
    options = settings(folder, tmp_path, methods=("00", "01"), prepare_minutes=0.04)
    assert run_benchmark(options, ["run_gpu.py"]) == 0
    name = resolve(str(folder)).name
    assert f"There is no drafter for {name} yet: training one first" in capsys.readouterr().out
    work = options.cache / "prepare" / name
    assert not have_features(work / ANSWERS)
    provenance = json.loads((artifacts.prepared_folder(options.cache, name) / "provenance.json").read_text())
    assert (provenance["device"], provenance["made_with"]) == (DEVICE, "python run_gpu.py --prepare")
    (work / STATE_FILE).unlink()
    again = prepare(replace(options, device="cpu"))
    assert json.loads((again / "provenance.json").read_text())["last_look"]["step"] > 0, "a CPU computes what it does not find"


def test_the_reference_in_numpy_is_refused_rather_than_run_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="it runs on NumPy alone; python run_cpu.py --target tiny measures it"):
        resolve_settings({"target": "tiny"}, {}, GPU)


def test_a_gpu_whose_memory_becomes_full_is_one_sentence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*words: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(loading.LoadedTarget, "build", full)
    with pytest.raises(UserError, match="the GPU's memory became full"):
        run_benchmark(settings(folder, tmp_path, methods=("00",)), ["run_gpu.py"])
