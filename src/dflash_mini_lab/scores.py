"""Scores over draft candidates: margins now; noise, pair scores and residual steps as methods need them. NumPy only."""
from __future__ import annotations

import numpy as np


def margins(scores: np.ndarray) -> np.ndarray:
    """`scores [S, ≥ 2]`, best first → `m[i] = z[i,0] - z[i,1]` in logits, `[S]`."""
    return scores[:, 0] - scores[:, 1]
