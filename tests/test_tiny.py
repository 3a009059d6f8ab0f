"""The tiny reference: NumPy only, exact under every method, with a drafter that is worth something. Never imports torch."""
from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tests.tables import path_to, random_parents

from dflash_mini_lab import artifacts, cli
from dflash_mini_lab.benchmark.engine import Engine, Model
from dflash_mini_lab.benchmark.experiment import refuse_unnamed
from dflash_mini_lab.benchmark.loading import load_model
from dflash_mini_lab.benchmark.run import choose_prompts
from dflash_mini_lab.benchmark_file import read, schema_errors
from dflash_mini_lab.catalog import TARGETS
from dflash_mini_lab.decoding import decode
from dflash_mini_lab.drafters.heads import HEAD_FILES
from dflash_mini_lab.exactness import Reference, reference_greedy, stock_logits
from dflash_mini_lab.measurement.clock import HostClock
from dflash_mini_lab.measurement.step_log import columns, tau
from dflash_mini_lab.methods import METHODS
from dflash_mini_lab.prompts import Prompt, refuse_overlap, training_seeds
from dflash_mini_lab.settings import Settings, resolve
from dflash_mini_lab.targets import tiny, tiny_reference
from dflash_mini_lab.targets.tiny import TinyConfig, tensor_shapes
from dflash_mini_lab.targets.tiny_reference import PlainReference
from dflash_mini_lab.targets.tiny_target import TinyTarget
from dflash_mini_lab.types import UserError

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "artifacts" / "tiny"
TEXT = ROOT / "benchmarks" / "tiny" / "text.txt"
DFLASH = METHODS[1]
TAPS = (0, 1)
RANDOM = TinyConfig(61, 32, 48, 2, 4, 2, 8, 120, 1e-5, 10000.0)


@cache
def random_target() -> TinyTarget:
    """float64, so that two orders of summation cannot choose two tokens."""
    order = np.random.default_rng(3)
    tensors = {
        name: order.normal(1.0 if "norm" in name else 0.0, 0.3, shape) for name, shape in tensor_shapes(RANDOM).items()
    }
    return TinyTarget(RANDOM, tensors)


@cache
def random_reference() -> PlainReference:
    order = np.random.default_rng(3)
    tensors = {
        name: order.normal(1.0 if "norm" in name else 0.0, 0.3, shape) for name, shape in tensor_shapes(RANDOM).items()
    }
    return PlainReference(RANDOM, tensors)


def random_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(4, RANDOM.vocab_size, count).tolist()


# The session.


def test_every_rejection_point_at_every_block_size_equals_a_fresh_pass() -> None:
    target = random_target()
    for block in range(2, 6):
        for first_kept in range(block + 1):
            committed = random_ids(7, seed=block)
            session = target.start(committed, 100, TAPS)
            session.prefill()
            session.take_features()
            for deep in range(3):
                rows = random_ids(block, seed=100 * block + 10 * first_kept + deep)
                assert session.verify(rows) == target.logits(committed + rows)[-block:].argmax(-1).tolist()
                kept = (first_kept + deep * 3) % (block + 1)
                session.keep(kept)
                committed += rows[:kept]
                assert session.length == len(committed)
                expected = np.concatenate(target.forward(committed, TAPS)[1], axis=-1)
                np.testing.assert_allclose(session.take_features(), expected[len(committed) - kept :], atol=1e-9)


def test_every_path_of_random_trees_equals_a_fresh_pass() -> None:
    target, order = random_target(), random.Random(1)
    for size in range(2, 7):
        for end in range(-1, size):
            committed = random_ids(7, seed=size)
            session = target.start(committed, 100, TAPS)
            session.prefill()
            session.take_features()
            for deep in range(3):
                parents, tokens = random_parents(size, order), random_ids(size, seed=100 * size + 10 * end + deep)
                paths = [path_to(row, parents) for row in range(size)]
                expected = [int(target.logits([*committed, *(tokens[row] for row in path)])[-1].argmax()) for path in paths]
                assert session.verify(tokens, parents) == expected
                kept = paths[end] if end >= 0 and not deep else [] if end < 0 else paths[order.randrange(size)]
                session.keep(kept)
                committed += [tokens[row] for row in kept]
                assert session.length == len(committed)
                features = np.concatenate(target.forward(committed, TAPS)[1], axis=-1)[len(committed) - len(kept) :]
                np.testing.assert_allclose(session.take_features(), features, atol=1e-9)


def test_the_single_row_path_equals_the_verify_path() -> None:
    plain, checked = random_target().start(random_ids(7, 1), 60, None), random_target().start(random_ids(7, 1), 60, TAPS)
    one, other = plain.prefill(), checked.prefill()
    for _ in range(20):
        assert one == other
        one, (other,) = plain.decode_one(one), checked.verify([other])
        checked.keep(1)


def test_what_a_session_cannot_do_is_refused() -> None:
    target = random_target()
    single = target.start(random_ids(5, 0), 20, None)
    single.prefill()
    with pytest.raises(RuntimeError, match="cannot be rolled back"):
        single.verify([4, 5])
    session = target.start(random_ids(5, 0), 20, TAPS)
    session.prefill()
    session.verify([4, 5, 6])
    for rows in (-1, 4, [0, 3], [-1]):
        with pytest.raises(ValueError, match="3 rows"):
            session.keep(rows)
    with pytest.raises(UserError, match=r"layers \(2,\); this target's layers are 0 … 1"):
        target.start([5], 20, (2,))


# The reference.


def test_the_reference_computes_the_same_logits_in_another_way() -> None:
    prompt, tokens = random_ids(6, 4), random_ids(9, 5)
    expected = random_target().logits([*prompt, *tokens])[len(prompt) - 1 :]
    np.testing.assert_allclose(stock_logits(random_reference(), prompt, tokens), expected, atol=1e-5)


def test_the_reference_ends_at_a_stop_token_the_budget_and_the_contexts_end() -> None:
    prompt = random_ids(6, 4)
    whole = reference_greedy(random_reference(), prompt, 8, frozenset(), 120)
    assert (len(whole.tokens), whole.finish) == (8, "budget")
    assert reference_greedy(random_reference(), prompt, 8, frozenset({whole.tokens[0]}), 120).finish == "stop"
    assert reference_greedy(random_reference(), prompt, 8, frozenset(), 8).finish == "context"


def test_the_reference_shares_nothing_with_the_forward_pass_that_it_checks() -> None:
    tree = ast.parse(Path(tiny_reference.__file__).read_text(encoding="utf-8"))
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in names if name and name.startswith("dflash")} == {"dflash_mini_lab.targets.tiny"}


# What is in the repository.


@cache
def model() -> Model:
    return load_model(settings(), print)


@cache
def engine() -> Engine:
    return model().build(120)


@cache
def reference(prompt: str, budget: int) -> Reference:
    with model().stock() as stock:
        return reference_greedy(stock, model().encode_prompt(prompt), budget, model().stop_ids, model().max_positions)


def settings(**words: str) -> Settings:
    return resolve({"target": "tiny", **words}, {})


def prompts() -> list[Prompt]:
    measured, calibration = choose_prompts(settings())
    return [*measured, *calibration]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.key)
def test_every_method_gives_the_references_tokens(method) -> None:
    for width in (None, 2):
        for prompt in prompts()[:5]:
            drafter = engine().drafter if method.select else None
            ids = model().encode_prompt(prompt.text)
            decoded = decode(engine().target, ids, method, 24, HostClock(), drafter, verify_width=width)
            assert decoded.tokens == reference(prompt.text, 24).tokens, prompt.id


def test_the_drafter_is_worth_more_than_chance_on_held_out_prompts() -> None:
    logs = []
    for prompt in prompts():
        decoded = decode(engine().target, model().encode_prompt(prompt.text), DFLASH, 24, HostClock(), engine().drafter)
        logs.append(columns(decoded))
    macro, _ = tau(logs)
    assert macro is not None
    assert macro > 1.5


def test_its_heads_were_worth_something_on_held_out_answers_when_they_were_trained() -> None:
    figures = json.loads((FOLDER / "provenance.json").read_text())["heads"]
    assert figures["held_out_anchors"] > 1000
    assert figures["base"]["accepted"] < min(figures["pair"]["accepted"], figures["markov"]["accepted"])
    assert figures["confidence"]["brier"] < figures["confidence"]["brier_of_the_rate"]
    assert figures["jump"]["alone"][0] > 20 / model().target_facts["vocabulary"], "the jump head sees the anchor's past only"


def test_the_target_and_its_drafter_are_in_the_repository_verified_and_small(tmp_path: Path) -> None:
    folder = artifacts.locate(Settings(cache=tmp_path), "tiny", print)
    assert folder == FOLDER
    pinned = {file.name for file in artifacts.read_manifest(folder / artifacts.MANIFEST).files}
    assert pinned == {path.name for path in folder.iterdir()} - {artifacts.MANIFEST}
    assert {"model.safetensors", "config.json", *HEAD_FILES, tiny.TENSOR_FILE, tiny.CONFIG_FILE, tiny.WORD_FILE} < pinned
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2e6


def test_it_was_built_from_the_text_in_the_repository() -> None:
    import hashlib

    text = TEXT.read_text(encoding="utf-8")
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert json.loads((FOLDER / "provenance.json").read_text())["text_sha256"] == digest
    assert tiny.read(FOLDER)[2].words == tiny.Words.of(text).words


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    for name in (tiny.CONFIG_FILE, tiny.TENSOR_FILE, tiny.WORD_FILE):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    config = json.loads((tmp_path / tiny.CONFIG_FILE).read_text())
    rows = config["vocab_size"]
    (tmp_path / tiny.CONFIG_FILE).write_text(json.dumps({**config, "vocab_size": rows + 1}))
    with pytest.raises(UserError, match=rf"embed_tokens.weight is \({rows}, 64\), the config says \({rows + 1}, 64\)"):
        tiny.read(tmp_path)
    (tmp_path / tiny.CONFIG_FILE).write_text(json.dumps(config))
    (tmp_path / tiny.WORD_FILE).write_text("<mask>\n<unknown>\nsea\n")
    with pytest.raises(UserError, match=f"words.txt: has not {rows} different words"):
        tiny.read(tmp_path)
    (tmp_path / tiny.TENSOR_FILE).write_bytes(b"cut")
    with pytest.raises(UserError, match="cannot be read"):
        tiny.read(tmp_path)


# Text and prompts.


def test_text_becomes_words_and_comes_back() -> None:
    words = tiny.Words.of("The sea, the keeper's sea. The sea")
    assert words.words == (*tiny.SPECIAL, "sea", "The", ",", ".", "keeper's", "the")
    assert words.encode("The\tsea,the  keeper's.") == [tiny.START, 5, 4, 6, 9, 8, 7]
    assert words.encode("Sea THE é") == [tiny.START, 4, 9, tiny.UNKNOWN], "small letters are looked for, others are unknown"
    ids = [tiny.START, tiny.MASK, 5, 4, 6, tiny.UNKNOWN, 7, tiny.END]
    assert words.decode(ids) == " The sea, <unknown>."


def test_eight_prompts_and_four_for_calibration_are_held_out_from_the_text() -> None:
    measured, calibration = choose_prompts(settings())
    assert (len(measured), len(calibration)) == (8, 4)
    text = TEXT.read_text(encoding="utf-8")
    assert not [prompt.id for prompt in (*measured, *calibration) if prompt.text in text]


def test_a_prompt_that_begins_a_line_of_the_text_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("the BAKER gets up, at")
    with pytest.raises(UserError, match="'prompt-1' is also a training seed"):
        choose_prompts(settings(prompts=str(own)))
    refuse_overlap([Prompt("x", "own", "The baker gets up late")], [], training_seeds(TEXT))


# The command.


def test_its_own_defaults_are_beaten_by_flags_smoke_and_variables() -> None:
    assert (settings().tokens, settings().prompt_limit, settings().cpu_threads, settings().repeats) == (24, 8, 1, 3)
    assert settings(tokens="30").tokens == 30
    assert resolve({"smoke": True}, {"DFLASH_TARGET": "tiny", "CPU_THREADS": "2"}).tokens == 16
    assert resolve({}, {"DFLASH_TARGET": "tiny", "CPU_THREADS": "2"}).cpu_threads == 2
    assert resolve({}, {}).tokens == 64


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--dtype", "bfloat16"), "runs in float32 only"),
        (("--peers", "generate"), "--peers: they are transformers' own"),
        (("--prepare",), "it is built: python tools/build_tiny.py"),
    ],
)
def test_what_numpy_alone_cannot_do_is_one_line(
    words: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in cli.NUMPY_THREADS:
        monkeypatch.setenv(name, "1")  # a run sets them: this puts them back
    assert cli.main(["--target", "tiny", "--output-dir", str(tmp_path), *words]) == 2
    assert sentence in capsys.readouterr().err


BLOCKED = """
import runpy, sys
asked = []
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "tokenizers", "huggingface_hub", "accelerate"):
            asked.append(name)
            raise ImportError(name)
sys.meta_path.insert(0, Blocker())
sys.argv = ["run_cpu.py", *sys.argv[1:]]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    import os
    print("status", end.code, asked, os.environ["OPENBLAS_NUM_THREADS"])
"""


def run_without_torch(*words: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CPU_", "DFLASH_", "OPENBLAS_"))}
    command = [sys.executable, "-c", BLOCKED, "--target", "tiny", "--no-bootstrap", *words]
    return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, encoding="utf-8")


def test_a_smoke_run_needs_no_torch_and_leaves_an_exact_benchmark_and_an_honest_report(tmp_path: Path) -> None:
    done = run_without_torch("--smoke", "--output-dir", str(tmp_path))
    assert done.stdout.splitlines()[-1] == "status 0 [] 1", done.stdout + done.stderr
    benchmark = read(tmp_path / "benchmark.json")
    assert schema_errors(benchmark) == []
    assert benchmark["gate"]["verdict"] == "exact"
    assert [arm["key"] for arm in benchmark["arms"]] == ["00", "00'", *(method.key for method in METHODS[1:])]
    assert benchmark["gate"]["runs"] == 2 * (len(METHODS) + 1)
    assert benchmark["target"]["path"] == "numpy"
    assert "recomputes the visible sequence" in benchmark["target"]["path_reason"]
    machine = benchmark["machine"]
    assert (machine["torch"], machine["transformers"], machine["threads"]) == (None, None, 1)
    assert machine["blas"]
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    note = "recomputes the visible sequence at every call, so its tokens a second say nothing about targets with a cache"
    assert note in page
    assert "recomputes the visible sequence" in done.stdout

    again = run_without_torch("--smoke", "--resume", "--output-dir", str(tmp_path))
    assert again.stdout.splitlines()[-1] == "status 0 [] 1", again.stdout + again.stderr

    cached = json.loads(json.dumps(benchmark))
    cached["target"]["path"] = "lean"
    with pytest.raises(UserError, match="stand beside no cached target's"):
        refuse_unnamed(benchmark, cached, ["path"])
    refuse_unnamed(benchmark, benchmark, [])


def test_its_environment_is_part_of_the_cpu_requirements() -> None:
    from dflash_mini_lab.bootstrap import pins

    assert cli.requirements(settings()) == "requirements-tiny.txt"
    assert cli.requirements(Settings()) == "requirements-cpu.txt"
    small, whole = pins([ROOT / "requirements-tiny.txt"]), pins([ROOT / "requirements-cpu.txt"])
    assert set(small) == {"numpy", "jinja2", "jsonschema", "safetensors", "tqdm"}
    assert small.items() <= whole.items()


def test_the_entry_of_the_catalogue_names_its_backend() -> None:
    assert (TARGETS["tiny"].kind, TARGETS["tiny"].backend) == ("repository", "numpy")
    assert {entry.backend for name, entry in TARGETS.items() if name != "tiny"} == {"torch"}


def test_a_sequence_of_ids_is_all_that_a_session_holds() -> None:
    """A rejected token leaves no trace: two sessions that took different ways to the same ids go on alike."""
    first, second = random_target().start([5, 6], 40, TAPS), random_target().start([5, 6], 40, TAPS)
    rejected: Sequence[int] = [9, 10, 11]
    for session in (first, second):
        session.prefill()
    first.verify([7, *rejected])
    first.keep(1)
    second.verify([7])
    second.keep(1)
    assert first.ids == second.ids == [5, 6, 7]
    assert first.verify([8]) == second.verify([8])
