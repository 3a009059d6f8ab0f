"""A target of a study model's full shape with random weights, for speed and memory where its weights cannot be had.

    python tools/random_target.py lfm2.5-350m ./random-lfm
    python run_cpu.py --target ./random-lfm --methods 00 --peers generate --tokens 32
    python run_cpu.py --target ./random-lfm --artifact-dir ./random-lfm/drafter --methods 00,01

Its text is noise; its arithmetic, cache and cost are the real model's, and so are those of the untrained drafter of the model's
recipe that lies in its folder `drafter`. The tokenizer is the embedded target's, filled up with unused words to the model's
vocabulary. Run it in the lab's environment (`.venv`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

SHAPES: dict[str, dict[str, Any]] = {
    "lfm2.5-350m": {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args(argv)
    make(chosen.shape, chosen.folder)
    return 0


def make(shape: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from dflash_mini_lab import artifacts, catalog
    from dflash_mini_lab.drafters.checkpoint import DRAFT_TO_TARGET, save_checkpoint
    from dflash_mini_lab.settings import resolve
    from dflash_mini_lab.targets.weights import fetch
    from dflash_mini_lab.training.model import TrainableDrafter
    from dflash_mini_lab.training.recipe import RECIPES, Recipe, drafter_config

    torch.manual_seed(7)
    options = dict(SHAPES[shape])
    config = AutoConfig.for_model(options.pop("model_type"), **options, eos_token_id=None, pad_token_id=None)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(fetch(catalog.TARGETS["smollm2-135m"], resolve({}, {}).cache, print))
    tokenizer.chat_template = None
    tokenizer.add_tokens([f"<unused-{index}>" for index in range(config.vocab_size - len(tokenizer))])
    tokenizer.save_pretrained(folder)
    recipe, name = RECIPES.get(shape, Recipe()), catalog.resolve(str(folder)).name
    drafter = drafter_config(recipe, config, name, config.vocab_size - 1, config.vocab_size)
    kept = torch.randperm(config.vocab_size)[: recipe.draft_vocabulary].sort().values.to(torch.int32)
    save_checkpoint(folder / "drafter", drafter, {**TrainableDrafter(drafter).state_dict(), DRAFT_TO_TARGET: kept})
    artifacts.write_manifest(folder / "drafter", name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
