"""What is trained and how long: one frozen recipe, scaled to a target. Figures and failures behind it: docs/lab-log.md."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dflash_mini_lab.drafters.checkpoint import DrafterConfig
from dflash_mini_lab.types import UserError


@dataclass(frozen=True)
class Recipe:
    """Block size counts the anchor. Rates are for AdamW; `anchors` random blocks are cut from each sequence of a step."""

    block_size: int = 6
    layers: int = 2
    taps: int = 5
    tap_layers: tuple[int, ...] | None = None
    """None: `taps` layers spread over the target."""
    width: int | None = None
    """The drafter's own hidden size, if the target's is larger. None: the target's, with its heads and layers to start from."""
    heads: int = 8
    """Of attention, where the drafter has a width of its own."""
    window: int | None = None
    """Context positions that a block sees. None: all."""
    draft_vocabulary: int = 8192
    answer_tokens: int = 128
    own_prompt_tokens: int = 80
    openings: int = 1
    """Times that a prompt is answered again behind a few sampled tokens: other answers for no other prompt."""
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
    data_share: float = 0.36
    heads_share: float = 0.08
    """Shares of the time that go into teacher data and into the heads; the rest trains the drafter."""
    own_prompts_share: float = 0.3
    """Share of the data's time that samples the target's own prompts."""
    look_every_s: float = 300.0
    float32: bool = False
    """Not in bfloat16 even where that is faster: which one is faster is measured, and another day's answer may differ."""
    seed: int = 7


RECIPES = {
    "smollm2-135m": Recipe(tap_layers=(1, 8, 15, 22, 27), answer_tokens=96, minutes=140.0, learning_rate=1e-3),
    "qwen3-0.6b": Recipe(tap_layers=(4, 14, 27), width=256, heads=8, window=16),
}
"""Targets whose recipe differs from the default."""
ON_CUDA: dict[str, Any] = {
    "teacher_batch": 2048,
    "sequences": 64,
    "anchors": 64,
    "minutes": 12.0,
    "data_share": 0.3,
    "own_prompts_share": 0.15,
    "look_every_s": 60.0,
}
"""What a GPU changes in any recipe; an estimate, not yet tried on one. Batches must be large to keep it busy. An anchor costs
about a hundredth of its sequence's features, so half of an answer's tokens are anchors. An own prompt is sampled in less time
than it takes to answer it twice."""


def recipe_for(target: str, device: str) -> Recipe:
    """The recipe of a target by its catalogue name, for the device that it is prepared on."""
    recipe = RECIPES.get(target, Recipe())
    return replace(recipe, **ON_CUDA) if device.startswith("cuda") else recipe


def drafter_config(recipe: Recipe, target_config: Any, target_name: str, mask_token_id: int, vocabulary: int) -> DrafterConfig:
    """The recipe's drafter. Unless it says otherwise: as wide as the target's own layers, with taps spread from the second layer
    to the third-last."""
    layers, target_width = target_config.num_hidden_layers, target_config.hidden_size
    width = min(recipe.width or target_width, target_width)
    if width < target_width:
        heads = kv_heads = recipe.heads
        head_dim = width // heads
    else:
        heads = target_config.num_attention_heads
        kv_heads = getattr(target_config, "num_key_value_heads", None) or heads
        head_dim = getattr(target_config, "head_dim", None) or width // heads
    rope = getattr(target_config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma's differ by the kind of layer
    inner = getattr(target_config, "intermediate_size", None) or 4 * target_width
    names = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    return DrafterConfig(
        hidden_size=width,
        intermediate_size=min(inner, 8 * width // 3 // 64 * 64 or 64),
        layers=recipe.layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=recipe.block_size,
        taps=recipe.tap_layers or spread_taps(layers, recipe.taps),
        mask_token_id=mask_token_id,
        target_layers=layers,
        vocabulary=vocabulary,
        eps=float(next((value for name in names if (value := getattr(target_config, name, None))), 1e-6)),
        rope_theta=rope.get("rope_theta", 10000.0),
        target_name=target_name,
        target_hidden_size=target_width if width < target_width else None,
        window=recipe.window,
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


def choose_mask_token(tokenizer: Any, stop_ids: frozenset[int], vocabulary: int, rows: int) -> int:
    """An existing, otherwise unused row of the embedding: the last special token that is neither a stop nor part of the chat
    template; else the first of the `rows` that lies beyond the tokenizer's `vocabulary`; else its last id. Raises UserError where
    there is none."""
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
    last = vocabulary if vocabulary < rows else vocabulary - 1
    if last in stop_ids or last in taken or last < 0:
        raise UserError("No row of the embedding is free to serve as the drafter's mask token.")
    return last
