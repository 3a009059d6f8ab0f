"""A model read weight by weight is the model that the library reads, and what is read can be given back."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny_models import FAMILIES, tiny_config
from transformers import AutoModelForCausalLM

from dflash_mini_lab.targets.reading import read_model, weight_files


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_every_weight_is_the_library_s(family: str, shard: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(weight_files(tmp_path)) > 1) is (shard == "20KB")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    ours, missing = read_model(str(tmp_path), theirs.config, torch.float16)
    assert not missing
    assert type(ours) is type(theirs)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == torch.float16
        assert torch.equal(tensor, expected[name]), name
    tied = [model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr() for model in (ours, theirs)]
    assert tied[0] == tied[1]


def test_a_weight_that_is_not_there_is_named(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    _, missing = read_model(str(tmp_path), tiny_config("llama"), torch.float32)
    assert missing == {"model.layers.0.mlp.up_proj.weight"}


def test_a_folder_without_safetensors_has_no_files(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert weight_files(tmp_path) == []


def test_no_weight_is_a_view_of_a_mapped_file(tmp_path: Path) -> None:
    """Of a mapped file every weight would have an address in the one mapping, and none could be given back alone."""
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    ours, _ = read_model(str(tmp_path), model.config, torch.float32)
    mapped = Path("/proc/self/maps")
    if mapped.is_file():
        assert str(tmp_path / "model.safetensors") not in mapped.read_text(encoding="utf-8")
    sizes = {parameter.untyped_storage().nbytes() for parameter in ours.parameters()}
    assert max(sizes) < (tmp_path / "model.safetensors").stat().st_size / 2
