"""Heads for a drafter that is there already: the part of `--prepare` that can be run again by itself.

    prepare_heads(Settings(target="smollm2-135m"), folder_of_the_drafter, work_of_prepare, minutes=20)
"""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from dflash_mini_lab.catalog import resolve
from dflash_mini_lab.drafters.checkpoint import load_checkpoint
from dflash_mini_lab.settings import Settings
from dflash_mini_lab.targets.loading import load_target
from dflash_mini_lab.targets.weights import fetch
from dflash_mini_lab.training.heads import HeadRecipe, TrainedHeads, add_heads
from dflash_mini_lab.training.prepare import ANSWERS, HELD_OUT, target_tensors
from dflash_mini_lab.training.recipe import RECIPES, Recipe
from dflash_mini_lab.training.shards import read_sequences


def prepare_heads(
    settings: Settings, folder: Path, work: Path, minutes: float, recipe: HeadRecipe | None = None
) -> TrainedHeads:
    """Train heads for `settings.target`'s drafter in `folder`, on the answers that its preparation left in `work`.

    Writes heads.safetensors, the files of methods 12 and 14, the log and the manifest to `folder`; interrupted, the same call
    goes on. The target's weights are fetched if need be. Raises UserError where a part is missing or does not fit.
    """
    entry = resolve(settings.target)
    config, _ = load_checkpoint(folder)
    if settings.cpu_threads:
        torch.set_num_threads(settings.cpu_threads)
    loaded = load_target(entry.name, fetch(entry, settings.cache, print), "float32", entry.prompt_format)
    tensors = target_tensors(loaded.stock_model(), config)
    base = replace(RECIPES.get(entry.name, Recipe()), seed=settings.seed)
    training, held_out = read_sequences(work / ANSWERS), read_sequences(work / HELD_OUT)
    return add_heads(folder, training, held_out, tensors, base, minutes * 60, work, recipe)
