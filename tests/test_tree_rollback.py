"""Trees on a target: every row as if its path had been decoded alone, and after any path that stays, as a fresh prefill of it."""
from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.tables import path_to, random_parents
from tests.test_rollback import features_of
from tests.tiny_models import COMPILED, FAMILIES, TAPS, random_ids, tiny_model, tiny_target, tolerance

from dflash_mini_lab.targets.lean_build import build_lean_decoder
from dflash_mini_lab.trees import row_table

PATHS = [(family, path) for family in FAMILIES for path in ("lean", "static")] + [(family, "compiled") for family in COMPILED]


def fresh_logits(family: str, committed: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
    """The library's logits after each row's own path `[rows, vocabulary]`, each from a whole pass; what follows is padding."""
    paths = [[*committed, *(tokens[row] for row in path_to(row, parents))] for row in range(len(tokens))]
    longest = max(map(len, paths))
    logits = tiny_model(family)(torch.tensor([path + [0] * (longest - len(path)) for path in paths]), use_cache=False).logits
    return torch.stack([rows[len(path) - 1] for rows, path in zip(logits, paths, strict=True)])



@pytest.mark.parametrize(("family", "path"), PATHS)
@torch.inference_mode()
def test_every_path_of_random_trees_at_every_size_equals_a_fresh_prefill(family: str, path: str) -> None:
    """Every node of the first tree is in turn the end of what stays, and so is nothing at all; two more trees follow."""
    target, order = tiny_target(family, path), random.Random(2)
    for size in range(2, 9):
        first = random_parents(size, order)
        for end in range(-1, size):
            committed = random_ids(9, seed=size)
            session = target.start(committed, 100, TAPS)
            session.prefill()
            session.take_features()
            for deep in range(3):
                parents = random_parents(size, order) if deep else first
                tokens = random_ids(size, seed=100 * size + 10 * end + deep)
                expected = fresh_logits(family, committed, tokens, parents)
                assert session.verify(tokens, parents) == expected.argmax(-1).tolist()
                if path == "static":
                    step = target.step(TAPS, size, trees=True)
                    torch.testing.assert_close(step.logits, expected, rtol=0, atol=1e-9)
                last = order.randrange(-1, size) if deep else end
                kept = path_to(last, parents) if last >= 0 else []
                session.keep(kept)
                committed = committed + [tokens[row] for row in kept]
                assert session.length == len(committed)
                expected_features = features_of(family, committed)[len(committed) - len(kept) :]
                taken = session.take_features()
                torch.testing.assert_close(taken, expected_features.to(taken.dtype), rtol=0, atol=tolerance(path))
            chain = random_ids(2, seed=5)
            expected = fresh_logits(family, committed, chain, [-1, 0])
            assert session.verify(chain) == expected.argmax(-1).tolist(), "a chain after a tree"
            session.keep(0)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_the_lean_decoder_s_logits_of_trees_are_the_library_s_padded_or_not(family: str) -> None:
    order = random.Random(3)
    plain = build_lean_decoder(tiny_model(family), 100, measure=False)
    for decoder in (plain, replace(plain, padded_rows={2: 4, 3: 6, 5: 8})):
        committed = random_ids(9, seed=1)
        cache = decoder.new_cache(100)
        decoder.forward(torch.tensor([committed]), cache)
        for size in (5, 2, 8, 3, 6, 3):
            parents, tokens = random_parents(size, order), random_ids(size, seed=size)
            table = torch.tensor(row_table(parents, decoder.history))
            hidden, _ = decoder.forward(torch.tensor([tokens]), cache, tree=table)
            expected = fresh_logits(family, committed, tokens, parents)
            torch.testing.assert_close(decoder.logits(hidden[0]), expected, rtol=0, atol=1e-9)
            kept = path_to(order.randrange(size), parents)
            cache.gather(torch.tensor(kept))
            cache.keep(len(kept))
            committed = committed + [tokens[row] for row in kept]


@pytest.mark.parametrize("path", ["lean", "static"])
def test_rows_that_the_call_did_not_have_are_not_kept(path: str) -> None:
    session = tiny_target("llama", path).start(random_ids(5, 0), 40, TAPS)
    session.prefill()
    session.verify([4, 5, 6], [-1, 0, 0])
    for rows in ([0, 3], [-1]):
        with pytest.raises(ValueError, match="3 rows"):
            session.keep(rows)


def test_the_library_s_own_modules_verify_no_tree() -> None:
    session = tiny_target("llama", "library").start(random_ids(5, 0), 40, TAPS)
    session.prefill()
    with pytest.raises(RuntimeError, match="no trees"):
        session.verify([4, 5, 6], [-1, 0, 0])


def test_the_random_trees_are_of_many_shapes() -> None:
    order = random.Random(0)
    shapes = {tuple(random_parents(6, order)) for _ in range(100)}
    assert len(shapes) > 30
    assert all(np.all(np.array(shape) < np.arange(6)) for shape in shapes)
