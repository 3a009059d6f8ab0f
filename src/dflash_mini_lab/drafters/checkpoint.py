"""The drafter on disk: the layout that the DFlash authors publish and SpecForge writes, plus a reduced draft vocabulary.

`config.json` (with `dflash_config.target_layer_ids`, `dflash_config.mask_token_id`, `block_size`, `num_target_layers`) and
`model.safetensors`. A reduced draft vocabulary is one more tensor, `draft_to_target` (target ids, ascending); without it the
drafter scores the whole vocabulary. Reading and checking only; no arithmetic.
"""
from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

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
    hidden, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, hidden * len(config.taps)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config.layers):
        layer = f"layers.{index}."
        shapes |= {
            layer + "self_attn.q_proj.weight": (config.heads * d, hidden),
            layer + "self_attn.k_proj.weight": (config.kv_heads * d, hidden),
            layer + "self_attn.v_proj.weight": (config.kv_heads * d, hidden),
            layer + "self_attn.o_proj.weight": (hidden, config.heads * d),
            layer + "self_attn.q_norm.weight": (d,),
            layer + "self_attn.k_norm.weight": (d,),
            layer + "mlp.gate_proj.weight": (inner, hidden),
            layer + "mlp.up_proj.weight": (inner, hidden),
            layer + "mlp.down_proj.weight": (hidden, inner),
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
        }
    return shapes


def save_tensors(tensors: Mapping[str, Tensor], path: Path, facts: dict[str, str] | None = None) -> None:
    """A safetensors file, every tensor contiguous. A full disk is an OSError here, as for any file; safetensors has its own."""
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, facts)
    except SafetensorError as error:
        full = "os error 28" in str(error) or "No space left" in str(error)
        number = errno.ENOSPC if full else errno.EIO
        raise OSError(number, os.strerror(number) if full else str(error), str(path)) from error


def save_checkpoint(folder: Path, config: DrafterConfig, tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, folder / TENSOR_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(config.as_json(), indent=2) + "\n", encoding="utf-8")


def load_checkpoint(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Config and tensors, every shape checked. Raises UserError naming the file and the tensor that does not fit."""
    try:
        facts = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / TENSOR_FILE)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename or folder}: no drafter here.") from error
    except Exception as error:  # safetensors raises its own type without a common base; any unreadable file is the user's news
        raise UserError(f"{folder}: the drafter cannot be read ({error}).") from error
    config = parse_config(facts, str(folder / CONFIG_FILE))
    for name, shape in tensor_shapes(config).items():
        if name not in tensors:
            raise UserError(f"{folder / TENSOR_FILE}: tensor {name} is missing.")
        if tuple(tensors[name].shape) != shape:
            raise UserError(f"{folder / TENSOR_FILE}: tensor {name} is {tuple(tensors[name].shape)}, the config says {shape}.")
    ids = tensors.get(DRAFT_TO_TARGET)
    if ids is not None and not _are_ids(ids, config.vocabulary):
        raise UserError(f"{folder / TENSOR_FILE}: {DRAFT_TO_TARGET} does not hold ascending ids below {config.vocabulary}.")
    return config, tensors


def _are_ids(ids: Tensor, vocabulary: int) -> bool:
    if ids.dim() != 1 or not len(ids) or ids.dtype not in (torch.int32, torch.int64):
        return False
    return bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocabulary
