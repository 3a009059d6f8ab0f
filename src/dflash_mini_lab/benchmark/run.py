"""The benchmark command, from settings to exit status: it reads as the order of events.

Report and JSON are written before the exit status is decided, so that a failure can be studied.
"""
from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_mini_lab.benchmark import results, stages
from dflash_mini_lab.benchmark.engine import Model
from dflash_mini_lab.benchmark.loading import load_model
from dflash_mini_lab.benchmark.stages import Run
from dflash_mini_lab.benchmark_file import Benchmark, schema_errors, write
from dflash_mini_lab.catalog import resolve
from dflash_mini_lab.decoding import refuse_without_heads, refuse_without_trees
from dflash_mini_lab.measurement.clock import clock_for
from dflash_mini_lab.measurement.energy import Energy, find_energy
from dflash_mini_lab.measurement.memory import find_memory
from dflash_mini_lab.methods import METHODS, by_key
from dflash_mini_lab.prompts import Prompt, encode_prompts, load_prompts, refuse_overlap, training_seeds
from dflash_mini_lab.report import write_report
from dflash_mini_lab.report.terminal import print_summary
from dflash_mini_lab.settings import Settings
from dflash_mini_lab.types import Clock

BENCHMARK_FILE = "benchmark.json"
OK, USAGE, INEXACT, INTERRUPTED = 0, 2, 3, 130


def run_benchmark(settings: Settings, argv: Sequence[str]) -> int:
    """Measure what `settings` ask for, leave benchmark.json and the report in `settings.output_dir`, return the exit status.

    `settings.methods`: keys, 00 among them; none stands for every method that can run. Raises UserError for a user's mistake.
    """
    prompts, calibration_prompts = choose_prompts(settings)
    settings.output_dir.mkdir(parents=True, exist_ok=True)  # a place that cannot be written is known now, not at the end
    if resolve(settings.target).backend == "torch":  # NumPy's own threads were set before it was loaded (cli.py)
        set_threads(settings.cpu_threads)
    model = load_model(settings, say)
    settings = replace(settings, methods=choose_methods(settings.methods, model, say))
    energy, clock = find_energy(model.device), clock_for(model.device)
    guarded: AbstractContextManager[None] = nullcontext()
    if model.device != "cpu":
        from dflash_mini_lab.measurement.gpu import full_memory_explained

        guarded = full_memory_explained()
    with guarded:
        return measure(settings, argv, model, prompts, calibration_prompts, clock, energy=energy)


def measure(
    settings: Settings,
    argv: Sequence[str],
    model: Model,
    prompts: Sequence[Prompt],
    calibration_prompts: Sequence[Prompt],
    clock: Clock,
    save: Callable[[Path, Benchmark], None] = write,
    energy: Energy | None = None,
) -> int:
    """The run itself, for any model: references, calibration, cost curve, tuning, cells, verdicts, results, report."""
    run = Run(
        model=model,
        prompts=prompts,
        encoded=encode_prompts(prompts, model.encode_prompt, model.max_positions),
        calibration=encode_prompts(calibration_prompts, model.encode_prompt, model.max_positions),
        settings=settings_entry(settings, model.backend),
        path=settings.output_dir / BENCHMARK_FILE,
        clock=clock,
        save=save,
        energy=energy,
        memory=find_memory(model.device),
    )
    benchmark = stages.new_benchmark(run, argv)
    if settings.resume and run.path.exists():
        benchmark = stages.resumed(run, benchmark)
        say(f"Continuing {run.path}: {len(benchmark['cells'])} cells are there.")
    elif settings.resume:
        say(f"There is nothing to resume in {settings.output_dir}: starting.")
    if settings.tune and settings.verify_width:
        say("No width is tuned: --verify-width gives it.")
    interrupted = False
    if not stages.all_measured(benchmark):
        try:
            take_measurements(run, benchmark)
        except KeyboardInterrupt:
            interrupted = True
        stages.take_load_and_peak(run, benchmark)
    stages.conclude(run, benchmark)
    page = write_report(benchmark, settings.output_dir)
    print_summary(benchmark, sys.stdout, shutil.get_terminal_size().columns)
    say(f"Report: {page}")
    for error in schema_errors(benchmark):
        say(f"warning: {run.path} does not fit its schema: {error}")
    return INTERRUPTED if interrupted else exit_status(benchmark)


def take_measurements(run: Run, benchmark: Benchmark) -> None:
    """Everything that needs a model. What the benchmark already has is not measured again."""
    with ExitStack() as peers_model:
        with run.model.stock() as stock:
            references = stages.take_references(run, benchmark, stock)
            expected = stages.take_calibration_references(run, benchmark, stock)
        engine = run.model.build(stages.capacity(run))
        if not benchmark["linear_plans"]:
            benchmark["linear_plans"], benchmark["padded_rows"] = engine.linear_plans, engine.padded_rows
        stages.take_execution(run, benchmark, engine)
        stock = peers_model.enter_context(run.model.stock() if run.settings["peers"] else nullcontext())
        stages.take_calibration(run, benchmark, engine, expected)
        stages.take_verify_cost(run, benchmark, engine)
        stages.take_tuning(run, benchmark, engine, expected)
        stages.run_cells(run, benchmark, engine, stock)
        stages.record_rounds(run, benchmark, engine)
    stages.judge_mismatches(run, benchmark, engine, references)


def exit_status(benchmark: Benchmark) -> int:
    return INEXACT if results.gate_fails(benchmark) else OK


def choose_methods(asked: Sequence[str], model: Model, say: Callable[[str], None]) -> tuple[str, ...]:
    """`asked`, or without a word of the user's every method; one that lacks a head, or a target that verifies its trees, is then
    left out, and it is said.

    Raises UserError for such a method that was asked for by name.
    """
    for key in asked:
        refuse_without_heads(by_key(key), model.heads)
        refuse_without_trees(by_key(key), model.trees)
    if asked:
        return tuple(asked)
    able = [method for method in METHODS if model.trees or not method.trees]
    if unable := [method.key for method in METHODS if method not in able]:
        say(f"Left out: method {', '.join(unable)}. A model that runs through transformers' own modules verifies no trees.")
    ready = [method for method in able if set(method.needs) <= set(model.heads.present)]
    without = [method.key for method in able if method not in ready]
    if without:
        heads = sorted({name for method in METHODS for name in method.needs} - set(model.heads.present))
        way_out = "; --prepare trains them" if model.backend == "torch" else ""
        say(f"Left out: methods {', '.join(without)}. This drafter has no {', '.join(heads)} heads{way_out}.")
    return tuple(method.key for method in ready)


def choose_prompts(settings: Settings) -> tuple[list[Prompt], list[Prompt]]:
    """The first prompts of the user's file or of the lab's for this target, and the first calibration prompts. An overlap is
    refused."""
    entry = resolve(settings.target)
    measured = load_prompts(settings.prompts or entry.prompt_file)
    tuned = load_prompts(entry.calibration_file)
    refuse_overlap(measured, tuned, training_seeds(entry.training_file))
    return measured[: settings.prompt_limit], tuned[: settings.calibration_prompt_limit]


def settings_entry(settings: Settings, backend: str = "torch") -> dict[str, Any]:
    """The `settings` of benchmark.json: everything that makes another experiment when it changes."""
    return {
        "tokens": settings.tokens,
        "repeats": settings.repeats,
        "prompt_limit": settings.prompt_limit,
        "warmup_cells": settings.warmup_cells,
        "seed": settings.seed,
        "threads": settings.cpu_threads or (default_threads() if backend == "torch" else 1),
        "dtype": settings.dtype,
        "methods": list(settings.methods),
        "peers": list(settings.peers),
        "verify_width": settings.verify_width,
        "ablations": list(settings.ablate) or None,
        "calibration_tokens": settings.calibration_tokens,
        "calibration_prompt_limit": settings.calibration_prompt_limit,
        "tuning_repeats": settings.tuning_repeats if settings.tune and not settings.verify_width else None,
    }


def set_threads(threads: int | None) -> None:
    import torch

    if threads:
        torch.set_num_threads(threads)


def default_threads() -> int:
    import torch

    return torch.get_num_threads()


def say(line: str) -> None:
    print(line, flush=True)
