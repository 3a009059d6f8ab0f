"""The library's model, every weight in memory of its own.

transformers maps a safetensors file as a whole: what the lean decoder has taken over stays resident until the last weight is
gone, so that a run held its model twice. Weights that are read one by one are given back one by one.
"""
from __future__ import annotations

import contextlib
import copy
import ctypes
import json
import sys
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from dflash_mini_lab.types import UserError


def read_model(where: str, config: Any, dtype: torch.dtype) -> tuple[Any, set[str]]:
    """The causal LM at `where` (a folder or a hub id) in `dtype`, and the names of the weights that it lacks.

    Raises whatever the library raises.
    """
    options = {"dtype": dtype, "output_loading_info": True}
    files = weight_files(Path(where))
    if not files or getattr(config, "quantization_config", None) is not None:
        model, info = AutoModelForCausalLM.from_pretrained(where, use_safetensors=True, **options)
        return model, info["missing_keys"]
    with ExitStack() as opened:
        weights: dict[str, Any] = {}
        for file in files:
            content = opened.enter_context(safe_open(file, framework="pt", device="cpu", backend="pread"))
            weights |= {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118 - it is no dictionary
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, info = kind.from_pretrained(None, config=copy.deepcopy(config), state_dict=weights, **options)
    give_back_memory()
    return model, info["missing_keys"]


def refuse_missing(where: Path | str, names: Collection[str]) -> None:
    """Raises UserError where the weights at `where` lack `names`: the library makes such a tensor up without an error."""
    if names:
        raise UserError(f"{where}: the weights lack {min(names)}, which would be made up at random.")


def weight_files(folder: Path) -> list[Path]:
    """A folder's safetensors files as the library looks for them: the one, or those that the index names; none of neither."""
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        return [folder / SAFE_WEIGHTS_NAME]
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return []
    return [folder / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))]


def give_back_memory() -> None:
    """Freed memory back to the system. glibc keeps it for the thread that had asked for it, and the library reads weights in
    several; other systems give it back by themselves."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # musl has nothing to ask
            ctypes.CDLL(None).malloc_trim(0)
