"""A small LFM2 or Qwen3 trained on text, in a folder as a user has it: the study's families where their weights cannot be had.

    python tools/build_small.py lfm2 ./small-lfm2
    python run_cpu.py --target ./small-lfm2 --prepare --prepare-minutes 10
    python run_cpu.py --target ./small-lfm2 --prompts ./small-lfm2/prompts.json --prompt-limit 200

Layers are the real model's in number, order and kind; widths are small. The text is docstrings of the pinned transformers'
models, which every lab environment has: English about software, under Apache-2.0, read where it is installed and never copied
into the repository. One module in five is held out, and the prompts in the folder are openings of its lines. One thread, one
seed, a fixed number of steps: a second build on the same machine is the same, byte for byte. Run it in the lab's environment
(`.venv`).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

START, END, UNUSED = "<|startoftext|>", "<|endoftext|>", "<|unused|>"
NOT_SCORED = -100
HELD_OUT_ONE_IN = 5
SHORTEST_PARAGRAPH = 60
"""Letters; shorter ones are headings and single names."""
PROMPTS_FILE, PROVENANCE_FILE = "prompts.json", "provenance.json"


@dataclass(frozen=True)
class Recipe:
    """`rows` pieces of text of `row_tokens` tokens are a step."""

    model: Mapping[str, Any]
    start: bool
    """Whether the tokenizer puts a start token before a text, as LFM2's does and Qwen3's does not."""
    unused_rows: int
    """Rows of the embedding beyond the tokenizer's last id, as Qwen3 has them."""
    vocabulary: int = 2048
    steps: int = 200
    rows: int = 12
    row_tokens: int = 160
    rate: float = 1e-2
    warm_up: float = 0.04
    prompts: int = 200
    prompt_words: tuple[int, int] = (5, 12)
    modules: str = "models/[a-d]*/modeling_*.py"
    """Of transformers; a test takes fewer."""
    seed: int = 7


COMMON = {
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
RECIPES = {
    "lfm2": Recipe(
        model={
            "model_type": "lfm2",
            "hidden_size": 128,
            "intermediate_size": 384,  # made 256 by the configuration's own rule: two thirds, rounded up
            "block_multiple_of": 128,
            "num_hidden_layers": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            **COMMON,
        },
        start=True,
        unused_rows=0,
    ),
    "qwen3": Recipe(
        model={
            "model_type": "qwen3",
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 28,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,  # wider than hidden_size / heads, as Qwen3-0.6B's
            **COMMON,
        },
        start=False,
        unused_rows=32,
        steps=120,
    ),
}


def build(recipe: Recipe, folder: Path, say: Any = print) -> None:
    """`folder` with the model, its tokenizer, prompts that it was not trained on, and what made it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        training, held_out = modules_text(recipe)
        text = "\n\n".join(paragraph for module in training for paragraph in module)
        tokenizer = make_tokenizer(recipe, text)
        model = make_model(recipe, tokenizer)
        count = sum(parameter.numel() for parameter in model.parameters())
        say(f"{count:,} parameters, {len(text):,} letters of {len(training)} modules' docstrings.")
        losses = train(recipe, model, texts_of(training, tokenizer), say)
        model.eval()
        scored = held_out_loss(recipe, model, texts_of(held_out, tokenizer))
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        prompts = choose_prompts(recipe, training, held_out)
        write_json(folder / PROMPTS_FILE, {"about": "Openings of lines that were held out.", "prompts": prompts})
        facts = {
            "made_with": "tools/build_small.py",
            "text": f"docstrings of transformers {version('transformers')}, Apache-2.0",
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "letters": len(text),
            "parameters": count,
            "steps": recipe.steps,
            "training_loss": losses,
            "held_out_loss": scored,
        }
        write_json(folder / PROVENANCE_FILE, facts)
        say(f"Held-out loss {scored} a token after {recipe.steps} steps. The model is in {folder}")
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


# The text.


def modules_text(recipe: Recipe) -> tuple[list[list[str]], list[list[str]]]:
    """Paragraphs of each module's docstrings, for training and held out; no paragraph comes twice, in either."""
    package = Path(transformers.__file__).parent
    seen: set[str] = set()
    sides: tuple[list[list[str]], list[list[str]]] = ([], [])
    for path in sorted(package.glob(recipe.modules)):
        name = path.relative_to(package).as_posix()
        paragraphs = [text for text in docstring_paragraphs(path) if not (text in seen or seen.add(text))]  # type: ignore[func-returns-value]
        if paragraphs:
            number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
            sides[number % HELD_OUT_ONE_IN == 0].append(paragraphs)
    return sides


def docstring_paragraphs(path: Path) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    texts = [ast.get_docstring(node) or "" for node in nodes]
    paragraphs = [part.strip() for text in texts for part in re.split(r"\n\s*\n", text)]
    return [part for part in paragraphs if sum(letter.isalpha() for letter in part) >= SHORTEST_PARAGRAPH]


def choose_prompts(recipe: Recipe, training: list[list[str]], held_out: list[list[str]]) -> list[dict[str, str]]:
    """Openings of held-out lines, each another one, and none to be found in the training text."""
    known = " ".join(" ".join(paragraph.split()) for module in training for paragraph in module)
    order = random.Random(recipe.seed)
    openings: dict[str, None] = {}
    for words in (line.split() for module in held_out for paragraph in module for line in paragraph.split("\n")):
        opening = " ".join(words[: order.randint(*recipe.prompt_words)])
        if len(words) >= recipe.prompt_words[0] and opening[0].isalpha() and opening not in known:
            openings[opening] = None
    texts = sorted(openings, key=lambda text: hashlib.sha256(text.encode()).digest())[: recipe.prompts]
    if len(texts) < recipe.prompts:
        raise SystemExit(f"The held-out text has {len(texts)} openings, and {recipe.prompts} are asked for.")
    return [{"id": f"opening-{number:03d}", "category": "docstring", "text": text} for number, text in enumerate(texts, start=1)]


# Tokenizer and model.


def make_tokenizer(recipe: Recipe, text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE, so that no text is unknown to it."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = [*([START] if recipe.start else []), END, UNUSED]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(text.split("\n\n"), trainer)
    if recipe.start:
        inner.post_processor = processors.TemplateProcessing(f"{START} $A", special_tokens=[(START, 0)])
    roles = {"bos_token": START} if recipe.start else {}
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, additional_special_tokens=[UNUSED], **roles)


def make_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Any:
    torch.manual_seed(recipe.seed)
    options = dict(recipe.model)
    config = AutoConfig.for_model(
        options.pop("model_type"),
        **options,
        vocab_size=len(tokenizer) + recipe.unused_rows,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


# Training: next-token loss on pieces of text that begin at a paragraph.


def texts_of(modules: list[list[str]], tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], list[int]]]:
    """Of each module its token ids, an END behind them, and where its paragraphs begin."""
    texts = []
    for module in modules:
        ids: list[int] = []
        begins = []
        for paragraph in module:
            begins.append(len(ids))
            ids += tokenizer(paragraph + "\n\n", add_special_tokens=False)["input_ids"]
        texts.append(([*ids, tokenizer.eos_token_id], begins))
    return texts


def pieces(recipe: Recipe, texts: Sequence[tuple[list[int], list[int]]], first: int, order: random.Random) -> list[Tensor]:
    """Every paragraph's piece, shuffled: `row_tokens` ids from where it begins, NOT_SCORED past the module's end. A start token
    comes first; without one in the tokenizer, END does in half of them, so that the model knows both ways to begin."""
    rows = []
    for ids, begins in texts:
        for begin in begins:
            head = [first] if recipe.start or order.random() < 0.5 else []
            row = [*head, *ids[begin:]][: recipe.row_tokens]
            rows.append(torch.tensor(row + [NOT_SCORED] * (recipe.row_tokens - len(row))))
    order.shuffle(rows)
    return rows


def train(recipe: Recipe, model: Any, texts: Sequence[tuple[list[int], list[int]]], say: Any) -> list[float]:
    """Mean loss of each tenth of the steps."""
    optimisers = make_optimisers(recipe, model)
    order, waiting, losses = random.Random(recipe.seed), [], []
    first = model.config.bos_token_id if recipe.start else model.config.eos_token_id
    for step in range(recipe.steps):
        if len(waiting) < recipe.rows:
            waiting = pieces(recipe, texts, first, order)
        batch, waiting = torch.stack(waiting[: recipe.rows]), waiting[recipe.rows :]
        loss = next_token_loss(model, batch)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = recipe.rate * rate_share(step / recipe.steps, recipe.warm_up)
            optimiser.step()
        losses.append(loss.item())
        if (step + 1) % max(1, recipe.steps // 10) == 0:
            say(f"step {step + 1} of {recipe.steps}: loss {mean(losses[-max(1, recipe.steps // 10):])}")
    tenth = max(1, recipe.steps // 10)
    return [mean(losses[start : start + tenth]) for start in range(0, len(losses), tenth)]


def make_optimisers(recipe: Recipe, model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest. Muon learns more a step and its step costs more; AdamW alone was not run
    long enough to be set beside it (docs/lab-log.md)."""
    embedding = model.get_input_embeddings().weight
    matrices = [weight for weight in model.parameters() if weight.ndim == 2 and weight is not embedding]
    rest = [weight for weight in model.parameters() if weight.ndim != 2 or weight is embedding]
    return [
        torch.optim.Muon(matrices, lr=recipe.rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_share(done: float, warm_up: float) -> float:
    return done / warm_up + 1e-2 if done < warm_up else 0.5 + 0.5 * math.cos(math.pi * (done - warm_up) / (1 - warm_up))


def next_token_loss(model: Any, batch: Tensor) -> Tensor:
    logits = model(batch.clamp(min=0), use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=NOT_SCORED)


@torch.no_grad()
def held_out_loss(recipe: Recipe, model: Any, texts: Sequence[tuple[list[int], list[int]]]) -> float:
    first = model.config.bos_token_id if recipe.start else model.config.eos_token_id
    rows = pieces(recipe, texts, first, random.Random(recipe.seed))[: 4 * recipe.rows]
    batches = [torch.stack(rows[at : at + recipe.rows]) for at in range(0, len(rows), recipe.rows)]
    return mean([next_token_loss(model, batch).item() for batch in batches])


def mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=RECIPES)
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args(argv)
    build(RECIPES[chosen.family], chosen.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
