"""The heads' training on a tiny random drafter and text in which each token decides the next."""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.tiny_models import TAPS, VOCABULARY, tiny_config
from torch import Tensor

from dflash_mini_lab.artifacts import MANIFEST, read_manifest, verify, write_manifest
from dflash_mini_lab.drafters.block import BlockDrafter
from dflash_mini_lab.drafters.checkpoint import CONFIG_FILE, DRAFT_TO_TARGET, TENSOR_FILE, DrafterConfig, save_checkpoint
from dflash_mini_lab.drafters.heads import load_heads
from dflash_mini_lab.methods.m05_fused_jump import residual
from dflash_mini_lab.methods.m12_parareal import similarity
from dflash_mini_lab.scores import PairScores
from dflash_mini_lab.training import heads as training_heads
from dflash_mini_lab.training.blocks import Blocks, cut_blocks
from dflash_mini_lab.training.frozen import Drafted, FrozenDrafter, matching_candidate
from dflash_mini_lab.training.head_looks import judge_confidence
from dflash_mini_lab.training.head_model import Heads, choice_loss, distilled_loss, prefix_survival, survival_loss
from dflash_mini_lab.training.heads import TRAINED_FILES, HeadRecipe, HeadTrainer, add_heads, jump_offsets, train_heads
from dflash_mini_lab.training.loop import Progress, resume
from dflash_mini_lab.training.losses import UNTRAINED
from dflash_mini_lab.training.model import TrainableDrafter
from dflash_mini_lab.training.recipe import Recipe, drafter_config
from dflash_mini_lab.training.ridge import collect_samples
from dflash_mini_lab.training.shards import Sequence, read_sequences, write_shard
from dflash_mini_lab.training.teacher import Trajectory
from dflash_mini_lab.types import UserError

TINY = Recipe(block_size=5, layers=1, tap_layers=TAPS, sequences=6, anchors=8, learning_rate=1e-2, seed=1)
NARROW = replace(TINY, width=16, heads=4, window=3)
"""A drafter with a width of its own and a window on the features."""
EVERY = VOCABULARY
SMALL = HeadRecipe(
    rank=8, jump_inner=24, candidates=EVERY, kept=EVERY, table_rate=3e-2, ridge_sequences=12, ridge_anchors=4
)
"""All are candidates: a drafter that knows nothing has the true token among its eight best by chance only."""
HIDDEN, PROMPT, ANSWER = 32, 4, 20
NEXT = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(8))
"""The text: token t is followed by NEXT[t]."""


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_heads, "bfloat16_is_faster", lambda device: False)


def config(recipe: Recipe = TINY) -> DrafterConfig:
    return drafter_config(recipe, tiny_config("llama"), "tiny", 1, VOCABULARY)


def target_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(VOCABULARY, HIDDEN, generator=generator) for name in ("embedding", "head")}


def checkpoint(draft_vocabulary: int = VOCABULARY - 5, recipe: Recipe = TINY) -> dict[str, Tensor]:
    """A drafter that knows nothing; its draft vocabulary leaves the last five ids out."""
    generator = torch.Generator().manual_seed(4)
    model = TrainableDrafter(config(recipe))
    for parameter in model.parameters():
        if parameter.dim() == 2:  # large enough that slot states tell contexts apart
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    tensors = {name: tensor.to(torch.float16) for name, tensor in model.state_dict().items()}
    return tensors | {DRAFT_TO_TARGET: torch.arange(draft_vocabulary, dtype=torch.int32)}


def trajectory(first: int) -> Trajectory:
    """Features that say which token their row is; the target sure of the next one, and of 15 others in a fixed order."""
    tokens = [first]
    while len(tokens) < PROMPT + ANSWER:
        tokens.append(int(NEXT[tokens[-1]]))
    tables = torch.randn(VOCABULARY, len(TAPS) * HIDDEN, generator=torch.Generator().manual_seed(6))
    answer = torch.tensor(tokens[PROMPT:])
    likely_ids = (answer[:, None] + torch.arange(16)) % VOCABULARY
    likely = torch.tensor([2.0**-rank for rank in range(1, 17)]).expand(ANSWER, -1)
    return Trajectory(tokens, PROMPT, tables[torch.tensor(tokens[:-1])], likely_ids.int(), likely.bfloat16())


def sequences(folder: Path, count: int = 40) -> list[Sequence]:
    write_shard(folder / "0.safetensors", [trajectory(first % VOCABULARY) for first in range(count)])
    return read_sequences(folder)


def frozen() -> FrozenDrafter:
    return FrozenDrafter(config(), checkpoint(), target_tensors(), torch.float32)


def trainer(recipe: Recipe = TINY) -> HeadTrainer:
    torch.manual_seed(0)
    return HeadTrainer(config(recipe), recipe, SMALL, checkpoint(recipe=recipe), target_tensors())


def blocks_of(some: list[Sequence], anchors: int = 8, seed: int = 0) -> Blocks:
    return cut_blocks(some, anchors, TINY.block_size, torch.Generator().manual_seed(seed))


def fields_of(drafted: Drafted) -> dict[str, Tensor]:
    return vars(drafted) | {"previous": drafted.previous}


def test_heads_see_no_feature_of_the_anchor_or_after_it(tmp_path: Path) -> None:
    blocks = blocks_of(sequences(tmp_path)[:2], anchors=1)
    rows = torch.arange(blocks.features.shape[1])
    after = (rows[None] >= blocks.anchors)[..., None]
    other = replace(blocks, features=torch.where(after, 7.0, blocks.features.float()))
    newest = (rows[None] == blocks.anchors - 1)[..., None]
    before = replace(blocks, features=torch.where(newest, 7.0, blocks.features.float()))
    seen, unchanged, changed = (fields_of(frozen().draft(b, 8)) for b in (blocks, other, before))
    for name, value in seen.items():
        assert torch.equal(value, unchanged[name]), name
    assert not torch.equal(seen["context"], changed["context"]), "the context vector is the row before the anchor"


def test_a_slot_s_inputs_do_not_change_with_its_own_token_or_later_ones(tmp_path: Path) -> None:
    blocks = blocks_of(sequences(tmp_path)[:3])
    for slot in range(TINY.block_size - 1):
        labels = blocks.labels.clone()
        labels[..., slot:] = (labels[..., slot:] + 1) % VOCABULARY
        seen, other = (frozen().draft(b, 8) for b in (blocks, replace(blocks, labels=labels)))
        for name in ("hidden", "context", "scores", "ids"):
            assert torch.equal(getattr(seen, name), getattr(other, name))
        assert torch.equal(seen.previous[..., : slot + 1], other.previous[..., : slot + 1])


def test_the_context_vector_is_the_fused_feature_of_the_row_before_the_anchor(tmp_path: Path) -> None:
    blocks, drafter = blocks_of(sequences(tmp_path)[:2]), frozen()
    context = drafter.draft(blocks, 8).context
    for row in range(2):
        fused = drafter.model.hidden_norm(drafter.model.fc(blocks.features[row].float()))
        torch.testing.assert_close(context[row], fused[blocks.anchors[row] - 1])


def test_candidates_are_the_drafters_best_in_target_ids(tmp_path: Path) -> None:
    tensors = checkpoint() | {DRAFT_TO_TARGET: torch.arange(3, VOCABULARY, 2, dtype=torch.int32)}
    drafter = FrozenDrafter(config(), tensors, target_tensors(), torch.float32)
    drafted = drafter.draft(blocks_of(sequences(tmp_path)[:2]), 5)
    logits = drafted.hidden @ target_tensors()["head"].T
    logits[..., [id for id in range(VOCABULARY) if id < 3 or id % 2 == 0]] = -torch.inf
    best, ids = logits.topk(5)
    torch.testing.assert_close(drafted.scores, best)
    assert torch.equal(drafted.ids, ids)
    assert torch.equal(drafted.columns, (ids - 3) // 2)
    assert matching_candidate(drafted.ids, ids[..., 2]).eq(2).all()
    assert matching_candidate(drafted.ids, torch.full(ids.shape[:-1], UNTRAINED)).eq(UNTRAINED).all()


def random_heads(drafter: FrozenDrafter) -> Heads:
    heads = Heads(drafter, rank=8, offsets=(2, 4), jump_inner=24)
    generator = torch.Generator().manual_seed(5)
    for parameter in heads.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return heads


@torch.no_grad()
def test_the_scores_are_the_written_formulas(tmp_path: Path) -> None:
    drafter = frozen()
    d, heads = drafter.draft(blocks_of(sequences(tmp_path)[:2]), 6), random_heads(drafter)
    t = {name: tensor.double() for name, tensor in heads.state_dict().items()}
    previous, row, block, slot, k = d.previous, 1, 3, 3, 2
    u, v, c, h = previous[row, block, slot], d.ids[row, block, slot, k], d.context[row, block].double(), d.hidden[row, block]
    gate = torch.tanh(t["pair.gate.weight"] @ c + t["pair.gate.bias"])
    expected = (t["pair.previous"][u] * gate * t["pair.next"][v]).sum() / 8**0.5
    assert heads.pair(previous, d.context, d.ids)[row, block, slot, k].item() == pytest.approx(expected.item(), rel=1e-4)
    expected = t["markov.scale"][slot] * (t["markov.previous"][u] * t["markov.next"][v]).sum() / 8**0.5
    assert heads.markov(previous, d.ids)[row, block, slot, k].item() == pytest.approx(expected.item(), rel=1e-4)
    state = torch.tanh(t["fused.slot.weight"] @ h[slot].double() + t["fused.offset_embedding"][1])
    expected = (state * t["fused.token"][v]).sum() / 8**0.5
    assert heads.fused(d.hidden, d.ids)[row, block, 1, k].item() == pytest.approx(expected.item(), rel=1e-4)
    x = c + t["jump.offset_embedding"][1]
    normed = x / (x.square().mean() + config().eps).sqrt() * t["jump.norm.weight"]
    x = x + t["jump.down.weight"] @ torch.nn.functional.silu(t["jump.up.weight"] @ normed)
    torch.testing.assert_close(heads.jump(d.context)[row, block, 1].double(), x, rtol=1e-4, atol=1e-5)
    expected = t["confidence.weight"] @ torch.cat([h[slot].double(), t["markov.previous"][u]]) + t["confidence.bias"][0]
    confidence = heads.confidence(d.hidden, heads.markov.previous[previous])[row, block, slot]
    assert confidence.item() == pytest.approx(expected.item(), rel=1e-4)


@torch.no_grad()
def test_method_09_chooses_after_its_own_choice(tmp_path: Path) -> None:
    drafter = frozen()
    d, heads = drafter.draft(blocks_of(sequences(tmp_path)[:1], anchors=1), 6), random_heads(drafter)
    chosen, before = heads.markov.choose(d)
    token = d.anchor_ids
    for slot in range(TINY.block_size - 1):
        assert torch.equal(before[..., slot], token)
        shifted = d.scores + heads.markov(token[..., None].expand(-1, -1, TINY.block_size - 1), d.ids)
        token = d.ids[..., slot, :].gather(-1, shifted[..., slot, :].argmax(-1, keepdim=True))[..., 0]
        assert torch.equal(chosen[..., slot], token)


def test_untrained_heads_change_no_score(tmp_path: Path) -> None:
    drafter = frozen()
    d, heads = drafter.draft(blocks_of(sequences(tmp_path)[:2]), 6), Heads(drafter, 8, (2, 4), 24)
    for scores in (heads.pair(d.previous, d.context, d.ids), heads.markov(d.previous, d.ids), heads.fused(d.hidden, d.ids)):
        assert not scores.any()


def test_each_loss_reaches_its_own_head_only(tmp_path: Path) -> None:
    drafter = frozen()
    drafted, heads = drafter.draft(blocks_of(sequences(tmp_path)[:4]), 40), random_heads(drafter)
    for name, loss in heads.losses(drafted, drafter, 8).items():
        heads.zero_grad(set_to_none=True)
        loss.backward(retain_graph=True)
        reached = {other.split(".")[0] for other, p in heads.named_parameters() if p.grad is not None and p.grad.any()}
        assert reached == {name}
    assert all(parameter.grad is None for parameter in drafter.model.parameters())


def test_the_confidence_is_taught_whether_the_prefix_survives() -> None:
    labels = torch.tensor([[5, 6, 7, 8], [5, 6, UNTRAINED, UNTRAINED]])
    chosen = torch.tensor([[5, 0, 7, 8], [5, 6, 7, 8]])
    assert prefix_survival(chosen, labels).tolist() == [[True, False, False, False], [True, True, False, False]]
    right = torch.tensor([[40.0, -40, -40, -40], [40, 40, 9, -9]])
    assert survival_loss(right, chosen, labels).item() == pytest.approx(0, abs=1e-6), "slots past the end are not taught"
    assert survival_loss(right * torch.tensor([1.0, 1, -1, 1]), chosen, labels).item() == pytest.approx(40 / 6)


def test_losses_by_hand() -> None:
    scores = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    choices = torch.tensor([[0, UNTRAINED]])
    nll = torch.tensor([1.0, 0.0]).log_softmax(0).neg()[0].item()
    assert choice_loss(scores, choices).item() == pytest.approx(nll)
    assert choice_loss(scores, torch.full((1, 2), UNTRAINED)).item() == 0
    teacher = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    p, q = teacher[0, 1].softmax(0), scores[0, 1].softmax(0)
    divergence = (p * (p / q).log()).sum().item() / 2
    inside = torch.tensor([[True, True]])
    assert distilled_loss(scores, teacher, choices, inside).item() == pytest.approx(0.7 * nll + 0.3 * divergence)


def test_confidence_figures_by_hand() -> None:
    confidence, survival = torch.tensor([0.9, 0.6, 0.4, 0.4]), torch.tensor([True, False, True, False])
    figures = judge_confidence(confidence, survival)
    assert figures["brier"] == pytest.approx((0.01 + 0.36 + 0.36 + 0.16) / 4, abs=1e-4)
    assert figures["auc"] == pytest.approx((2 + 0 + 0.5) / 4)
    assert figures["brier_of_the_rate"] == 0.25
    assert judge_confidence(confidence, torch.ones(4).bool())["auc"] is None


def test_jump_offsets_are_every_second_slot() -> None:
    assert jump_offsets(5) == (2, 4)
    assert jump_offsets(1) == (1,)


@pytest.mark.slow
def test_every_head_learns_a_text_in_which_each_token_decides_the_next(tmp_path: Path) -> None:
    some, learner = sequences(tmp_path), trainer()
    before = {name: tensor.clone() for name, tensor in learner.exact.model.state_dict().items()}
    progress = Progress()
    first = learner.look(progress, {}, some)
    losses = [learner.step(blocks_of(some[step % 7 * 5 :][:6], seed=step), 1.0) for step in range(150)]
    last = learner.look(progress, {}, some)
    for name in losses[0].keys() - {"confidence"}:  # what survives changes as the Markov bias learns
        assert losses[-1][name] < 0.8 * losses[0][name], name
    assert first["pair"] == first["markov"] == first["base"] == last["base"]
    assert last["base"]["accepted"] < 0.2
    for name in ("pair", "markov"):
        assert last[name]["accepted"] > 2, name
    for name in ("jump", "fused"):
        assert min(last[name]["accuracy"]) > 2 * max(last[name]["base_accuracy"]), name
    assert min(last["jump"]["alone"]) > 0.5, "the row before the anchor decides every later token"
    assert last["confidence"]["brier"] < last["confidence"]["brier_of_the_rate"]
    assert last["confidence"]["auc"] > 0.6
    after = learner.exact.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), "the drafter is frozen"


def train(folder: Path, seconds: float, tensors: dict[str, Tensor] | None = None) -> training_heads.TrainedHeads:
    some = sequences(folder / "answers")
    return train_heads(
        config(), TINY, tensors or checkpoint(), target_tensors(), some[:30], some[30:], seconds, folder, SMALL
    )


def test_an_interrupted_training_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, done = HeadTrainer.step, []

    def third_time_interrupted(self: HeadTrainer, blocks: Blocks, rate_share: float) -> dict[str, Tensor]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(step(self, blocks, rate_share))
        return done[-1]

    monkeypatch.setattr(HeadTrainer, "step", third_time_interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 600.0)
    monkeypatch.setattr(HeadTrainer, "step", step)
    learner = trainer()
    untrained = {name: tensor.clone() for name, tensor in learner.module.state_dict().items()}
    progress = resume(learner, tmp_path)
    assert progress is not None
    assert progress.step == 2
    assert progress.seconds > 0
    assert not torch.equal(learner.module.state_dict()["pair.next"], untrained["pair.next"])
    assert {int(state["step"]) for state in learner.optimiser.state_dict()["state"].values()} == {2}
    trained = train(tmp_path, progress.seconds + 1e-6)
    assert trained.look["step"] == 3, "the time that is left is enough for one step"
    lines = (tmp_path / training_heads.HEADS_LOG_FILE).read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["step"] for line in lines] == [3]


def test_heads_of_another_drafter_are_trained_anew(tmp_path: Path) -> None:
    train(tmp_path, 1e-6)
    other = checkpoint()
    other["norm.weight"] = other["norm.weight"] * 2
    assert train(tmp_path, 0.0).look["step"] == 1
    assert train(tmp_path, 0.0, other).look["step"] == 0
    assert not (tmp_path / training_heads.HEADS_LOG_FILE).exists(), "its log is not the other's"


def test_answers_too_short_to_cut_blocks_from_are_refused(tmp_path: Path) -> None:
    some = [replace(sequence, length=PROMPT + 1) for sequence in sequences(tmp_path)]
    with pytest.raises(UserError, match="No answer is long enough"):
        train_heads(config(), TINY, checkpoint(), target_tensors(), some, [], 0.0, tmp_path, SMALL)


@pytest.mark.parametrize("held_out", [0, 8])
def test_heads_are_added_to_a_drafter_s_folder_and_load_there(tmp_path: Path, held_out: int) -> None:
    folder, some = tmp_path / "drafter", sequences(tmp_path / "answers")
    save_checkpoint(folder, config(), checkpoint())
    (folder / "note.txt").write_text("not pinned")
    write_manifest(folder, "tiny", {"made": "here"}, only=(CONFIG_FILE, TENSOR_FILE))
    add_heads(folder, some[held_out:], some[:held_out], target_tensors(), TINY, 1e-6, tmp_path / "work", SMALL)
    manifest = read_manifest(folder / MANIFEST)
    assert {file.name for file in manifest.files} == {CONFIG_FILE, TENSOR_FILE, *TRAINED_FILES}
    assert verify(folder, manifest) == {}
    assert manifest.target == "tiny"
    assert json.loads((folder / MANIFEST).read_text())["facts"] == {"made": "here"}
    heads = load_heads(folder, config())
    assert heads.present == ("pair", "jump", "fused", "markov", "parareal", "gap")
    assert bool(heads.parareal.diagnostics) == bool(heads.gap.diagnostics) == bool(held_out)


class FixedSession:
    """A verifier's session that has just read `rows [tokens, taps · hidden]`."""

    def __init__(self, rows: Tensor) -> None:
        self._rows: Iterator[Tensor] = iter([rows])

    def take_features(self) -> Tensor:
        return next(self._rows)


@pytest.mark.parametrize("recipe", [TINY, NARROW], ids=["as wide as the target", "narrow"])
def test_what_training_sees_is_what_a_method_sees(tmp_path: Path, recipe: Recipe) -> None:
    """Context, states, candidates, every head's scores and the embedding products, against drafters/ and methods/."""
    some, learner = sequences(tmp_path / "answers"), trainer(recipe)
    for step in range(3):
        learner.step(blocks_of(some[:6], seed=step), 1.0)
    learner.module.load_state_dict(learner.tensors())  # the rounding of the file
    folder = tmp_path / "drafter"
    save_checkpoint(folder, config(recipe), checkpoint(recipe=recipe))
    parareal, gap = learner.fit(some, [])
    training_heads.write_heads(folder, training_heads.TrainedHeads(learner.tensors(), parareal, gap, {}), tmp_path / "none")
    heads, tables = load_heads(folder, config(recipe)), target_tensors()
    tensors = checkpoint(recipe=recipe)
    drafter = BlockDrafter(config(recipe), tensors, tables["embedding"], tables["head"], 64, measure=False, heads=heads)
    blocks, sequence = blocks_of(some[:1], anchors=3), some[0]
    seen, h = learner.exact.draft(blocks, 6), learner.module
    samples = collect_samples(learner.exact, some[:1], 3, 6, torch.Generator().manual_seed(0))
    for block, anchor in enumerate(blocks.anchors[0].tolist()):
        session = drafter.start(FixedSession(blocks.features[0, :anchor].float()), 64, ("jump",))  # type: ignore[arg-type]
        draft = session.draft(sequence.tokens[: anchor + 1].tolist())
        ids, scores = draft.top(6)
        at = heads.jump.offsets - 1

        def same(ours: Tensor, theirs: np.ndarray, block: int = block) -> None:
            np.testing.assert_allclose(ours[0, block].detach().numpy(), theirs, rtol=2e-3, atol=2e-4)

        assert seen.ids[0, block].tolist() == ids.tolist()
        same(seen.scores, scores)
        same(seen.context, draft.context())
        same(seen.hidden, draft.states())
        columns = seen.columns[:, :, at]
        same(learner.exact.head(learner.exact.model.norm(h.jump(seen.context))).gather(-1, columns), draft.jump(ids[at]))
        same(h.fused(seen.hidden, seen.ids), residual(heads.fused, draft.states()[at], ids[at]))
        pairs, first = PairScores(heads.pair, draft.context(), draft.anchor, ids), seen.ids[..., 0]
        previous = torch.cat([seen.anchor_ids[..., None], first[..., :-1]], dim=-1)
        slots = np.arange(TINY.block_size - 1)
        same(h.pair(previous, seen.context, seen.ids), pairs.forward(slots, 0 * slots))
        np.testing.assert_allclose(samples.similar[block], similarity(draft, ids), rtol=2e-3, atol=2e-4)


def test_a_bfloat16_pass_trains_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_heads, "bfloat16_is_faster", lambda device: True)
    trained = train(tmp_path, 1e-6)
    assert all(torch.isfinite(tensor).all() for tensor in trained.tensors.values())
    assert trained.look["held_out_anchors"] > 0
