"""Peers: transformers' own decoding, run as arms of the same schedule through the same gate, on the stock model.

Their loops are the library's, so their rounds cannot be seen: a peer has times and tokens, and no step log.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dflash_mini_lab.types import Clock, UserError

LOOKUP_TOKENS = 10
"""Drafts per round of prompt lookup; the value in transformers' own documentation."""


@dataclass(frozen=True)
class Peer:
    key: str
    name: str
    summary: str
    settings: dict[str, Any]
    """Given to transformers' GenerationConfig."""


PEERS = (
    Peer("generate", "transformers generate", "the library's own greedy decoding of the same weights", {}),
    Peer("prompt-lookup", "transformers prompt lookup", "the library's drafts copied from the prompt and the answer so far",
         {"prompt_lookup_num_tokens": LOOKUP_TOKENS}),
)  # fmt: skip


def by_key(key: str) -> Peer:
    for peer in PEERS:
        if peer.key == key:
            return peer
    raise UserError(f"Unknown peer {key!r}; known: {', '.join(peer.key for peer in PEERS)}.")


@dataclass(frozen=True)
class PeerAnswer:
    """`first_tokens` came with the first call, so `prefill_seconds` paid for them and `decode_seconds` for the others."""

    tokens: tuple[int, ...]
    finish: str
    first_tokens: int
    prefill_seconds: float
    decode_seconds: float


def answer(
    peer: Peer,
    model: Any,
    prompt_ids: Sequence[int],
    budget: int,
    stop_ids: frozenset[int],
    max_positions: int,
    clock: Clock,
    vocabulary: int | None = None,
) -> PeerAnswer:
    """Greedy `generate` of up to `budget` tokens with a stock transformers model. Where its head has more rows than `vocabulary`,
    the library is told to suppress the others, as the lab's own targets leave them out.

    A streamer reads the clock when the first tokens arrive: that separates prefill from decoding, as in the lab's own loop.
    """
    import torch

    room = min(budget, max_positions - len(prompt_ids) + 1)
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    arrivals = _Arrivals(clock)
    padding = list(range(vocabulary or model.config.vocab_size, model.config.vocab_size))
    settings = {**peer.settings, **({"suppress_tokens": padding} if padding else {})}
    with _neutral_generation(model, settings, room, stop_ids):
        started = clock.now()
        try:
            output = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=arrivals)
        except (NotImplementedError, ValueError) as error:
            raise UserError(f"Peer {peer.key} does not run on this target: {error} Leave it out of --peers.") from error
        ended = clock.now()
    tokens = tuple(output[0, len(prompt_ids) :].tolist())
    finish = "stop" if tokens[-1] in stop_ids else "budget" if len(tokens) >= budget else "context"
    first = arrivals.first_at if arrivals.first_at is not None else ended
    return PeerAnswer(tokens, finish, max(arrivals.first_tokens, 1), first - started, ended - first)


class _Arrivals:
    """A transformers streamer that only notes when, and how many, first new tokens came; the prompt is put before them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._puts = 0
        self.first_at: float | None = None
        self.first_tokens = 0

    def put(self, tokens: Any) -> None:
        self._puts += 1
        if self._puts == 2:
            self.first_at, self.first_tokens = self._clock.now(), tokens.numel()

    def end(self) -> None:
        pass


@contextmanager
def _neutral_generation(model: Any, settings: dict[str, Any], budget: int, stop_ids: frozenset[int]) -> Iterator[None]:
    """Greedy and nothing else. transformers fills unset fields from the checkpoint's own generation defaults, and a repetition
    penalty among them would change the text."""
    from transformers import GenerationConfig

    stops = sorted(stop_ids) or None
    saved = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=budget, eos_token_id=stops, pad_token_id=stops[0] if stops else 0, **settings
    )
    try:
        yield
    finally:
        model.generation_config = saved


