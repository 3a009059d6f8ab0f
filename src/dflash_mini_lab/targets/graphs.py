"""A decode step of fixed shape: every tensor at a fixed address, so that CUDA can record its kernels once and replay them.

Replaying a graph costs one launch where the eager step costs hundreds, and at batch 1 launches are most of a small model's time.
Nothing in the body may depend on a value that only the host knows: how much of the cache is filled and where the next row goes
are numbers in a device buffer, attention reads the whole cache behind a mask, and new keys and values are put in by index.
The eager twin runs the same body, line for line, and that is what the tests on a CPU see.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_mini_lab.crossings import Crossings
from dflash_mini_lab.targets.lean import (
    Attention,
    LeanCache,
    LeanDecoder,
    ShortConvolution,
    TreeRows,
    bring_forward,
    chain_inputs,
    convolve,
    layer_views,
    merge,
    project,
)
from dflash_mini_lab.trees import row_table

ALIGNMENT = 8
"""CUDA's fused attention kernels want a mask whose rows are multiples of this many elements."""
WARM_UPS = 3
"""Runs before a capture: libraries allocate their workspaces in the first ones."""


class StaticState:
    """One sequence's state at fixed addresses, for steps of up to `widest` rows.

    Attention: `memory` and its `keys/values[i]` as in LeanCache, of a batch of 1 and positions ≥ capacity. Convolution:
    `windows[i] [1, taps - 1 + widest, hidden]`: the last inputs before the newest step, followed by that step's rows, as there
    too. The next step finds the inputs before it `kept` rows further on, so that rolling back moves two numbers.
    """

    def __init__(self, decoder: LeanDecoder, capacity: int, widest: int) -> None:
        self.capacity, self.widest = capacity, widest
        self.length = self.kept = self.last_rows = 0
        self._leases = 0
        empty, like = decoder.new_cache(1), decoder.embedding
        self.attending, self.history, self.device = empty.attending, empty.history, like.device
        *outer, _, head_dim = empty.memory.shape
        self.memory = like.new_zeros(*outer, -(-capacity // ALIGNMENT) * ALIGNMENT, head_dim)
        self.keys, self.values = layer_views(self.memory, self.attending)
        self.windows = {index: like.new_zeros(1, self.history + widest, like.shape[1]) for index in empty.inputs}
        self.start_of_windows = empty.inputs

    @cached_property
    def capture_stream(self) -> torch.cuda.Stream:
        """One for all steps: cuBLAS keeps a workspace for each stream that it has seen."""
        return torch.cuda.Stream(self.device)

    def lease(self) -> int:
        """Begin a new sequence. The number is the sequence's own: an older one that goes on finds it changed."""
        self._leases += 1
        self.length = self.kept = self.last_rows = 0
        return self._leases

    def holds(self, lease: int) -> bool:
        return lease == self._leases

    def prefill_cache(self) -> LeanCache:
        """An empty cache for the decoder's own forward pass, whose keys and values are these."""
        return LeanCache(0, self.capacity, self.memory, self.attending, dict(self.start_of_windows), self.history)

    def adopt(self, cache: LeanCache) -> None:
        """Go on from a prefill in `prefill_cache()`, of which every row was kept."""
        for index, inputs in cache.inputs.items():
            self.windows[index][:, : self.history] = inputs
        self.length, self.kept, self.last_rows = cache.length, 0, 0

    def advance(self, rows: int) -> None:
        self.length += rows
        self.kept = self.last_rows = rows

    def gather(self, rows: Tensor) -> None:
        """Bring `rows [n]` of the last step, in ascending order, to the first places of that step, for `keep(n)`."""
        bring_forward(self.memory, 4, self.length - self.last_rows, rows)
        for window in self.windows.values():
            bring_forward(window, 1, self.history, rows)

    def keep(self, rows: int) -> None:
        """Keep the first `rows` rows of the last step (0 … all) and forget the others."""
        if not 0 <= rows <= self.last_rows:
            raise ValueError(f"keep({rows}): the last call had {self.last_rows} rows")
        if self.last_rows:
            self.kept = rows
        self.length -= self.last_rows - rows
        self.last_rows = 0


class CapturedStep:
    """The target's step for exactly `rows` rows on one `state`: `rows + 2` integers in, `rows` greedy ids out. A step for trees
    takes the rows' `trees.row_table` as well.

    `greedy [rows]` and `features [rows, taps · hidden]` are overwritten by every run; so are `logits [rows, vocabulary]`, which
    stay on the device.
    """

    def __init__(
        self,
        decoder: LeanDecoder,
        state: StaticState,
        rows: int,
        taps: Sequence[int],
        vocabulary: int,
        capture: bool,
        trees: bool = False,
    ) -> None:
        """`capture=False`: the eager twin. Raises RuntimeError where CUDA refuses the capture."""
        if not 1 <= rows <= state.widest:
            raise ValueError(f"a step of {rows} rows on a state for at most {state.widest}")
        self.decoder, self.state, self.rows, self.taps = decoder, state, rows, tuple(taps)
        self.vocabulary = vocabulary
        like, device = decoder.embedding, decoder.embedding.device
        columns = 1 + state.history + rows if trees else 0
        self.inputs = torch.zeros(rows + 2 + rows * columns, dtype=torch.int64, device=device)
        """The tokens, then `state.length`, then `state.kept`, then a tree's table."""
        self.tree = TreeRows(self.inputs[rows + 2 :].view(rows, columns), state.history) if trees else None
        if self.tree:  # a row that sees nothing would leave NaN in the state while the step is captured
            self.tree.table.copy_(torch.tensor(row_table(range(-1, rows - 1), state.history)))
        self.greedy = torch.zeros(rows, dtype=torch.int64, device=device)
        self.features = like.new_zeros(rows, len(self.taps) * like.shape[1])
        self.logits = like.new_zeros(rows, vocabulary)
        positions = state.memory.shape[4]
        self._rows = torch.arange(rows, device=device)
        self._columns = torch.arange(positions, device=device)
        self._open = like.new_zeros(rows, positions)
        self._recent = torch.arange(state.history, device=device)
        self._graph = self._captured() if capture else None

    def run(self, tokens: Sequence[int], crossings: Crossings, parents: Sequence[int] = ()) -> list[int]:
        """The greedy token after each of `tokens`, which extend the sequence of `state`; `parents` for a step of trees."""
        state = self.state
        if state.length + self.rows > state.capacity:
            raise ValueError(f"{state.length} + {self.rows} tokens do not fit a cache of {state.capacity}")
        table = row_table(parents, state.history) if self.tree else []
        crossings.send_into([*tokens, state.length, state.kept, *chain.from_iterable(table)], self.inputs)
        if self._graph is None:
            self._body()
        else:
            self._graph.replay()
        state.advance(self.rows)
        return crossings.integers(self.greedy)

    def _body(self) -> None:
        """What a graph records: device tensors in, device tensors out, no shape and no branch that a value decides."""
        decoder, state, rows, tree = self.decoder, self.state, self.rows, self.tree
        ids, length, kept = self.inputs[:rows], self.inputs[rows], self.inputs[rows + 1]
        places = length + self._rows
        positions = length + tree.depths if tree else places
        rotation = decoder.rotation.index_select(0, positions).view(rows, 1, -1)
        if tree:
            mask = self._open.masked_fill(self._columns >= length, float("-inf")).index_copy_(1, places, tree.hidden(self._open))
        else:
            mask = self._open.masked_fill(self._columns > places[:, None], float("-inf"))
        recent = kept + self._recent

        def mix(index: int, mixer: Attention | ShortConvolution, x: Tensor) -> Tensor:
            if isinstance(mixer, Attention):
                return self._attend(mixer, x, index, rotation, places, mask)
            gate_in, gate_out, value = mixer.in_proj(x).chunk(3, dim=-1)
            window = torch.cat([state.windows[index].index_select(1, recent), gate_in * value], dim=1)
            state.windows[index][:, : window.shape[1]] = window
            return convolve(mixer, tree.inputs(window) if tree else chain_inputs(mixer, window), gate_out)

        x, features = decoder.through_layers(F.embedding(ids[None], decoder.embedding), mix, self.taps)
        self.features.copy_(features[0])
        self.logits.copy_(decoder.head.logits(decoder.final_norm(x[0]))[:, : self.vocabulary])
        self.greedy.copy_(self.logits.argmax(dim=-1))

    def _attend(self, a: Attention, x: Tensor, index: int, rotation: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        q, k, v = project(a, x, rotation)
        keys, values = self.state.keys[index], self.state.values[index]
        keys.index_copy_(2, places, k.transpose(1, 2))
        values.index_copy_(2, places, v.transpose(1, 2))
        groups = a.heads // a.kv_heads
        q = q.reshape(1, a.kv_heads, groups * self.rows, a.head_dim)
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask.repeat(groups, 1))
        return merge(a, mixed, self.rows)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Record `_body`, which runs a few times for it at position 0 of `state`: only between two sequences."""
        stream, graph = self.state.capture_stream, torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self.state.device))
        with torch.cuda.stream(stream):  # a capture that fails would leave its stream the current one
            for _ in range(WARM_UPS):
                self._body()
            torch.cuda.synchronize(self.state.device)
            with torch.cuda.graph(graph, stream=stream):
                self._body()
        torch.cuda.current_stream(self.state.device).wait_stream(stream)
        return graph
