"""Folders of Qwen's first generation, whose weights are those of a Qwen2 of transformers under other names."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# Fields that change nothing up to seq_length.
_EXTENSIONS = {"use_dynamic_ntk": True, "use_logn_attn": True}


def write_qwen(folder: Path, qwen2: Path, **overrides: Any) -> None:
    """Write the config.json and the weights of a Qwen2 folder as Qwen's first generation has them.

    qwen2: as many KV heads as heads, embeddings not tied. overrides: fields of config.json.
    """
    source = json.loads((qwen2 / "config.json").read_text())
    rope = source["rope_parameters"]
    fields = {
        "architectures": ["QWenLMHeadModel"],
        "model_type": "qwen",
        "torch_dtype": "float32",
        "hidden_size": source["hidden_size"],
        "intermediate_size": 2 * source["intermediate_size"],
        "kv_channels": source["hidden_size"] // source["num_attention_heads"],
        "layer_norm_epsilon": source["rms_norm_eps"],
        "max_position_embeddings": 4 * source["max_position_embeddings"],
        "no_bias": True,
        "num_attention_heads": source["num_attention_heads"],
        "num_hidden_layers": source["num_hidden_layers"],
        "rotary_emb_base": rope["rope_theta"],
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "seq_length": source["max_position_embeddings"],
        "tie_word_embeddings": False,
        "vocab_size": source["vocab_size"],
        **_EXTENSIONS,
        **overrides,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    weights = load_file(qwen2 / "model.safetensors")
    save_file(_renamed(weights, source["num_hidden_layers"]), folder / "model.safetensors")


def _renamed(weights: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    named = {
        "transformer.wte.weight": weights["model.embed_tokens.weight"],
        "transformer.ln_f.weight": weights["model.norm.weight"],
        "lm_head.weight": weights["lm_head.weight"],
    }
    for layer in range(layers):
        old, new = f"model.layers.{layer}", f"transformer.h.{layer}"
        for kind in ("weight", "bias"):
            parts = [weights[f"{old}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
            named[f"{new}.attn.c_attn.{kind}"] = torch.cat(parts)
        for theirs, ours in (
            ("self_attn.o_proj", "attn.c_proj"),
            ("mlp.gate_proj", "mlp.w2"),
            ("mlp.up_proj", "mlp.w1"),
            ("mlp.down_proj", "mlp.c_proj"),
            ("input_layernorm", "ln_1"),
            ("post_attention_layernorm", "ln_2"),
        ):
            named[f"{new}.{ours}.weight"] = weights[f"{old}.{theirs}.weight"]
    return {name: tensor.contiguous() for name, tensor in named.items()}
