"""`--prepare`: from nothing but the target to verified drafter artifacts. Every stage is kept on disk and can be resumed.

1 prompts: the seeds, and user turns (chat) or texts (base) that the target samples itself; 2 answers: greedy, with features;
3 the drafter; 4 artifacts: checkpoint, provenance, log, manifest; 5 heads beside the drafter, which stays as it is.
One path for every device. On a GPU the recipe is larger and features are computed again in every step (features.py); work that
was begun on one device goes on, on another.
"""
from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dflash_mini_lab import artifacts
from dflash_mini_lab.catalog import Entry, resolve
from dflash_mini_lab.decoding import decode
from dflash_mini_lab.drafters.block import BlockDrafter
from dflash_mini_lab.drafters.checkpoint import CONFIG_FILE, TENSOR_FILE, DrafterConfig, load_checkpoint, save_checkpoint
from dflash_mini_lab.drafters.layout import check_fit, vocabulary_digest
from dflash_mini_lab.files import replace_file
from dflash_mini_lab.measurement.clock import HostClock
from dflash_mini_lab.measurement.gpu import full_memory_explained
from dflash_mini_lab.methods import by_key
from dflash_mini_lab.packed_linear import bfloat16_is_faster
from dflash_mini_lab.prompts import load_prompts, not_held_out, written_requests
from dflash_mini_lab.settings import CPU, GPU, Settings
from dflash_mini_lab.targets.lean import LeanDecoder
from dflash_mini_lab.targets.lean_build import unsupported_reason
from dflash_mini_lab.targets.library_target import LibraryDecoder
from dflash_mini_lab.targets.loading import LoadedTarget, load_target
from dflash_mini_lab.targets.weights import fetch
from dflash_mini_lab.training.allocator import keep_freed_memory
from dflash_mini_lab.training.blocks import choose_draft_vocabulary
from dflash_mini_lab.training.features import ComputedFeatures
from dflash_mini_lab.training.heads import add_heads
from dflash_mini_lab.training.prompts import hold_out, own_prompts, training_texts
from dflash_mini_lab.training.recipe import Recipe, choose_mask_token, drafter_config, recipe_for
from dflash_mini_lab.training.shards import Sequence, have_features, read_sequences, write_shard
from dflash_mini_lab.training.teacher import begin_answers, continue_batch, equal_length_batches, rows_that_fit
from dflash_mini_lab.training.train import LOG_FILE, RealLoop, train_drafter
from dflash_mini_lab.types import UserError

REAL_LOOP_PROMPTS, REAL_LOOP_TOKENS = 8, 48
FEWEST_SEQUENCES = 16
LONGEST_OPENING = 12
"""Sampled tokens before an answer goes on greedily."""
LONGEST_SEQUENCE = 1024
"""Tokens of a prompt and its answer; a target with a shorter context sets its own limit."""
PROVENANCE_FILE, STATE_FILE, PROMPTS_FILE = "provenance.json", "prepare-state.json", "own-prompts.json"
MADE_FOR_FILE = "made-for.json"
ANSWERS, HELD_OUT = "answers", "held-out"
"""Folders of shards."""


@full_memory_explained()
def prepare(settings: Settings) -> Path:
    """Train a drafter for `settings.target` on `settings.device`; returns the artifact folder. Interrupted, the same command goes
    on. The target speaks in bfloat16 where that is faster there, else in float32, whatever `settings.dtype` is.

    Raises UserError where the target cannot be read, or the time given was too short for any data.
    """
    entry, device = resolve(settings.target), settings.device
    recipe = replace(recipe_for(entry.name, device), seed=settings.seed)
    if settings.prepare_minutes:
        recipe = replace(recipe, minutes=settings.prepare_minutes)
    say = print
    keep_freed_memory()
    where = fetch(entry, settings.cache, say)
    if settings.cpu_threads:
        torch.set_num_threads(settings.cpu_threads)
    dtype = "bfloat16" if bfloat16_is_faster(device) else "float32"
    loaded = load_target(entry.name, where, dtype, entry.prompt_format, device)
    work = settings.cache / "prepare" / entry.name
    work.mkdir(parents=True, exist_ok=True)
    rows = loaded.config.vocab_size
    mask = choose_mask_token(loaded.tokenizer, loaded.stop_ids, loaded.vocabulary, rows)
    config = drafter_config(recipe, loaded.config, entry.name, mask, rows)
    check_fit(config, rows, loaded.config.hidden_size, loaded.config.num_hidden_layers, loaded.stop_ids)
    weights = {path.name: artifacts.sha256(path) for path in sorted(where.glob("*.safetensors"))}
    refuse_other_work(work, {"drafter": config.as_json(), "weights": weights})
    say(f"Preparing a drafter for {entry.name}: {recipe.minutes:g} minutes, kept in {work} (interrupt and go on as you like).")
    collect(loaded, entry, config, recipe, work)
    kept = device == "cpu" and have_features(work / ANSWERS) and have_features(work / HELD_OUT)
    features = None if kept else ComputedFeatures(loaded.decoder(LONGEST_SEQUENCE), config.taps)
    training, held_out = (read_sequences(work / part, device, features) for part in (ANSWERS, HELD_OUT))
    if len(training) < FEWEST_SEQUENCES:
        raise UserError(f"Only {len(training)} answers in the time given: --prepare-minutes needs to be larger.")
    draft_to_target = choose_draft_vocabulary(training, recipe.draft_vocabulary, loaded.vocabulary)
    real = load_target(entry.name, where, "float32", entry.prompt_format, device)
    tensors = target_tensors(real.stock_model(), config)
    began = time.monotonic()
    earlier, start = _earlier_drafter(entry.name, config)
    if start:
        say(f"Training goes on from the drafter in {earlier.parent}.")
    checkpoint, look = train_drafter(
        config,
        recipe,
        tensors,
        draft_to_target,
        training,
        held_out,
        recipe.minutes * 60 * (1 - recipe.data_share - recipe.heads_share),
        work,
        real_loop(real, config, tensors, held_out),
        start,
    )
    folder = settings.artifact_dir or artifacts.prepared_folder(settings.cache, entry.name)
    provenance = {
        "made_with": f"python {(CPU if device == 'cpu' else GPU).script} --prepare",
        "recipe": asdict(recipe),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "dtype": dtype,
        "torch": torch.__version__,
        "target_weights": weights,
        "started_from": artifacts.sha256(earlier) if start else beginning(config, tensors),
        "sequences": len(training),
        "answer_tokens": sum(sequence.answer_tokens for sequence in training),
        "draft_vocabulary_coverage": _coverage(draft_to_target, held_out),
        "wall_minutes_of_last_session": round((time.monotonic() - began) / 60, 1),
        "last_look": look,
    }
    config = replace(config, tokenizer_sha256=vocabulary_digest(loaded.tokenizer.get_vocab()))
    write_artifacts(folder, entry.name, config, checkpoint, provenance, work / LOG_FILE)
    add_heads(folder, training, held_out, tensors, recipe, recipe.minutes * 60 * recipe.heads_share, work)
    reached = [look[name] or "not measured, too few answers" for name in ("held_out_tau", "real_loop_tau")]
    say(f"Held-out acceptance length τ {reached[0]}, in the real loop {reached[1]}. Artifacts: {folder}")
    if coverage := provenance["draft_vocabulary_coverage"]:
        say(f"The draft vocabulary of {len(draft_to_target)} tokens has {coverage:.1%} of the held-out answers' tokens.")
    return folder


def beginning(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> str:
    """What `train.warm_start` begins with, for the provenance."""
    fits = not config.target_hidden_size and any(name.startswith("warm.") for name in tensors)
    return "the target's own last layers" if fits else "random weights"


def _earlier_drafter(target: str, config: DrafterConfig) -> tuple[Path, dict[str, Tensor] | None]:
    """The tensor file of the drafter that the repository has for `target`, and its tensors where its shape is `config`'s."""
    folder = artifacts.COMMITTED / target
    path = folder / TENSOR_FILE
    if not path.is_file():
        return path, None
    found, tensors = load_checkpoint(folder)
    same = replace(found, block_size=config.block_size, tokenizer_sha256=config.tokenizer_sha256) == config
    return path, tensors if same else None


def refuse_other_work(work: Path, made_for: dict[str, Any]) -> None:
    """Raise UserError where `work` was begun for other weights or another drafter; else note there what it is for."""
    path = work / MADE_FOR_FILE
    if not path.exists():
        path.write_text(json.dumps(made_for) + "\n", encoding="utf-8")
        return
    earlier = json.loads(path.read_text(encoding="utf-8"))
    for name, value in made_for.items():
        if earlier.get(name) != value:
            raise UserError(f"{work}: was begun with other {name}; remove that folder to start anew.")


def collect(loaded: LoadedTarget, entry: Entry, config: DrafterConfig, recipe: Recipe, work: Path) -> None:
    """Fill `work/answers` until the data's share of the time is used up; earlier sessions' time counts. The entry's training
    texts are used, and none of its prompts."""
    seconds = recipe.minutes * 60 * recipe.data_share
    spent = _read_state(work)
    if spent >= seconds:
        return
    longest = min(LONGEST_SEQUENCE, loaded.config.max_position_embeddings) - recipe.answer_tokens - LONGEST_OPENING
    if longest < 1:
        raise UserError(f"{loaded.where}: a context of {loaded.config.max_position_embeddings} tokens is too short to train on.")
    decoder = loaded.decoder(LONGEST_SEQUENCE)
    began = time.monotonic() - spent
    own = _own_texts(decoder, loaded, recipe, work / PROMPTS_FILE, began + seconds * recipe.own_prompts_share)
    spent = time.monotonic() - began
    measured = [prompt for path in (entry.prompt_file, entry.calibration_file) for prompt in load_prompts(path)]

    def encoded(texts: Iterable[str]) -> dict[str, list[int]]:
        wanted = list(dict.fromkeys(not_held_out(list(texts), measured)))
        return {text: ids for text, ids in zip(wanted, loaded.encode_prompts(wanted), strict=True) if 0 < len(ids) <= longest}

    prompts = encoded([*own, *written_requests(entry.training_file)])
    held_out = {text: prompts.pop(text) for text in hold_out(prompts, recipe.held_out_prompts)}
    prompts = encoded(training_texts(list(prompts), entry.training_file, recipe.seed))
    rows = _batch(decoder, recipe, max(map(len, (*prompts.values(), *held_out.values())), default=1))
    order = random.Random(recipe.seed)
    answers = [
        (ANSWERS, batch, order.randint(1, LONGEST_OPENING) if again else 0)
        for again in range(1 + recipe.openings)
        for batch in equal_length_batches(list(prompts.values()), rows, recipe.seed + again)
    ]
    order.shuffle(answers)
    judges = [(HELD_OUT, batch, 0) for batch in equal_length_batches(list(held_out.values()), rows, recipe.seed, 1)]
    batches = [batch for pair in zip_longest(answers, judges) for batch in pair if batch]  # both, however little time there is
    taps = config.taps if loaded.device == "cpu" else ()
    began = time.monotonic() - spent  # reading thousands of requests is no part of a short preparation's time
    bar = tqdm(total=round(seconds), initial=round(spent), unit="s", disable=None, desc="answers")
    stops = sorted(loaded.stop_ids)
    for index, (folder, batch, opening) in enumerate(batches):
        path = work / folder / f"{index:05d}.safetensors"
        if not path.exists():
            if opening:
                batch = begin_answers(decoder, batch, opening, stops, recipe.seed + index, loaded.vocabulary)
                if not len(batch):
                    continue
            answered = continue_batch(decoder, batch, recipe.answer_tokens, stops, taps, vocabulary=loaded.vocabulary)
            write_shard(path, answered)
            spent = time.monotonic() - began
            _write_state(work, spent)
            bar.n = min(round(spent), bar.total)
            bar.refresh()
        if spent >= seconds:
            break
    bar.close()
    _write_state(work, seconds)


def _batch(decoder: LeanDecoder | LibraryDecoder, recipe: Recipe, longest_prompt: int) -> int:
    """Prompts that are answered together: the recipe's, as far as a GPU's memory takes them. What the library's cache takes is
    not known before it is full, so it gets as many as a CPU."""
    if not decoder.embedding.is_cuda:
        return recipe.teacher_batch
    if not isinstance(decoder, LeanDecoder):
        return min(recipe.teacher_batch, Recipe.teacher_batch)
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return min(recipe.teacher_batch, rows_that_fit(decoder, longest_prompt + recipe.answer_tokens, free))


def _own_texts(decoder: Any, loaded: LoadedTarget, recipe: Recipe, path: Path, until: float) -> list[str]:
    """The target's own prompts, sampled until `until` (monotonic seconds) in the first session, read back in later ones."""
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    texts = own_prompts(decoder, loaded, recipe, until, _batch(decoder, recipe, recipe.own_prompt_tokens))
    path.write_text(json.dumps(texts, ensure_ascii=False, indent=0), encoding="utf-8")
    return texts


def target_tensors(model: Any, config: DrafterConfig) -> dict[str, Tensor]:
    """What training needs of the target, float32: embedding, head, and its last layers under the drafter's names (`warm.`), where
    they are such as the drafter's own; a drafter for another family begins at random."""
    tensors = {"embedding": model.get_input_embeddings().weight, "head": model.get_output_embeddings().weight}
    if unsupported_reason(model.config):
        return {name: tensor.detach().float() for name, tensor in tensors.items()}
    base = model.model
    final = getattr(base, "norm", None) or base.embedding_norm
    tensors["warm.norm.weight"] = final.weight
    for index, layer in enumerate(base.layers[-config.layers :]):
        name = f"warm.layers.{index}."
        mlp = getattr(layer, "mlp", None) or layer.feed_forward
        parts = ("gate_proj", "up_proj", "down_proj") if hasattr(mlp, "gate_proj") else ("w1", "w3", "w2")
        for ours, theirs in zip(("gate", "up", "down"), parts, strict=True):
            tensors[f"{name}mlp.{ours}_proj.weight"] = getattr(mlp, theirs).weight
        attention = getattr(layer, "self_attn", None)
        if attention is not None:
            for part in "qkv":
                tensors[f"{name}self_attn.{part}_proj.weight"] = getattr(attention, f"{part}_proj").weight
            out = getattr(attention, "o_proj", None) or attention.out_proj
            tensors[f"{name}self_attn.o_proj.weight"] = out.weight
        before = getattr(layer, "input_layernorm", None) or layer.operator_norm
        after = getattr(layer, "post_attention_layernorm", None) or layer.ffn_norm
        tensors[f"{name}input_layernorm.weight"] = before.weight
        tensors[f"{name}post_attention_layernorm.weight"] = after.weight
        if index == 0:
            tensors["warm.hidden_norm.weight"] = before.weight
    return {name: tensor.detach().float() for name, tensor in tensors.items()}


def real_loop(
    loaded: LoadedTarget, config: DrafterConfig, tensors: dict[str, Tensor], held_out: list[Sequence]
) -> RealLoop:
    """τ (request macro) of method 01 in the decode loop on held-out prompts: training accuracy is not acceptance."""
    target = loaded.build(capacity=LONGEST_SEQUENCE, measure=False)
    target.prepare_steps((config.block_size,), config.taps)
    method, clock = by_key("01"), HostClock()
    spread = held_out[:: max(1, len(held_out) // REAL_LOOP_PROMPTS)][:REAL_LOOP_PROMPTS]
    prompts = [sequence.tokens[: sequence.prompt_length].tolist() for sequence in spread]

    def measure(config: DrafterConfig, checkpoint: dict[str, Tensor]) -> float:
        drafter = BlockDrafter(config, checkpoint, target.embedding, tensors["head"], LONGEST_SEQUENCE, measure=False)
        lengths = []
        for prompt in prompts:
            answer = decode(target, prompt, method, REAL_LOOP_TOKENS, clock, drafter)
            if answer.steps:
                lengths.append((len(answer.tokens) - 1) / len(answer.steps))
        return sum(lengths) / len(lengths) if lengths else float("nan")

    return measure


def write_artifacts(
    folder: Path, target: str, config: DrafterConfig, checkpoint: dict[str, Tensor], provenance: dict[str, Any], log: Path
) -> None:
    save_checkpoint(folder, config, checkpoint)
    (folder / PROVENANCE_FILE).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
    if log.exists():
        shutil.copyfile(log, folder / LOG_FILE)
    artifacts.write_manifest(folder, target, only=(CONFIG_FILE, TENSOR_FILE, PROVENANCE_FILE, LOG_FILE))


def _coverage(draft_to_target: Tensor, held_out: list[Sequence]) -> float | None:
    """Share of held-out answer tokens that the draft vocabulary contains."""
    if not held_out:
        return None
    tokens = torch.cat([sequence.tokens[sequence.prompt_length :] for sequence in held_out])
    return round(torch.isin(tokens, draft_to_target).float().mean().item(), 4)


def _read_state(work: Path) -> float:
    path = work / STATE_FILE
    return json.loads(path.read_text(encoding="utf-8"))["data_seconds"] if path.exists() else 0.0


def _write_state(work: Path, seconds: float) -> None:
    replace_file(work / STATE_FILE, json.dumps({"data_seconds": round(seconds, 1)}).encode("utf-8"))
