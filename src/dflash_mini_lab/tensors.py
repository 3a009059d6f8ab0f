"""Names and shapes of the tensors that targets and drafters have in common, and the check of a file against them. No arithmetic,
and no framework that tensors belong to."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_mini_lab.types import UserError

Shapes = dict[str, tuple[int, ...]]


def block_shapes(hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int) -> Shapes:
    """One decoder layer of the Llama kind, by the names that transformers gives its tensors within the layer."""
    return {
        "self_attn.q_proj.weight": (heads * head_dim, hidden),
        "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head_dim),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def refuse_other_shapes(path: Path, tensors: Mapping[str, Any], shapes: Shapes) -> None:
    """Raises UserError naming the first tensor of `path` that is missing or has another shape than the config says."""
    for name, shape in shapes.items():
        if name not in tensors:
            raise UserError(f"{path}: tensor {name} is missing.")
        if tuple(tensors[name].shape) != shape:
            raise UserError(f"{path}: tensor {name} is {tuple(tensors[name].shape)}, the config says {shape}.")
