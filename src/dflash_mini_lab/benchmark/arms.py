"""The arms of a run: method 00 twice, the other methods, the peers; and how one of them answers one prompt."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dflash_mini_lab.benchmark import peers
from dflash_mini_lab.benchmark.engine import Engine
from dflash_mini_lab.benchmark.results import BASELINE, CONTROL
from dflash_mini_lab.decoding import decode
from dflash_mini_lab.measurement.step_log import columns
from dflash_mini_lab.methods import by_key
from dflash_mini_lab.types import Clock, Method

if TYPE_CHECKING:  # a comparison of two files needs no torch
    from dflash_mini_lab.crossings import Crossings
    from dflash_mini_lab.measurement.energy import Energy


@dataclass(frozen=True)
class Arm:
    """An entry of benchmark.json's `arms`. `verify_width`: rows of a full verifier call, anchor included."""

    key: str
    name: str
    kind: str
    summary: str
    settings: dict[str, Any] = field(default_factory=dict)
    settings_source: str | None = None
    verify_width: int | None = None
    verify_width_source: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_arms(
    method_keys: Sequence[str],
    peer_keys: Sequence[str],
    block_size: int,
    verify_width: int | None,
    chosen: Mapping[str, Any],
    tuned: Mapping[str, int] = MappingProxyType({}),
) -> list[Arm]:
    """Arms in the order in which tables list them. `chosen`: method key → its calibrated settings; `tuned`: → its tuned width.

    Method 00 is always measured, twice. `verify_width`: the user's own, which beats a tuned one; without either, the whole block.
    """
    normal = by_key(BASELINE)
    again = f"{normal.name}, again"
    arms = [
        Arm(BASELINE, normal.name, "baseline", normal.summary, verify_width=1),
        Arm(CONTROL, again, "control", "method 00 a second time: the noise floor of the run", verify_width=1),
    ]
    for key in method_keys:
        method = by_key(key)
        if method.key == BASELINE:
            continue
        values, source = _settings(method, chosen)
        width, width_source = _width(method, block_size, verify_width, tuned)
        arms.append(Arm(method.key, method.name, "method", method.summary, values, source, width, width_source))
    for key in peer_keys:
        peer = peers.by_key(key)
        arms.append(Arm(peer.key, peer.name, "peer", peer.summary, dict(peer.settings)))
    return arms


def _settings(method: Method, chosen: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The values a method runs with, and where they came from: its own calibration, that of the method it follows, or neither."""
    if method.settings_of and method.settings_of in chosen:
        followed = chosen[method.settings_of]
        return {name: followed[name] for name in method.settings}, f"calibrated (method {method.settings_of})"
    return {**method.settings, **chosen.get(method.key, {})}, "calibrated" if method.key in chosen else "default"


def _width(method: Method, block_size: int, given: int | None, tuned: Mapping[str, int]) -> tuple[int, str]:
    """The width a method verifies with, and where it came from. A method that follows another verifies as that one does."""
    if given:
        return min(given, block_size), "given"
    if method.key in tuned:
        return tuned[method.key], "tuned"
    if method.settings_of and method.settings_of in tuned:
        return tuned[method.settings_of], f"tuned (method {method.settings_of})"
    return block_size, "block"


def answer(
    engine: Engine, stock: Any, arm: Arm, prompt_ids: Sequence[int], budget: int, clock: Clock, bonus: bool = True
) -> dict[str, Any]:
    """One arm's answer to one prompt, as an entry of a cell's `runs`. `stock`: the library's model, for peers only; `bonus`: as
    `decode` takes it."""
    target = engine.target
    if arm.kind == "peer":
        limit = stock.config.max_position_embeddings
        peer, stops = peers.by_key(arm.key), target.stop_ids
        answered = peers.answer(peer, stock, prompt_ids, budget, stops, limit, clock, target.vocabulary)
        return {"arm": arm.key, **asdict(answered), "tokens": list(answered.tokens), "steps": None}
    key = BASELINE if arm.key == CONTROL else arm.key
    drafter = engine.drafter if arm.kind == "method" else None
    decoded = decode(target, prompt_ids, by_key(key), budget, clock, drafter, arm.settings, arm.verify_width, bonus)
    return {
        "arm": arm.key,
        "tokens": list(decoded.tokens),
        "finish": decoded.finish,
        "prefill_seconds": decoded.prefill_seconds,
        "decode_seconds": decoded.decode_seconds,
        "steps": columns(decoded),
    }


def metered(run: Callable[[], dict[str, Any]], crossings: Crossings | None, energy: Energy | None) -> dict[str, Any]:
    """`run()`, an `answer`, with what crossed between host and device and with its joules, each where it is measured.

    Both are of the whole answer, prefill included, and are read outside its times.
    """
    crossed = crossings.as_json() if crossings else None
    joules = energy.read() if energy else None
    entry = run()
    if energy and joules is not None and (now := energy.read()) is not None:
        entry["joules"] = now - joules
    if crossings and crossed is not None and entry["steps"] is not None:  # a peer's crossings are the library's own
        entry["crossings"] = crossings.since(crossed)
    return entry
