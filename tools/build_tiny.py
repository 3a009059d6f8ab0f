"""Builds artifacts/tiny: the tiny reference target, its block drafter and heads, and the manifest that pins them. Deterministic.

    python tools/build_tiny.py                 writes artifacts/tiny (about three minutes on one core)
    python tools/build_tiny.py --folder other  writes elsewhere, to compare

One thread, one seed, deterministic algorithms, float32, and a clock that counts steps: a second build on the same machine is the
same, byte for byte. On another one the last bits of the weights may differ, and with them the digests. Text:
benchmarks/tiny/text.txt. The target is trained here; drafter and heads by the lab's own training. Needs the lab's environment
(`.venv`); what it builds needs NumPy only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dflash_mini_lab.cli import NUMPY_THREADS

if __name__ == "__main__":  # before anything loads NumPy, which cannot be told later
    os.environ.update(dict.fromkeys(NUMPY_THREADS, "1"))

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_mini_lab import artifacts
from dflash_mini_lab.catalog import TARGETS
from dflash_mini_lab.drafters.checkpoint import save_checkpoint, save_tensors
from dflash_mini_lab.prompts import load_prompts, refuse_overlap, training_seeds
from dflash_mini_lab.targets import tiny
from dflash_mini_lab.targets.lean_build import build_lean_decoder
from dflash_mini_lab.training.blocks import choose_draft_vocabulary
from dflash_mini_lab.training.heads import HeadRecipe, train_heads, write_heads
from dflash_mini_lab.training.prepare import target_tensors
from dflash_mini_lab.training.recipe import Recipe, drafter_config
from dflash_mini_lab.training.shards import read_sequences, write_shard
from dflash_mini_lab.training.teacher import continue_batch
from dflash_mini_lab.training.train import train_drafter

NAME = "tiny"
READ_HERE = (
    "block_size", "layers", "tap_layers", "draft_vocabulary", "answer_tokens", "sequences", "anchors", "teacher_share",
    "learning_rate", "warm_up", "final_rate", "float32", "seed",
)  # fmt: skip
NOT_SCORED = -100
"""Label of a position without a next word."""


@dataclass(frozen=True)
class TinyRecipe:
    """Steps are optimiser steps; `rows` is per step. Lengths are in words and signs."""

    seed: int = 7
    hidden_size: int = 64
    intermediate_size: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    positions: int = 160
    target_steps: int = 1400
    rows: int = 24
    row_length: int = 44
    target_rate: float = 5e-3
    warm_up: float = 0.05
    unknown_share: float = 0.08
    """Words that the target reads as unknown while it learns, so that one means something to it."""
    leaps: float = 0.25
    """How often a sentence is followed by a random one, although its paragraph goes on."""
    ends: float = 0.25
    """How often the end of a paragraph ends the text."""
    opening_lengths: tuple[int, ...] = (3, 4, 5, 6, 7)
    own_openings: int = 3200
    drafter_steps: int = 3000
    head_steps: int = 800
    training: Recipe = field(
        default_factory=lambda: Recipe(
            block_size=4,
            layers=2,
            tap_layers=(0, 1),
            draft_vocabulary=768,
            answer_tokens=28,
            sequences=16,
            anchors=12,
            learning_rate=3e-3,
            float32=True,
        )
    )
    """Of the drafter, and of what its heads share with it."""
    head_training: HeadRecipe = field(default_factory=lambda: HeadRecipe(candidates=32))


def build(folder: Path, recipe: TinyRecipe | None = None, text: str | None = None) -> dict[str, Any]:
    """Train and write everything under `folder`; returns what provenance.json says. `text`: a sentence a line, paragraphs parted
    by an empty line."""
    recipe = recipe or TinyRecipe()
    text = held_out_text() if text is None else text
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    words = tiny.Words.of(text)
    target, target_loss = train_target(recipe, words, text)
    say(f"The target's loss on its text: {target_loss}")
    model = drafter_config(recipe.training, target.config, NAME, tiny.MASK, len(words))
    tensors = target_tensors(target, model)
    with TemporaryDirectory() as place:
        work = Path(place)
        answer_openings(recipe, target, words, text, model.taps, work)
        training, held_out = (read_sequences(work / side) for side in ("training", "held-out"))
        say(f"It answered {len(training)} openings, and {len(held_out)} that nothing is trained on.")
        vocabulary = choose_draft_vocabulary(training, recipe.training.draft_vocabulary, len(words))
        common = (training, held_out)
        steps = recipe.drafter_steps
        checkpoint, look = train_drafter(model, recipe.training, tensors, vocabulary, *common, steps, work, now=step_clock())
        steps, choices = recipe.head_steps, recipe.head_training
        heads = train_heads(model, recipe.training, checkpoint, tensors, *common, steps, work, choices, now=step_clock())
        answered = torch.cat([sequence.tokens[sequence.prompt_length :] for sequence in held_out])

    folder.mkdir(parents=True, exist_ok=True)
    save_tensors({name: t for name, t in target.state_dict().items() if name != "lm_head.weight"}, folder / tiny.TENSOR_FILE)
    write_json(folder / tiny.CONFIG_FILE, target_config(recipe, len(words)))
    write(folder / tiny.WORD_FILE, "".join(f"{word}\n" for word in words.words))
    save_checkpoint(folder, model, checkpoint)
    write_heads(folder, heads)
    provenance = {
        "made_with": "python tools/build_tiny.py",
        "recipe": facts_of(recipe),
        "text_words": len(tiny.PIECES.findall(text)),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "target_loss": target_loss,
        "answers": len(training),
        "draft_vocabulary_coverage": round(torch.isin(answered, vocabulary).float().mean().item(), 4),
        "drafter": without_seconds(look),
        "heads": without_seconds(heads.look),
        "torch": torch.__version__.split("+")[0],
    }
    write_json(folder / "provenance.json", provenance)
    artifacts.write_manifest(folder, NAME)
    return provenance


def held_out_text() -> str:
    """The text, once it is sure that no prompt of the lab's begins one of its lines."""
    entry = TARGETS[NAME]
    refuse_overlap(load_prompts(entry.prompt_file), load_prompts(entry.calibration_file), training_seeds(entry.training_file))
    return entry.training_file.read_text(encoding="utf-8")


def target_config(recipe: TinyRecipe, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.hidden_size // recipe.heads,
        "max_position_embeddings": recipe.positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": tiny.START,
        "eos_token_id": tiny.END,
    }


# The target: next word, on the sentences of the text in ever other company.


def train_target(recipe: TinyRecipe, words: tiny.Words, text: str) -> tuple[LlamaForCausalLM, float]:
    """The model and its mean loss over the last tenth of the steps."""
    torch.manual_seed(recipe.seed)
    own = {"pad_token_id": None, "initializer_range": recipe.hidden_size**-0.5}  # the library's 0.02 is for wide models
    model = LlamaForCausalLM(LlamaConfig(**target_config(recipe, len(words)), **own))
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.target_rate, betas=(0.9, 0.95), weight_decay=0.1)
    first = max(1, round(recipe.warm_up * recipe.target_steps))
    curve = torch.optim.lr_scheduler.SequentialLR(
        optimiser,
        [
            torch.optim.lr_scheduler.LinearLR(optimiser, 1 / first, total_iters=first),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, recipe.target_steps - first)),
        ],
        [first],
    )
    rows, losses = text_rows(recipe, words, text), []
    for _ in range(recipe.target_steps):
        ids = torch.tensor([next(rows) for _ in range(recipe.rows)])
        unknown = (torch.rand(ids.shape) < recipe.unknown_share) & (ids >= len(tiny.SPECIAL))
        logits = model(ids.masked_fill(unknown, tiny.UNKNOWN)[:, :-1], use_cache=False).logits
        labels = ids[:, 1:].masked_fill(ids[:, 1:] == tiny.MASK, NOT_SCORED)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NOT_SCORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        curve.step()
        losses.append(loss.item())
    last = losses[-max(1, len(losses) // 10) :]
    return model.eval(), round(sum(last) / len(last), 4)


def text_rows(recipe: TinyRecipe, words: tiny.Words, text: str) -> Iterator[list[int]]:
    """Rows of `row_length` ids, for ever: START, then sentences, each followed by the next of its paragraph or by a random one.

    In ever other company, a sentence is learned by its own words and not only by what stands before it.
    """
    paragraphs = [[words.encode(line)[1:] for line in paragraph.splitlines()] for paragraph in text.strip().split("\n\n")]
    order = random.Random(recipe.seed)
    while True:
        row, following = [tiny.START], []
        while len(row) < recipe.row_length:
            if not following or order.random() < recipe.leaps:
                paragraph = order.choice(paragraphs)
                following = paragraph[order.randrange(len(paragraph)) :]
            row += following[0]
            following = following[1:]
            if not following and order.random() < recipe.ends:
                row.append(tiny.END)
                break
        row += [tiny.MASK] * (recipe.row_length - len(row))
        yield row[: recipe.row_length]


# What the target itself says: openings from the text and of its own, each answered greedily.


def answer_openings(
    recipe: TinyRecipe, target: LlamaForCausalLM, words: tiny.Words, text: str, taps: Sequence[int], work: Path
) -> None:
    """Shards `work/training` of answers to openings of the text's lines and of the target's own, and `work/held-out` of answers
    to an eighth of its own."""
    decoder = build_lean_decoder(target, capacity=recipe.positions, measure=False)
    generator = torch.Generator().manual_seed(recipe.seed)
    lines = [words.encode(line) for line in text.splitlines() if line]
    for side in ("training", "held-out"):
        (work / side).mkdir()
    for length in recipe.opening_lengths:
        blank = torch.full((recipe.own_openings // len(recipe.opening_lengths), 1), tiny.START)
        sampled = continue_batch(decoder, blank, length, (), temperature=1.0, generator=generator)
        own = sorted({tuple(found.tokens) for found in sampled if tiny.END not in found.tokens})
        held_out = own[::8]
        known = {tuple(line[: 1 + length]) for line in lines if len(line) > 1 + length}
        for side, openings in (("training", {*own, *known} - {*held_out}), ("held-out", held_out)):
            prompts = torch.tensor(sorted(openings))
            answers = continue_batch(decoder, prompts, recipe.training.answer_tokens, (tiny.END,), taps)
            write_shard(work / side / f"{length:02}.safetensors", answers)


# Small parts.


def step_clock() -> Callable[[], float]:
    """A clock for the training loops, which train for so many seconds: every reading is one later, and there is one a step."""
    readings = count()
    return lambda: float(next(readings))


def facts_of(recipe: TinyRecipe) -> dict[str, Any]:
    """The recipe without what the lab's own preparation alone reads of it."""
    facts = asdict(recipe)
    return facts | {"training": {name: facts["training"][name] for name in READ_HERE}}


def without_seconds(look: dict[str, Any]) -> dict[str, Any]:
    """A training loop's last look without the readings of `step_clock`."""
    return {name: value for name, value in look.items() if name not in ("training_seconds", "real_loop_tau")}


def write_json(path: Path, content: dict[str, Any]) -> None:
    write(path, json.dumps(content, indent=2) + "\n")


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def say(line: str) -> None:
    print(line, flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=artifacts.COMMITTED / NAME)
    build(parser.parse_args(argv).folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
