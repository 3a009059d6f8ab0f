"""The tapped features of one session between a verify call, its rollback, and the drafter that reads them."""
from __future__ import annotations

import torch
from torch import Tensor


class FeatureLog:
    """Rows of the last call wait until `keep` says how many of them stay; `take` hands over what stayed since the last take."""

    def __init__(self, width: int, like: Tensor) -> None:
        """`width`: taps · hidden; `like` gives dtype and device."""
        self._nothing = like.new_empty(0, width)
        self._kept: list[Tensor] = []
        self._waiting: Tensor | None = None

    def record(self, features: Tensor) -> None:
        """`features [rows, taps · hidden]`, which nobody writes to any more."""
        self._waiting = features

    def gather(self, rows: Tensor) -> None:
        """Bring `rows [n]` of the last call to its first places, for `keep(n)`."""
        if self._waiting is not None:
            self._waiting = self._waiting.index_select(0, rows)

    def keep(self, rows: int) -> None:
        if self._waiting is not None:
            self._kept.append(self._waiting[:rows])
            self._waiting = None

    def take(self) -> Tensor:
        kept, self._kept = self._kept or [self._nothing], []
        return kept[0] if len(kept) == 1 else torch.cat(kept)
