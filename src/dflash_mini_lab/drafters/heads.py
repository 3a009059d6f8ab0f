"""The heads beside a drafter on disk: `heads.safetensors`, and two small fits as JSON. Reading and checking; no arithmetic.

A group of tensors is there whole or not at all, and so is a fit; a method says which it needs (`Method.needs`).
"""
from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize

from dflash_mini_lab.drafters.layout import DrafterConfig
from dflash_mini_lab.types import FusedHead, GapFit, Heads, JumpHead, MarkovHead, PairHead, PararealFit, UserError

HEADS_FILE, PARAREAL_FILE, GAP_FILE = "heads.safetensors", "v12_parareal.json", "v14_simple_parareal.json"
HEAD_FILES = (HEADS_FILE, PARAREAL_FILE, GAP_FILE)
PARAREAL_FEATURES = 8
NUMPY_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "u1", "BOOL": "?"}

Shape = tuple[str, ...]
SHAPES: dict[str, dict[str, Shape]] = {
    "pair": {
        "pair.previous": ("V", "r"),
        "pair.next": ("V", "r"),
        "pair.gate.weight": ("r", "H"),
        "pair.gate.bias": ("r",),
    },
    "jump": {
        "jump.offsets": ("J",),
        "jump.offset_embedding": ("J", "H"),
        "jump.norm.weight": ("H",),
        "jump.up.weight": ("M", "H"),
        "jump.down.weight": ("H", "M"),
    },
    "fused": {
        "fused.offsets": ("J",),
        "fused.slot.weight": ("r", "H"),
        "fused.offset_embedding": ("J", "r"),
        "fused.token": ("V", "r"),
    },
    "markov": {
        "markov.previous": ("V", "r"),
        "markov.next": ("V", "r"),
        "markov.scale": ("S",),
        "confidence.weight": ("H+r",),
        "confidence.bias": ("1",),
    },
}
"""V vocabulary, H hidden size and S slots are the drafter's; r, J and M are whatever the group's first tensor with them says."""
HEAD_TYPES: dict[str, Any] = {"pair": PairHead, "jump": JumpHead, "fused": FusedHead, "markov": MarkovHead}


def load_heads(folder: Path, config: DrafterConfig, names: Collection[str] = HEAD_FILES) -> Heads:
    """What there is in `folder` among the files `names` (those that a manifest pins). An absent file or group is None.

    Arrays are float32, offsets int64. Raises UserError naming the file and the tensor or entry that does not fit `config`.
    """
    here = {name: folder / name for name in HEAD_FILES if name in names and (folder / name).is_file()}
    found: dict[str, Any] = {}
    if HEADS_FILE in here:
        path = here[HEADS_FILE]
        tensors = read_tensors(path)
        for group, shapes in SHAPES.items():
            if tensors.keys() & shapes.keys():
                found[group] = HEAD_TYPES[group](*read_group(path, tensors, shapes, config))
    if PARAREAL_FILE in here:
        found["parareal"] = read_parareal(here[PARAREAL_FILE])
    if GAP_FILE in here:
        found["gap"] = read_gap(here[GAP_FILE])
    return Heads(**found)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """NumPy knows no bfloat16, which is the upper half of a float32: it is read as that."""
    try:
        arrays = {}
        for name, tensor in deserialize(path.read_bytes()):
            if tensor["dtype"] == "BF16":
                flat = (np.frombuffer(tensor["data"], "<u2").astype("<u4") << 16).view("<f4")
            else:
                flat = np.frombuffer(tensor["data"], NUMPY_TYPES[tensor["dtype"]])
            arrays[name] = flat.reshape(tensor["shape"])
        return arrays
    except Exception as error:  # safetensors raises its own type without a common base; any unreadable file is the user's news
        raise UserError(f"{path}: the drafter's heads cannot be read ({error}).") from error


def read_group(path: Path, tensors: dict[str, np.ndarray], shapes: dict[str, Shape], config: DrafterConfig) -> list[np.ndarray]:
    """The group's arrays in the table's order, which is that of its dataclass's fields."""
    sizes = {"V": config.vocabulary, "H": config.hidden_size, "S": config.block_size - 1, "1": 1}
    arrays = []
    for name, shape in shapes.items():
        if name not in tensors:
            raise UserError(f"{path}: tensor {name} is missing.")
        tensor = tensors[name]
        if tensor.ndim == len(shape):
            for size, letter in zip(tensor.shape, shape, strict=True):
                if "+" not in letter:
                    sizes.setdefault(letter, size)
        expected = tuple(sum(sizes.get(letter, 0) for letter in size.split("+")) for size in shape)
        if tuple(tensor.shape) != expected or 0 in expected:
            wanted = ", ".join(f"{letter} = {size}" if size else letter for letter, size in zip(shape, expected, strict=True))
            raise UserError(f"{path}: tensor {name} is {tuple(tensor.shape)}, this drafter needs ({wanted}).")
        arrays.append(offsets(path, name, tensor) if name.endswith(".offsets") else numbers(path, name, tensor))
    return arrays


def numbers(path: Path, name: str, tensor: np.ndarray) -> np.ndarray:
    if not np.issubdtype(tensor.dtype, np.floating):
        raise UserError(f"{path}: tensor {name} holds {tensor.dtype}, not fractions.")
    array = tensor.astype(np.float32)
    if not np.isfinite(array).all():
        raise UserError(f"{path}: tensor {name} holds a value that is not finite.")
    return array


def offsets(path: Path, name: str, tensor: np.ndarray) -> np.ndarray:
    array = tensor.astype(np.int64)
    if np.issubdtype(tensor.dtype, np.floating) or array[0] < 1 or (np.diff(array) < 1).any():
        raise UserError(f"{path}: tensor {name} does not hold ascending slots, counted from 1.")
    return array


def read_parareal(path: Path) -> PararealFit:
    facts = read_json(path)
    fit = PararealFit(
        mean=vector(path, facts, "mean"),
        scale=vector(path, facts, "scale"),
        weights=vector(path, facts, "weights"),
        intercept=number(path, facts, "intercept"),
        omega=number(path, facts, "omega"),
        rounds=int(number(path, facts, "rounds")),
        clip=number(path, facts, "clip"),
        candidates=int(number(path, facts, "candidates")),
        diagnostics=facts.get("diagnostics", {}),
    )
    if not (fit.scale > 0).all() or fit.rounds < 1 or fit.clip <= 0 or fit.candidates < 2:
        raise UserError(f"{path}: scale and clip must be above 0, rounds at least 1, candidates at least 2.")
    return fit


def read_gap(path: Path) -> GapFit:
    facts = read_json(path)
    values = {name: number(path, facts, name) for name in ("intercept", "margin", "slot")}
    return GapFit(**values, diagnostics=facts.get("diagnostics", {}))


def read_json(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}).") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("diagnostics", {}), dict):
        raise UserError(f"{path}: not an object with a fit's numbers.")
    return facts


def number(path: Path, facts: dict[str, Any], name: str) -> float:
    if not is_number(facts.get(name)):
        raise UserError(f"{path}: {name} is not a number.")
    return facts[name]


def vector(path: Path, facts: dict[str, Any], name: str) -> np.ndarray:
    values = facts.get(name)
    if not isinstance(values, list) or len(values) != PARAREAL_FEATURES or not all(map(is_number, values)):
        raise UserError(f"{path}: {name} is not a list of {PARAREAL_FEATURES} numbers.")
    return np.array(values, dtype=np.float64)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def head_facts(heads: Heads) -> dict[str, Any]:
    """For benchmark.json: each head's parameters, and what its fit reported."""
    facts: dict[str, Any] = {}
    for name in heads.present:
        head = getattr(heads, name)
        values = [getattr(head, item.name) for item in fields(head) if item.name not in ("offsets", "diagnostics")]
        facts[name] = {"parameters": sum(int(np.size(value)) for value in values)}
        if getattr(head, "diagnostics", None):
            facts[name]["diagnostics"] = dict(head.diagnostics)
    return facts
