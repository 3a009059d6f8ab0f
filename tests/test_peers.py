from __future__ import annotations

import pytest
from tiny_lab import POSITIONS, FakeClock, encode, greedy, stock_model
from tiny_models import FAMILIES, tiny_model

from dflash_mini_lab.benchmark import peers
from dflash_mini_lab.exactness import reference_greedy
from dflash_mini_lab.types import UserError

NOTHING: frozenset[int] = frozenset()


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.key)
def test_a_peer_gives_the_greedy_text_and_its_times_are_split_at_the_first_token(peer: peers.Peer) -> None:
    prompt = encode("hello hello")
    answered = peers.answer(peer, stock_model(), prompt, 20, NOTHING, POSITIONS, FakeClock(tick=1.0))
    assert list(answered.tokens) == greedy(prompt, 20)
    assert answered.finish == "budget"
    assert (answered.prefill_seconds, answered.decode_seconds) == (1.0, 1.0)
    assert 1 <= answered.first_tokens < 20


def test_the_librarys_own_decoding_delivers_one_token_with_the_prefill() -> None:
    answered = peers.answer(peers.by_key("generate"), stock_model(), encode("hello"), 20, NOTHING, POSITIONS, FakeClock())
    assert answered.first_tokens == 1


def test_a_peer_stops_after_the_stop_token() -> None:
    tokens = greedy(encode("hello"), 20)
    stops = frozenset({tokens[4]})
    answered = peers.answer(peers.by_key("generate"), stock_model(), encode("hello"), 20, stops, POSITIONS, FakeClock())
    assert list(answered.tokens) == tokens[: tokens.index(tokens[4]) + 1]
    assert answered.finish == "stop"


def test_a_budget_of_one_is_all_prefill() -> None:
    answered = peers.answer(peers.by_key("generate"), stock_model(), encode("hello"), 1, NOTHING, POSITIONS, FakeClock())
    assert len(answered.tokens) == 1


def test_the_checkpoints_generation_defaults_change_nothing_and_come_back() -> None:
    model = stock_model()
    own = model.generation_config
    own.repetition_penalty = 5.0
    try:
        answered = peers.answer(peers.by_key("generate"), model, encode("hello"), 20, NOTHING, POSITIONS, FakeClock())
        assert model.generation_config is own
    finally:
        own.repetition_penalty = None
    assert list(answered.tokens) == greedy(encode("hello"), 20)


def test_an_unknown_peer_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="generate, prompt-lookup"):
        peers.by_key("medusa")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.key)
def test_peers_run_on_every_family(family: str, peer: peers.Peer) -> None:
    model, prompt = tiny_model(family), [5, 9, 12, 40, 5, 9, 12]
    answered = peers.answer(peer, model, prompt, 24, NOTHING, POSITIONS, FakeClock())
    assert answered.tokens == reference_greedy(model, prompt, 24, NOTHING, POSITIONS).tokens
