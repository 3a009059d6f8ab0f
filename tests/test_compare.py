"""Two runs against each other: ratios worked out by hand, refusals that name the field, and a page that stays text."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sample import sample_benchmark
from test_report import EVIL, SOURCE, Page

from dflash_mini_lab import cli
from dflash_mini_lab.benchmark.comparison import compare, read_whole
from dflash_mini_lab.benchmark_file import schema_errors, write
from dflash_mini_lab.measurement.statistics import Floor, joint_floor, ratio_of_runs
from dflash_mini_lab.report import render_comparison
from dflash_mini_lab.report.comparison import Comparison, Factor, Line, sentence, summary, warnings
from dflash_mini_lab.types import UserError

TOKENS = [11, 12, 13, 14, 15]  # one from the prefill, four decoded: a run of 4 s takes 1 s a token
SHELL = sample_benchmark(prompts=2, repeats=1, peers=())
PROMPTS = ("tides", "primes")


def made(times: dict[str, tuple[list[float], ...]], prompts: tuple[str, ...] = PROMPTS) -> dict[str, Any]:
    """A benchmark from decode seconds: arm → for each prompt one time per repeat. The control repeats the baseline."""
    times = {"00'": times["00"], **times}
    benchmark = copy.deepcopy(SHELL)
    benchmark["prompts"] = [prompt for prompt in benchmark["prompts"] if prompt["id"] in prompts]
    benchmark["arms"] = [arm for arm in benchmark["arms"] if arm["key"] in times]
    benchmark["reference"] = [{"prompt": prompt, "tokens": TOKENS, "text": "t", "finish": "budget"} for prompt in prompts]
    spent = [
        (prompt, repeat, {arm: seconds[place][repeat] for arm, seconds in times.items()})
        for place, prompt in enumerate(prompts)
        for repeat in range(len(times["00"][place]))
    ]
    warm_up = (prompts[0], -1, {arm: 1000.0 * (arm != "00") + 1 for arm in times})
    benchmark["cells"] = [
        {
            "prompt": prompt,
            "repeat": repeat,
            "warmup": repeat < 0,
            "order": list(seconds),
            "runs": [
                {
                    "arm": arm,
                    "tokens": list(TOKENS),
                    "finish": "budget",
                    "prefill_seconds": 0.5,
                    "decode_seconds": time,
                    "steps": None,
                }
                for arm, time in seconds.items()
            ],
        }
        for prompt, repeat, seconds in [warm_up, *spent]
    ]
    benchmark["results"] = None  # nothing may be taken from here
    assert schema_errors(benchmark) == []
    return benchmark


A = made({"00": ([4, 4], [4, 4]), "01": ([2, 8], [1, 1]), "08": ([3, 3], [3, 3])})
B = made({"00": ([4, 4], [4, 4]), "01": ([1, 1], [1, 1]), "08": ([2, 2], [2, 2])})


def compared(one: dict[str, Any], other: dict[str, Any], *across: str) -> Comparison:
    return compare(("a.json", "b.json"), one, other, across)


def line(comparison: Comparison, key: str) -> Line:
    return next(line for line in comparison.lines if line.key == key)


def about(factor: Factor | None) -> list[float | None] | None:
    return factor and [round(value, 9) if value else value for value in (factor.mean, factor.low, factor.high)]


def spoilt(benchmark: dict[str, Any], arm: str, warmup: bool = False) -> dict[str, Any]:
    benchmark = copy.deepcopy(benchmark)
    cell = next(cell for cell in benchmark["cells"] if cell["warmup"] == warmup)
    next(run for run in cell["runs"] if run["arm"] == arm)["tokens"][3] = 99
    return benchmark


def test_the_ratio_is_over_prompts_and_the_repeats_of_two_runs_are_no_pairs() -> None:
    # DFlash: √(2·8) / 1 = 4 on one prompt and 1 on the other. Both drawn twice in a quarter of the samples: [1–4] around 2.
    found = line(compared(A, B), "01")
    assert about(found.ratio) == [2, 1, 4]
    assert found.verdict == "no difference"  # it reaches down to 1
    assert found.speedup_a is not None
    assert round(found.speedup_a.mean, 9) == 2  # (4/2 · 4/8 · 4/1 · 4/1) ^ ¼
    assert about(found.speedup_b) == [4, 4, 4]


def test_above_one_b_is_faster_and_turned_round_it_is_a() -> None:
    assert (about(line(compared(A, B), "08").ratio), line(compared(A, B), "08").verdict) == ([1.5, 1.5, 1.5], "B faster")
    turned = line(compared(B, A), "08")
    assert (about(turned.ratio), turned.verdict) == ([round(2 / 3, 9)] * 3, "A faster")
    assert sentence(compared(A, B)) == "B is faster in 1 of 3 arms, A in none; 2 show no difference"
    assert sentence(compared(A, A)) == "No difference between A and B in 3 arms"


def test_a_ratio_must_leave_the_noise_of_both_runs() -> None:
    assert joint_floor(Floor(1 / 1.1, 1.1), Floor(1 / 1.2, 1.2)).high == pytest.approx(1.32)
    assert joint_floor(Floor(None, None), Floor(0.9, 1.1)) == Floor(None, None)
    for times_a, verdict in ((2.6, "no difference"), (2.7, "B faster")):  # 1.30 and 1.35 against 1.1 · 1.2 = 1.32
        one = made({"00": ([4], [4]), "00'": ([4.4], [4.4]), "01": ([times_a], [times_a])})
        other = made({"00": ([4], [4]), "00'": ([4.8], [4.8]), "01": ([2], [2])})
        assert line(compared(one, other), "01").verdict == verdict


def test_with_one_prompt_the_repeats_of_each_run_are_drawn_and_a_single_one_gives_no_interval() -> None:
    # Two of 2 and 8 s: 2, 4, 4 or 8 s a quarter of the time each.
    ratio = ratio_of_runs({"p": [2.0, 8.0]}, {"p": [1.0, 1.0]})
    assert [round(value or 0, 9) for value in (ratio.mean, ratio.low, ratio.high)] == [4, 2, 8]
    single = ratio_of_runs({"p": [2.0, 8.0], "q": [9.0]}, {"p": [1.0], "r": [9.0]})
    assert (round(single.mean, 9), single.low, single.high) == (4, None, None)
    with pytest.raises(ValueError, match="no ratios"):
        ratio_of_runs({"p": [1.0]}, {"q": [1.0]})
    one = made({"00": ([4],), "01": ([2],)}, ("tides",))
    assert line(compared(one, one), "01").verdict == "one measurement"


def test_time_is_per_token_so_another_budget_can_be_compared_on_purpose() -> None:
    short = copy.deepcopy(B)
    short["settings"]["tokens"] = 3
    for entry in [*short["reference"], *(run for cell in short["cells"] for run in cell["runs"])]:
        entry["tokens"] = entry["tokens"][:3]  # two decoded: its 2 s are 1 s a token, against 3 s / 4
    found = compared(A, short, "tokens")
    assert about(line(found, "08").ratio) == [0.75, 0.75, 0.75]
    assert found.other_texts == ()


CHANGES = [
    (("lab_version",), "9", "lab_version", "lab"),
    (("target", "weights_sha256"), "0" * 64, "target.weights_sha256", "target"),
    (("target", "dtype"), "bfloat16", "target.dtype", "dtype"),
    (("target", "device"), "cuda", "target.device", "device"),
    (("target", "path"), "library", "target.path", "path"),
    (("drafter", "files", 0, "sha256"), "0" * 64, "drafter.files.model.safetensors", "drafter"),
    (("machine", "cpu"), "Other", "machine.cpu", "machine"),
    (("machine", "torch"), "9", "machine.torch", "software"),
    (("machine", "threads"), 4, "machine.threads", "threads"),
    (("settings", "threads"), 4, "settings.threads", "threads"),
    (("settings", "verify_width"), 3, "settings.verify_width", "verify-width"),
    (("settings", "ablations"), ["no-bonus"], "settings.ablations", "ablations"),
    (("settings", "new_one"), True, "settings.new_one", "new-one"),
    (("prompts", 0, "text"), "Other?", "prompts.tides.text", "prompts"),
    (("prompts", 0, "prompt_tokens"), 1, "prompts.tides.prompt_tokens", "target"),
]


@pytest.mark.parametrize(("path", "value", "field", "axis"), CHANGES, ids=[change[2] for change in CHANGES])
def test_another_experiment_is_refused_by_field_and_compared_where_it_is_meant(
    path: tuple[Any, ...], value: object, field: str, axis: str
) -> None:
    other = copy.deepcopy(B)
    place = other
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(UserError) as refusal:
        compared(A, other)
    assert f"{field} is " in str(refusal.value)
    assert f"--across {axis})" in str(refusal.value)
    with pytest.raises(UserError, match=field):
        compared(A, other, "seed")
    found = compared(A, other, axis)
    assert about(line(found, "08").ratio) == [1.5, 1.5, 1.5]
    first = summary(found).splitlines()[3]
    assert first.startswith(f"! Across {axis}, on purpose: {field} is ")
    assert f"Across {axis}, on purpose: {field} is " in Page(render_comparison(found)).text


def test_every_differing_field_is_named_at_once() -> None:
    other = copy.deepcopy(B)
    other["machine"]["cpu"], other["settings"]["tokens"], other["drafter"] = "Other", 32, None
    with pytest.raises(UserError) as refusal:
        compared(A, other, "dtype")
    sentence = str(refusal.value)
    assert all(name in sentence for name in ("machine.cpu", "drafter.name", "drafter.files.config.json", "settings.tokens"))
    assert sentence.endswith("--across dtype,machine,drafter,tokens).")


def test_an_axis_that_does_not_exist_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"no 'thread'; it names lab, .*threads, .*or a setting \(.*seed, tokens"):
        compared(A, B, "thread")


def test_how_much_was_measured_may_differ_and_is_told() -> None:
    other = made({"00": ([4], [4]), "01": ([1], [1])})
    other["settings"] |= {"repeats": 1, "methods": ["00", "01"], "peers": [], "warmup_cells": 1}
    one = copy.deepcopy(A)
    one["settings"] |= {"repeats": 2}
    found = compared(one, other)
    assert about(line(found, "01").ratio) == [2, 1, 4]
    assert (line(found, "08").ratio, line(found, "08").verdict) == (None, "not in B")
    assert any("settings.repeats is 2 in A and 1 in B" in warning for warning in warnings(found))


def test_across_prompts_only_the_common_ones_count() -> None:
    other = made({"00": ([4, 4],), "01": ([1, 1],), "08": ([2, 2],)}, ("tides",))
    found = compared(A, other, "prompts")
    assert found.prompts == ("tides",)
    assert about(line(found, "01").ratio) == [4, 2, 8]
    other["prompts"][0]["id"] = other["reference"][0]["prompt"] = "new"
    with pytest.raises(UserError, match="no prompt in common"):
        compared(A, other, "prompts")


@pytest.mark.parametrize("warmup", [False, True])
def test_an_arm_inexact_in_either_run_gets_no_ratio(warmup: bool) -> None:
    for one, other, where in ((spoilt(A, "08", warmup), B, "A"), (A, spoilt(B, "08", warmup), "B")):
        found = compared(one, other)
        assert (line(found, "08").ratio, line(found, "08").verdict) == (None, f"inexact in {where}")
        assert line(found, "01").ratio is not None
        assert sentence(found) == "No difference between A and B in 2 arms; 1 arm changed the output"
        assert "1.50×" not in summary(found) + render_comparison(found)
    assert line(compared(spoilt(A, "08"), spoilt(B, "08")), "08").verdict == "inexact in A and B"


def test_a_tie_keeps_its_ratio_and_an_inexact_method_00_leaves_no_floor() -> None:
    one = spoilt(A, "08")
    one["gate"]["mismatches"] = [{"arm": "08", "prompt": "tides", "repeat": 0, "verdict": "tie"}]
    assert about(line(compared(one, B), "08").ratio) == [1.5, 1.5, 1.5]
    found = line(compared(spoilt(A, "00"), B), "08")
    assert (about(found.ratio), found.verdict, found.speedup_a) == ([1.5, 1.5, 1.5], "no floor", None)


def test_a_machine_that_changed_its_pace_is_told_unless_it_was_meant_to() -> None:
    slow = made({"00": ([8, 8], [8, 8]), "01": ([4, 4], [4, 4])})
    quick = made({"00": ([4, 4], [4, 4]), "01": ([2, 2], [2, 2])})
    assert any("Normal differs from itself (2.00×" in warning for warning in warnings(compared(slow, quick)))
    quick["machine"]["cpu"] = "Other"
    assert not any("itself" in warning for warning in warnings(compared(slow, quick, "machine")))


def test_settings_that_calibration_chose_otherwise_other_texts_and_an_unfinished_run_are_told() -> None:
    other = copy.deepcopy(B)
    next(arm for arm in other["arms"] if arm["key"] == "08")["settings"] = {"threshold": 0.5}
    other["complete"] = False
    for entry in [other["reference"][1], *(run for cell in other["cells"][3:] for run in cell["runs"])]:
        entry["tokens"] = [11, 12, 77, 14, 15]
    found = compared(A, other)
    assert line(found, "08").note == "threshold is 0.25 in A and 0.5 in B"
    told = " ".join(warnings(found))
    assert "B is not finished" in told
    assert "The references differ for primes" in told
    assert line(found, "08").ratio is not None


def test_names_stay_text_on_the_page() -> None:
    one, other = copy.deepcopy(A), copy.deepcopy(B)
    for benchmark in (one, other):
        benchmark["machine"]["cpu"] = benchmark["target"]["name"] = benchmark["created"] = EVIL
        benchmark["arms"][2]["name"] = benchmark["prompts"][0]["id"] = EVIL
        benchmark["arms"][2]["settings"] = {EVIL: benchmark is one}
        benchmark["settings"][EVIL] = EVIL if benchmark is one else 1
        for entry in [*benchmark["reference"], *benchmark["cells"]]:
            entry["prompt"] = EVIL if entry["prompt"] == "tides" else entry["prompt"]
    html = render_comparison(compare((EVIL, EVIL), one, other, [EVIL.replace("_", "-")]))
    page = Page(html)
    names = {tag for tag, _ in page.elements}
    assert not names & {"script", "img", "iframe", "object", "embed", "base", "form", "link"}
    attributes = {name for _, names in page.elements for name in names}
    assert not [name for name in attributes if name.startswith("on") or name in ("style", "src")]
    assert page.text.count("<script>alert(1)</script>") >= 8
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in page.attributes("href")} <= set(ids)
    (policy,) = [names["content"] for _, names in page.elements if names.get("http-equiv") == "Content-Security-Policy"]
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def test_a_narrow_console_without_tau_keeps_ratio_and_verdict() -> None:
    text = summary(compared(A, B), width=50, encoding="ascii")
    assert "1.50x [1.50-1.50]" in text
    assert "B faster" in text
    assert "A's own  " not in text


def damaged(name: str) -> str:
    benchmark = copy.deepcopy(A)
    if name == "half":
        return json.dumps(benchmark)[:5000]
    if name == "version":
        benchmark["schema_version"] = 2
    elif name == "no cells":
        del benchmark["cells"]
    elif name == "no reference":
        benchmark["reference"] = benchmark["reference"][:1]
    elif name == "twice":
        benchmark["cells"].append(benchmark["cells"][-1])
    elif name == "infinite":
        benchmark["cells"][1]["runs"][0]["decode_seconds"] = float("inf")
    elif name == "warm-up":
        benchmark["cells"][0]["repeat"] = 7
    elif name == "list":
        return "[]"
    return json.dumps(benchmark)


@pytest.mark.parametrize("name", ["half", "version", "no cells", "no reference", "twice", "infinite", "warm-up", "list"])
def test_a_damaged_file_is_one_line_and_status_2(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.json", A)
    (tmp_path / "b.json").write_text(damaged(name), encoding="utf-8")
    assert cli.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--output-dir", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("error: ")
    assert "b.json" in output.err
    assert not (tmp_path / "compare.html").exists()


def test_the_command_prints_the_table_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = copy.deepcopy(B)
    other["settings"]["threads"] = other["machine"]["threads"] = 4
    one, two, folder = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "new"
    write(one, A)
    write(two, other)
    words = ["compare", str(one), str(two), "--output-dir", str(folder)]
    assert cli.main(words) == 2
    refusal = capsys.readouterr().err
    assert refusal.count("\n") == 1
    assert "settings.threads is 2 in A and 4 in B" in refusal
    assert cli.main([*words, "--across", "threads"]) == 0
    printed = capsys.readouterr().out
    assert "! Across threads, on purpose: machine.threads is 2 in A and 4 in B; settings.threads is" in printed
    assert "1.50× [1.50–1.50]" in printed
    assert "1.50×" in (folder / "compare.html").read_text(encoding="utf-8")
    assert read_whole(one) == A
    (tmp_path / "file").write_text("")
    assert cli.main([*words[:3], "--across", "threads", "--output-dir", str(tmp_path / "file")]) == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["compare"], "required: A.json, B.json"),
        (["compare", "none.json", "none.json"], "A.json: 'none.json' is not a file that exists"),
        (["compare", __file__, __file__, "--across", ","], "--across: ',' is not names separated by commas"),
    ],
)
def test_a_mistake_of_the_command_line_is_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert words in message


def test_comparing_never_imports_torch() -> None:
    code = "import sys, dflash_mini_lab.benchmark.comparison; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SOURCE.parent)}
    )
    assert done.stdout.strip() == "[]"
