"""benchmark.json while it is being made: a new one or a continued one, one step at a time, saved after each.

Every function here extends the benchmark by one kind of fact and leaves what is already there, which is all that resuming is.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from dflash_mini_lab import __version__
from dflash_mini_lab.benchmark import recording, results
from dflash_mini_lab.benchmark.arms import Arm, answer, make_arms, metered
from dflash_mini_lab.benchmark.engine import Engine, Model
from dflash_mini_lab.benchmark.experiment import differing_field
from dflash_mini_lab.benchmark.prefilled import prefilled_once
from dflash_mini_lab.benchmark_file import SCHEMA_VERSION, Benchmark, read, schema_errors, write
from dflash_mini_lab.calibration import calibrate
from dflash_mini_lab.decoding import decode
from dflash_mini_lab.exactness import Reference, judge, reference_greedy, stock_block_logits, stock_logits
from dflash_mini_lab.measurement import machine, schedule
from dflash_mini_lab.measurement.cost_curve import SMALLEST_WIDEST, measure_verify_cost
from dflash_mini_lab.measurement.energy import Energy
from dflash_mini_lab.measurement.memory import Memory
from dflash_mini_lab.methods import by_key
from dflash_mini_lab.prompts import Prompt
from dflash_mini_lab.report.progress import Progress
from dflash_mini_lab.settings import NO_BONUS
from dflash_mini_lab.tuning import agreement, tune
from dflash_mini_lab.types import Clock, Decoded, Method, UserError


@dataclass(frozen=True)
class Run:
    """What every step of one run shares. `encoded` and `calibration`: prompt id → token ids."""

    model: Model
    prompts: Sequence[Prompt]
    encoded: Mapping[str, Sequence[int]]
    calibration: Mapping[str, Sequence[int]]
    settings: Mapping[str, Any]
    """The `settings` entry of benchmark.json."""
    path: Path
    clock: Clock
    progress: Callable[[int, str], Progress] = Progress
    """`progress(total, label)`: a bar for one stage."""
    save: Callable[[Path, Benchmark], None] = write
    energy: Energy | None = None
    memory: Memory | None = None

    @property
    def bonus(self) -> bool:
        """Whether a round commits its bonus token."""
        return NO_BONUS not in (self.settings["ablations"] or ())


def new_benchmark(run: Run, command: Sequence[str]) -> Benchmark:
    model = run.model
    return {
        "schema_version": SCHEMA_VERSION,
        "lab_version": __version__,
        "created": utc_now(),
        "finished": None,
        "complete": False,
        "command": list(command),
        "target": model.target_facts,
        "drafter": model.drafter_facts,
        "settings": dict(run.settings),
        "machine": {
            **machine.facts(model.device, model.backend, run.settings["threads"]),
            "load_average_after": None,
        },
        "linear_plans": [],
        "padded_rows": {},
        "execution": None,
        "prompts": [
            {"id": p.id, "category": p.category, "text": p.text, "prompt_tokens": len(run.encoded[p.id])}
            for p in run.prompts
        ],
        "arms": [arm.as_json() for arm in arms(run, {}, {})],
        "calibration": {"prompts": list(run.calibration), "seconds": 0.0, "methods": {}},
        "tuning": {"seconds": 0.0, "methods": {}} if run.settings["tuning_repeats"] else None,
        "reference": [],
        "cells": [],
        "verify_cost": None,
        "gate": {"verdict": "pending", "runs": 0, "exact": 0, "mismatches": []},
        "results": None,
    }


def resumed(run: Run, fresh: Benchmark) -> Benchmark:
    """The interrupted benchmark at `run.path`. Raises UserError naming the first field in which `fresh` differs from it."""
    earlier = read(run.path)
    if errors := schema_errors(earlier, limit=1):
        raise UserError(f"{run.path}: cannot be resumed, it does not fit its schema ({errors[0]}). Leave --resume out.")
    if difference := differing_field(earlier, fresh):
        raise UserError(f"{run.path}: cannot be resumed, {difference}. Give the same settings, or leave --resume out.")
    return earlier


def arms(run: Run, calibrated: Mapping[str, Any], tuned: Mapping[str, Any]) -> list[Arm]:
    """The arms with what was chosen for them so far: the `methods` of `calibration` and of `tuning`."""
    settings = run.settings
    chosen = {key: entry["chosen"] for key, entry in calibrated.items()}
    widths = {key: entry["chosen"] for key, entry in tuned.items() if entry["chosen"]}
    return make_arms(settings["methods"], settings["peers"], run.model.block_size, settings["verify_width"], chosen, widths)


def take_references(run: Run, benchmark: Benchmark, stock: Any) -> dict[str, Reference]:
    """The reference of every prompt, by the stock model. One that the file already has must come out the same again."""
    known = {entry["prompt"]: entry["tokens"] for entry in benchmark["reference"]}
    references = {}
    answers = _references(run, stock, run.encoded, run.settings["tokens"], "reference")
    for prompt, reference in zip(run.prompts, answers, strict=True):
        references[prompt.id] = reference
        tokens = list(reference.tokens)
        if known.get(prompt.id, tokens) != tokens:
            raise UserError(f"{run.path}: cannot be resumed, the reference for prompt {prompt.id!r} is another text now.")
        if prompt.id not in known:
            text = run.model.decode_text(tokens)
            benchmark["reference"].append({"prompt": prompt.id, "tokens": tokens, "text": text, "finish": reference.finish})
    run.save(run.path, benchmark)
    return references


def take_calibration_references(run: Run, benchmark: Benchmark, stock: Any) -> dict[str, list[int]]:
    """Calibration prompt → the tokens that every trial must give; empty when no method is left to calibrate or to tune."""
    if not methods_to_calibrate(run, benchmark) and not methods_to_tune(run, benchmark):
        return {}
    budget = run.settings["calibration_tokens"]
    answers = _references(run, stock, run.calibration, budget, "calibration reference")
    return {prompt: list(reference.tokens) for prompt, reference in zip(run.calibration, answers, strict=True)}


def _references(
    run: Run, stock: Any, encoded: Mapping[str, Sequence[int]], budget: int, label: str
) -> list[Reference]:
    references = []
    with run.progress(len(encoded), label) as progress:
        for prompt, ids in encoded.items():
            progress.now("the library's model", prompt)
            model = run.model
            references.append(reference_greedy(stock, ids, budget, model.stop_ids, model.max_positions, model.vocabulary))
            progress.done()
    return references


def methods_to_calibrate(run: Run, benchmark: Benchmark) -> list[str]:
    """Keys of the methods with a grid and no calibrated settings; none once a cell has been run, for its settings are in use."""
    if benchmark["cells"] or run.model.block_size < 2:
        return []
    done = benchmark["calibration"]["methods"]
    keys = [arm["key"] for arm in benchmark["arms"] if arm["kind"] == "method"]
    return [key for key in keys if by_key(key).grid and key not in done]


def take_calibration(run: Run, benchmark: Benchmark, engine: Engine, expected: Mapping[str, Sequence[int]]) -> None:
    """Choose each method's settings on the calibration prompts, and give them to the arms. Saved after each method."""
    settings, entry = run.settings, benchmark["calibration"]
    waiting = methods_to_calibrate(run, benchmark) if expected else []
    budget, clock, engine = settings["calibration_tokens"], run.clock, prefilled_once(engine)

    def answer(method: Method, values: Mapping[str, float], prompt: str) -> Decoded:
        ids, width = run.calibration[prompt], settings["verify_width"]
        return decode(engine.target, ids, method, budget, clock, engine.drafter, values, width, run.bonus)

    with run.progress(len(waiting), "calibration") as progress:
        for key in waiting:
            progress.now(by_key(key).name, "calibration prompts")
            started = clock.now()
            found = calibrate(by_key(key), answer, expected, settings["seed"])
            entry["seconds"] += clock.now() - started
            if found:
                entry["methods"][key] = found
                benchmark["arms"] = [arm.as_json() for arm in arms(run, entry["methods"], {})]
                run.save(run.path, benchmark)
            progress.done()
            progress.cell(by_key(key).name)


def methods_to_tune(run: Run, benchmark: Benchmark) -> list[str]:
    """Keys of the methods with no tuned width, of a run that tunes; none once a cell has been run. A method that follows
    another of the run follows its width as well: between the two lies the one difference that they are compared for."""
    if not run.settings["tuning_repeats"] or benchmark["cells"] or run.model.block_size < 2:
        return []
    keys = [arm["key"] for arm in benchmark["arms"] if arm["kind"] == "method"]
    return [key for key in keys if by_key(key).settings_of not in keys and key not in benchmark["tuning"]["methods"]]


def take_tuning(run: Run, benchmark: Benchmark, engine: Engine, expected: Mapping[str, Sequence[int]]) -> None:
    """Choose each method's verify width on the calibration prompts, with the settings it has by now. Saved after each method."""
    settings, entry, clock = run.settings, benchmark.get("tuning"), run.clock
    waiting = methods_to_tune(run, benchmark) if expected else []
    if entry is None or not waiting:
        return
    values = {arm["key"]: arm["settings"] for arm in benchmark["arms"]}
    engine = prefilled_once(engine)

    def answer(key: str, width: int, prompt: str) -> Decoded:
        ids, budget = run.calibration[prompt], settings["calibration_tokens"]
        return decode(engine.target, ids, by_key(key), budget, clock, engine.drafter, values[key], width, run.bonus)

    with run.progress(len(waiting), "tuning") as progress:
        for key in waiting:
            progress.now(by_key(key).name, "calibration prompts")
            started = clock.now()
            found = tune(
                partial(answer, key),
                run.model.block_size,
                expected,
                benchmark["verify_cost"],
                settings["tuning_repeats"],
                settings["seed"] + 2,
                run.bonus,
            )
            entry["seconds"] += clock.now() - started
            entry["methods"][key] = found
            entry["agreement"] = agreement(entry["methods"])
            calibrated = benchmark["calibration"]["methods"]
            benchmark["arms"] = [arm.as_json() for arm in arms(run, calibrated, entry["methods"])]
            run.save(run.path, benchmark)
            progress.done()
            progress.cell(by_key(key).name)


def capacity(run: Run) -> int:
    """Tokens that the longest sequence of the run can reach, a whole rejected block and the cost curve's calls included."""
    prompts = max(map(len, run.encoded.values())) + run.settings["tokens"]
    calibration = max(map(len, run.calibration.values()), default=0) + run.settings["calibration_tokens"]
    return min(run.model.max_positions, max(prompts, calibration) + max(run.model.block_size, SMALLEST_WIDEST) + 16)


def take_execution(run: Run, benchmark: Benchmark, engine: Engine) -> None:
    """How steps run, and what is measured beside time. Of a continued run, the process that goes on describes itself."""
    energy = run.energy or Energy(None, "not asked for")
    memory = run.memory or Memory(None, "not asked for")
    loaded = memory.peak()
    earlier = benchmark.get("execution") or {"peak_memory_bytes": None}
    benchmark["execution"] = {
        "decode": engine.decode,
        "peak_memory_bytes": larger(earlier["peak_memory_bytes"], loaded),
        "memory": {
            "source": memory.source,
            "reason": memory.reason,
            "before_bytes": memory.before,
            "loaded_bytes": loaded,
        },
        "energy": {"source": energy.source, "reason": energy.reason},
    }


def take_verify_cost(run: Run, benchmark: Benchmark, engine: Engine) -> None:
    """The cost curve at the run's own context length: its first prompt and half of that prompt's answer."""
    if benchmark["verify_cost"] is not None:
        return
    prompt = run.prompts[0].id
    answered = next(entry["tokens"] for entry in benchmark["reference"] if entry["prompt"] == prompt)
    context = [*run.encoded[prompt], *answered[: max(1, len(answered) // 2)]]
    repeats = 9 if run.settings["tokens"] >= 32 else 3
    block, seed = run.model.block_size, run.settings["seed"]
    taps = engine.drafter.taps if engine.drafter else ()
    with run.progress(1, "verify cost") as progress:
        progress.now(f"1 … {max(SMALLEST_WIDEST, block)} rows", f"{len(context)} tokens of context")
        benchmark["verify_cost"] = measure_verify_cost(engine.target, context, block, taps, run.clock, repeats, seed)
        progress.done()
    run.save(run.path, benchmark)


def run_cells(run: Run, benchmark: Benchmark, engine: Engine, stock: Any) -> None:
    """Every planned cell that the file does not have yet, in the order of the plan; the file is saved after each."""
    plan = schedule.plan(
        [prompt.id for prompt in run.prompts],
        run.settings["repeats"],
        [arm["key"] for arm in benchmark["arms"]],
        run.settings["warmup_cells"],
        run.settings["seed"],
    )
    by_name = {arm["key"]: Arm(**arm) for arm in benchmark["arms"]}
    have = {(cell["prompt"], cell["repeat"]) for cell in benchmark["cells"]}
    left = [cell for cell in plan if (cell.prompt, cell.repeat) not in have]
    if have and left and not left[0].warmup and run.settings["warmup_cells"]:  # a resumed process is as cold as a new one
        left.insert(0, replace(left[0], repeat=min(repeat for _, repeat in have) - 1, warmup=True))
    with run.progress(len(left) * len(by_name), "benchmark") as progress:
        for cell in left:
            runs = []
            for key in cell.order:
                progress.now(by_name[key].name, cell.prompt)
                ids = run.encoded[cell.prompt]
                ask = partial(answer, engine, stock, by_name[key], ids, run.settings["tokens"], run.clock, run.bonus)
                runs.append(metered(ask, engine.crossings, run.energy))
                progress.done()
            entry = {"prompt": cell.prompt, "repeat": cell.repeat, "warmup": cell.warmup, "order": list(cell.order), "runs": runs}
            benchmark["cells"].append(entry)
            benchmark["gate"] = results.gate(benchmark, benchmark["gate"]["mismatches"], judged=False)
            run.save(run.path, benchmark)
            progress.cell(f"{cell.prompt}, " + ("warm-up" if cell.warmup else f"repeat {cell.repeat + 1}"))
    benchmark["complete"] = True


def record_rounds(run: Run, benchmark: Benchmark, engine: Engine) -> None:
    """What each method did in the first rounds of the first prompt's answer, with its final settings. Nothing here is timed, and
    it comes after everything that is."""
    if "rounds" in benchmark:
        return
    prompt, engine = run.prompts[0].id, prefilled_once(engine)
    expected = next(entry["tokens"] for entry in benchmark["reference"] if entry["prompt"] == prompt)
    methods = [Arm(**arm) for arm in benchmark["arms"] if arm["kind"] == "method"]
    entries = {}
    with run.progress(len(methods), "recording rounds") as progress:
        for arm in methods:
            progress.now(arm.name, prompt)
            entries[arm.key] = recording.record(
                engine, arm, run.encoded[prompt], run.settings["tokens"], run.clock, expected, run.bonus
            )
            progress.done()
    texts = recording.texts(entries.values(), run.model.decode_text)
    benchmark["rounds"] = {"prompt": prompt, "texts": texts, "methods": entries}
    run.save(run.path, benchmark)


def judge_mismatches(run: Run, benchmark: Benchmark, engine: Engine, references: Mapping[str, Reference]) -> None:
    """Give every inexact run that has none its verdict, and the gate its own. The library's model is opened only if needed."""
    mismatches = list(benchmark["gate"]["mismatches"])
    judged = {(m["arm"], m["prompt"], m["repeat"]) for m in mismatches}
    waiting = [key for key in results.inexact_runs(benchmark) if key not in judged]
    if waiting:
        runs = results.runs_by_key(benchmark)
        peers = {arm["key"] for arm in benchmark["arms"] if arm["kind"] == "peer"}
        verdicts: dict[tuple[Any, ...], dict[str, Any]] = {}
        with run.model.stock() as stock, run.progress(len(waiting), "judging mismatches") as progress:
            for arm, prompt, repeat in waiting:
                progress.now(arm, prompt)
                tokens, ids = runs[arm, prompt, repeat]["tokens"], run.encoded[prompt]
                same = (arm in peers, prompt, tuple(tokens))  # the same wrong text in another repeat has the same verdict
                if same not in verdicts:
                    path = partial(stock_block_logits, stock, ids) if arm in peers else engine.path_logits(ids)
                    mismatch = judge(references[prompt], tokens, partial(stock_logits, stock, ids), path)
                    assert mismatch is not None
                    verdicts[same] = mismatch.as_json(run.model.decode_text)
                mismatches.append({"arm": arm, "prompt": prompt, "repeat": repeat, **verdicts[same]})
                progress.done()
    benchmark["gate"] = results.gate(benchmark, mismatches, judged=True)


def all_measured(benchmark: Benchmark) -> bool:
    """Whether nothing is left that needs a model."""
    return benchmark["complete"] and benchmark["gate"]["verdict"] != "pending" and "rounds" in benchmark


def take_load_and_peak(run: Run, benchmark: Benchmark) -> None:
    """Of the process that has just measured; of several processes' peaks the largest."""
    benchmark["machine"]["load_average_after"] = machine.load_average()
    if run.memory and (execution := benchmark.get("execution")) and "memory" in execution:
        execution["peak_memory_bytes"] = larger(execution["peak_memory_bytes"], run.memory.peak())


def larger(*found: int | None) -> int | None:
    return max((number for number in found if number is not None), default=None)


def conclude(run: Run, benchmark: Benchmark) -> None:
    """Results from what has been measured, and the time at which all of it had been."""
    benchmark["gate"] = results.gate(benchmark, benchmark["gate"]["mismatches"], benchmark["gate"]["verdict"] != "pending")
    benchmark["results"] = results.results(benchmark)
    if benchmark["complete"] and benchmark["finished"] is None:
        benchmark["finished"] = utc_now()
    run.save(run.path, benchmark)


def utc_now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
