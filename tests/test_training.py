"""The preparation pipeline on a tiny real model: data, blocks, losses, a drafter that learns, and a run that resumes."""
from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_folder import family_config
from tests.tiny_models import FAMILIES, POSITIONS, TAPS, WINDOWED, plain_greedy, random_ids, tiny_config, tiny_model
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM

from dflash_mini_lab.drafters.checkpoint import DRAFT_TO_TARGET
from dflash_mini_lab.targets.lean import LeanDecoder
from dflash_mini_lab.targets.lean_build import build_lean_decoder
from dflash_mini_lab.targets.library_target import LibraryDecoder
from dflash_mini_lab.training import train
from dflash_mini_lab.training.blocks import choose_draft_vocabulary, cut_blocks, target_to_draft
from dflash_mini_lab.training.features import ComputedFeatures
from dflash_mini_lab.training.loop import learning_rate_share
from dflash_mini_lab.training.losses import UNTRAINED, dpace_weights, expected_accepted, slot_cross_entropy, teacher_loss
from dflash_mini_lab.training.model import TrainableDrafter
from dflash_mini_lab.training.prepare import beginning, refuse_other_work, target_tensors
from dflash_mini_lab.training.prompts import hold_out, training_texts
from dflash_mini_lab.training.recipe import Recipe, choose_mask_token, drafter_config, spread_taps
from dflash_mini_lab.training.shards import Sequence, have_features, read_features, read_sequences, write_shard
from dflash_mini_lab.training.teacher import (
    ACTIVATIONS,
    LOGITS,
    begin_answers,
    continue_batch,
    equal_length_batches,
    rows_that_fit,
)
from dflash_mini_lab.training.train import train_drafter
from dflash_mini_lab.types import UserError

TINY = Recipe(block_size=4, layers=1, tap_layers=TAPS, draft_vocabulary=40, sequences=4, anchors=6, minutes=1.0)
NARROW = replace(TINY, width=16, heads=4, window=6)
"""A drafter with a width of its own and a window on the features."""


def decoder_of(family: str, library: bool = False) -> LeanDecoder | LibraryDecoder:
    model = tiny_model(family)
    return LibraryDecoder(model) if library or family in WINDOWED else build_lean_decoder(model, POSITIONS, measure=False)


def answers_of(family: str, prompts: list[list[int]], new: int, stops: tuple[int, ...] = ()) -> dict[tuple, list[int]]:
    found = continue_batch(decoder_of(family), torch.tensor(prompts), new, stops, TAPS)
    return {tuple(t.tokens[: t.prompt_length]): t.tokens[t.prompt_length :] for t in found}


@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
def test_a_batch_s_answers_are_what_each_prompt_alone_gets(family: str) -> None:
    prompts = [random_ids(3, 0) + random_ids(4, seed) for seed in range(6)]
    answers = answers_of(family, prompts, 12)
    assert answers == {tuple(prompt): plain_greedy(family, prompt, 12) for prompt in prompts}


def test_a_stop_token_is_the_last_of_its_answer_and_the_others_go_on() -> None:
    prompts = [random_ids(5, seed) for seed in range(8)]
    full = {tuple(prompt): plain_greedy("llama", prompt, 10) for prompt in prompts}
    stop = full[tuple(prompts[0])][3]
    for prompt, answer in answers_of("llama", prompts, 10, (stop,)).items():
        whole = full[prompt]
        assert answer == (whole[: whole.index(stop) + 1] if stop in whole else whole)


def test_an_answer_is_begun_by_sampling_and_left_out_where_it_ended() -> None:
    prompts = torch.tensor([random_ids(5, seed) for seed in range(8)])
    begun = [begin_answers(decoder_of("llama"), prompts, 3, (), seed, 61) for seed in (1, 1, 2)]
    assert torch.equal(begun[0][:, :5].sort(0).values, prompts.sort(0).values)
    assert torch.equal(begun[0], begun[1])
    assert not torch.equal(begun[0], begun[2])
    said = int(begun[0][0, -1])
    kept = begin_answers(decoder_of("llama"), prompts, 3, (said,), 1, 61)
    assert 0 < len(kept) < 8
    assert (kept[:, 5:] != said).all()
    assert begin_answers(decoder_of("llama"), prompts, 3, range(61), 1, 61).shape == (0, 8)


@pytest.mark.parametrize("library", [False, True])
def test_a_padded_row_of_the_head_is_neither_said_nor_taught(library: bool) -> None:
    prompts = torch.tensor([random_ids(5, seed) for seed in range(8)])
    whole = {token for t in continue_batch(decoder_of("qwen3", library), prompts, 10, (), TAPS) for token in t.tokens[5:]}
    limit = max(whole)
    for found in continue_batch(decoder_of("qwen3", library), prompts, 10, (), TAPS, vocabulary=limit):
        assert max(found.tokens[5:]) < limit
        assert int(found.likely_ids.max()) < limit
        assert found.likely_ids[:, 0].tolist() == found.tokens[5:]


@pytest.mark.parametrize("library", [False, True])
@torch.inference_mode()
def test_features_on_disk_are_those_of_a_fresh_pass(tmp_path: Path, library: bool) -> None:
    decoder = decoder_of("lfm2", library)
    prompts = torch.tensor([random_ids(5, 0)[:2] + random_ids(3, seed) for seed in range(4)])
    write_shard(tmp_path / "0.safetensors", continue_batch(decoder, prompts, 9, (), TAPS))
    sequences = read_sequences(tmp_path)
    assert len(sequences) == 4
    assert have_features(tmp_path)
    for sequence in sequences:
        hidden = tiny_model("lfm2")(sequence.tokens[None, :-1], output_hidden_states=True).hidden_states
        expected = torch.cat([hidden[tap + 1][0] for tap in TAPS], dim=-1)
        torch.testing.assert_close(read_features([sequence])[0].double(), expected, rtol=1e-2, atol=1e-2)


def test_batches_hold_prompts_of_one_length_and_small_buckets_are_left_out() -> None:
    prompts = [random_ids(5, seed) for seed in range(20)] + [random_ids(7, seed) for seed in range(3)]
    batches = equal_length_batches(prompts, 12, seed=0)
    assert sorted(tuple(batch.shape) for batch in batches) == [(8, 5), (12, 5)]


@torch.no_grad()
def test_features_computed_again_are_those_of_each_sequence_alone(tmp_path: Path) -> None:
    model = tiny_model("lfm2")
    decoder = build_lean_decoder(model, POSITIONS, measure=False)
    for number, length in enumerate((5, 8)):  # two shards, answers of unequal lengths, and no features kept
        prompts = torch.tensor([random_ids(length, seed) for seed in range(3)])
        write_shard(tmp_path / f"{number}.safetensors", continue_batch(decoder, prompts, 9, (), candidates=2))
    assert not have_features(tmp_path)
    sequences = read_sequences(tmp_path, features=ComputedFeatures(decoder, TAPS))
    blocks = cut_blocks(sequences, 4, 5, torch.Generator().manual_seed(0))
    assert len(sequences) == len(blocks.features) == 6
    for sequence, found in zip(sequences, blocks.features, strict=True):
        hidden = model(sequence.tokens[None, :-1], output_hidden_states=True).hidden_states
        expected = torch.cat([hidden[tap + 1][0] for tap in TAPS], dim=-1)
        torch.testing.assert_close(found[: sequence.length - 1], expected, rtol=0, atol=1e-9)


def test_a_batch_is_as_large_as_memory_allows() -> None:
    decoder = build_lean_decoder(tiny_model("llama", torch.float32), POSITIONS, measure=False)
    cache = 2 * 4 * 2 * 8 * 50 * 4  # keys and values, layers, heads, head size, positions, bytes
    assert rows_that_fit(decoder, 50, 2 * 7 * (cache + 50 * 32 * 4 * ACTIVATIONS + 61 * 4 * LOGITS)) == 7
    assert rows_that_fit(decoder, 50, 0) == 1


def sequence_on_disk(folder: Path, device: str = "cpu") -> list[Sequence]:
    decoder = build_lean_decoder(tiny_model("llama", torch.float32), POSITIONS, measure=False)
    prompts = torch.tensor([random_ids(4, seed) for seed in range(24)])
    write_shard(folder / "0.safetensors", continue_batch(decoder, prompts, 16, (), TAPS))
    return read_sequences(folder, device)


def test_blocks_are_cut_inside_answers_and_label_what_follows_the_anchor(tmp_path: Path) -> None:
    sequences = sequence_on_disk(tmp_path)[:3]
    blocks = cut_blocks(sequences, 50, 5, torch.Generator().manual_seed(0))
    for row, sequence in enumerate(sequences):
        assert int(blocks.anchors[row].min()) >= sequence.prompt_length
        assert int(blocks.anchors[row].max()) <= len(sequence.tokens) - 2
        for anchor, token, labels in zip(blocks.anchors[row], blocks.anchor_ids[row], blocks.labels[row], strict=True):
            after = sequence.tokens[anchor + 1 : anchor + 5].tolist()
            assert token == sequence.tokens[anchor]
            assert labels.tolist() == after + [UNTRAINED] * (4 - len(after))


def test_each_slot_s_teacher_row_is_the_one_its_label_was_chosen_from(tmp_path: Path) -> None:
    blocks = cut_blocks(sequence_on_disk(tmp_path)[:3], 50, 5, torch.Generator().manual_seed(0))
    inside = blocks.labels != UNTRAINED
    assert torch.equal(blocks.likely_ids[..., 0][inside], blocks.labels[inside])
    assert (blocks.likely.diff(dim=-1) <= 0).all()
    assert blocks.likely.sum(-1).max() <= 1.01


def test_held_out_prompts_are_trained_on_in_no_form(tmp_path: Path) -> None:
    own = {f"{'long ' * (number % 3)}question {number}": [0] * (3 + number % 3) for number in range(96)}
    held_out = hold_out(own, 10)
    assert len(held_out) == 10
    assert hold_out(dict(sorted(own.items())), 10) == held_out != sorted(own)[:10], "no order of the texts decides"
    kept = [text for text in own if text not in held_out]
    seeds = tmp_path / "seeds.json"
    seeds.write_text(json.dumps({"groups": []}), encoding="utf-8")
    assert training_texts(kept, seeds, 0) == kept


def test_written_requests_are_asked_as_they_are_and_one_held_out_comes_back_in_no_form(tmp_path: Path) -> None:
    seeds = tmp_path / "seeds.json"
    groups = [{"patterns": ["{x}"], "values": ["write a", "write b"]}, {"patterns": ["Why {x}?"], "values": ["c"]}]
    seeds.write_text(json.dumps({"groups": groups}), encoding="utf-8")
    assert training_texts(["own", "write a"], seeds, 0) == ["own", "write a", "Why c?"]


def test_seeds_are_at_most_half_as_many_as_own_prompts(tmp_path: Path) -> None:
    seeds = tmp_path / "seeds.json"
    groups = [{"patterns": ["{x}?"], "values": [str(number) for number in range(3000)]}]
    seeds.write_text(json.dumps({"groups": groups}), encoding="utf-8")
    assert len(training_texts([f"own {n}" for n in range(4000)], seeds, 0)) == 6000
    assert len(training_texts([], seeds, 0)) == 1000


def test_the_draft_vocabulary_holds_the_most_frequent_answer_tokens(tmp_path: Path) -> None:
    sequences = sequence_on_disk(tmp_path)
    chosen = choose_draft_vocabulary(sequences, 5, 61)
    counts = torch.bincount(torch.cat([s.tokens[s.prompt_length :] for s in sequences]), minlength=61)
    assert counts[chosen].min() >= counts[[t for t in range(61) if t not in chosen.tolist()]].max()
    rows = target_to_draft(chosen, 61)
    assert rows[chosen].tolist() == [0, 1, 2, 3, 4]
    assert (rows == UNTRAINED).sum() == 56


def test_weights_and_accepted_lengths_by_hand() -> None:
    weights = dpace_weights(torch.tensor([[1.0, 0.0]]), alpha=0.5)
    torch.testing.assert_close(weights, torch.tensor([[1.5, 0.5]]))
    assert expected_accepted(torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).bool()).tolist() == [2, 0, 4]


def test_the_loss_is_half_the_choice_s_and_half_the_teacher_s_and_its_gradient_is_autograd_s() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().view(1, 1, 3)
    rows, likely = torch.tensor([[[0, 2, UNTRAINED]]]), torch.tensor([[[0.6, 0.3, 0.1]]])
    loss, _ = teacher_loss(logits, torch.tensor([[0]]), rows, likely, 0.5)
    assert loss.item() == pytest.approx(-0.5 * math.log(0.5) - 0.5 * (0.6 * math.log(0.5) + 0.3 * math.log(0.2)))

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 5, 9, generator=generator, requires_grad=True)
    labels = torch.randint(-1, 9, (3, 4, 5), generator=generator).masked_fill_(torch.rand(3, 4, 5) < 0.1, UNTRAINED)
    labels[labels < 0] = UNTRAINED
    rows = torch.rand(3, 4, 5, 12, generator=generator).argsort(-1)[..., :4]
    rows[rows >= 9] = UNTRAINED
    likely = torch.rand(3, 4, 5, 4, generator=generator).softmax(-1)
    loss, gradient = teacher_loss(logits, labels, rows, likely, 0.3)
    logs = logits.log_softmax(-1)
    hard = slot_cross_entropy(logs, labels)
    soft = -(likely * (rows >= 0) * logs.gather(-1, rows.clamp(min=0))).sum(-1)
    weights = dpace_weights(torch.exp(-hard)) * (labels >= 0)
    expected = (weights * (0.7 * hard + 0.3 * soft)).sum() / weights.sum()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert logits.grad is not None
    torch.testing.assert_close(gradient, logits.grad)


def test_taps_run_from_the_second_to_the_third_last_layer() -> None:
    assert spread_taps(30, 5) == (1, 8, 14, 20, 27)
    assert spread_taps(4, 5) == (1,)
    assert spread_taps(3, 2) == (1,)
    with pytest.raises(UserError, match="too shallow"):
        spread_taps(2, 1)


def test_the_rate_warms_up_and_falls_to_its_floor() -> None:
    assert learning_rate_share(0.02, TINY) == pytest.approx(0.5)
    assert learning_rate_share(0.04, TINY) == pytest.approx(1.0)
    assert learning_rate_share(1.0, TINY) == pytest.approx(TINY.final_rate)


def test_a_narrow_drafter_takes_nothing_from_the_target_that_does_not_fit_it() -> None:
    model = TrainableDrafter(drafter_config(NARROW, tiny_config("llama"), "tiny", 1, 61))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train.warm_start(model, target_tensors(tiny_model("llama", torch.float32), model.config))
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {f"layers.0.self_attn.{part}_norm.weight" for part in "qk"}


def test_what_a_training_began_from_is_said_as_it_was() -> None:
    def said(recipe: Recipe, model: Any) -> str:
        config = drafter_config(recipe, model.config, "tiny", 1, model.config.vocab_size)
        return beginning(config, target_tensors(model, config))

    llama = tiny_model("llama", torch.float32)
    assert said(TINY, llama) == "the target's own last layers"
    assert said(NARROW, llama) == "random weights"
    assert said(TINY, AutoModelForCausalLM.from_config(family_config("mistral"))) == "random weights"


@pytest.mark.slow
def test_a_drafter_learns_and_an_interrupted_training_goes_on(tmp_path: Path) -> None:
    sequences = sequence_on_disk(tmp_path / "answers")
    model = tiny_model("llama", torch.float32)
    config = drafter_config(TINY, model.config, "tiny", 1, 61)
    tables = {"embedding": model.get_input_embeddings().weight.detach(), "head": model.get_output_embeddings().weight.detach()}
    vocabulary = choose_draft_vocabulary(sequences, 61, 61)

    def trained(seconds: float) -> tuple[dict, dict]:
        recipe = replace(TINY, learning_rate=3e-3, teacher_share=0.0)  # a random target has no distribution worth learning
        clock = (tick / 50 for tick in count())  # fifty steps a second, whatever the machine is doing
        return train_drafter(config, recipe, tables, vocabulary, sequences, sequences, seconds, tmp_path, now=clock.__next__)

    _, first = trained(1.0)
    tensors, second = trained(4.0)
    assert second["step"] > first["step"] > 0
    assert second["training_seconds"] >= 4.0 > first["training_seconds"]
    assert second["held_out_tau"] > first["held_out_tau"]
    assert second["held_out_tau"] > 1.5, "these answers were trained on, so they must be predictable"
    assert DRAFT_TO_TARGET in tensors

    recipe = replace(TINY, learning_rate=1e-6)
    other = tmp_path / "other"
    other.mkdir()
    _, again = train_drafter(config, recipe, tables, vocabulary, sequences, sequences, 0.3, other, start=tensors)
    assert again["held_out_tau"] == pytest.approx(second["held_out_tau"], abs=0.1), "it goes on from the drafter it was given"


class Tokens:
    """What `choose_mask_token` asks of a tokenizer."""

    def __init__(self, special: dict[int, str], template: str = "") -> None:
        self.chat_template = template
        self.added_tokens_decoder = {number: AddedToken(text, special=True) for number, text in special.items()}
        self.bos_token_id, self.eos_token_id, self.unk_token_id, self.pad_token_id = 0, 1, 2, None


def test_the_mask_token_is_an_unused_special_row_of_the_embedding() -> None:
    special = {0: "<s>", 1: "</s>", 2: "<unk>", 5: "<a>", 6: "<b>", 7: "<turn>", 90: "<no row>"}
    assert choose_mask_token(Tokens(special, "{{ <turn> }}"), frozenset({6}), 60, 64) == 5
    assert choose_mask_token(Tokens({0: "<s>"}), frozenset({6}), 60, 64) == 60, "a row that no word has"
    assert choose_mask_token(Tokens({0: "<s>"}), frozenset({6}), 60, 60) == 59
    with pytest.raises(UserError, match="No row"):
        choose_mask_token(Tokens({}), frozenset({59}), 60, 60)


def training_arguments(folder: Path, device: str = "cpu") -> dict:
    sequences = sequence_on_disk(folder / "answers", device)
    model = tiny_model("llama", torch.float32)
    tables = {"embedding": model.get_input_embeddings().weight, "head": model.get_output_embeddings().weight}
    tables = {name: table.detach().to(device) for name, table in tables.items()}
    return {
        "config": drafter_config(TINY, model.config, "tiny", 1, 61), "recipe": TINY, "target_tensors": tables,
        "draft_to_target": torch.arange(61), "training": sequences, "held_out": [], "seconds": 0.2, "folder": folder,
    }  # fmt: skip


def test_every_part_of_a_narrow_drafter_is_trained(tmp_path: Path) -> None:
    arguments = training_arguments(tmp_path)
    sequences, tables = arguments["training"], arguments["target_tensors"]
    torch.manual_seed(0)
    drafter = TrainableDrafter(drafter_config(NARROW, tiny_config("llama"), "tiny", 1, 61))
    train.warm_start(drafter, tables)
    before = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
    trainer = train.DrafterTrainer(drafter, NARROW, tables, torch.arange(61))
    blocks = cut_blocks(sequences[:8], 8, NARROW.block_size, torch.Generator().manual_seed(0))
    losses = [trainer.step(blocks, 1.0)["loss"].item() for _ in range(12)]
    assert losses[-1] < losses[0]
    assert all(not torch.equal(parameter, before[name]) for name, parameter in drafter.named_parameters())
    assert {"input.weight", "output.weight"} <= drafter.state_dict().keys() == trainer.checkpoint().keys() - {DRAFT_TO_TARGET}


def test_ctrl_c_keeps_what_was_trained(tmp_path: Path) -> None:
    def interrupted(config: object, tensors: object) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_drafter(**training_arguments(tmp_path), real_loop=interrupted)
    _, look = train_drafter(**training_arguments(tmp_path) | {"seconds": 0.01})
    assert look["training_seconds"] >= 0.2, "the time is used up, so nothing was trained again"
    assert look["step"] >= 1


@pytest.mark.parametrize("faster", [True, False])
def test_a_log_has_no_nan_and_both_number_formats_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    monkeypatch.setattr(train, "bfloat16_is_faster", lambda device: faster)
    arguments = training_arguments(tmp_path) | {"recipe": replace(TINY, look_every_s=0.0)}  # a look after every step
    train_drafter(**arguments, real_loop=lambda config, tensors: float("nan"))
    lines = (tmp_path / train.LOG_FILE).read_text().splitlines()
    looks = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert len(looks) > 1
    assert all(look["loss"] > 0 and look["real_loop_tau"] is None and look["held_out_tau"] is None for look in looks)


def test_work_that_was_begun_for_another_model_is_refused(tmp_path: Path) -> None:
    refuse_other_work(tmp_path, {"drafter": {"layers": 2}, "weights": {"a": "1"}})
    refuse_other_work(tmp_path, {"drafter": {"layers": 2}, "weights": {"a": "1"}})
    with pytest.raises(UserError, match="begun with other weights; remove that folder"):
        refuse_other_work(tmp_path, {"drafter": {"layers": 2}, "weights": {"a": "2"}})
