"""prompts × arms → benchmark.json, saved after every cell, resumable; then results, gate and report."""
from __future__ import annotations

from dflash_mini_lab.benchmark.run import run_benchmark

__all__ = ["run_benchmark"]
