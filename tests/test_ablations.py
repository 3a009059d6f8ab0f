"""Runs without what makes them fast: every method's text stays plain greedy decoding's, and the file says what was left out."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_lab
import torch
from tests.tables import random_heads
from tests.test_heads import GAP, PARAREAL, head_tensors, write
from tests.tiny_folder import WORDS, save_tiny_model
from tests.tiny_models import (
    FAMILIES,
    POSITIONS,
    ScriptedDrafter,
    TickingClock,
    paths_of,
    plain_greedy,
    random_ids,
    tiny_model,
    tiny_target,
)

from dflash_mini_lab import artifacts, cli
from dflash_mini_lab.benchmark.experiment import differences
from dflash_mini_lab.benchmark.loading import ablated
from dflash_mini_lab.benchmark.run import settings_entry
from dflash_mini_lab.benchmark_file import Benchmark, read, schema_errors
from dflash_mini_lab.catalog import resolve
from dflash_mini_lab.decoding import decode
from dflash_mini_lab.drafters import block
from dflash_mini_lab.drafters.checkpoint import DRAFT_TO_TARGET, DrafterConfig, save_checkpoint
from dflash_mini_lab.methods import METHODS, by_key
from dflash_mini_lab.packed_linear import PLAIN, ROUNDED, PackedLinear, stock_plan
from dflash_mini_lab.prefetched_linear import kernel
from dflash_mini_lab.report.verdict import verdict
from dflash_mini_lab.settings import ABLATIONS, Settings
from dflash_mini_lab.targets import lean_build
from dflash_mini_lab.targets.lm_head import FullHead, ScreenedHead
from dflash_mini_lab.targets.tiny_target import TinyTarget
from dflash_mini_lab.training.model import TrainableDrafter
from dflash_mini_lab.tuning import predict
from dflash_mini_lab.types import UserError

PATHS = ("lean", "static", "library")
DFLASH = by_key("01")


# Without the bonus token, and with every logit.


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.slug)
@pytest.mark.parametrize("kind", ["right", "random"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_answers_as_plain_greedy_decoding_does(family: str, kind: str, method) -> None:
    for seed, path in enumerate(paths_of(method)):
        prompt = random_ids(5 + seed, seed)
        answer = plain_greedy(family, prompt, 24)
        for size in (2, 7):
            drafter = ScriptedDrafter(kind, len(prompt), answer, size, seed)
            target = tiny_target(family, path, full_logits=True)
            decoded = decode(target, prompt, method, 24, TickingClock(), drafter, bonus=False)
            assert list(decoded.tokens) == answer
            assert all(step.committed == max(1, step.accepted) for step in decoded.steps)


@pytest.mark.parametrize("path", PATHS)
def test_a_round_commits_what_it_accepted_and_at_least_the_targets_own_token(path: str) -> None:
    prompt = random_ids(6, 0)
    answer = plain_greedy("llama", prompt, 25)
    for kind, committed in (("right", [6, 6, 6, 5, 1]), ("wrong", [1] * 24)):
        drafter = ScriptedDrafter(kind, 6, answer, 7)
        decoded = decode(tiny_target("llama", path), prompt, DFLASH, 25, TickingClock(), drafter, bonus=False)
        assert list(decoded.tokens) == answer
        assert [step.committed for step in decoded.steps] == committed


@pytest.mark.parametrize("place", range(9))
def test_without_the_bonus_token_a_stop_token_ends_the_text_too(place: int) -> None:
    prompt = random_ids(6, 4)
    answer = plain_greedy("llama", prompt, 30)
    target = tiny_target("llama", "lean", frozenset({answer[place]}))
    decoded = decode(target, prompt, DFLASH, 30, TickingClock(), ScriptedDrafter("right", 6, answer, 8), bonus=False)
    assert list(decoded.tokens) == answer[: answer.index(answer[place]) + 1]
    assert decoded.finish == "stop"


@pytest.mark.parametrize("left", range(1, 10))
def test_without_the_bonus_token_the_context_ends_where_it_did(left: int) -> None:
    prompt = random_ids(POSITIONS - left, 2)
    answer = plain_greedy("llama", prompt, 50)
    drafter = ScriptedDrafter("right", len(prompt), answer, 8)
    decoded = decode(tiny_target("llama", "lean"), prompt, DFLASH, 50, TickingClock(), drafter, bonus=False)
    assert (list(decoded.tokens), decoded.finish) == (answer, "context")


def test_the_cost_model_counts_what_a_round_without_bonus_token_commits() -> None:
    # Block 4, accepting 3, 1, 0, 1: rounds commit 3, 1, 1, 1 at 4 rows, at 3 rows at most 2, at 2 rows always 1.
    counts = {"rows": [4] * 4, "proposed": [3] * 4, "accepted": [3, 1, 0, 1], "committed": [3, 1, 1, 1], "work": [0] * 4}
    log = {**counts, **{phase: [0.5] * 4 for phase in ("draft", "select", "verify", "rest")}}
    curve = {"rows": [1, 2, 3, 4], "ratio": [1.0] * 4, "median_seconds": [1.0] * 4}
    found = predict([log], [2, 3, 4], curve, bonus=False)
    assert found is not None
    assert [line["tokens_per_round"] for line in found["widths"]] == [1.0, 1.25, 1.5]


@pytest.mark.parametrize("path", ["lean", "static"])
def test_full_logits_are_those_of_every_row_of_the_prompt(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    honest = FullHead.logits
    monkeypatch.setattr(FullHead, "logits", lambda self, hidden: (rows.append(len(hidden)), honest(self, hidden))[1])
    for full, expected in ((False, 1), (True, 9)):
        tiny_target("llama", path, full_logits=full).start(random_ids(9, 1), 40, (0,)).prefill()
        assert rows.pop() == expected


def test_full_logits_leave_the_screen_out_and_keep_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_build, "measure_plan", lambda weights: stock_plan(weights[0]))
    monkeypatch.setattr(lean_build, "rounded_plan", lambda _, plan, storage: replace(plan, storage=storage))
    model = type(tiny_model("qwen3"))(tiny_model("qwen3").config).eval()
    assert isinstance(lean_build.build_lean_decoder(model, 32).head, ScreenedHead)
    decoder = lean_build.build_lean_decoder(model, 32, screen=False)
    assert isinstance(decoder.head, FullHead)
    assert [plan.storage for plan in decoder.plans].count(lean_build.SCREENED) == 0


def test_the_numpy_target_scores_its_whole_sequence_and_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.test_tiny import TAPS, random_target

    plain = random_target()
    full = TinyTarget.__new__(TinyTarget)
    vars(full).update(vars(plain) | {"full_logits": True})
    sessions = [target.start([5, 6, 7, 8], 40, TAPS) for target in (plain, full)]
    assert len({session.prefill() for session in sessions}) == 1
    assert sessions[0].verify([9, 10, 11]) == sessions[1].verify([9, 10, 11])
    scored: list[int] = []

    class Head(np.ndarray):
        def __rmatmul__(self, hidden: np.ndarray) -> np.ndarray:
            scored.append(len(hidden))
            return hidden @ np.asarray(self)

    for target in (plain, full):
        target.head = target.head.view(Head)
        target.start([5, 6, 7, 8], 40, TAPS).prefill()
    assert scored == [1, 4]


# The drafter's vocabulary.


def test_the_reduced_vocabulary_is_left_out_only_when_it_is_asked_for_and_there() -> None:
    config = object()
    whole = {"fc.weight": 1}
    reduced = {**whole, DRAFT_TO_TARGET: [1, 2]}
    assert ablated((config, reduced), ("no-bonus",)) == (config, reduced)  # type: ignore[arg-type]
    assert ablated((config, reduced), ("full-vocabulary",)) == (config, whole)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="scores the whole vocabulary already"):
        ablated((config, whole), ("full-vocabulary",))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no drafter runs here"):
        ablated(None, ("full-vocabulary",))


# A whole run.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target's folder and its drafter's: random, with a reduced vocabulary and every head."""
    folder = save_tiny_model(tmp_path_factory.mktemp("target") / "tiny")
    beside = tmp_path_factory.mktemp("drafter")
    vocabulary, hidden = 4 + len(WORDS), 64
    config = DrafterConfig(hidden, 48, 1, 4, 2, 16, 4, (0, 2), 3, 4, vocabulary, target_name="tiny")
    torch.manual_seed(2)
    kept = torch.arange(2, vocabulary, 2, dtype=torch.int32)
    save_checkpoint(beside, config, {**TrainableDrafter(config).state_dict(), DRAFT_TO_TARGET: kept})
    write(beside, head_tensors(random_heads(vocabulary, hidden, 3, offsets=(2,))), parareal=PARAREAL, gap=GAP)
    artifacts.write_manifest(beside, resolve(str(folder)).name, {})
    return folder, beside


def measured(model: tuple[Path, Path], out: Path, *words: str, status: int = 0) -> Benchmark:
    small = ["--tokens", "8", "--repeats", "1", "--prompt-limit", "1", "--calibration-prompt-limit", "0", "--cpu-threads", "1"]
    places = ["--target", str(model[0]), "--artifact-dir", str(model[1]), "--output-dir", str(out)]
    assert cli.main([*places, *small, *words]) == status
    benchmark = read(out / "benchmark.json")
    assert schema_errors(benchmark) == []
    return benchmark


def test_a_run_with_every_ablation_is_exact_for_every_method_and_says_so(model: tuple[Path, Path], tmp_path: Path) -> None:
    benchmark = measured(model, tmp_path, "--ablate", ",".join(reversed(ABLATIONS)))
    assert benchmark["settings"]["ablations"] == list(ABLATIONS)
    assert [arm["key"] for arm in benchmark["arms"]] == ["00", "00'", *(method.key for method in METHODS[1:])]
    assert benchmark["gate"]["verdict"] == "exact"
    assert benchmark["drafter"]["draft_vocabulary"] == 4 + len(WORDS)
    assert {plan["storage"] for plan in benchmark["linear_plans"]} == {"plain"}
    assert not any(plan["gigabytes_per_second"] for plan in benchmark["linear_plans"])
    every, page = "full-logits, no-bonus, full-vocabulary, exact-drafter, stock-linear", tmp_path / "index.html"
    assert f"An ablation: {every}" in " ".join(verdict(benchmark).warnings)
    assert every in page.read_text(encoding="utf-8")


def test_cells_trials_and_recorded_rounds_all_go_without_the_bonus_token(tmp_path: Path) -> None:
    """The tiny lab's drafter knows two tokens of three, so that most rounds accept something."""
    found = {}
    for name, ablate in (("whole", ()), ("ablated", ("no-bonus",))):
        options = tiny_lab.settings(tmp_path / name, tokens=24, ablate=ablate, tune=True, tuning_repeats=1)
        assert tiny_lab.run(options) == 0
        found[name] = read(tmp_path / name / "benchmark.json")
    for name, extra in (("whole", 1), ("ablated", 0)):
        runs = [run for cell in found[name]["cells"] for run in cell["runs"] if run["arm"] == "01"]
        pairs = [pair for run in runs for pair in zip(run["steps"]["committed"], run["steps"]["accepted"], strict=True)]
        recorded = found[name]["rounds"]["methods"]["01"]
        assert recorded["exact"]
        pairs += [(known["committed"], known["accepted"]) for known in recorded["rounds"]]
        assert any(accepted for _, accepted in pairs)
        assert all(committed == max(1, accepted + extra) for committed, accepted in pairs)
    trials = [benchmark["calibration"]["methods"]["08"]["trials"][0]["tau"] for benchmark in found.values()]
    assert trials[1] < trials[0]
    whole, ablated = (benchmark["tuning"]["methods"]["01"] for benchmark in found.values())
    assert [trial["tau"] for trial in ablated["trials"]] < [trial["tau"] for trial in whole["trials"]]
    assert ablated["trials"][0]["tau"] == 1.0, "two rows without the bonus token commit one token a round"
    assert ablated["analytic"]["widths"][0]["tokens_per_round"] == 1.0


def test_no_ablation_is_no_field_that_an_earlier_file_lacks(
    model: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (lean_build, block):  # no time is spent on measuring products
        monkeypatch.setattr(place, "measure_plan", lambda weights: stock_plan(weights[0]))
    benchmark = measured(model, tmp_path, "--methods", "01")
    assert benchmark["settings"]["ablations"] is None
    assert benchmark["drafter"]["draft_vocabulary"] == 1 + len(WORDS) // 2
    earlier = {**benchmark, "settings": {name: v for name, v in benchmark["settings"].items() if name != "ablations"}}
    assert differences(earlier, benchmark) == []
    other = {**benchmark, "settings": {**benchmark["settings"], "ablations": ["no-bonus"]}}
    assert [(found.field, found.axis) for found in differences(benchmark, other)] == [("settings.ablations", "ablations")]


def test_stock_layers_are_neither_measured_nor_packed(model: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_mini_lab.benchmark.loading import load_model

    packed: list[bool] = []
    honest = PackedLinear.__init__
    monkeypatch.setattr(
        PackedLinear, "__init__", lambda self, w, b, plan: (packed.append(plan.storage != PLAIN), honest(self, w, b, plan))[1]
    )
    asked = Settings(target=str(model[0]), artifact_dir=model[1], ablate=("stock-linear",))
    engine = load_model(asked, print).build(64)
    assert packed
    assert not any(packed)
    assert not any(plan["gigabytes_per_second"] for plan in engine.linear_plans)


@pytest.mark.skipif(kernel() is None, reason="no LLVM, fused multiply-add or OpenMP here")
def test_an_exact_drafter_is_not_rounded(model: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_mini_lab.benchmark.loading import load_model

    monkeypatch.setattr(block, "rounded_plan", lambda _, plan: plan if plan.in_features % 2 else replace(plan, storage=ROUNDED))
    storages = []
    for ablate in ((), ("exact-drafter",)):
        asked = Settings(target=str(model[0]), artifact_dir=model[1], ablate=ablate)
        storages.append([plan["storage"] for plan in load_model(asked, print).build(64).linear_plans])
    assert ROUNDED in storages[0]
    assert ROUNDED not in storages[1]


@pytest.mark.parametrize("ablation", ["stock-linear", "exact-drafter"])
def test_what_the_tiny_target_has_not_cannot_be_left_out(
    ablation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in cli.NUMPY_THREADS:
        monkeypatch.setenv(name, "1")
    assert cli.main(["--target", "tiny", "--output-dir", str(tmp_path), "--ablate", ablation]) == 2
    assert "NumPy's products only" in capsys.readouterr().err


def test_the_tiny_target_without_bonus_token_and_with_every_logit_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in cli.NUMPY_THREADS:
        monkeypatch.setenv(name, "1")
    words = ["--target", "tiny", "--smoke", "--ablate", "no-bonus,full-logits", "--output-dir", str(tmp_path)]
    assert cli.main(words) == 0
    assert read(tmp_path / "benchmark.json")["settings"]["ablations"] == ["full-logits", "no-bonus"]


def test_the_settings_of_a_run_hold_its_ablations() -> None:
    assert settings_entry(Settings(ablate=("no-bonus",)))["ablations"] == ["no-bonus"]
