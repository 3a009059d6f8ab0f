"""A user's own GGUF file: converted once, kept, verified, and run as any other model. The conversion is transformers' own."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.tiny_folder import family_config
from tests.tiny_gguf import save_gguf
from transformers import AutoModelForCausalLM, PreTrainedConfig

from dflash_mini_lab import cli
from dflash_mini_lab.benchmark_file import read
from dflash_mini_lab.catalog import resolve
from dflash_mini_lab.targets.loading import load_target
from dflash_mini_lab.targets.weights import fetch
from dflash_mini_lab.types import UserError

SHAPES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "gemma3": {"vocab_size": 96, "num_hidden_layers": 6, "layer_types": None, "head_dim": 32, "eos_token_id": 1},
}


def config_of(family: str) -> PreTrainedConfig:
    return family_config(family, **{"vocab_size": 64, "eos_token_id": 0, "bos_token_id": None, **SHAPES[family]})


@pytest.mark.parametrize("family", SHAPES)
@torch.inference_mode()
def test_every_family_answers_as_the_weights_in_the_file_do(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    weights = save_gguf(tmp_path / "model.gguf", config)
    model = AutoModelForCausalLM.from_config(config).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if config.tie_word_embeddings else [], [])
    entry = resolve(str(tmp_path))
    assert (entry.kind, entry.source) == ("gguf", str(tmp_path / "model.gguf"))
    loaded = load_target(entry.name, fetch(entry, tmp_path / "cache", print))
    ids = loaded.encode_prompt("the is a th")
    assert len(ids) > 4
    target = loaded.build(64, measure=False)
    torch.testing.assert_close(target.logits(ids), model(torch.tensor([ids])).logits[0], rtol=0, atol=1e-4)
    assert loaded.stop_ids == {config.eos_token_id}


def test_a_file_is_converted_once_and_again_where_it_or_its_copy_changed(tmp_path: Path) -> None:
    path, said = tmp_path / "model.gguf", []
    save_gguf(path, config_of("qwen3"))
    entry = resolve(str(path))
    folder = fetch(entry, tmp_path / "cache", said.append)
    assert fetch(entry, tmp_path / "cache", said.append) == folder
    assert len(said) == 1
    (folder / "model.safetensors").write_bytes(b"?")
    assert fetch(entry, tmp_path / "cache", said.append) == folder
    assert "damaged" in said[1]
    save_gguf(path, config_of("qwen2"))
    assert fetch(entry, tmp_path / "cache", said.append) != folder, "another file in the same place"


def test_a_gguf_file_runs_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_LAB_CACHE", str(tmp_path / "cache"))
    save_gguf(tmp_path / "model.gguf", config_of("lfm2"))
    words = ["--target", str(tmp_path / "model.gguf"), "--methods", "00", "--tokens", "6", "--repeats", "1"]
    words += ["--prompt-limit", "1", "--calibration-prompt-limit", "0", "--cpu-threads", "1"]
    assert cli.main([*words, "--output-dir", str(tmp_path / "out")]) == 0
    benchmark = read(tmp_path / "out" / "benchmark.json")
    assert benchmark["gate"]["verdict"] == "exact"
    assert benchmark["target"]["source"] == str(tmp_path / "model.gguf")


def test_what_is_no_gguf_file_or_lacks_weights_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(50))
    with pytest.raises(UserError, match=r"model\.gguf: transformers cannot read it"):
        fetch(resolve(str(tmp_path)), tmp_path / "cache", print)
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(UserError, match=r"several GGUF files \(model\.gguf, other\.gguf\): name one of them"):
        resolve(str(tmp_path))
    with pytest.raises(UserError, match="no such folder or file"):
        resolve(str(tmp_path / "none.gguf"))
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"is a file, but no \.gguf"):
        resolve(str(tmp_path / "model.bin"))
    config = config_of("qwen3")
    save_gguf(tmp_path / "model.gguf", config, leave_out="model.layers.2.mlp.up_proj.weight")
    with pytest.raises(UserError, match=r"the weights lack model\.layers\.2\.mlp\.up_proj\.weight, which would be made up"):
        fetch(resolve(str(tmp_path / "model.gguf")), tmp_path / "cache", print)
