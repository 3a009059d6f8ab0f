"""00 Normal: cached greedy decoding by the target alone. The exact reference and the 1.000× of a run."""
from __future__ import annotations

from dflash_mini_lab.types import Method

NORMAL = Method("00", "normal", "Normal", "greedy decoding by the target alone, one token a call", select=None)
