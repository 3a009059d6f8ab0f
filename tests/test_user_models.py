"""A user's own model, from the command line to the exit status: a folder, a hub's cache, and what people get wrong."""
from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import load_file
from tests.tiny_folder import family_config, refuse_sockets, save_family, save_random_drafter, save_tiny_model

from dflash_mini_lab import artifacts, cli
from dflash_mini_lab.benchmark.loading import safetensors_shapes
from dflash_mini_lab.benchmark_file import read, schema_errors
from dflash_mini_lab.catalog import resolve
from dflash_mini_lab.decoding import decode
from dflash_mini_lab.drafters.checkpoint import DRAFT_TO_TARGET
from dflash_mini_lab.measurement.clock import HostClock
from dflash_mini_lab.methods import by_key
from dflash_mini_lab.targets import weights
from dflash_mini_lab.targets.loading import load_target
from dflash_mini_lab.training.heads import TRAINED_FILES
from dflash_mini_lab.types import UserError

SMALL = ("--tokens", "8", "--repeats", "1", "--prompt-limit", "1", "--calibration-prompt-limit", "0", "--cpu-threads", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_LAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_cache(home: Path, folder: Path, owner: str, name: str, reference: str = "main", commit: str = COMMIT) -> None:
    """The layout of huggingface_hub's cache: blobs are left out, a snapshot may hold plain files."""
    repository = home / "hub" / f"models--{owner}--{name}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / reference).write_text(commit)
    shutil.copytree(folder, repository / "snapshots" / commit)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of an empty hub cache, offline and with sockets blocked."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))  # read from the environment at import
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refuse_sockets(monkeypatch)
    return tmp_path / "home"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_canonical_study_runs_from_the_hubs_cache_with_sockets_blocked(hub: Path, tmp_path: Path, dtype: str) -> None:
    config = family_config("lfm2")
    hub_cache(hub, save_family(tmp_path / "model", config, torch.bfloat16), "LiquidAI", "LFM2.5-350M-Base")
    drafter = save_random_drafter(tmp_path / "drafter", "lfm2.5-350m", config)
    words = ["--target", "lfm2.5-350m", "--dtype", dtype, "--methods", "00,01", "--artifact-dir", str(drafter)]
    assert cli.main([*words, "--output-dir", str(tmp_path / "out"), *SMALL]) == 0
    benchmark = read(tmp_path / "out" / "benchmark.json")
    assert schema_errors(benchmark) == []
    assert benchmark["gate"]["verdict"] == "exact" or (dtype != "float32" and benchmark["gate"]["verdict"] == "ties")
    assert (benchmark["target"]["source"], benchmark["target"]["revision"]) == ("LiquidAI/LFM2.5-350M-Base", COMMIT)
    assert (benchmark["target"]["path"], benchmark["target"]["dtype"]) == ("lean", dtype)


def test_a_revision_is_what_is_loaded_and_one_that_is_not_there_is_named(hub: Path, folder: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", layers=3)
    hub_cache(hub, folder, "some-owner", "tiny")
    hub_cache(hub, other, "some-owner", "tiny", "v2", COMMIT[::-1])
    for target, commit, layers in (
        ("some-owner/tiny", COMMIT, 4),
        ("some-owner/tiny@v2", COMMIT[::-1], 3),
        (f"some-owner/tiny@{COMMIT}", COMMIT, 4),
    ):
        entry = resolve(target)
        where = weights.fetch(entry, tmp_path / "cache", print)
        assert weights.resolved_revision(where) == commit
        assert load_target(entry.name, where).config.num_hidden_layers == layers
    with pytest.raises(UserError, match="some-owner/tiny at v3: not in the local cache"):
        weights.fetch(resolve("some-owner/tiny@v3"), tmp_path / "cache", print)
    assert weights.resolved_revision(folder) is None


def test_without_a_network_and_without_being_told_so_the_cache_serves_or_one_sentence_does(
    hub: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    def no_name_is_known(*words: object, **options: object) -> NoReturn:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", no_name_is_known)
    hub_cache(hub, folder, "some-owner", "tiny")
    assert weights.resolved_revision(weights.fetch(resolve("some-owner/tiny"), tmp_path / "cache", print)) == COMMIT
    with pytest.raises(UserError, match="LFM2.5-350M-Base: not in the local cache, and the hub cannot be reached"):
        weights.fetch(resolve("lfm2.5-350m"), tmp_path / "cache", print)


def test_a_hub_id_in_the_hubs_cache_loads_and_answers_without_a_network(
    hub: Path, folder: Path, tmp_path: Path
) -> None:
    hub_cache(hub, folder, "some-owner", "tiny")
    entry = resolve("some-owner/tiny")
    where = weights.fetch(entry, tmp_path / "cache", print)
    assert where.parent.parent.name == "models--some-owner--tiny"
    loaded = load_target(entry.name, where)
    target = loaded.build(64, measure=False)
    answer = decode(target, loaded.encode_prompt("why is the sky"), by_key("00"), 5, HostClock())
    assert len(answer.tokens) == 5 or answer.finish == "stop"
    with pytest.raises(UserError, match="some-owner/other: not in the local cache"):
        weights.fetch(resolve("some-owner/other"), tmp_path / "cache", print)


def test_the_hubs_variables_decide_where_it_looks(folder: Path, tmp_path: Path) -> None:
    """In a process of its own, since huggingface_hub reads HF_HOME and HF_HUB_OFFLINE when it is imported."""
    import os
    import subprocess
    import sys

    hub_cache(tmp_path / "home", folder, "some-owner", "tiny")
    code = (
        "from pathlib import Path; from dflash_mini_lab.catalog import resolve\n"
        "from dflash_mini_lab.targets.weights import fetch\n"
        "print(fetch(resolve('some-owner/tiny'), Path('.'), print))"
    )
    source = Path(weights.__file__).parents[2]
    variables = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(source)}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE", "TRANSFORMERS"))}
    done = subprocess.run([sys.executable, "-c", code], env={**kept, **variables}, capture_output=True, text=True)
    assert done.stdout.strip().startswith(str(tmp_path / "home" / "hub" / "models--some-owner--tiny")), done.stderr


def test_prompts_encoded_together_are_those_encoded_one_by_one(folder: Path) -> None:
    loaded = load_target("tiny", folder)
    texts = ["why is the sky", "water", "the sky is a b c"]
    assert loaded.encode_prompts(texts) == [list(loaded.tokenizer(text)["input_ids"]) for text in texts]
    loaded.tokenizer.chat_template = "{% for turn in messages %}<s> {{ turn.content }} </s>{% endfor %} is"
    loaded.prompt_format = "chat"
    turns = [[{"role": "user", "content": text}] for text in texts]
    alone = [loaded.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True) for turn in turns]
    assert loaded.encode_prompts(texts) == [list(one["input_ids"]) for one in alone]
    with pytest.raises(UserError, match="empty"):
        loaded.encode_prompts(["water", " "])


@pytest.mark.slow
def test_a_target_without_a_drafter_has_one_trained_and_is_measured(
    folder: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_sockets(monkeypatch)
    folder = Path(shutil.copytree(folder, tmp_path / "model"))
    out = tmp_path / "report"
    words = ["--target", str(folder), "--prepare-minutes", "0.15", "--output-dir", str(out), "--methods", "01", *SMALL]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert f"There is no drafter for {resolve(str(folder)).name} yet: training one first" in said
    benchmark = read(out / "benchmark.json")
    assert schema_errors(benchmark) == []
    assert benchmark["gate"]["verdict"] == "exact"
    assert benchmark["results"]["arms"]["01"]["runs"] == 1
    assert (out / "index.html").exists()

    prepared = artifacts.prepared_folder(cache, resolve(str(folder)).name)
    names = {file.name for file in artifacts.read_manifest(prepared / artifacts.MANIFEST).files}
    assert names == {"config.json", "model.safetensors", "provenance.json", "training-log.jsonl", *TRAINED_FILES}
    assert benchmark["drafter"]["provenance"]["sequences"] >= 16
    assert DRAFT_TO_TARGET in load_file(prepared / "model.safetensors")

    assert cli.main(words) == 0
    assert "training one first" not in capsys.readouterr().out, "the second run finds it"

    own = tmp_path / "own"
    own.mkdir()
    (own / "My Notes.txt").write_text("not an artifact")
    again = ["--target", str(folder), "--prepare", "--prepare-minutes", "0.15", "--artifact-dir", str(own), "--cpu-threads", "1"]
    assert cli.main(again) == 0
    assert json.loads((own / "provenance.json").read_text(), parse_constant=pytest.fail)["last_look"]["loss"] is None
    assert cli.main([*words, "--artifact-dir", str(own)]) == 0, "a training that had nothing left to do is as good"

    save_tiny_model(folder, layers=5)
    assert cli.main(["--target", str(folder), "--prepare", "--prepare-minutes", "0.15"]) == 2
    assert "was begun with other" in capsys.readouterr().err


# What people get wrong: one line and status 2.


def failing(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main([*words, "--methods", "00", *SMALL]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    return error


def test_a_clone_without_git_lfs_is_recognised(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder, tmp_path / "m")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    (tmp_path / "m" / "model.safetensors").write_text(pointer)
    assert "git lfs pull" in failing(capsys, "--target", str(tmp_path / "m"), "--output-dir", str(tmp_path / "out"))


@pytest.mark.parametrize("content", [b"", b"\x02", b"\x02\0\0\0\0\0\0\0[]", b"\x05\0\0\0\0\0\0\0{not}", b"\xff" * 9])
def test_what_is_no_safetensors_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="not a safetensors file"):
        safetensors_shapes(tmp_path / "x.safetensors")


def test_weights_that_end_early_are_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder, tmp_path / "m")
    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "m" / "model.safetensors").write_bytes(whole[:-100])
    assert "cannot be loaded" in failing(capsys, "--target", str(tmp_path / "m"), "--output-dir", str(tmp_path / "out"))


def test_pickled_weights_are_never_opened(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder, tmp_path / "m")
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "m" / "pytorch_model.bin")
    (tmp_path / "m" / "model.safetensors").unlink()
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was opened"))
    with pytest.raises(UserError, match="cannot be loaded"):
        load_target("m", tmp_path / "m").stock_model()


def test_a_config_that_lacks_what_a_text_decoder_has_is_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text('{"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "vocab_size": 27}')
    with pytest.raises(UserError, match="'bloom' has no max_position_embeddings"):
        load_target("m", tmp_path / "m")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", '{"model_type": "llama", "hidden_size": "big"}', "cannot be loaded"),
        ("config.json", '{"model_type": "llama"', "cannot be loaded"),
        ("tokenizer.json", '{"x": 1}', "cannot be loaded"),
        ("chat_template.jinja", "{{ raise_exception('odd turn') }}", "its chat template refuses a user's turn (odd turn)"),
        ("chat_template.jinja", "{% for x in %}", "its chat template refuses"),
    ],
)
def test_a_broken_file_of_a_model_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: str, words: str
) -> None:
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / file).write_text(content)
    assert words in failing(capsys, "--target", str(tmp_path / "m"), "--output-dir", str(tmp_path / "out"))


def test_weights_of_another_shape_or_incomplete_ones_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(UserError, match="cannot be loaded"):
        load_target("m", tmp_path / "m").stock_model()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    with pytest.raises(UserError, match=r"lack model\.layers\.4\."):
        load_target("m", tmp_path / "m").stock_model()


def test_a_benchmark_that_is_none_cannot_be_resumed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "benchmark.json").write_text('{"schema_version": 1}')
    error = failing(capsys, "--target", str(folder), "--output-dir", str(tmp_path), "--resume")
    assert "cannot be resumed, it does not fit its schema" in error


@pytest.mark.parametrize("bad", ["owner/a--b", "owner/model.git", "owner/model-"])
def test_a_name_that_the_hub_does_not_allow_is_one_line(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no hub id" in failing(capsys, "--target", bad)


@pytest.mark.parametrize("words", [(), ("--prepare", "--prepare-minutes", "0.01")])
def test_an_output_folder_that_is_a_file_is_known_before_anything_is_loaded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    (tmp_path / "taken").write_text("")
    if words:
        monkeypatch.setenv("DFLASH_LAB_CACHE", str(tmp_path / "taken"))
    error = failing(capsys, "--target", str(folder), "--output-dir", str(tmp_path / "taken"), *words)
    assert "taken" in error
    assert "Choose another place" in error


@pytest.mark.parametrize("left", [1, 2, 9, 30])
def test_a_prompt_at_the_contexts_end_is_measured(folder: Path, tmp_path: Path, left: int) -> None:
    (tmp_path / "p.txt").write_text(" ".join(["water"] * (320 - left)))
    words = ["--target", str(folder), "--prompts", str(tmp_path / "p.txt"), "--methods", "00"]
    assert cli.main([*words, "--output-dir", str(tmp_path / "out"), *SMALL]) == 0


def test_a_prompt_past_the_contexts_end_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text(" ".join(["water"] * 320))
    error = failing(capsys, "--target", str(folder), "--prompts", str(tmp_path / "p.txt"), "--output-dir", str(tmp_path / "out"))
    assert "'prompt-1' has 320 tokens; this target takes at most 319" in error


def test_ids_after_a_gap_in_the_tokenizer_may_be_emitted(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    path = tmp_path / "m" / "tokenizer.json"
    content = json.loads(path.read_text())
    del content["model"]["vocab"]["why"]
    path.write_text(json.dumps(content))
    loaded = load_target("m", tmp_path / "m")
    assert len(loaded.tokenizer) < loaded.vocabulary == loaded.config.vocab_size
