"""The tiny reference against the library: a Llama's weights, the block drafter's scores, and a builder that repeats itself."""
from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from tests.tables import random_heads
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_mini_lab.decoding import decode
from dflash_mini_lab.drafters.block import BlockDrafter
from dflash_mini_lab.drafters.checkpoint import DRAFT_TO_TARGET, DrafterConfig, load_checkpoint, save_checkpoint
from dflash_mini_lab.drafters.heads import load_heads
from dflash_mini_lab.drafters.numpy_block import NumpyBlockDrafter, load_arrays
from dflash_mini_lab.measurement.clock import HostClock
from dflash_mini_lab.methods import METHODS
from dflash_mini_lab.targets import tiny
from dflash_mini_lab.targets.tiny_target import TinyTarget
from dflash_mini_lab.training import heads, train
from dflash_mini_lab.training.model import TrainableDrafter
from dflash_mini_lab.training.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "artifacts" / "tiny"
CONFIG = DrafterConfig(32, 48, 2, 4, 2, 8, 4, (0, 1), 7, 2, 50)


def test_the_weights_are_those_of_a_llama_that_the_library_runs() -> None:
    config, tensors, words = tiny.read(FOLDER)
    library = LlamaForCausalLM(LlamaConfig(**vars(config), tie_word_embeddings=True, pad_token_id=None)).eval()
    missing, unexpected = library.load_state_dict(load_file(FOLDER / tiny.TENSOR_FILE), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    library.tie_weights()
    ids = words.encode("The keeper of the ferry sings in the rain.")
    with torch.inference_mode():
        expected = library(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(TinyTarget(config, tensors).logits(ids), expected, atol=1e-4)


class FixedFeatures:
    """A session that hands out features a few rows at a time, as rounds of a decode loop do."""

    def __init__(self, features) -> None:
        self.features, self.given, self.limit = features, 0, 0

    def take_features(self):
        rows, self.given = self.features[self.given : self.limit], self.limit
        return rows


@pytest.mark.parametrize(("reduced", "dtype"), [(False, torch.float32), (True, torch.float16)])
@pytest.mark.parametrize(
    "config", [CONFIG, replace(CONFIG, hidden_size=16, target_hidden_size=32, window=3)], ids=["published", "small window"]
)
def test_the_numpy_drafter_scores_as_the_block_drafter_does(
    tmp_path: Path, reduced: bool, dtype: torch.dtype, config: DrafterConfig
) -> None:
    torch.manual_seed(1)
    model = TrainableDrafter(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    if reduced:
        tensors[DRAFT_TO_TARGET] = torch.tensor([3, 9, 12, 20, 31, 44], dtype=torch.int32)
    save_checkpoint(tmp_path, config, tensors)
    embedding, features = torch.randn(50, 32), torch.randn(12, 64)
    random = random_heads(50, config.hidden_size, 3, offsets=(2, 4))  # the second lies past the block
    ours = NumpyBlockDrafter(*load_arrays(tmp_path), embedding.numpy(), embedding.numpy(), 40, random)
    theirs = BlockDrafter(*load_checkpoint(tmp_path), embedding, embedding, 40, measure=False, heads=random)
    sessions = FixedFeatures(features.numpy()), FixedFeatures(features)
    running = ours.start(sessions[0], 40, ("jump",)), theirs.start(sessions[1], 40, ("jump",))
    for anchor in (3, 4, 8, 11):
        drafts = []
        for session, drafter in zip(sessions, running, strict=True):
            session.limit = anchor
            drafts.append(drafter.draft(list(range(10, 11 + anchor))))
        (mine, ids), (expected, their_ids) = (draft.logits() for draft in drafts)
        assert ids.tolist() == their_ids.tolist()
        np.testing.assert_allclose(mine, expected, atol=1e-4)
        for k in (1, 2, 8, 60):
            (top, scores), (their_top, their_scores) = (draft.top(k) for draft in drafts)
            assert top.tolist() == their_top.tolist()
            np.testing.assert_allclose(scores, their_scores, atol=1e-4)
        candidates = drafts[0].top(5)[0]
        for ask in (
            lambda draft: draft.context(),
            lambda draft: draft.states(),
            lambda draft, ids=candidates: draft.jump(ids[1:2]),
            lambda draft, ids=candidates: draft.embeddings(ids),
            lambda draft: draft.prefix_embedding(),
        ):
            mine, expected = map(ask, drafts)
            assert mine.dtype == expected.dtype == np.float32
            np.testing.assert_allclose(mine, expected, atol=1e-4)


class InTorch:
    """The block drafter of PyTorch on a target of NumPy."""

    def __init__(self, drafter: BlockDrafter) -> None:
        self.drafter = drafter
        self.taps, self.block_size, self.heads = drafter.taps, drafter.block_size, drafter.heads

    def start(self, session, capacity, needs=()):
        features = SimpleNamespace(take_features=lambda: torch.from_numpy(session.take_features().copy()))
        return self.drafter.start(features, capacity, needs)


def test_every_method_proposes_the_same_on_either_drafter() -> None:
    config, tensors, words = tiny.read(FOLDER)
    target, drafter = TinyTarget(config, tensors), load_checkpoint(FOLDER)
    table = torch.from_numpy(target.embedding)
    trained = load_heads(FOLDER, drafter[0])
    ours = NumpyBlockDrafter(*load_arrays(FOLDER), target.embedding, target.embedding, target.max_positions, trained)
    theirs = InTorch(BlockDrafter(*drafter, table, table, target.max_positions, measure=False, heads=trained))
    rounds = 0
    for method in METHODS[1:]:
        for text in ("The keeper of the ferry", "At noon the children"):
            answers = [decode(target, words.encode(text), method, 24, HostClock(), either) for either in (ours, theirs)]
            mine, expected = ([(step.proposed, step.accepted, step.work) for step in answer.steps] for answer in answers)
            assert mine == expected, method.key
            assert answers[0].tokens == answers[1].tokens
            rounds += len(mine)
    assert rounds > 100


def test_of_equal_scores_the_lower_id_comes_first(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CONFIG, dict(TrainableDrafter(CONFIG).state_dict()))
    config, tensors = load_arrays(tmp_path)
    flat = NumpyBlockDrafter(config, tensors, np.ones((50, 32), np.float32), np.zeros((50, 32), np.float32), 40)
    session = FixedFeatures(np.ones((3, 64), np.float32))
    session.limit = 3
    draft = flat.start(session, 40).draft([1, 2, 3, 4])
    for k in (1, 2, 5):
        assert draft.top(k)[0].tolist() == [list(range(k))] * 3


@pytest.mark.slow
def test_a_second_build_is_the_same_byte_for_byte_and_another_seed_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (train, heads):  # what is measured is not the same twice
        monkeypatch.setattr(module, "bfloat16_is_faster", lambda *where: pytest.fail("a build measures nothing"))
    sys.path.insert(0, str(ROOT / "tools"))
    from build_tiny import TinyRecipe, build

    text = "The sea is calm.\nThe sea is grey.\n\nThe wind turned to the east.\nA boat came home late.\n"
    training = Recipe(block_size=4, layers=1, tap_layers=(0, 1), draft_vocabulary=12, answer_tokens=6, sequences=3, float32=True)
    small = {"hidden_size": 16, "intermediate_size": 24, "opening_lengths": (2,), "own_openings": 24, "rows": 3, "row_length": 9}
    steps = {"target_steps": 3, "drafter_steps": 3, "head_steps": 3}
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        for name, seed in (("one", 7), ("two", 7), ("other", 8)):
            recipe = TinyRecipe(seed=seed, training=replace(training, seed=seed), **small, **steps)
            build(tmp_path / name, recipe, text)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    one, two, other = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two", "other"))
    assert one.keys() == {path.name for path in FOLDER.iterdir()}
    assert one == two
    for name in ("target.safetensors", "model.safetensors", "heads.safetensors"):
        assert one[name] != other[name]
    assert b"seconds" not in one["provenance.json"].split(b'"drafter": {')[1], "steps are no seconds"


def test_a_damaged_file_is_no_drafter(tmp_path: Path) -> None:
    from dflash_mini_lab.types import UserError

    save_checkpoint(tmp_path, CONFIG, dict(TrainableDrafter(CONFIG).state_dict()))
    save_file({"fc.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="fc.weight is"):
        load_arrays(tmp_path)
