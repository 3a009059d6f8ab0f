"""Prompts that the target writes itself: user turns of a chat model, openings of a base model."""
from __future__ import annotations

import hashlib
import random
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from dflash_mini_lab.prompts import training_seeds, written_requests
from dflash_mini_lab.targets.lean import LeanDecoder
from dflash_mini_lab.targets.library_target import LibraryDecoder
from dflash_mini_lab.targets.loading import LoadedTarget
from dflash_mini_lab.training.recipe import Recipe
from dflash_mini_lab.training.teacher import continue_batch

SHORTEST = 12
"""Characters; shorter texts are greetings and fragments."""
HELD_OUT_BATCH = 16
"""Held-out prompts of one length."""
FEWEST_SEEDS = 1000
"""A drafter learns the seeds' patterns by heart: there are at most half as many seeds as own prompts, or this many."""
PLACE = "\u241f"
"""Stands for the user's words while the template is cut open; a character that no template contains."""


def own_prompts(
    decoder: LeanDecoder | LibraryDecoder, loaded: LoadedTarget, recipe: Recipe, until: float, rows: int
) -> list[str]:
    """Texts sampled at temperature 1, `rows` at a time, until `until` (monotonic seconds), without duplicates, sorted.

    Chat target: the template up to the start of the user turn, continued to the end-of-turn token; a turn still unfinished at
    `own_prompt_tokens` is cut after its last whole sentence. Base target: a random piece of text from the
    beginning-of-sequence token (or the end-of-text one).
    """
    chat = loaded.prompt_format == "chat"
    opening = _user_turn_opening(loaded) if chat else _text_opening(loaded)
    generator = torch.Generator(decoder.embedding.device).manual_seed(recipe.seed)
    stops = sorted(loaded.stop_ids)
    found: set[str] = set()
    began = time.monotonic()
    sampled = partial(
        continue_batch, decoder, new_tokens=recipe.own_prompt_tokens, stop_ids=stops, candidates=0, temperature=1.0,
        generator=generator, vocabulary=loaded.vocabulary,
    )  # fmt: skip
    bar = tqdm(total=max(round(until - began), 1), unit="s", disable=None, desc="own prompts")
    while time.monotonic() < until:
        batch = torch.tensor([opening] * rows)
        for trajectory in sampled(batch):
            text = loaded.decode_text(trajectory.tokens[len(opening) :]).strip()
            if chat and trajectory.tokens[-1] not in loaded.stop_ids:
                text = _whole_sentences(text)
            elif not chat:
                words = text.split()
                text = " ".join(words[: random.Random(len(found)).randint(4, 24)])
            if len(text) >= SHORTEST:
                found.add(text)
        bar.n = min(round(time.monotonic() - began), bar.total)
        bar.refresh()
    bar.close()
    return sorted(found)


def hold_out(prompts: Mapping[str, Sequence[int]], most: int) -> list[str]:
    """Up to `most` of the texts (text → token ids), kept out of training in any form; what training is judged on.

    An eighth of each token length, at most HELD_OUT_BATCH of it, the commonest lengths first: each length is one batch. Which
    texts those are, their digests say: the first of a sorted list would all begin alike.
    """
    by_length: dict[int, list[str]] = defaultdict(list)
    for text in sorted(prompts, key=lambda text: hashlib.sha256(text.encode()).digest()):
        by_length[len(prompts[text])].append(text)
    chosen: list[str] = []
    for texts in sorted(by_length.values(), key=len, reverse=True):
        chosen += texts[: min(len(texts) // 8, HELD_OUT_BATCH, most - len(chosen))]
    return chosen


def training_texts(prompts: Sequence[str], seeds: Path, seed: int) -> list[str]:
    """`prompts`, those that the target wrote itself and the file's written ones, and some of the file's filled patterns."""
    written = set(written_requests(seeds))
    own = sum(text not in written for text in prompts)
    patterns = [text for text in training_seeds(seeds) if text not in written]
    random.Random(seed).shuffle(patterns)
    return [*prompts, *patterns[: max(own // 2, FEWEST_SEEDS)]]


def _whole_sentences(text: str) -> str:
    """`text` up to its last sentence end; nothing where it has none."""
    ends = list(re.finditer(r"[.?!:][\"')]?(?=\s)", text))
    return text[: ends[-1].end()] if ends else ""


def _user_turn_opening(loaded: LoadedTarget) -> list[int]:
    turns = [{"role": "user", "content": PLACE}]
    before = loaded.tokenizer.apply_chat_template(turns, tokenize=False).split(PLACE)[0]
    return list(loaded.tokenizer(before, add_special_tokens=False)["input_ids"])


def _text_opening(loaded: LoadedTarget) -> list[int]:
    tokenizer = loaded.tokenizer
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return [0 if start is None else start]
