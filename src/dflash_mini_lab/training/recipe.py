"""What is trained and how long: one frozen recipe, scaled to a target. Figures and failures behind it: docs/lab-log.md."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_mini_lab.drafters.checkpoint import DrafterConfig
from dflash_mini_lab.types import UserError

DATA_SHARE, HEADS_SHARE = 0.4, 0.1
"""Shares of the preparation time that go into teacher data and into the heads; the rest trains the drafter."""


@dataclass(frozen=True)
class Recipe:
    """Block size counts the anchor. Rates are for AdamW; `anchors` random blocks are cut from each sequence of a step."""

    block_size: int = 6
    layers: int = 2
    taps: int = 5
    tap_layers: tuple[int, ...] | None = None
    """None: `taps` layers spread over the target."""
    draft_vocabulary: int = 8192
    answer_tokens: int = 128
    own_prompt_tokens: int = 80
    teacher_batch: int = 128
    sequences: int = 12
    anchors: int = 27
    teacher_share: float = 0.5
    """Share of the loss that asks for the target's distribution; the rest asks for its choice."""
    learning_rate: float = 1.5e-3
    warm_up: float = 0.04
    final_rate: float = 0.03
    held_out_prompts: int = 192
    minutes: float = 60.0
    float32: bool = False
    """Not in bfloat16 even where that is faster: which one is faster is measured, and another day's answer may differ."""
    seed: int = 7


RECIPES = {"smollm2-135m": Recipe(tap_layers=(1, 8, 15, 22, 27), minutes=140.0, learning_rate=1e-3)}
"""Targets whose recipe differs from the default."""


def drafter_config(recipe: Recipe, target_config: Any, target_name: str, mask_token_id: int, vocabulary: int) -> DrafterConfig:
    """A drafter as wide as the target's own layers, with taps spread from the second layer to the third-last."""
    layers = target_config.num_hidden_layers
    heads, kv_heads = target_config.num_attention_heads, target_config.num_key_value_heads
    return DrafterConfig(
        hidden_size=target_config.hidden_size,
        intermediate_size=min(target_config.intermediate_size, 8 * target_config.hidden_size // 3 // 64 * 64 or 64),
        layers=recipe.layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=getattr(target_config, "head_dim", None) or target_config.hidden_size // heads,
        block_size=recipe.block_size,
        taps=recipe.tap_layers or spread_taps(layers, recipe.taps),
        mask_token_id=mask_token_id,
        target_layers=layers,
        vocabulary=vocabulary,
        eps=float(getattr(target_config, "rms_norm_eps", None) or target_config.norm_eps),
        rope_theta=(target_config.rope_parameters or {}).get("rope_theta", 10000.0),
        target_name=target_name,
    )


def spread_taps(layers: int, taps: int) -> tuple[int, ...]:
    """`taps` layer indices, evenly from the second layer to the third-last, as DFlash takes them."""
    if layers < 3:
        raise UserError(f"A target of {layers} layers is too shallow to tap: at least 3 are needed.")
    first, last = 1, max(layers - 3, 1)
    count = min(taps, last - first + 1)
    if count == 1:
        return (last,)
    return tuple(sorted({round(first + index * (last - first) / (count - 1)) for index in range(count)}))


def choose_mask_token(tokenizer: Any, stop_ids: frozenset[int], vocabulary: int) -> int:
    """An existing, otherwise unused row of the embedding: the last special token that is neither a stop nor part of the chat
    template, else the last id below `vocabulary` (rows of the embedding). Raises UserError where there is none."""
    template = tokenizer.chat_template or ""
    special = [
        (identity, str(token))
        for identity, token in sorted(tokenizer.added_tokens_decoder.items(), reverse=True)
        if token.special and identity < vocabulary and identity not in stop_ids and str(token) not in template
    ]
    taken = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id}
    for identity, _ in special:
        if identity not in taken:
            return identity
    last = vocabulary - 1
    if last in stop_ids or last in taken or last < 0:
        raise UserError("No row of the embedding is free to serve as the drafter's mask token.")
    return last
