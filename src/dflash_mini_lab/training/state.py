"""An interrupted training on disk: a module, its optimiser, and a few facts, in one safetensors file replaced whole.

What was saved on one device goes on, on any other.
"""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from dflash_mini_lab.drafters.checkpoint import save_tensors
from dflash_mini_lab.files import replacing

MODULE, OPTIMISER = "module.", "optimiser."


def save_state(path: Path, module: nn.Module, optimiser: torch.optim.Optimizer, facts: Mapping[str, object]) -> None:
    tensors = {MODULE + name: tensor for name, tensor in module.state_dict().items()}
    for index, state in optimiser.state_dict()["state"].items():
        tensors |= {f"{OPTIMISER}{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    with replacing(path) as part:
        save_tensors(copies, part, {name: str(value) for name, value in facts.items()})


def read_facts(path: Path) -> dict[str, str] | None:
    """What `save_state` was told; None where nothing was begun."""
    if not path.exists():
        return None
    with safe_open(path, "pt") as saved:
        return saved.metadata()


def load_state(path: Path, module: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Put what `save_state` wrote back into a module and an optimiser of the same shapes."""
    with safe_open(path, "pt") as saved:
        # Copies: a tensor that stays mapped keeps Windows from replacing the file.
        tensors = {name: saved.get_tensor(name).clone() for name in saved.keys()}  # noqa: SIM118 - it is no dict
    # Whatever the first word: states written before this file was shared say `model.`.
    module.load_state_dict({name.partition(".")[2]: t for name, t in tensors.items() if not name.startswith(OPTIMISER)})
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(OPTIMISER):
            _, index, field = name.split(".")
            state.setdefault(int(index), {})[field] = tensor
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
