"""The heads beside a drafter: read whole or refused by name, run as their formulas say, and harmless in the loop."""
from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.tables import random_heads
from tests.tiny_models import (
    FAMILIES,
    HIDDEN,
    POSITIONS,
    TAPS,
    VOCABULARY,
    TickingClock,
    plain_greedy,
    random_ids,
    tiny_model,
    tiny_target,
)

from dflash_mini_lab import artifacts
from dflash_mini_lab.benchmark.run import choose_methods
from dflash_mini_lab.decoding import decode
from dflash_mini_lab.drafters.block import BlockDrafter
from dflash_mini_lab.drafters.checkpoint import DRAFT_TO_TARGET, DrafterConfig
from dflash_mini_lab.drafters.heads import GAP_FILE, HEADS_FILE, PARAREAL_FILE, SHAPES, head_facts, load_heads
from dflash_mini_lab.methods import METHODS, by_key
from dflash_mini_lab.training.model import TrainableDrafter
from dflash_mini_lab.types import Heads, UserError

BLOCK = 6
CONFIG = DrafterConfig(HIDDEN, 48, 2, 4, 2, 8, BLOCK, TAPS, 7, 4, VOCABULARY, target_name="tiny")
HEADS = random_heads(VOCABULARY, HIDDEN, BLOCK - 1, offsets=(2, 4, 7))
PARAREAL = {
    "mean": [0.5] * 8, "scale": [2.0] * 8, "weights": [0.1] * 8, "intercept": 0.2, "omega": 0.75, "rounds": 2, "clip": 6.0,
    "candidates": 6, "diagnostics": {"hold_out_mse": [1.0, 0.5]},
}  # fmt: skip
GAP = {"intercept": -0.5, "margin": 0.75, "slot": 0.25, "diagnostics": {"switch_rate": 0.1}}


def head_tensors(heads: Heads = HEADS) -> dict[str, torch.Tensor]:
    """The groups of tensors as training writes them: names from the table, in the order of each dataclass's fields."""
    tensors = {}
    for group, names in SHAPES.items():
        head = getattr(heads, group)
        for name, item in zip(names, fields(head), strict=True):
            tensor = torch.from_numpy(getattr(head, item.name))
            tensors[name] = tensor.int() if name.endswith(".offsets") else tensor
    return tensors


def write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **fits: Any) -> Path:
    if tensors is not None:
        save_file(tensors, folder / HEADS_FILE)
    for name, content in fits.items():
        (folder / {"parareal": PARAREAL_FILE, "gap": GAP_FILE}[name]).write_text(json.dumps(content))
    return folder


def test_the_files_are_those_that_training_writes() -> None:
    assert (HEADS_FILE, PARAREAL_FILE, GAP_FILE) == ("heads.safetensors", "v12_parareal.json", "v14_simple_parareal.json")
    assert sorted(name for names in SHAPES.values() for name in names) == [
        "confidence.bias", "confidence.weight",
        "fused.offset_embedding", "fused.offsets", "fused.slot.weight", "fused.token",
        "jump.down.weight", "jump.norm.weight", "jump.offset_embedding", "jump.offsets", "jump.up.weight",
        "markov.next", "markov.previous", "markov.scale",
        "pair.gate.bias", "pair.gate.weight", "pair.next", "pair.previous",
    ]  # fmt: skip


def test_heads_come_back_as_they_were_saved(tmp_path: Path) -> None:
    found = load_heads(write(tmp_path, head_tensors(), parareal=PARAREAL, gap=GAP), CONFIG)
    assert found.present == ("pair", "jump", "fused", "markov", "parareal", "gap")
    for group in SHAPES:
        for name, array in asdict(getattr(found, group)).items():
            assert np.array_equal(array, getattr(getattr(HEADS, group), name)), (group, name)
            assert array.dtype == (np.int64 if name == "offsets" else np.float32)
    assert {**asdict(found.parareal), "mean": [0.5] * 8, "scale": [2.0] * 8, "weights": [0.1] * 8} == PARAREAL
    assert found.parareal.scale.tolist() == [2.0] * 8
    assert asdict(found.gap) == GAP


def test_half_precision_on_disk_is_float32_here(tmp_path: Path) -> None:
    tensors = {name: tensor if tensor.dtype == torch.int32 else tensor.bfloat16() for name, tensor in head_tensors().items()}
    found = load_heads(write(tmp_path, tensors), CONFIG)
    assert found.pair.previous.dtype == np.float32
    assert np.allclose(found.pair.previous, HEADS.pair.previous, atol=0.03)


def test_what_is_absent_is_none_and_methods_know_it(tmp_path: Path) -> None:
    assert load_heads(tmp_path, CONFIG).present == ()
    pair = {name: tensor for name, tensor in head_tensors().items() if name.startswith("pair.")}
    assert load_heads(write(tmp_path, pair, gap=GAP), CONFIG).present == ("pair", "gap")
    assert load_heads(tmp_path, CONFIG, names=[GAP_FILE]).present == ("gap",), "a file that no manifest pins is not opened"


@pytest.mark.parametrize("group", SHAPES)
def test_a_tensor_that_is_missing_or_misshapen_is_named(tmp_path: Path, group: str) -> None:
    tensors = head_tensors()
    named = "|".join(SHAPES[group])
    for name in SHAPES[group]:
        whole = tensors[name]
        write(tmp_path, {other: tensor for other, tensor in tensors.items() if other != name})
        with pytest.raises(UserError, match=f"{HEADS_FILE}: tensor {name} is missing"):
            load_heads(tmp_path, CONFIG)
        write(tmp_path, {**tensors, name: whole[None]})
        with pytest.raises(UserError, match=rf"{HEADS_FILE}: tensor {name} is \("):
            load_heads(tmp_path, CONFIG)
        for axis in range(whole.dim()):  # where it is the first with a rank or a count of its own, another disagrees with it
            write(tmp_path, {**tensors, name: torch.cat([whole, whole.narrow(axis, 0, 1)], axis)})
            with pytest.raises(UserError, match=rf"{HEADS_FILE}: tensor ({named}) (is \(|does not hold ascending)"):
                load_heads(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("pair.gate.bias", torch.tensor([0.0, 1.0, float("nan"), 0.0]), "not finite"),
        ("pair.gate.bias", torch.zeros(4, dtype=torch.int32), "not fractions"),
        ("jump.offsets", torch.tensor([0, 2, 4]), "ascending slots, counted from 1"),
        ("jump.offsets", torch.tensor([2, 2, 4]), "ascending slots, counted from 1"),
        ("fused.offsets", torch.tensor([2.0, 4.0, 6.0]), "ascending slots, counted from 1"),
        ("fused.offsets", torch.zeros(0, dtype=torch.int32), "tensor fused.offsets is"),
    ],
)
def test_a_tensor_of_the_wrong_values_is_named(tmp_path: Path, name: str, tensor: torch.Tensor, sentence: str) -> None:
    write(tmp_path, {**head_tensors(), name: tensor})
    with pytest.raises(UserError, match=rf"{HEADS_FILE}: tensor {name} .*{sentence}|{HEADS_FILE}: {sentence}"):
        load_heads(tmp_path, CONFIG)


def test_a_file_that_is_cut_is_one_sentence(tmp_path: Path) -> None:
    write(tmp_path, head_tensors())
    whole = (tmp_path / HEADS_FILE).read_bytes()
    for cut in (0, 4, 100, len(whole) - 1):
        (tmp_path / HEADS_FILE).write_bytes(whole[:cut])
        with pytest.raises(UserError, match="heads cannot be read"):
            load_heads(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("fit", "change", "sentence"),
    [
        ("parareal", {"mean": [0.0] * 7}, "mean is not a list of 8 numbers"),
        ("parareal", {"weights": [0.0] * 7 + ["x"]}, "weights is not a list"),
        ("parareal", {"weights": None}, "weights is not a list"),
        ("parareal", {"scale": [1.0] * 7 + [0.0]}, "scale and clip must be above 0"),
        ("parareal", {"candidates": 1}, "candidates at least 2"),
        ("parareal", {"rounds": 0}, "rounds at least 1"),
        ("parareal", {"omega": float("nan")}, "omega is not a number"),
        ("parareal", {"clip": True}, "clip is not a number"),
        ("gap", {"margin": "1"}, "margin is not a number"),
        ("gap", {"diagnostics": []}, "not an object"),
    ],
)
def test_a_fit_that_is_none_is_named(tmp_path: Path, fit: str, change: dict, sentence: str) -> None:
    write(tmp_path, **{fit: {**(PARAREAL if fit == "parareal" else GAP), **change}})
    with pytest.raises(UserError, match=sentence):
        load_heads(tmp_path, CONFIG)
    for text in ("{", "[]", ""):
        (tmp_path / GAP_FILE).write_text(text)
        with pytest.raises(UserError, match="v1"):
            load_heads(tmp_path, CONFIG)


def test_benchmark_json_tells_of_each_head() -> None:
    facts = head_facts(replace(HEADS, gap=None, markov=None))
    assert facts["pair"] == {"parameters": 2 * VOCABULARY * 4 + 4 * HIDDEN + 4}
    assert facts["fused"] == {"parameters": 4 * HIDDEN + 3 * 4 + VOCABULARY * 4}
    assert facts["parareal"]["diagnostics"] == {"rounds": []}
    assert list(facts) == ["pair", "jump", "fused", "parareal"]


# At run time.


@cache
def drafter_tensors(reduced: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = TrainableDrafter(CONFIG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    kept = {DRAFT_TO_TARGET: torch.arange(3, VOCABULARY, 2, dtype=torch.int32)} if reduced else {}
    return {**model.state_dict(), **kept}


def block_drafter(family: str = "llama", reduced: bool = False, heads: Heads = HEADS) -> BlockDrafter:
    model = tiny_model(family)
    embedding, head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    return BlockDrafter(CONFIG, drafter_tensors(reduced), embedding, head, POSITIONS, measure=False, heads=heads)


class Features:
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.given = rows, 0

    def take_features(self) -> torch.Tensor:
        rows, self.given = self.rows[self.given : self.upto], self.upto
        return rows


def test_a_draft_gives_the_context_the_states_and_embeddings_of_its_round() -> None:
    drafter = block_drafter(reduced=True)
    embedding, head = drafter.embedding, tiny_model("llama").get_output_embeddings().weight.detach()
    features = Features(torch.randn(20, len(TAPS) * HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    session, ids, committed = drafter.start(features, 64), random_ids(21, 3), []
    for length in (5, 6, 9, 21):
        committed += ids[len(committed) : length]
        features.upto = length - 1
        draft = session.draft(committed)
        tensors = {name: tensor.double() for name, tensor in drafter_tensors().items()}
        fused = F.linear(features.rows[length - 2], tensors["fc.weight"])
        expected = F.rms_norm(fused, (HIDDEN,), tensors["hidden_norm.weight"], CONFIG.eps)
        np.testing.assert_allclose(draft.context(), expected, rtol=0, atol=1e-5)
        logits, columns = draft.logits()
        np.testing.assert_allclose(draft.states() @ head.numpy().T[:, columns], logits, rtol=0, atol=1e-3)
        asked = np.array([[3, 60], [8, 3]])
        assert np.array_equal(draft.embeddings(asked), embedding[torch.tensor(asked)].float().numpy())
        for _ in range(2):
            mean = embedding[torch.tensor(committed)].mean(0)
            np.testing.assert_allclose(draft.prefix_embedding(), mean, rtol=0, atol=1e-6)
        assert {array.dtype for array in (draft.context(), draft.states(), draft.embeddings(asked), mean.float().numpy())} == {
            np.dtype(np.float32)
        }


@pytest.mark.parametrize("reduced", [False, True])
def test_the_jump_head_scores_candidates_from_the_context_alone(reduced: bool) -> None:
    drafter = block_drafter(reduced=reduced)
    head = tiny_model("llama").get_output_embeddings().weight.detach()
    features = Features(torch.randn(9, len(TAPS) * HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    features.upto = 9
    draft = drafter.start(features, 64, needs=("pair", "jump")).draft(random_ids(10, 3))
    ids, _ = draft.top(7)
    found = draft.jump(ids[[1, 3]])
    jump = {name: torch.from_numpy(value) for name, value in asdict(HEADS.jump).items()}
    norm = drafter_tensors()["norm.weight"]
    for row, slot in enumerate((1, 3)):  # offsets 2 and 4; 7 is past the block
        h = torch.from_numpy(draft.context()) + jump["offset_embedding"][row]
        h = h + jump["down"] @ F.silu(jump["up"] @ F.rms_norm(h, (HIDDEN,), jump["norm"], CONFIG.eps))
        scores = head.float() @ F.rms_norm(h, (HIDDEN,), norm, CONFIG.eps)
        np.testing.assert_allclose(found[row], scores[torch.from_numpy(ids[slot])], rtol=1e-4, atol=1e-4)


def test_the_jump_pass_runs_only_for_a_method_that_needs_it() -> None:
    drafter = block_drafter()
    features = Features(torch.ones(4, len(TAPS) * HIDDEN, dtype=torch.float64))
    features.upto = 4
    plain = drafter.start(features, 64).draft(random_ids(5, 3))
    with pytest.raises(RuntimeError, match="jump head gave 0 rows"):
        plain.jump(plain.top(3)[0][[1, 3]])
    features.given = 0
    jumping = drafter.start(features, 64, ("jump",)).draft(random_ids(5, 3))
    assert np.array_equal(plain.logits()[1], jumping.logits()[1])
    np.testing.assert_allclose(plain.logits()[0], jumping.logits()[0], atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_a_block_drafter_and_its_heads_every_method_answers_as_plain_greedy_decoding_does(family: str) -> None:
    drafter, target, prompt = block_drafter(family, reduced=True), tiny_target(family, "lean"), random_ids(6, 4)
    answer = plain_greedy(family, prompt, 10)
    for method in METHODS:
        decoded = decode(target, prompt, method, 10, TickingClock(), drafter)
        assert list(decoded.tokens) == answer, method.slug
        assert any(step.proposed for step in decoded.steps) or method.key in ("00", "08")


@pytest.mark.parametrize("offsets", [(2,), (6,), (40, 41)])
def test_a_jump_head_for_other_blocks_is_harmless(offsets: tuple[int, ...]) -> None:
    heads = random_heads(VOCABULARY, HIDDEN, BLOCK - 1, offsets=offsets)
    prompt, drafter = random_ids(6, 4), block_drafter(heads=heads)
    for key in ("04", "05"):
        decoded = decode(tiny_target("llama", "lean"), prompt, by_key(key), 6, TickingClock(), drafter)
        assert list(decoded.tokens) == plain_greedy("llama", prompt, 10)[:6]


# Before a run.


def test_a_method_without_its_head_is_refused_in_one_sentence() -> None:
    drafter = block_drafter(heads=replace(HEADS, jump=None, pair=None))
    with pytest.raises(UserError) as caught:
        decode(tiny_target("llama", "lean"), [4, 5], by_key("04"), 5, TickingClock(), drafter)
    sentence = str(caught.value)
    assert sentence.startswith("Method 04 DFlash4-JUMP-MOBS needs the pair and the jump heads")
    assert "--prepare" in sentence
    with pytest.raises(UserError, match="Method 02 DFlash2 needs the pair head, which"):
        decode(tiny_target("llama", "lean"), [4, 5], by_key("02"), 5, TickingClock(), drafter)


class Has:
    def __init__(self, heads: Heads, trees: bool = True) -> None:
        self.heads, self.backend, self.trees = heads, "torch", trees


def test_every_method_runs_by_default_that_has_its_heads_and_the_others_are_named() -> None:
    said: list[str] = []
    assert choose_methods((), Has(HEADS), said.append) == tuple(method.key for method in METHODS)
    assert said == []
    chosen = choose_methods((), Has(Heads(pair=HEADS.pair)), said.append)
    assert chosen == ("00", "01", "02", "03", "06", "07", "08", "10", "11", "13", "15")
    (line,) = said
    assert "04, 05, 09, 12, 14" in line
    assert "fused, gap, jump, markov, parareal" in line
    assert "--prepare" in line
    assert choose_methods((), Has(Heads()), said.append) == ("00", "01", "06", "08", "10", "13", "15")


def test_a_method_asked_for_by_name_is_not_left_out_but_refused() -> None:
    with pytest.raises(UserError, match="Method 09 V9 DSpark-Lite needs the markov head"):
        choose_methods(("00", "01", "09"), Has(Heads(pair=HEADS.pair)), pytest.fail)
    assert choose_methods(("00", "02"), Has(Heads(pair=HEADS.pair)), pytest.fail) == ("00", "02")


def test_a_target_that_verifies_no_trees_leaves_their_method_out_and_refuses_it_by_name() -> None:
    said: list[str] = []
    chosen = choose_methods((), Has(HEADS, trees=False), said.append)
    assert chosen == tuple(method.key for method in METHODS if method.key != "15")
    assert said == ["Left out: method 15. A model that runs through transformers' own modules verifies no trees."]
    with pytest.raises(UserError, match="Method 15 Tree proposes trees, and a model"):
        choose_methods(("00", "15"), Has(HEADS, trees=False), pytest.fail)


def test_the_names_of_needs_are_those_of_heads() -> None:
    known = {item.name for item in fields(Heads)}
    assert {name for method in METHODS for name in method.needs} == known


def test_the_manifest_beside_the_files_comes_before_the_repository_s(tmp_path: Path) -> None:
    for name in ("own", "repository/tiny"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / f"{name[:3]}.bin").write_bytes(b"x")
        artifacts.write_manifest(tmp_path / name, "tiny")

    def names(folder: str) -> list[str]:
        found = artifacts.manifest_of(tmp_path / folder, "tiny", tmp_path / "repository")
        return [file.name for file in found.files] if found else []

    assert names("own") == ["own.bin"]
    assert names("downloads") == ["rep.bin"]
    assert artifacts.manifest_of(tmp_path, "other", tmp_path / "repository") is None
