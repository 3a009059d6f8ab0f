"""What goes between the host and the device that holds the weights, counted and timed at the one place where it goes.

A round should move a few integers out and a few in; a method that takes full logits moves megabytes, and these figures show it.
On a CPU the same code counts what would have crossed, at the cost of two clock readings. No model, no method, no cache.
"""
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass
class Direction:
    """`seconds` are the host's, from the call until it may go on; what the device still had to compute is not among them."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class Crossings:
    """Totals since they were made. One object serves a target and its drafter."""

    to_device: Direction = field(default_factory=Direction)
    to_host: Direction = field(default_factory=Direction)

    def send(self, numbers: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
        """Token ids, or other whole numbers, on `device`; a list as int64, an array in its own dtype and shape."""
        started = time.perf_counter()
        sent = torch.as_tensor(numbers, device=device)
        self._add(self.to_device, sent, started)
        return sent

    def send_into(self, tokens: Sequence[int], buffer: Tensor) -> None:
        """As `send`, into a buffer `[len(tokens)]` that stays where it is; a CUDA device copies it while the host goes on."""
        started = time.perf_counter()
        buffer.copy_(torch.tensor(tokens, pin_memory=buffer.is_cuda), non_blocking=True)
        self._add(self.to_device, buffer, started)

    def integers(self, tensor: Tensor) -> list[int]:
        """`tensor [n]` as Python integers."""
        started = _settled(tensor)
        received = tensor.tolist()
        self._add(self.to_host, tensor, started)
        return received

    def array(self, tensor: Tensor) -> np.ndarray:
        """`tensor` as a NumPy array of its own dtype; on a CPU they share memory."""
        started = _settled(tensor)
        received = tensor.cpu().numpy()
        self._add(self.to_host, tensor, started)
        return received

    def found_on_host(self, *found: np.ndarray, asked: np.ndarray | None = None) -> None:
        """What a search would have sent, and been sent, had what it read not been on the host already. It took no time."""
        for way, arrays in ((self.to_host, found), (self.to_device, () if asked is None else (asked,))):
            way.count += len(arrays)
            way.bytes += sum(array.nbytes for array in arrays)

    def ids_on_host(self, count: int) -> None:
        """As `found_on_host`, of so many ids that came and as many that were sent."""
        for way in (self.to_host, self.to_device):
            way.count += 1
            way.bytes += 8 * count

    def as_json(self) -> dict[str, dict[str, float]]:
        return {"to_device": asdict(self.to_device), "to_host": asdict(self.to_host)}

    def since(self, earlier: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        """What crossed since `as_json` gave `earlier`."""
        now = self.as_json()
        return {way: {name: now[way][name] - earlier[way][name] for name in now[way]} for way in now}

    @staticmethod
    def _add(direction: Direction, tensor: Tensor, started: float) -> None:
        direction.count += 1
        direction.bytes += tensor.numel() * tensor.element_size()
        direction.seconds += time.perf_counter() - started


def _settled(tensor: Tensor) -> float:
    """The time at which the device has computed `tensor`: waiting for that is no crossing."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return time.perf_counter()


def on_host(tensor: Tensor) -> np.ndarray:
    """Of a tensor on the CPU, which need not cross; float32 without the call that has nothing to convert: 15 µs a round."""
    return (tensor if tensor.dtype == torch.float32 else tensor.float()).numpy()
