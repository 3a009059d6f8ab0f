"""From settings to a `Model`: catalogue, files and their digests, tokenizer, drafter. Weights are read when asked for."""
from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from dflash_mini_lab import artifacts
from dflash_mini_lab.benchmark.engine import Engine, Model
from dflash_mini_lab.catalog import Entry, resolve
from dflash_mini_lab.drafters.layout import DRAFT_TO_TARGET, DrafterConfig, check_fit, vocabulary_digest
from dflash_mini_lab.measurement.cost_curve import SMALLEST_WIDEST
from dflash_mini_lab.settings import EXACT_DRAFTER, FULL_LOGITS, FULL_VOCABULARY, STOCK_LINEAR, Settings
from dflash_mini_lab.targets.weights import resolved_revision
from dflash_mini_lab.types import Heads, UserError

Say = Callable[[str], None]
Checkpoint = tuple[DrafterConfig, dict[str, Any]]
"""A drafter's config and tensors, of PyTorch or NumPy."""


def load_model(settings: Settings, say: Say) -> Model:
    """The target of `settings` with its drafter. A target without artifacts has one trained first, and it is said.

    Raises UserError for whatever cannot be had. With method 00 alone in `settings.methods`, no drafter is asked for.
    """
    entry = resolve(settings.target)
    if entry.backend == "numpy":
        from dflash_mini_lab.benchmark.tiny import load_tiny

        return load_tiny(settings, entry, say)
    from dflash_mini_lab.targets.loading import load_target
    from dflash_mini_lab.targets.weights import fetch

    where = fetch(entry, settings.cache, say)
    folder = None
    if settings.methods != ("00",):
        folder = artifacts.locate(settings, entry.name, say)
        if folder is None:
            say(f"There is no drafter for {entry.name} yet: training one first (--prepare-minutes N limits it).")
            from dflash_mini_lab.training.prepare import prepare

            folder = prepare(settings)
    loaded = load_target(entry.name, where, settings.dtype, entry.prompt_format, settings.device)
    facts = target_facts(entry, where, settings, loaded.facts())
    if settings.device != "cpu":
        from dflash_mini_lab.measurement.gpu import require_memory

        require_memory(entry.name, facts["parameters"], settings.dtype)
    manifest = artifacts.manifest_of(folder, entry.name) if folder else None
    checkpoint = unpadded(ablated(_read_drafter(folder), settings.ablate), loaded.vocabulary)
    if checkpoint:
        shape = (loaded.config.vocab_size, loaded.config.hidden_size, loaded.config.num_hidden_layers)
        known = checkpoint[0].tokenizer_sha256  # else there is nothing to compare, and a digest takes 90 ms
        tokenizer = vocabulary_digest(loaded.tokenizer.get_vocab()) if known else None
        check_fit(checkpoint[0], *shape, loaded.stop_ids, tokenizer)
    heads = read_heads(folder, checkpoint[0], manifest) if folder and checkpoint else Heads()
    about_drafter = None
    if folder and checkpoint:
        about_drafter = drafter_facts(entry, folder, checkpoint, heads, manifest, loaded.vocabulary)
    keep_stock = bool(settings.peers)

    @contextmanager
    def stock() -> Iterator[Any]:
        """Loaded when first asked for, and kept until the target takes its weights over; with peers, to the end."""
        yield loaded.stock_model()

    def build(capacity: int) -> Engine:
        model = loaded.stock_model()
        embedding, head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
        measure = STOCK_LINEAR not in settings.ablate
        if measure and settings.device == "cpu":
            say("Timing this machine's products; the first run in a folder also compiles for them.")
        target = loaded.build(capacity, measure, keep_stock, full_logits=FULL_LOGITS in settings.ablate)
        drafter = None
        if checkpoint:
            from dflash_mini_lab.drafters.block import BlockDrafter

            tables, exact = (embedding, head[: loaded.vocabulary]), EXACT_DRAFTER in settings.ablate
            drafter = BlockDrafter(*checkpoint, *tables, capacity, measure, exact, target.plans, heads, target.crossings)
        block_size, taps = (drafter.block_size, drafter.taps) if drafter else (1, ())
        decode = target.prepare_steps(range(1, max(block_size, SMALLEST_WIDEST) + 1), taps)

        def path_logits(prompt_ids: Any) -> Any:
            return lambda tokens: target.logits([*prompt_ids, *tokens])[len(prompt_ids) - 1 :].float().cpu().numpy()

        plans = [*target.plans, *(drafter.plans if drafter else [])]
        padded = {str(rows): run for rows, run in target.padded_rows.items()}
        return Engine(target, drafter, path_logits, [plan.as_json() for plan in plans], padded, decode, target.crossings)

    return Model(
        stop_ids=loaded.stop_ids,
        max_positions=loaded.config.max_position_embeddings,
        block_size=checkpoint[0].block_size if checkpoint else 1,
        encode_prompt=loaded.encode_prompt,
        decode_text=loaded.decode_text,
        stock=stock,
        build=build,
        target_facts=facts,
        drafter_facts=about_drafter,
        heads=heads,
        vocabulary=loaded.vocabulary,
        device=settings.device,
        trees=loaded.path_reason is None,
    )


def _read_drafter(folder: Path | None) -> Checkpoint | None:
    from dflash_mini_lab.drafters.checkpoint import load_checkpoint

    return load_checkpoint(folder) if folder else None


def ablated(checkpoint: Checkpoint | None, ablations: Sequence[str]) -> Checkpoint | None:
    """The drafter as it is to run: with `full-vocabulary`, without its reduced one. Raises UserError where it has none."""
    if FULL_VOCABULARY not in ablations:
        return checkpoint
    if checkpoint is None or DRAFT_TO_TARGET not in checkpoint[1]:
        what = "this drafter scores the whole vocabulary already" if checkpoint else "no drafter runs here"
        raise UserError(f"--ablate {FULL_VOCABULARY}: {what}; leave it out.")
    config, tensors = checkpoint
    return config, {name: tensor for name, tensor in tensors.items() if name != DRAFT_TO_TARGET}


def unpadded(checkpoint: Checkpoint | None, vocabulary: int) -> Checkpoint | None:
    """The drafter without the columns of its reduced vocabulary that the target may not emit."""
    if checkpoint is None or DRAFT_TO_TARGET not in checkpoint[1]:
        return checkpoint  # it scores the target's own head, of which it is given no padded row
    config, tensors = checkpoint
    ids = tensors[DRAFT_TO_TARGET]
    return config, {**tensors, DRAFT_TO_TARGET: ids[ids < vocabulary]}


def read_heads(folder: Path, config: Any, manifest: artifacts.Manifest | None) -> Heads:
    """The heads that the manifest pins: a file that nothing has verified is not opened."""
    from dflash_mini_lab.drafters.heads import load_heads

    return load_heads(folder, config, [file.name for file in manifest.files] if manifest else ())


def target_facts(
    entry: Entry, where: Path, settings: Settings, facts: dict[str, Any], weights: str = "*.safetensors"
) -> dict[str, Any]:
    """The `target` entry of benchmark.json. `weights`: the files of its weights in the folder `where`."""
    return {
        "name": entry.name,
        "source": entry.source,
        "license": entry.license,
        "revision": resolved_revision(where),
        **facts,
        **weights_facts(where, weights),
        "dtype": settings.dtype,
        "device": settings.device,
    }


def drafter_facts(
    entry: Entry, folder: Path, checkpoint: Checkpoint, heads: Heads, manifest: artifacts.Manifest | None, vocabulary: int
) -> dict[str, Any]:
    """The `drafter` entry of benchmark.json, with every file that the manifest pins, and the drafter as it runs on a target of
    `vocabulary` ids that may be emitted."""
    from dflash_mini_lab.drafters.heads import head_facts

    files = manifest.files if manifest else ()
    config, tensors = checkpoint
    return {
        "name": entry.name,
        "files": [{"name": file.name, "sha256": file.sha256, "bytes": file.bytes} for file in files],
        "block_size": config.block_size,
        "taps": list(config.taps),
        "layers": config.layers,
        "hidden_size": config.hidden_size,
        "feature_window": config.window,
        "draft_vocabulary": len(tensors[DRAFT_TO_TARGET]) if DRAFT_TO_TARGET in tensors else vocabulary,
        "parameters": sum(prod(tensor.shape) for name, tensor in tensors.items() if name != DRAFT_TO_TARGET),
        "provenance": _provenance(folder),
        "heads": head_facts(heads),
    }


def _provenance(folder: Path) -> dict[str, Any]:
    """`provenance.json` beside the weights, or the manifest's `facts`; empty where a checkpoint has neither."""
    for name, key in (("provenance.json", None), (artifacts.MANIFEST, "facts")):
        path = folder / name
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            found = content.get(key) if key else content
            if isinstance(found, dict):
                return found
    return {}


def weights_facts(folder: Path, pattern: str = "*.safetensors") -> dict[str, Any]:
    """Parameters, bytes and digest of a folder's safetensors files; for several, the digest of their `name digest` lines."""
    files = sorted(folder.glob(pattern))
    if not files:
        raise UserError(f"{folder}: has no safetensors weights; the lab reads no pickled ones.")
    digests = {path.name: artifacts.sha256(path) for path in files}
    together = "".join(f"{name} {digest}\n" for name, digest in digests.items())
    return {
        "parameters": sum(prod(shape) for path in files for shape in safetensors_shapes(path).values()),
        "weights_sha256": next(iter(digests.values())) if len(digests) == 1 else hashlib.sha256(together.encode()).hexdigest(),
        "weights_bytes": sum(path.stat().st_size for path in files),
    }


def safetensors_shapes(path: Path) -> dict[str, list[int]]:
    """Tensor name → shape, from the file's header alone."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("it ends before its header does")
            header = json.loads(file.read(length))
        return {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    except (struct.error, ValueError, AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: not a safetensors file ({error}). A clone without Git LFS holds pointers only: run git lfs pull there."
        ) from error
