"""Freed memory that stays with the process: seen in the pages that a second round of the same work has to fetch."""
from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource
import torch
from dflash_mini_lab.training.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.zeros(12_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
given_back = faults()
assert keep_freed_memory()
faults()
print(given_back, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone can be told")
def test_a_block_freed_is_not_fetched_from_the_system_again() -> None:
    src = Path(__file__).resolve().parents[1] / "src"
    asked = [sys.executable, "-c", FAULTS]
    found = subprocess.run(asked, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(src)})
    given_back, kept = map(int, found.stdout.split())
    assert given_back > 100
    assert kept < given_back / 10
