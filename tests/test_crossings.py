"""Whatever a round moves between host and device goes through `Crossings`: what it counts is all there is."""
from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from tests.test_drafter import CONFIG, FixedFeatures, target_tables, trained_looking_model
from tests.tiny_models import random_ids, tiny_target

from dflash_mini_lab.drafters.block import BlockDrafter

SOURCE = Path(__file__).resolve().parents[1] / "src" / "dflash_mini_lab"
ON_THE_WAY = (
    *("drafters/block.py", "targets/lean.py", "targets/lean_target.py", "targets/graphs.py", "targets/captured_target.py"),
    *("targets/library_target.py", "targets/features.py"),
)
"""Files whose code runs inside a timed round."""
MOVERS = {"tensor", "as_tensor", "from_numpy", "cpu", "cuda", "tolist", "item", "numpy", "pin_memory"}
UNTIMED = {"__init__", "_ids"}
"""Functions that run at load, or for a verdict after everything that is timed."""


def uncounted(source: str) -> list[str]:
    """`function: method` of each call that moves data by itself."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and function.name not in UNTIMED:
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in MOVERS:
                    found.append(f"{function.name}: {call.func.attr}")
    return found


@pytest.mark.parametrize("name", ON_THE_WAY)
def test_nothing_in_a_round_crosses_uncounted(name: str) -> None:
    assert uncounted((SOURCE / name).read_text(encoding="utf-8")) == []


def test_the_check_sees_a_copy() -> None:
    assert uncounted("def f(x):\n    return torch.tensor(x, device=d)\n") == ["f: tensor"]
    assert uncounted("def f(x):\n    return x.argmax(-1).tolist()\n") == ["f: tolist"]
    assert uncounted("def __init__(self, x):\n    self.ids = x.cpu().numpy()\n") == []


def test_the_embeddings_of_the_prefix_cost_their_new_ids_and_one_mean() -> None:
    embedding, head = target_tables()
    drafter = BlockDrafter(CONFIG, dict(trained_looking_model().state_dict()), embedding, head, 64, measure=False)
    session = drafter.start(FixedFeatures(torch.zeros(0, 2 * CONFIG.hidden_size)), 64)
    for committed, new in (([4, 5, 6], 3), ([4, 5, 6, 9], 1)):
        before = drafter.crossings.as_json()
        mean = session.prefix_embedding(committed)
        torch.testing.assert_close(torch.tensor(mean), embedding[committed].mean(0), rtol=0, atol=1e-6)
        crossed = drafter.crossings.since(before)
        assert (crossed["to_device"]["count"], crossed["to_device"]["bytes"]) == (1, 8 * new)
        assert (crossed["to_host"]["count"], crossed["to_host"]["bytes"]) == (1, 4 * CONFIG.hidden_size)


@pytest.mark.parametrize("parents", [(), (-1, 0, 0, 1)])
def test_a_compiled_step_counts_what_single_operations_send(parents: tuple[int, ...]) -> None:
    counted = []
    for path in ("lean", "compiled"):
        target = tiny_target("plain llama", path)
        session = target.start(random_ids(5, 1), 40, (0, 2))
        session.prefill()
        before = target.crossings.as_json()
        session.verify([4, 5, 6, 7], parents)
        since = target.crossings.since(before)
        counted.append({way: (facts["count"], facts["bytes"]) for way, facts in since.items()})
    assert counted[0] == counted[1]
