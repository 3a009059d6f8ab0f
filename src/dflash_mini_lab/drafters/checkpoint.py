"""Reading and writing a drafter's checkpoint with PyTorch; what it holds is in `layout.py`."""
from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_mini_lab.drafters.layout import (
    CONFIG_FILE,
    DRAFT_TO_TARGET,
    TENSOR_FILE,
    DrafterConfig,
    parse_config,
    read_checkpoint,
    tensor_shapes,
)

__all__ = [
    "CONFIG_FILE",
    "DRAFT_TO_TARGET",
    "TENSOR_FILE",
    "DrafterConfig",
    "load_checkpoint",
    "parse_config",
    "save_checkpoint",
    "save_tensors",
    "tensor_shapes",
]


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
    return read_checkpoint(folder, partial(load_file, backend="pread"))  # Windows replaces no file that is mapped
