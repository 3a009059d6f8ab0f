"""These tests need a CUDA GPU and are skipped without one. docs/gpu.md says how to run them."""
from __future__ import annotations

import warnings

import pytest
import torch


def cuda_is_there() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a CUDA build without a driver warns
        return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not cuda_is_there():
        for item in items:
            if item.path.parent.name == "gpu":
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
