"""Builds artifacts/tiny: the tiny reference target, its block drafter, and the manifest that pins them. Deterministic.

    python tools/build_tiny.py                 writes artifacts/tiny (about two minutes on one core)
    python tools/build_tiny.py --folder other  writes elsewhere, to compare

One thread, one seed, deterministic algorithms: a second build on the same machine is the same, byte for byte. On another one the
last bits of the weights may differ, and with them the digests. Text: benchmarks/tiny/text.txt. Needs the lab's environment
(`.venv`); what it builds needs NumPy only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_mini_lab import artifacts
from dflash_mini_lab.catalog import TARGETS
from dflash_mini_lab.drafters.checkpoint import DrafterConfig, save_checkpoint, save_tensors
from dflash_mini_lab.prompts import load_prompts, refuse_overlap, training_seeds
from dflash_mini_lab.targets import tiny
from dflash_mini_lab.training.model import TrainableDrafter

NAME = "tiny"
NOT_SCORED = -100
"""Label of a position without a next character."""


@dataclass(frozen=True)
class Recipe:
    """Steps are optimiser steps; `lines`, `texts` and `anchors` are per step."""

    seed: int = 7
    hidden_size: int = 64
    intermediate_size: int = 160
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    positions: int = 160
    target_steps: int = 280
    lines: int = 24
    target_rate: float = 4e-3
    opening_letters: tuple[int, ...] = (6, 15, 24)
    own_openings: int = 288
    answer_letters: int = 72
    drafter_layers: int = 1
    block_size: int = 4
    drafter_steps: int = 500
    texts: int = 16
    anchors: int = 24
    drafter_rate: float = 4e-3
    warm_up: float = 0.05


def build(folder: Path, recipe: Recipe = Recipe(), lines: Sequence[str] | None = None) -> dict[str, Any]:
    """Train and write everything under `folder`; returns what provenance.json says. `lines`: the text, one sentence each."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    lines = held_out_lines() if lines is None else lines
    target, target_loss = train_target(recipe, lines)
    say(f"The target's loss on its text: {target_loss}")
    texts, starts = own_texts(recipe, target, lines)
    say(f"It answered {len(texts)} openings.")
    drafter, looks = train_drafter(recipe, target, texts, starts)
    say(f"The drafter: {looks}")

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor for name, tensor in target.state_dict().items() if name != "lm_head.weight"}
    save_tensors(weights, folder / tiny.TENSOR_FILE)
    write_json(folder / tiny.CONFIG_FILE, target_config(recipe))
    save_checkpoint(folder, drafter.config, dict(drafter.state_dict()))
    provenance = {
        "made_with": "python tools/build_tiny.py",
        "recipe": asdict(recipe),
        "text_lines": len(lines),
        "text_sha256": hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest(),
        "target_loss": target_loss,
        "drafter_texts": len(texts),
        "last_look": looks,
        "torch": torch.__version__.split("+")[0],
    }
    write_json(folder / "provenance.json", provenance)
    artifacts.write_manifest(folder, NAME)
    return provenance


def held_out_lines() -> list[str]:
    """The lines of the text, once it is sure that no prompt of the lab's begins one of them."""
    entry = TARGETS[NAME]
    folder = ROOT / entry.prompts
    measured, calibration = (load_prompts(folder / name) for name in ("prompts.json", "calibration_prompts.json"))
    refuse_overlap(measured, calibration, training_seeds(folder / entry.training_texts))
    return [line for line in (folder / entry.training_texts).read_text(encoding="utf-8").splitlines() if line]


def target_config(recipe: Recipe) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 128,
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


# The target: next character, on whole lines.


def train_target(recipe: Recipe, lines: Sequence[str]) -> tuple[LlamaForCausalLM, float]:
    """The model and its mean loss over the last tenth of the steps."""
    torch.manual_seed(recipe.seed)
    started = {"pad_token_id": None, "initializer_range": recipe.hidden_size**-0.5}  # the library's 0.02 is for wide models
    model = LlamaForCausalLM(LlamaConfig(**target_config(recipe), **started))
    rows = padded([[*tiny.encode(line), tiny.END] for line in lines])
    losses = []
    for batch in scheduled(model, recipe.target_steps, recipe.target_rate, recipe.warm_up, len(rows), recipe.lines):
        ids = rows[batch]
        ids = ids[:, : int((ids != tiny.MASK).sum(1).max())]
        logits = model(ids[:, :-1], use_cache=False).logits
        labels = ids[:, 1:].masked_fill(ids[:, 1:] == tiny.MASK, NOT_SCORED)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NOT_SCORED)
        loss.backward()
        losses.append(float(loss.detach()))
    return model.eval(), round(mean(losses[-max(1, len(losses) // 10) :]), 4)


# What the target itself says: openings from the text and of its own, each answered greedily.


@torch.inference_mode()
def own_texts(recipe: Recipe, target: LlamaForCausalLM, lines: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Ids `[texts, length]`, MASK after the end of each; and where each answer starts `[texts]`."""
    torch.manual_seed(recipe.seed)
    longest = max(recipe.opening_letters)
    own = continued(target, torch.full((recipe.own_openings, 1), tiny.START), longest, sampled=True).tolist()
    texts, starts = [], []
    for number, letters in enumerate(recipe.opening_letters):
        openings = [tiny.encode(line) for line in lines if len(line) > letters] + own[number :: len(recipe.opening_letters)]
        group = [row[: 1 + letters] for row in openings if tiny.END not in row[: 1 + letters]]
        answered = continued(target, torch.tensor(group), recipe.answer_letters, sampled=False)
        texts.append(F.pad(answered, (0, longest - letters), value=tiny.MASK))
        starts += [1 + letters] * len(group)
    return torch.cat(texts), torch.tensor(starts)


def continued(target: LlamaForCausalLM, ids: Tensor, letters: int, sampled: bool) -> Tensor:
    """`ids [rows, width]` with `letters` more each, MASK after an END. `sampled`: at temperature 1, else greedy."""
    step, cache = ids, None
    for _ in range(letters):
        output = target(step, cache=cache, use_cache=True, logits_to_keep=1)
        cache, logits = output.cache, output.logits[:, -1]
        step = torch.multinomial(logits.softmax(-1), 1) if sampled else logits.argmax(-1, keepdim=True)
        ended = (ids[:, -1:] == tiny.END) | (ids[:, -1:] == tiny.MASK)
        ids = torch.cat([ids, step.masked_fill(ended, tiny.MASK)], dim=1)
    return ids


# The drafter: random anchors in the answers, features of the frozen target.


def train_drafter(
    recipe: Recipe, target: LlamaForCausalLM, texts: Tensor, starts: Tensor
) -> tuple[TrainableDrafter, dict[str, Any]]:
    """The drafter, and its loss and accuracy per slot over the last tenth of the steps."""
    torch.manual_seed(recipe.seed)
    facts = target_config(recipe)
    config = DrafterConfig(
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        layers=recipe.drafter_layers,
        heads=recipe.heads,
        kv_heads=recipe.kv_heads,
        head_dim=facts["head_dim"],
        block_size=recipe.block_size,
        taps=tuple(range(recipe.layers)),
        mask_token_id=tiny.MASK,
        target_layers=recipe.layers,
        vocabulary=facts["vocab_size"],
        eps=facts["rms_norm_eps"],
        rope_theta=facts["rope_theta"],
        target_name=NAME,
    )
    drafter = TrainableDrafter(config)
    for module in drafter.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=module.in_features**-0.5)  # as the target's
    embedding = target.get_input_embeddings().weight.detach()
    slots = torch.arange(1, recipe.block_size)
    weights = torch.exp(-(slots - 1) / 4.0)
    losses, right = [], []
    for batch in scheduled(drafter, recipe.drafter_steps, recipe.drafter_rate, recipe.warm_up, len(texts), recipe.texts):
        ids = texts[batch]
        features = tapped(target, ids, config.taps)
        last = (ids != tiny.MASK).sum(1) - 2  # an anchor has at least one letter after it
        spread = torch.rand(len(ids), recipe.anchors)
        anchors = starts[batch, None] + (spread * (last - starts[batch] + 1).clamp(min=1)[:, None]).long()
        anchors = torch.minimum(anchors, last.clamp(min=1)[:, None])
        places = anchors[..., None] + slots
        labels = ids.gather(1, places.clamp(max=ids.shape[1] - 1).flatten(1)).view(places.shape)
        labels = labels.masked_fill((labels == tiny.MASK) | (places >= ids.shape[1]), NOT_SCORED)
        masks = embedding[tiny.MASK].expand(*anchors.shape, recipe.block_size - 1, -1)
        block = torch.cat([embedding[ids.gather(1, anchors)][:, :, None], masks], dim=2)
        logits = drafter(features, block, anchors) @ embedding.T
        each = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), ignore_index=NOT_SCORED, reduction="none")
        scored = (labels != NOT_SCORED) * weights
        loss = (each.view(labels.shape) * weights).sum() / scored.sum()
        loss.backward()
        losses.append(float(loss.detach()))
        right.append((logits.argmax(-1) == labels).float().mean((0, 1)))
    recent = max(1, len(losses) // 10)
    accuracy = torch.stack(right[-recent:]).mean(0).tolist()
    return drafter, {"loss": round(mean(losses[-recent:]), 4), "slot_accuracy": [round(share, 4) for share in accuracy]}


@torch.no_grad()
def tapped(target: LlamaForCausalLM, ids: Tensor, taps: Sequence[int]) -> Tensor:
    """Outputs of the layers in `taps`, `[texts, length, taps · hidden]`; by hooks, since the library norms its last state."""
    outputs: dict[int, Tensor] = {}

    def keep(tap: int) -> Any:
        return lambda module, inputs, output: outputs.__setitem__(tap, output[0] if isinstance(output, tuple) else output)

    hooks = [target.model.layers[tap].register_forward_hook(keep(tap)) for tap in taps]
    target.model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat([outputs[tap] for tap in taps], dim=-1)


# Small parts.


def scheduled(
    model: torch.nn.Module, steps: int, rate: float, warm_up: float, size: int, batch: int
) -> Iterator[Tensor]:
    """Rows of each step's batch, every row once before any comes again; after the caller's `backward`, one AdamW step."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    first = max(1, int(warm_up * steps))
    curve = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / first) * (0.5 + 0.5 * float(torch.cos(torch.tensor(3.1416 * step / steps))))
    )
    waiting = torch.randperm(size)
    for _ in range(steps):
        if len(waiting) < min(batch, size):
            waiting = torch.randperm(size)
        rows, waiting = waiting[:batch], waiting[batch:]
        optimiser.zero_grad()
        yield rows
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        curve.step()


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[tiny.MASK] * (width - len(row))] for row in rows])


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=artifacts.REPOSITORY / NAME)
    build(parser.parse_args().folder)


if __name__ == "__main__":
    main()
