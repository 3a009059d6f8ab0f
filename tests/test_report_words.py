"""The verdict's sentences, the terminal's table and the live progress."""

from __future__ import annotations

import io

import pytest
from sample import add_mismatch, add_tuning, interrupt, sample_benchmark

from dflash_mini_lab.report.format import console_text, moment
from dflash_mini_lab.report.progress import Progress, left_seconds
from dflash_mini_lab.report.ranking import rank
from dflash_mini_lab.report.terminal import print_summary, results_table, summary
from dflash_mini_lab.report.tuning import agreement, tuning
from dflash_mini_lab.report.verdict import gate_failed, verdict_sentence


def run(verdict: str, mean: float, low: float | None, high: float | None, **options) -> dict:
    benchmark = sample_benchmark(prompts=2, repeats=1, methods=("01",), peers=(), **options)
    benchmark["results"]["arms"]["01"] |= {"verdict": verdict, "speedup": {"mean": mean, "low": low, "high": high}}
    benchmark["results"]["noise_floor"] = {"low": 0.99, "high": 1.01, "wide": False}
    return benchmark


def noisy(benchmark: dict) -> dict:
    benchmark["results"]["noise_floor"] = {"low": 0.88, "high": 1.1, "wide": True}
    return benchmark


def half_done(benchmark: dict) -> dict:
    return benchmark | {"complete": False, "gate": benchmark["gate"] | {"verdict": "pending"}}


def in_bfloat16(benchmark: dict) -> dict:
    benchmark["target"]["dtype"] = "bfloat16"
    return benchmark


FASTER = ("faster", 1.8349, 1.74, 1.91)
SENTENCES = {
    "DFlash is 1.83× [1.74–1.91] faster here; output identical": run(*FASTER),
    "A single measurement puts DFlash at 1.83×, too little to call; output identical": run("no difference", 1.8349, None, None),
    "DFlash is slower here, 0.82× [0.80–0.84] the speed of normal decoding; output identical": run("slower", 0.82, 0.80, 0.84),
    "DFlash makes no difference here (1.01× [0.98–1.03], within the noise); output identical": run(
        "no difference", 1.01, 0.98, 1.03
    ),
    "This machine was too noisy to tell whether DFlash helps (1.04× [0.90–1.20]); output identical": noisy(
        run("no difference", 1.04, 0.90, 1.20)
    ),
    "DFlash is 1.83× [1.74–1.91] faster here, on a noisy machine; output identical": noisy(run(*FASTER)),
    "So far, DFlash is 1.83× [1.74–1.91] faster here; output not checked yet": half_done(run(*FASTER)),
    "Output changed: DFlash failed the exactness gate, so it gets no speed-up": add_mismatch(run(*FASTER), "01"),
    "Output changed: Normal did not reproduce the reference, so this run has no speed-ups": add_mismatch(run(*FASTER), "00"),
    "Unfinished run: 1 of 2 cells measured, no result yet": interrupt(run(*FASTER), 1),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_verdict_in_one_sentence(sentence: str) -> None:
    assert verdict_sentence(SENTENCES[sentence]) == sentence


def test_a_failing_method_does_not_hide_that_another_is_faster() -> None:
    benchmark = add_mismatch(sample_benchmark(prompts=3), "08")
    assert verdict_sentence(benchmark).startswith(
        "Output changed: ACT failed the exactness gate, so it gets no speed-up. DFlash is 1.92× ["
    )


def test_the_headline_prefers_a_clear_win_to_a_higher_but_doubtful_mean() -> None:
    benchmark = sample_benchmark(prompts=3)
    benchmark["results"]["arms"]["08"] |= {"verdict": "no difference", "speedup": {"mean": 9.0, "low": 0.5, "high": 30.0}}
    assert verdict_sentence(benchmark).startswith("DFlash is")


def test_a_single_measurement_is_not_called_no_difference() -> None:
    benchmark = run("no difference", 1.8349, None, None)
    assert "one measurement" in results_table(benchmark)
    assert "no difference" not in results_table(benchmark)


def test_a_peer_never_takes_the_headline() -> None:
    benchmark = sample_benchmark(prompts=3)
    benchmark["results"]["arms"]["generate"] |= {"verdict": "faster", "speedup": {"mean": 9.0, "low": 8.0, "high": 9.5}}
    assert verdict_sentence(benchmark).startswith("DFlash is")


def test_ties_fail_a_float32_run_and_are_only_counted_in_bfloat16() -> None:
    tied = add_mismatch(run(*FASTER), "01", "tie")
    tied["results"]["arms"]["01"] |= {"verdict": "faster", "speedup": {"mean": 1.8, "low": 1.7, "high": 1.9}}
    assert gate_failed(tied)
    assert not gate_failed(in_bfloat16(tied))
    assert verdict_sentence(tied) == "DFlash is 1.80× [1.70–1.90] faster here; output identical but for 1 numerical tie"


def test_a_speedup_in_the_file_of_an_inexact_arm_is_not_believed() -> None:
    benchmark = add_mismatch(sample_benchmark(prompts=2), "08")
    benchmark["results"]["arms"]["08"] |= {"verdict": "faster", "speedup": {"mean": 3.0, "low": 2.9, "high": 3.1}}
    last = rank(benchmark)[-1]
    assert (last.key, last.mean, last.verdict) == ("08", None, "inexact")


def test_every_arm_is_ranked_fastest_first() -> None:
    rows = rank(sample_benchmark())
    assert {row.key for row in rows} == {"00", "00'", "01", "08", "generate", "prompt-lookup"}
    means = [row.mean for row in rows]
    assert means == sorted(means, reverse=True)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp437", "utf-8", None])
def test_the_table_prints_on_any_console(encoding: str | None) -> None:
    text = summary(add_mismatch(sample_benchmark(prompts=2), "08"), 80, encoding)
    text.encode(encoding if encoding in ("cp1252", "cp437", "utf-8") else "ascii")
    assert "DFlash" in text
    assert "inexact" in text


def test_a_stream_that_cannot_print_a_tick_gets_a_word() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_summary(sample_benchmark(prompts=2), stream, 80)
    assert b"yes" in raw.getvalue()
    assert b"tau" in raw.getvalue()


def test_a_tuned_run_says_how_often_the_cost_model_agrees_and_another_says_nothing() -> None:
    benchmark = sample_benchmark(prompts=2)
    assert "cost model" not in summary(benchmark)
    once = "tuned widths agree with the cost model for 1 of 2 methods"
    assert summary(add_tuning(benchmark)).splitlines()[-1] == f"{once}; for 1 the two differ by less than the noise"
    compared = benchmark["tuning"]["agreement"]["methods"]
    compared["08"]["verdict"] = "differ"
    assert agreement(benchmark) == f"{once}; for 1 by more"
    compared["01"]["verdict"] = compared["08"]["verdict"] = "unknown"
    benchmark["tuning"]["methods"]["01"]["agree"] = None
    never = "tuned widths agree with the cost model for 0 of 2 methods"
    assert agreement(benchmark) == f"{never}; for 2 there is nothing to compare"
    del benchmark["tuning"]["agreement"]
    assert agreement(benchmark) == never, "a file of before it was recorded"


def test_the_page_marks_the_measured_and_the_expected_width() -> None:
    benchmark = add_tuning(sample_benchmark(prompts=2))
    found = tuning(benchmark)
    assert found is not None
    dflash, act = found["methods"]
    assert [line[-1] for line in dflash["table"]] == ["", "", "✓ measured, ✓ cost model", "", ""]
    assert [line[-1] for line in act["table"]] == ["", "✓ measured", "", "", "✓ cost model"]
    assert dflash["words"] == "fastest at 4; cost model: 4"
    assert act["words"] == "fastest at 3; cost model: 6, +1.2% time over 4 answers: within the noise (±2.8%)"
    expected = f"{1.5 / 0.0292:.1f}"  # the model's speed-up over the curve's single-row decode
    assert act["table"][-1][:5] == (6, 2, "57.0", expected, "1.70")
    assert act["table"][0][7] == "✗ no"


@pytest.mark.parametrize("width", [40, 60, 72, 80, 200])
def test_the_table_fits_its_width_and_keeps_exactness(width: int) -> None:
    lines = results_table(sample_benchmark(), width, "ascii").splitlines()
    assert max(map(len, lines)) <= width
    assert "Exact" in lines[0]
    assert len(lines) == 7


def test_a_loss_is_said_in_a_narrow_table_too() -> None:
    benchmark = sample_benchmark(prompts=2)
    benchmark["results"]["arms"]["08"] |= {"verdict": "slower"}
    (line,) = [line for line in results_table(benchmark, 60).splitlines() if line.startswith("ACT")]
    assert line.endswith("slower")


def test_text_for_a_console_has_no_control_characters() -> None:
    assert console_text("a\x1b[2Jb\x07", "utf-8") == "a\ufffd[2Jb\ufffd"


def test_a_time_that_is_none_stays_as_it_is() -> None:
    assert moment("2026-01-02T03:04:05Z") == "2 January 2026, 03:04 UTC"
    assert moment("<yesterday>") == "<yesterday>"


class Console(io.StringIO):
    encoding = "cp1252"

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def progress_on(stream: Console) -> str:
    with Progress(total=4, stream=stream, width=79) as progress:
        for arm in ("Normal", "DFlash τ"):
            progress.now(arm, "tides\x1b[2J")
            progress.done()
        progress.cell("tides, repeat 1")
    return stream.getvalue()


def test_a_log_gets_one_line_a_cell_and_no_bar() -> None:
    text = progress_on(Console(terminal=False))
    assert text.count("\n") == 1
    assert text.startswith("benchmark: 2/4, tides, repeat 1, ")
    assert "\r" not in text


def test_a_terminal_shows_arm_prompt_and_time_left_and_is_clean_afterwards() -> None:
    text = progress_on(Console(terminal=True))
    assert "2/4" in text
    assert "DFlash tau on tides" in text
    assert "left" in text
    assert "\x1b" not in text
    assert "\n" not in text
    assert not text.rsplit("\r", 2)[1].strip()


def test_the_time_left_follows_the_pace_so_far() -> None:
    assert left_seconds(elapsed=10.0, finished=4, total=12) == 20.0
    assert left_seconds(elapsed=10.0, finished=13, total=12) == 0.0
