"""The tiny reference as a `Model`: NumPy only, through the same loop, methods, schedule, gate and report as every other target.

Neither PyTorch nor transformers may enter this file or anything that it imports.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dflash_mini_lab import artifacts
from dflash_mini_lab.benchmark.engine import Engine, Model
from dflash_mini_lab.benchmark.loading import ablated, drafter_facts, read_heads, target_facts
from dflash_mini_lab.catalog import Entry
from dflash_mini_lab.drafters.layout import check_fit
from dflash_mini_lab.drafters.numpy_block import NumpyBlockDrafter, load_arrays
from dflash_mini_lab.exactness import LogitsOf, StockSteps
from dflash_mini_lab.settings import EXACT_DRAFTER, FULL_LOGITS, STOCK_LINEAR, Settings
from dflash_mini_lab.targets import tiny
from dflash_mini_lab.targets.tiny_reference import PlainReference
from dflash_mini_lab.targets.tiny_target import TinyTarget
from dflash_mini_lab.types import Heads, UserError

WHY_NUMPY = "recomputes the visible sequence at every call; its speed says nothing about targets with a cache"


def load_tiny(settings: Settings, entry: Entry, say: Callable[[str], None]) -> Model:
    """Target and drafter from the repository's files, verified. Raises UserError for what NumPy alone cannot do."""
    if settings.dtype != "float32":
        raise UserError(f"--dtype {settings.dtype}: the {entry.name} reference runs in float32 only.")
    if settings.peers:
        raise UserError(f"--peers: they are transformers' own, and the {entry.name} reference does without it; leave them out.")
    for name in sorted({STOCK_LINEAR, EXACT_DRAFTER} & set(settings.ablate)):
        raise UserError(f"--ablate {name}: the {entry.name} reference has NumPy's products only; leave it out.")
    folder = artifacts.locate(settings, entry.name, say)
    if folder is None:
        raise UserError(f"artifacts/{entry.name} is not here; restore it with: git checkout -- artifacts/{entry.name}")
    config, tensors, words = tiny.read(folder)
    manifest = artifacts.manifest_of(folder, entry.name)
    checkpoint = ablated(load_arrays(folder) if settings.methods != ("00",) else None, settings.ablate)
    stops = frozenset({tiny.END})
    if checkpoint:
        check_fit(checkpoint[0], config.vocab_size, config.hidden_size, config.num_hidden_layers, stops)
    heads = read_heads(folder, checkpoint[0], manifest) if checkpoint else Heads()

    @contextmanager
    def stock() -> Iterator[StockSteps]:
        yield PlainReference(config, tensors)

    def build(capacity: int) -> Engine:
        target = TinyTarget(config, tensors, FULL_LOGITS in settings.ablate)
        drafter = None
        if checkpoint:
            drafter = NumpyBlockDrafter(*checkpoint, target.embedding, target.embedding, target.max_positions, heads)

        def path_logits(prompt_ids: Sequence[int]) -> LogitsOf:
            return lambda tokens: target.logits([*prompt_ids, *tokens])[len(prompt_ids) - 1 :]

        return Engine(target, drafter, path_logits, [], {})

    return Model(
        stop_ids=stops,
        max_positions=config.max_position_embeddings,
        block_size=checkpoint[0].block_size if checkpoint else 1,
        encode_prompt=words.encode,
        decode_text=words.decode,
        stock=stock,
        build=build,
        target_facts=target_facts(entry, folder, settings, facts(config), tiny.TENSOR_FILE),
        drafter_facts=drafter_facts(entry, folder, checkpoint, heads, manifest, config.vocab_size) if checkpoint else None,
        heads=heads,
        backend="numpy",
    )


def facts(config: tiny.TinyConfig) -> dict[str, Any]:
    """What benchmark.json records of the model itself."""
    return {
        "family": "llama",
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "max_positions": config.max_position_embeddings,
        "prompt_format": "plain",
        "chat_template_sha256": None,
        "path": TinyTarget.path,
        "path_reason": WHY_NUMPY,
    }
