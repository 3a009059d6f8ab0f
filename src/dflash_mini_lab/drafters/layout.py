"""The drafter's layout on disk: the one that the DFlash authors publish and SpecForge writes, plus a reduced draft vocabulary.

`config.json` (with `dflash_config.target_layer_ids`, `dflash_config.mask_token_id`, `block_size`, `num_target_layers`) and
`model.safetensors`. A reduced draft vocabulary is one more tensor, `draft_to_target` (target ids, ascending); without it the
drafter scores the whole vocabulary. What else is the lab's own stands in the config's `dflash_lab`, where it is used at all: a
drafter of the published kind stays one. Checking only: no arithmetic, and no framework that tensors belong to.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mini_lab.tensors import block_shapes, refuse_other_shapes
from dflash_mini_lab.types import UserError

CONFIG_FILE, TENSOR_FILE = "config.json", "model.safetensors"
DRAFT_TO_TARGET = "draft_to_target"
LAB_FIELDS = {
    "target": "target_name",
    "target_hidden_size": "target_hidden_size",
    "feature_window": "window",
    "tokenizer_sha256": "tokenizer_sha256",
}
"""Names in `dflash_lab` → fields of DrafterConfig."""


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a block drafter. `taps` are indices of target layers whose outputs it reads."""

    hidden_size: int
    """The drafter's own width."""
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
    target_hidden_size: int | None = None
    """The target's width, where the drafter has another. It then has two projections of its own: `input`, from the target's
    embeddings, and `output`, to the target's head. None: the drafter is as wide as the target and has neither."""
    window: int | None = None
    """The last context positions before the anchor that a block sees. None: all."""
    tokenizer_sha256: str | None = None
    """Digest of the target's tokenizer (`vocabulary_digest`). None: not known, as in a published checkpoint."""

    @property
    def feature_size(self) -> int:
        """Width of one tapped feature, and of a row of the target's embedding and head."""
        return self.target_hidden_size or self.hidden_size

    def as_json(self) -> dict:
        own = {name: getattr(self, field) for name, field in LAB_FIELDS.items()}
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
            "dflash_lab": {name: value for name, value in own.items() if name == "target" or value is not None},
        }


def parse_config(facts: dict, where: str) -> DrafterConfig:
    """Read a published `config.json`. Raises UserError that names the missing, impossible or unknown field."""
    try:
        dflash = facts["dflash_config"]
        rope = facts.get("rope_parameters") or {}
        own = facts.get("dflash_lab") or {}
        refuse_unknown(facts, own, where)
        mask = dflash.get("mask_token_id")
        if type(mask) is not int:
            raise UserError(
                f"{where}: the mask token is unset ({mask!r}): dflash_config.mask_token_id must be an existing, otherwise "
                "unused row of the target's embedding."
            )
        return DrafterConfig(
            hidden_size=facts["hidden_size"],
            intermediate_size=facts["intermediate_size"],
            layers=facts["num_hidden_layers"],
            heads=facts["num_attention_heads"],
            kv_heads=facts["num_key_value_heads"],
            head_dim=facts["head_dim"],
            block_size=facts["block_size"],
            taps=tuple(dflash["target_layer_ids"]),
            mask_token_id=mask,
            target_layers=facts["num_target_layers"],
            vocabulary=facts["vocab_size"],
            eps=facts.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta", facts.get("rope_theta", 10000.0)),
            **{field: own.get(name) for name, field in LAB_FIELDS.items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: not a DFlash drafter, {error} is missing or malformed.") from error


def refuse_unknown(facts: dict, own: dict, where: str) -> None:
    """Raises UserError for what would make it another drafter than the one that runs here."""
    unknown = sorted(own.keys() - LAB_FIELDS.keys())
    if unknown:
        raise UserError(f"{where}: dflash_lab has {unknown[0]!r}, which this version of the lab does not know.")
    for name in ("target_hidden_size", "feature_window"):
        value = own.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise UserError(f"{where}: dflash_lab.{name} is {value!r}, not a whole number above 0.")
    if facts.get("use_sliding_window") or set(facts.get("layer_types") or ()) - {"full_attention"}:
        raise UserError(f"{where}: some of its layers do not have full attention, which this lab's drafter does not know.")


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the published layout with its shape, and the two projections of a drafter with a width of its own."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.feature_size * len(config.taps)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if config.target_hidden_size:
        shapes |= {"input.weight": (hidden, config.feature_size), "output.weight": (config.feature_size, hidden)}
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


def check_fit(
    config: DrafterConfig,
    vocabulary: int,
    hidden: int,
    layers: int | None = None,
    stop_ids: Collection[int] = (),
    tokenizer_sha256: str | None = None,
) -> None:
    """Raises UserError where the drafter was made for another target than one of `layers` layers whose embedding has
    `vocabulary` rows of size `hidden`, or where its mask token is not free there. None: not known here, so not compared."""
    made_for = f"This drafter was made for {config.target_name or 'a target'}"
    if config.feature_size != hidden:
        raise UserError(f"{made_for} of hidden size {config.feature_size}; this target has {hidden}.")
    if config.vocabulary != vocabulary:
        raise UserError(f"{made_for} with a vocabulary of {config.vocabulary}; this target has {vocabulary}.")
    if layers is not None and config.target_layers != layers:
        raise UserError(f"{made_for} of {config.target_layers} layers; this target has {layers}.")
    if any(not 0 <= tap < config.target_layers for tap in config.taps):
        raise UserError(f"The drafter reads layers {config.taps}; its target's are 0 … {config.target_layers - 1}.")
    if None not in (tokenizer_sha256, config.tokenizer_sha256) and tokenizer_sha256 != config.tokenizer_sha256:
        raise UserError(f"{made_for} with another tokenizer: the ids of its words are not those of this target's.")
    mask = f"The drafter's mask token {config.mask_token_id}"
    if not 0 <= config.mask_token_id < vocabulary:
        raise UserError(f"{mask} is not a row of the {vocabulary}-row embedding.")
    if config.mask_token_id in stop_ids:
        raise UserError(f"{mask} is a stop token of this target; it must be an otherwise unused row of the embedding.")


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """SHA-256 of which id each word of a tokenizer has."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


def _are_ids(ids: Any, vocabulary: int) -> bool:
    if ids.ndim != 1 or not len(ids) or str(ids.dtype).removeprefix("torch.") not in ("int32", "int64"):
        return False
    return bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocabulary
