"""Which models the lab can run, from their configuration alone: what is refused is refused by name, with what it would need.

The library's own facts decide, never a list of names: the class it would load, its sub-models, and whether its state can be
rolled back.
"""
from __future__ import annotations

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from dflash_mini_lab.types import UserError

NEEDED_OF_CONFIG = ("vocab_size", "num_hidden_layers", "hidden_size", "max_position_embeddings")


def refuse_unsuitable(where: str, config: Any) -> None:
    """Raise UserError unless `config` (of transformers) is a decoder of text alone whose cache can be cropped."""
    reason = _reason(config)
    if reason:
        raise UserError(f"{where}: a model of type {config.model_type!r} {reason}")


def _reason(config: Any) -> str | None:
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder; the lab runs decoders alone, such as Llama, Qwen, Gemma or LFM2."
    if text is not config:
        others = ", ".join(name.removesuffix("_config") for name in config.sub_configs if name != "text_config")
        return (
            f"is multimodal ({others} beside text); the lab runs text alone. Its language model saved in a folder of its own "
            f"(type {text.model_type!r}) may run."
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "is no causal language model of transformers; the lab runs text decoders only."
    if getattr(config, "is_decoder", None) is False:
        return "is an encoder: its tokens see those after them, so it cannot be continued greedily."
    if MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._is_stateful:
        return (
            "cannot be rolled back: its layers fold every token into a recurrent state, and transformers keeps no history of "
            "it, so a rejected draft could not be undone. It would need the state after each row of a verify call, which "
            "attention has in its keys and values and LFM2 in its convolution's inputs."
        )
    lacking = [name for name in NEEDED_OF_CONFIG if not isinstance(getattr(config, name, None), int)]
    if lacking:
        return f"has no {lacking[0]}; the lab runs text decoders that know their own size."
    return None
