"""Two runs against each other, arm by arm, from their raw cells. Pure but for `read_whole`; never imports torch.

Whether two runs may be compared is asked of `experiment.py`. Nothing here trusts a figure that the files computed.
"""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_mini_lab.benchmark import results
from dflash_mini_lab.benchmark.experiment import differences, refuse_unnamed, shared_prompts, short
from dflash_mini_lab.benchmark_file import Benchmark, read, schema_errors
from dflash_mini_lab.measurement.statistics import Floor, Ratio, joint_floor, ratio_of_runs, verdict
from dflash_mini_lab.report.comparison import Change, Comparison, Factor, Line
from dflash_mini_lab.types import UserError

VERDICTS = {"faster": "B faster", "slower": "A faster"}
Times = dict[str, list[float]]
"""Prompt → decode seconds per token, one for each repeat."""


def read_whole(path: Path) -> Benchmark:
    """The benchmark in `path`. Raises UserError, one sentence, where it is damaged or of another version."""
    benchmark = read(path)
    for problem in schema_errors(benchmark, limit=1) or incoherences(benchmark):
        raise UserError(f"{path}: is damaged ({short(problem, 160)}).")
    return benchmark


def incoherences(benchmark: Benchmark) -> Iterator[str]:
    """What a schema cannot see and a comparison relies on."""
    if not isinstance(benchmark["settings"].get("seed", 0), int) or not isinstance(benchmark["settings"].get("repeats", 1), int):
        yield "settings: seed and repeats are whole numbers"
    known, arms = {entry["prompt"] for entry in benchmark["reference"]}, [arm["key"] for arm in benchmark["arms"]]
    seen = set()
    for number, cell in enumerate(benchmark["cells"]):
        where = f"cells[{number}]"
        if cell["prompt"] not in known:
            yield f"{where}: there is no reference for its prompt"
        if cell["warmup"] != (cell["repeat"] < 0):
            yield f"{where}: warm-ups have negative repeats, and nothing else has"
        for run in cell["runs"]:
            key = (run["arm"], cell["prompt"], cell["repeat"])
            if key in seen or run["arm"] not in arms:
                yield f"{where}: arm {run['arm']} is there twice, or is no arm of the run"
            seen.add(key)
            if not math.isfinite(run["decode_seconds"]):
                yield f"{where}: a time is no number"


def compare(files: tuple[str, str], one: Benchmark, other: Benchmark, across: Sequence[str] = ()) -> Comparison:
    """A (`one`) against B (`other`), which may differ in what `across` names.

    Raises UserError, one sentence with the fields, where they differ in anything else or have no prompt in common.
    """
    refuse_unnamed(one, other, across)
    prompts = shared_prompts(one, other)
    if not prompts:
        raise UserError("these two runs have no prompt in common.")
    (speedups_a, floor_a), (speedups_b, floor_b) = results.speedups(one), results.speedups(other)
    floor = joint_floor(floor_a, floor_b)
    times_a, times_b = times(one, prompts), times(other, prompts)
    wrong_a, wrong_b = results.violating_arms(one), results.violating_arms(other)
    arms_a, arms_b = ({arm["key"]: arm for arm in benchmark["arms"]} for benchmark in (one, other))
    lines = []
    for key, arm in (arms_b | arms_a).items():
        ratio = None
        if key in wrong_a | wrong_b:
            told = "inexact in " + " and ".join(label for label, wrong in (("A", wrong_a), ("B", wrong_b)) if key in wrong)
        elif missing := [label for label, run in (("A", times_a), ("B", times_b)) if not run[key]]:
            told = "not in " + " and ".join(missing)
        elif not times_a[key].keys() & times_b[key].keys():
            told = "no prompt in both"
        else:
            ratio = ratio_of_runs(times_a[key], times_b[key], int(one["settings"].get("seed", 0)))
            told = _verdict(ratio, floor)
        lines.append(
            Line(
                key,
                arm["name"],
                arm["kind"],
                _factor(ratio),
                told,
                _factor(speedups_a.get(key)),
                _factor(speedups_b.get(key)),
                _arm_note(arms_a.get(key), arms_b.get(key)),
            )
        )
    return Comparison(
        files=files,
        runs=(one, other),
        across=tuple(dict.fromkeys(across)),
        changes=tuple(Change(d.field, d.axis, short(d.one), short(d.other)) for d in differences(one, other)),
        lines=tuple(sorted(lines, key=lambda line: [*arms_a, *arms_b].index(line.key))),
        floor=(floor.low, floor.high) if floor.low is not None and floor.high is not None else None,
        prompts=tuple(prompts),
        other_texts=tuple(_other_texts(one, other, prompts)),
    )


def times(benchmark: Benchmark, prompts: Sequence[str]) -> dict[str, Times]:
    """Arm → prompt → seconds per token of its measured runs; warm-ups, and answers without a decoded token, have none."""
    found: dict[str, Times] = defaultdict(lambda: defaultdict(list))
    for (arm, prompt, _), run in results.measured_runs(benchmark).items():
        seconds = results.seconds_per_token(run)
        if prompt in prompts and seconds:
            found[arm][prompt].append(seconds)
    return found


def _verdict(ratio: Ratio, floor: Floor) -> str:
    if ratio.low is None:
        return "one measurement"
    if floor.low is None:
        return "no floor"
    told = verdict(ratio, floor)
    return VERDICTS.get(told, told)


def _factor(ratio: Ratio | None) -> Factor | None:
    return Factor(ratio.mean, ratio.low, ratio.high) if ratio else None


def _arm_note(one: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    """In which of its own settings an arm of both runs differs: calibration chooses them anew in every run."""
    if not one or not other:
        return ""
    a, b = ({**(arm.get("settings") or {}), "verify width": arm.get("verify_width")} for arm in (one, other))
    differing = [name for name in a | b if a.get(name) != b.get(name)]
    return "; ".join(f"{name} is {short(a.get(name))} in A and {short(b.get(name))} in B" for name in differing)


def _other_texts(one: Benchmark, other: Benchmark, prompts: Sequence[str]) -> Iterator[str]:
    """Prompts whose references part before the shorter one ends; another budget alone is no other text."""
    a, b = ({entry["prompt"]: entry["tokens"] for entry in benchmark["reference"]} for benchmark in (one, other))
    for prompt in prompts:
        if any(left != right for left, right in zip(a.get(prompt, ()), b.get(prompt, ()), strict=False)):
            yield prompt
