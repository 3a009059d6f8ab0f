"""The block drafter: training and run time are one function, nothing leaks past an anchor, and misfits are refused by name."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from dflash_mini_lab.crossings import Crossings
from dflash_mini_lab.drafters import block, checkpoint
from dflash_mini_lab.drafters.block import BlockDraft, BlockDrafter, _best_on_device
from dflash_mini_lab.drafters.checkpoint import DRAFT_TO_TARGET, DrafterConfig, load_checkpoint, parse_config, save_checkpoint
from dflash_mini_lab.drafters.layout import check_fit, vocabulary_digest
from dflash_mini_lab.packed_linear import PLAIN, SCREENED, LinearPlan, stock_plan
from dflash_mini_lab.training.model import TrainableDrafter
from dflash_mini_lab.types import UserError

HIDDEN, VOCABULARY, BLOCK = 32, 50, 5
CONFIG = DrafterConfig(HIDDEN, 48, 2, 4, 2, 8, BLOCK, (0, 2), 7, 4, VOCABULARY, target_name="tiny")
NARROW = replace(CONFIG, hidden_size=16, target_hidden_size=HIDDEN, heads=4, kv_heads=4, head_dim=4)
WINDOWED = replace(CONFIG, window=3)
SMALL_WINDOW = replace(NARROW, window=3)
"""The Qwen3 study's drafter, in miniature: a width of its own, and a window on the features."""
SHAPES = pytest.mark.parametrize(
    "config", [CONFIG, NARROW, WINDOWED, SMALL_WINDOW], ids=["published", "narrow", "windowed", "narrow and windowed"]
)


def trained_looking_model(config: DrafterConfig = CONFIG) -> TrainableDrafter:
    torch.manual_seed(1)
    model = TrainableDrafter(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def target_tables() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(VOCABULARY, HIDDEN, generator=generator), torch.randn(VOCABULARY, HIDDEN, generator=generator)


class FixedFeatures:
    """A session that hands out features a few rows at a time, as rounds of a decode loop do."""

    def __init__(self, features: torch.Tensor) -> None:
        self.features, self.given = features, 0

    def upto(self, rows: int) -> FixedFeatures:
        self.limit = rows
        return self

    def take_features(self) -> torch.Tensor:
        rows, self.given = self.features[self.given : self.limit], self.limit
        return rows


def training_logits(model: TrainableDrafter, features: torch.Tensor, ids: list[int], anchors: list[int]) -> torch.Tensor:
    """`[blocks, S, vocabulary]` of the training forward for one sequence."""
    embedding, head = target_tables()
    anchor = embedding[torch.tensor([ids[a] for a in anchors])][None, :, None]
    mask = embedding[CONFIG.mask_token_id].expand(1, len(anchors), BLOCK - 1, -1)
    return model(features[None], torch.cat([anchor, mask], 2), torch.tensor([anchors]))[0] @ model.scoring_rows(head).T


@SHAPES
@torch.no_grad()
def test_one_pass_at_run_time_equals_the_training_forward_for_every_anchor(config: DrafterConfig) -> None:
    model, (embedding, head) = trained_looking_model(config), target_tables()
    ids = torch.randint(8, VOCABULARY, (14,), generator=torch.Generator().manual_seed(3)).tolist()
    features = torch.randn(13, 2 * HIDDEN, generator=torch.Generator().manual_seed(4))
    anchors = [3, 4, 8, 11]
    expected = training_logits(model, features, ids, anchors)
    drafter = BlockDrafter(config, dict(model.state_dict()), embedding, head, 64, measure=False)
    session = FixedFeatures(features)
    running = drafter.start(session, 64)
    for place, anchor in enumerate(anchors):
        session.upto(anchor)
        draft = running.draft(ids[: anchor + 1])
        found, scores = draft.top(VOCABULARY)
        logits = torch.empty(BLOCK - 1, VOCABULARY).scatter_(1, torch.tensor(found), torch.tensor(scores))
        torch.testing.assert_close(logits, expected[place], rtol=1e-5, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("changed", range(6, 13))
def test_features_at_or_after_an_anchor_never_reach_its_block(changed: int) -> None:
    model = trained_looking_model()
    ids = list(range(10, 24))
    features = torch.randn(13, 2 * HIDDEN, generator=torch.Generator().manual_seed(4))
    before = training_logits(model, features, ids, [2, 6, 9])
    features = features.clone()
    features[changed] += 10.0
    after = training_logits(model, features, ids, [2, 6, 9])
    for place, anchor in enumerate((2, 6, 9)):
        assert torch.equal(before[place], after[place]) == (changed >= anchor)


@torch.no_grad()
@pytest.mark.parametrize("changed", range(13))
def test_a_block_sees_as_many_features_before_its_anchor_as_its_window_has(changed: int) -> None:
    model, anchors = trained_looking_model(WINDOWED), [2, 6, 9]
    features = torch.randn(13, 2 * HIDDEN, generator=torch.Generator().manual_seed(4))
    before = training_logits(model, features, list(range(10, 24)), anchors)
    features[changed] += 10.0
    after = training_logits(model, features, list(range(10, 24)), anchors)
    for place, anchor in enumerate(anchors):
        assert torch.equal(before[place], after[place]) == (not anchor - 3 <= changed < anchor)


@torch.no_grad()
def test_the_anchors_of_other_blocks_never_reach_a_block() -> None:
    model = trained_looking_model()
    features = torch.randn(13, 2 * HIDDEN, generator=torch.Generator().manual_seed(4))
    ids = list(range(10, 24))
    before = training_logits(model, features, ids, [2, 6, 9])
    ids[6], ids[9] = 40, 41
    after = training_logits(model, features, ids, [2, 6, 9])
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


@torch.no_grad()
def test_a_reduced_draft_vocabulary_proposes_the_target_s_own_ids() -> None:
    model, (embedding, head) = trained_looking_model(), target_tables()
    features = torch.randn(6, 2 * HIDDEN, generator=torch.Generator().manual_seed(4))
    tensors = dict(model.state_dict())
    full = BlockDrafter(CONFIG, tensors, embedding, head, 64, measure=False)
    chosen = torch.tensor(sorted({3, 9, 12, 20, 31, 44}), dtype=torch.int32)
    reduced = BlockDrafter(CONFIG, {**tensors, DRAFT_TO_TARGET: chosen}, embedding, head, 64, measure=False)
    committed = [10, 11, 12, 13, 14, 15, 16]
    everything, scores = full.start(FixedFeatures(features).upto(6), 64).draft(committed).top(VOCABULARY)
    ids, kept = reduced.start(FixedFeatures(features).upto(6), 64).draft(committed).top(6)
    for slot in range(4):
        assert ids[slot].tolist() == [token for token in everything[slot].tolist() if token in chosen.tolist()]
    assert (scores[:, :-1] >= scores[:, 1:]).all()
    logits, columns = reduced.start(FixedFeatures(features).upto(6), 64).draft(committed).logits()
    assert (logits.shape, logits.dtype, columns.tolist()) == ((4, 6), "float32", chosen.tolist())
    order = (-logits).argsort(axis=1)
    assert (columns[order] == ids).all()
    assert (logits[[[0], [1], [2], [3]], order] == kept).all()


def test_candidates_of_equal_score_come_in_the_order_of_their_columns() -> None:
    """As the first choice alone does, and a search through the full logits: or two methods would differ by a tie."""
    embedding, _ = target_tables()
    drafter = BlockDrafter(CONFIG, dict(trained_looking_model().state_dict()), embedding, embedding[:1].repeat(50, 1), 64, False)
    states = torch.ones(3, HIDDEN)
    draft = BlockDraft(drafter.start(FixedFeatures(torch.ones(0, HIDDEN)), 64), [10], states, drafter.scores(states))
    for k in (1, VOCABULARY, VOCABULARY + 5):
        assert draft.top(k)[0].tolist() == [list(range(min(k, VOCABULARY)))] * 3


def test_the_plan_of_a_screened_head_is_not_the_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft over the whole vocabulary has the target's head's shape: by its plan every draft read it at the stock rate."""
    embedding, head = target_tables()
    ways = {(VOCABULARY, HIDDEN): SCREENED, (HIDDEN, 2 * HIDDEN): PLAIN}
    known = [LinearPlan(outputs, inputs, storage) for (outputs, inputs), storage in ways.items()]
    monkeypatch.setattr(block, "measure_plan", lambda weights: stock_plan(weights[0]))
    drafter = BlockDrafter(CONFIG, dict(trained_looking_model().state_dict()), embedding, head, 64, known_plans=known)
    measured = {(plan.out_features, plan.in_features) for plan in drafter.plans}
    assert (VOCABULARY, HIDDEN) in measured
    assert (HIDDEN, 2 * HIDDEN) not in measured


def test_a_search_on_a_device_finds_what_the_hosts_finds_and_both_count_the_same_crossings() -> None:
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(3))
    logits[2, 4] = logits[2, 7] = 9.0  # the two best of a row
    embedding, head = target_tables()
    for k in (1, 2, 8):
        device = Crossings()
        columns, scores = _best_on_device(logits, k, device)
        drafter = BlockDrafter(CONFIG, dict(trained_looking_model().state_dict()), embedding, head, 64, False)
        draft = BlockDraft(drafter.start(FixedFeatures(torch.ones(0, HIDDEN)), 64), [10], torch.ones(5, HIDDEN), [logits.clone()])
        before = drafter.crossings.to_host.bytes
        found = draft.top(k)
        assert (columns.tolist(), scores.tolist()) == (found[0].tolist(), found[1].tolist())
        assert drafter.crossings.to_host.bytes - before == device.to_host.bytes == 5 * k * (8 + 4)
        assert torch.equal(draft._logits, logits), "the draft's logits are left as they were"


@SHAPES
def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path: Path, config: DrafterConfig) -> None:
    config = replace(config, tokenizer_sha256="5e" * 32)
    tensors = {**trained_looking_model(config).state_dict(), DRAFT_TO_TARGET: torch.arange(9, dtype=torch.int32)}
    save_checkpoint(tmp_path, config, tensors)
    found, loaded = load_checkpoint(tmp_path)
    assert found == config
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_a_checkpoint_that_is_missing_cut_or_misshapen_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no drafter here"):
        load_checkpoint(tmp_path)
    tensors = dict(trained_looking_model().state_dict())
    save_checkpoint(tmp_path, CONFIG, {name: t for name, t in tensors.items() if name != "fc.weight"})
    with pytest.raises(UserError, match="fc.weight is missing"):
        load_checkpoint(tmp_path)
    save_checkpoint(tmp_path, replace(CONFIG, taps=(0, 1, 2)), tensors)
    with pytest.raises(UserError, match="fc.weight is"):
        load_checkpoint(tmp_path)
    save_checkpoint(tmp_path, CONFIG, tensors)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for cut in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "model.safetensors").write_bytes(whole[:cut])
        with pytest.raises(UserError, match="cannot be read"):
            load_checkpoint(tmp_path)
    facts = CONFIG.as_json()
    del facts["block_size"]
    (tmp_path / "config.json").write_text(json.dumps(facts))
    (tmp_path / "model.safetensors").write_bytes(whole)
    with pytest.raises(UserError, match="block_size"):
        load_checkpoint(tmp_path)


def test_a_published_config_has_nothing_of_the_lab_s_and_loads() -> None:
    """As the DFlash authors write it: no `dflash_lab`, rotary settings in a group, fields that are for other programs."""
    facts = CONFIG.as_json()
    del facts["dflash_lab"], facts["rope_theta"]
    facts |= {"rope_parameters": {"rope_theta": 1e6}, "layer_types": ["full_attention"] * 2, "use_sliding_window": False}
    facts |= {"sliding_window": None, "dtype": "bfloat16", "max_window_layers": 2}
    assert parse_config(facts, "x") == replace(CONFIG, rope_theta=1e6, target_name=None)
    assert CONFIG.as_json()["dflash_lab"] == {"target": "tiny"}, "an older drafter of the lab is written as it was"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dflash_lab": {"target": "tiny", "depth_window": 3}}, "dflash_lab has 'depth_window', which this version"),
        ({"dflash_lab": {"feature_window": 0}}, "feature_window is 0, not a whole number above 0"),
        ({"dflash_lab": {"feature_window": "16"}}, "feature_window is '16'"),
        ({"dflash_lab": {"target_hidden_size": True}}, "target_hidden_size is True"),
        ({"dflash_lab": ["tiny"]}, "not a DFlash drafter"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "do not have full attention"),
        ({"use_sliding_window": True}, "do not have full attention"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "the mask token is unset"),
        ({"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": None}}, "the mask token is unset"),
        ({"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": "<mask>"}}, "the mask token is unset"),
    ],
)
def test_a_config_that_means_another_drafter_is_refused_by_name(change: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        parse_config(CONFIG.as_json() | change, "here/config.json")
    assert str(caught.value).startswith("here/config.json: ")


THE_TARGET = {"vocabulary": VOCABULARY, "hidden": HIDDEN, "layers": 4, "stop_ids": {2, 3}, "tokenizer_sha256": "aa"}


@SHAPES
def test_a_drafter_fits_the_target_that_it_was_made_for(config: DrafterConfig) -> None:
    for digest in (None, "aa"):
        check_fit(replace(config, tokenizer_sha256=digest), **THE_TARGET)
    check_fit(replace(config, tokenizer_sha256="aa"), VOCABULARY, HIDDEN)


@SHAPES
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden": 40}, "made for tiny of hidden size 32; this target has 40"),
        ({"vocabulary": 51}, "made for tiny with a vocabulary of 50; this target has 51"),
        ({"layers": 5}, "made for tiny of 4 layers; this target has 5"),
        ({"tokenizer_sha256": "bb"}, "made for tiny with another tokenizer"),
        ({"stop_ids": {7}}, "mask token 7 is a stop token"),
    ],
)
def test_a_drafter_of_another_target_is_refused_by_name(config: DrafterConfig, change: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_fit(replace(config, tokenizer_sha256="aa"), **{**THE_TARGET, **change})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"mask_token_id": VOCABULARY}, "mask token 50 is not a row of the 50-row embedding"),
        ({"mask_token_id": -1}, "mask token -1 is not a row"),
        ({"taps": (0, 4)}, r"reads layers \(0, 4\); its target's are 0 … 3"),
        ({"taps": (-1, 2)}, "reads layers"),
        ({"vocabulary": 51}, "vocabulary of 51"),
    ],
)
def test_a_drafter_that_cannot_run_is_refused_by_name(change: dict, sentence: str) -> None:
    embedding, head = target_tables()
    with pytest.raises(UserError, match=sentence):
        BlockDrafter(replace(CONFIG, **change), dict(trained_looking_model().state_dict()), embedding, head, 64, measure=False)
    with pytest.raises(UserError, match="hidden size 32"):
        BlockDrafter(CONFIG, dict(trained_looking_model().state_dict()), torch.randn(VOCABULARY, 40), head, 64, measure=False)


def test_the_digest_of_a_tokenizer_says_which_id_each_word_has() -> None:
    words = {"a": 0, "b": 1, "ß": 2}
    assert vocabulary_digest(words) == vocabulary_digest(dict(reversed(words.items())))
    assert vocabulary_digest(words) != vocabulary_digest({"a": 1, "b": 0, "ß": 2})
    assert vocabulary_digest(words) != vocabulary_digest({**words, "d": 3})


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([3, VOCABULARY], dtype=torch.int32),
        torch.tensor([-1, 3]),
        torch.tensor([5, 5]),
        torch.tensor([[1, 2]]),
        torch.tensor([1.0, 2.0]),
        torch.zeros(0, dtype=torch.int32),
    ],
    ids=["past the end", "negative", "twice", "matrix", "fractions", "none"],
)
def test_a_draft_vocabulary_that_is_none_is_refused(tmp_path: Path, ids: torch.Tensor) -> None:
    save_checkpoint(tmp_path, CONFIG, {**trained_looking_model().state_dict(), DRAFT_TO_TARGET: ids})
    with pytest.raises(UserError, match="draft_to_target does not hold ascending ids below 50"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(("message", "number"), [("I/O error: No space left on device (os error 28)", 28), ("odd", 5)])
def test_a_full_disk_is_the_error_that_every_other_file_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, number: int
) -> None:
    def failing(*arguments: object) -> None:
        raise SafetensorError(message)

    monkeypatch.setattr(checkpoint, "save_file", failing)
    with pytest.raises(OSError, match="model.safetensors") as caught:
        save_checkpoint(tmp_path, CONFIG, {})
    assert caught.value.errno == number
