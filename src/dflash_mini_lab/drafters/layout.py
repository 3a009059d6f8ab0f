"""The drafter's layout on disk: the one that the DFlash authors publish and SpecForge writes, plus a reduced draft vocabulary.

`config.json` (with `dflash_config.target_layer_ids`, `dflash_config.mask_token_id`, `block_size`, `num_target_layers`) and
`model.safetensors`. A reduced draft vocabulary is one more tensor, `draft_to_target` (target ids, ascending); without it the
drafter scores the whole vocabulary. Checking only: no arithmetic, and no framework that tensors belong to.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mini_lab.tensors import block_shapes, refuse_other_shapes
from dflash_mini_lab.types import UserError

CONFIG_FILE, TENSOR_FILE = "config.json", "model.safetensors"
DRAFT_TO_TARGET = "draft_to_target"


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a block drafter. `taps` are indices of target layers whose outputs it reads."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    taps: tuple[int, ...]
    mask_token_id: int
    target_layers: int
    vocabulary: int
    eps: float = 1e-6
    rope_theta: float = 10000.0
    target_name: str | None = None

    def as_json(self) -> dict:
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.taps)},
            "num_target_layers": self.target_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "vocab_size": self.vocabulary,
            "dflash_lab": {"target": self.target_name},
        }


def parse_config(facts: dict, where: str) -> DrafterConfig:
    """Read a published `config.json`. Raises UserError that names the missing or impossible field."""
    try:
        dflash = facts["dflash_config"]
        rope = facts.get("rope_parameters") or {}
        return DrafterConfig(
            hidden_size=facts["hidden_size"],
            intermediate_size=facts["intermediate_size"],
            layers=facts["num_hidden_layers"],
            heads=facts["num_attention_heads"],
            kv_heads=facts["num_key_value_heads"],
            head_dim=facts["head_dim"],
            block_size=facts["block_size"],
            taps=tuple(dflash["target_layer_ids"]),
            mask_token_id=dflash["mask_token_id"],
            target_layers=facts["num_target_layers"],
            vocabulary=facts["vocab_size"],
            eps=facts.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta", facts.get("rope_theta", 10000.0)),
            target_name=(facts.get("dflash_lab") or {}).get("target"),
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{where}: not a DFlash drafter, {error} is missing or malformed.") from error


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the published layout with its shape."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, hidden * len(config.taps)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config.layers):
        block = block_shapes(hidden, config.intermediate_size, config.heads, config.kv_heads, config.head_dim)
        block |= {f"self_attn.{part}_norm.weight": (config.head_dim,) for part in "qk"}
        shapes |= {f"layers.{index}.{name}": shape for name, shape in block.items()}
    return shapes


def read_checkpoint(folder: Path, load_file: Callable[[Path], dict[str, Any]]) -> tuple[DrafterConfig, dict[str, Any]]:
    """Config and tensors, as `load_file` of one of safetensors' frameworks gives them, every shape checked.

    Raises UserError naming the file and the tensor that does not fit.
    """
    try:
        facts = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / TENSOR_FILE)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename or folder}: no drafter here.") from error
    except Exception as error:  # safetensors raises its own type without a common base; any unreadable file is the user's news
        raise UserError(f"{folder}: the drafter cannot be read ({error}).") from error
    config = parse_config(facts, str(folder / CONFIG_FILE))
    refuse_other_shapes(folder / TENSOR_FILE, tensors, tensor_shapes(config))
    ids = tensors.get(DRAFT_TO_TARGET)
    if ids is not None and not _are_ids(ids, config.vocabulary):
        raise UserError(f"{folder / TENSOR_FILE}: {DRAFT_TO_TARGET} does not hold ascending ids below {config.vocabulary}.")
    return config, tensors


def check_fit(config: DrafterConfig, vocabulary: int, hidden: int) -> None:
    """Raises UserError where the drafter was made for another embedding than one of `vocabulary` rows of size `hidden`."""
    if config.hidden_size != hidden:
        raise UserError(f"This drafter was made for a target of hidden size {config.hidden_size}; this one has {hidden}.")
    if config.vocabulary != vocabulary:
        raise UserError(f"This drafter was made for a vocabulary of {config.vocabulary}; this target has {vocabulary}.")
    if not 0 <= config.mask_token_id < vocabulary:
        raise UserError(f"The drafter's mask token {config.mask_token_id} is not a row of the {vocabulary}-row embedding.")


def _are_ids(ids: Any, vocabulary: int) -> bool:
    if ids.ndim != 1 or not len(ids) or str(ids.dtype).removeprefix("torch.") not in ("int32", "int64"):
        return False
    return bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocabulary
