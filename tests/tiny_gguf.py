"""A GGUF file as llama.cpp's converter writes it: a tiny random model, 8-bit matrices, and a byte-level tokenizer inside."""
from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

NAMES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "lfm2": "lfm2", "gemma3_text": "gemma3"}
TOKENS = ["<|end|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "th", "the", "Ġt", "is"]
MERGES = ["t h", "th e", "Ġ t", "i s"]


def save_gguf(path: Path, config: PreTrainedConfig, leave_out: str = "") -> dict[str, torch.Tensor]:
    """Write `path`; returns the weights under transformers' names, as they are once the file's 8 bits are read back."""
    torch.manual_seed(9)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1 and config.model_type != "gemma3_text"), 0.3)
    arch = NAMES[config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    write_facts(writer, config, arch)
    write_tokenizer(writer, config)
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    read_back = {}
    for name, tensor in model.state_dict().items():
        if name == leave_out or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        base, suffix = name.rsplit(".", 1)
        weights = tensor.numpy().squeeze(1) if ".conv.conv." in name else tensor.numpy()
        if weights.ndim == 2 and weights.shape[1] % 32 == 0:
            packed = gguf.quantize(permuted(name, weights, config), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{names.get_name(base)}.{suffix}", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            weights = gguf.dequantize(gguf.quantize(weights, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0)
        else:
            plus_one = arch == "gemma3" and "norm" in name
            writer.add_tensor(f"{names.get_name(base)}.{suffix}", weights + 1 if plus_one else weights)
        read_back[name] = torch.from_numpy(weights).view(tensor.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_back


def permuted(name: str, weights: np.ndarray, config: PreTrainedConfig) -> np.ndarray:
    """llama.cpp keeps a Llama's rotary pairs side by side."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if config.model_type != "llama" or heads is None:
        return weights
    return weights.reshape(heads, 2, -1, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)


def write_facts(writer: gguf.GGUFWriter, config: PreTrainedConfig, arch: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps if arch == "lfm2" else config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"] if arch == "gemma3" else rope["rope_theta"])
    if arch == "lfm2":
        attends = [kind == "full_attention" for kind in config.layer_types]
        writer.add_head_count_kv([config.num_key_value_heads * there for there in attends])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    if arch == "gemma3":
        writer.add_key_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)


def write_tokenizer(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    """Padded as llama.cpp pads: unused tokens with names of their own. Gemma's is sentencepiece: scores for merges."""
    if config.model_type == "gemma3_text":
        tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *"▁abcdefghijklmnopqrstuvwxyz.", "th", "the", "is"]
        tokens += [f"<unused{index}>" for index in range(config.vocab_size - len(tokens))]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
        writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * (len(tokens) - 4))
        for add, index in ((writer.add_pad_token_id, 0), (writer.add_eos_token_id, 1), (writer.add_bos_token_id, 2)):
            add(index)
        writer.add_unk_token_id(3)
        return
    tokens = [*TOKENS, *(f"[PAD{index}]" for index in range(len(TOKENS), config.vocab_size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    control, normal, unused = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.UNUSED
    writer.add_token_types([control, *[normal] * (len(TOKENS) - 1), *[unused] * (len(tokens) - len(TOKENS))])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
