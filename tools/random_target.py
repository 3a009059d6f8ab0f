"""A target of a study model's full shape with random weights, for speed and memory where its weights cannot be had.

    python tools/random_target.py lfm2.5-350m ./random-lfm
    python run_cpu.py --target ./random-lfm --methods 00 --peers generate --tokens 32

Its text is noise; its arithmetic, cache and cost are the real model's. The tokenizer is the embedded target's, filled up with
unused words to the model's vocabulary. Run it in the lab's environment (`.venv`).
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

    from dflash_mini_lab.catalog import TARGETS
    from dflash_mini_lab.settings import resolve
    from dflash_mini_lab.targets.weights import fetch

    torch.manual_seed(7)
    options = dict(SHAPES[shape])
    config = AutoConfig.for_model(options.pop("model_type"), **options, eos_token_id=None, pad_token_id=None)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(fetch(TARGETS["smollm2-135m"], resolve({}, {}).cache, print))
    tokenizer.chat_template = None
    tokenizer.add_tokens([f"<unused-{index}>" for index in range(config.vocab_size - len(tokenizer))])
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
