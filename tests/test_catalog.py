"""What `--target` means. Nothing falls back to another target."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tools import random_target
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_mini_lab.catalog import TARGETS, resolve
from dflash_mini_lab.training.recipe import RECIPES, Recipe
from dflash_mini_lab.types import UserError


@pytest.mark.parametrize("name", ["smollm2-135m", "lfm2.5-350m", "qwen3-0.6b"])
def test_a_known_name_is_its_entry(name: str) -> None:
    assert resolve(name) is TARGETS[name]


def test_an_unknown_name_lists_the_known_ones_and_the_other_ways() -> None:
    with pytest.raises(UserError) as caught:
        resolve("smolm2-135m")
    for words in ("Did you mean smollm2-135m?", *TARGETS, "folder", "hub id"):
        assert words in str(caught.value)


def test_a_hub_id_is_taken_as_it_is() -> None:
    entry = resolve("HuggingFaceTB/SmolLM2-360M")
    assert (entry.kind, entry.source, entry.name) == ("hub", "HuggingFaceTB/SmolLM2-360M", "HuggingFaceTB--SmolLM2-360M")
    assert entry.prompt_format is None


def test_the_hub_id_of_a_known_target_shares_its_artifacts() -> None:
    assert resolve("Qwen/Qwen3-0.6B-Base") is TARGETS["qwen3-0.6b"]


def test_a_revision_is_another_target_with_artifacts_of_its_own() -> None:
    known, other = TARGETS["lfm2.5-350m"], resolve("LiquidAI/LFM2.5-350M-Base@refs/pr/2")
    assert (other.source, other.revision, other.prompt_format) == (known.source, "refs/pr/2", known.prompt_format)
    assert other.name == "lfm2.5-350m--refs-pr-2"
    assert resolve("owner/model@v1").name == "owner--model--v1"
    assert resolve("owner/model").revision is None
    for bad in ("owner/model@", "owner/model@-x", "owner/model@a@b", "owner/model@a..b"):
        with pytest.raises(UserError):
            resolve(bad)


def test_a_folder_is_a_target_with_a_name_of_its_place(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent / "mon modèle").mkdir(parents=True)
        (tmp_path / parent / "mon modèle" / "config.json").write_text("{}")
    first, second = (resolve(str(tmp_path / parent / "mon modèle")) for parent in ("a", "b"))
    assert first.source == str(tmp_path / "a" / "mon modèle")
    assert first.name != second.name
    assert re.fullmatch(r"[A-Za-z0-9.-]+", first.name)


def test_a_folder_wins_over_a_hub_id_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("owner/model").mkdir(parents=True)
    Path("owner/model/config.json").write_text("{}")
    assert resolve("owner/model").kind == "folder"


def test_a_folder_without_a_model_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("path", ["./nowhere", "/no/where", "~/nowhere-at-all", "C:\\models\\x", "a/b/c", ".."])
def test_a_path_that_does_not_exist_is_not_mistaken_for_a_hub_id(path: str) -> None:
    with pytest.raises(UserError, match="no such folder|no config"):
        resolve(path)


@pytest.mark.parametrize("bad", ["", "owner/", "/", "owner/mo del", "own..er/m..odel", "-x/y", "owner/model?x"])
def test_what_is_neither_is_refused(bad: str) -> None:
    with pytest.raises(UserError):
        resolve(bad)


def test_the_page_of_targets_counts_the_parameters_of_the_shapes() -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "targets.md").read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith("| parameters |"))
    counted = {}
    for name, shape in random_target.SHAPES.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
        counted[name] = sum(parameter.numel() for parameter in model.parameters())
    assert re.findall(r"([\d,]+) \(counted in its shape\)", row) == [f"{count:,}" for count in counted.values()]
    assert [name for name in TARGETS if name in counted] == list(counted)
    for count, on_disk, in_memory in zip(
        counted.values(), *(re.findall(rf"([\d,]+) MB \({size} bytes each\)", text) for size in (2, 4)), strict=True
    ):
        assert (on_disk, in_memory) == (f"{2 * count / 1e6:,.0f}", f"{4 * count / 1e6:,.0f}")


def test_lfm2_5_s_shape_is_its_published_one() -> None:
    config = AutoConfig.for_model(**random_target.SHAPES["lfm2.5-350m"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert [index for index, kind in enumerate(config.layer_types) if kind == "full_attention"] == [2, 5, 8, 10, 12, 14]
    assert model.model.layers[0].feed_forward.w1.weight.shape == (4608, 1024), "two thirds of 6656, rounded up to 256s"
    assert model.model.layers[0].conv.conv.weight.shape == (1024, 1, 3)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_page_of_targets_has_every_entry_as_the_table_has_it() -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "targets.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.-]+)` \| ([^|]+) \| ([^|]+) \| (chat|plain) \| (lean|NumPy) \|$", text, re.MULTILINE)
    path = {"torch": "lean", "numpy": "NumPy"}
    expected = [(e.name, e.source, e.license, e.prompt_format, path[e.backend]) for e in TARGETS.values()]
    assert rows == expected
    minutes = [f"{RECIPES.get(name, Recipe()).minutes:g} minutes" for name in TARGETS if name != "tiny"]
    (row,) = (line for line in text.splitlines() if line.startswith("| `--prepare`"))
    assert [cell.strip() for cell in row.split("|")[2:-2]] == minutes
