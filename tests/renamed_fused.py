"""Folders of families that transformers lacks, with the weights of the nearest model of transformers under the family's
own names: ChatGLM of GLM, Baichuan and TeleChat of Llama, MiniCPM of Granite, PLaMo 3 of Gemma 3."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
# Takes the reference's fields and tensors, and returns the family's.
Writer = Callable[[dict[str, Any], Tensors], tuple[dict[str, Any], Tensors]]

_BAICHUAN_2_TOKENS = 125696


def _write(
    family: str, write: Writer, folder: Path, make_reference: Callable[..., Path], overrides: dict[str, Any]
) -> None:
    """family: of the reference, whose weights are written as another family has them."""
    reference = make_reference(family, **overrides)
    fields, tensors = json.loads((reference / "config.json").read_text()), load_file(reference / "model.safetensors")
    common = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "hidden_size", "num_attention_heads")}
    own, renamed = write(fields, tensors)
    # A writer may have changed the reference, too.
    save_file(tensors, reference / "model.safetensors", {"format": "pt"})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**common, "torch_dtype": "float32", **own}))
    save_file({name: tensor.contiguous() for name, tensor in renamed.items()}, folder / "model.safetensors")


def _chatglm(fields: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    heads, groups = fields["num_attention_heads"], fields["num_key_value_heads"]
    names = {"num_layers": "num_hidden_layers", "padded_vocab_size": "vocab_size", "kv_channels": "head_dim",
             "ffn_hidden_size": "intermediate_size", "seq_length": "max_position_embeddings",
             "layernorm_epsilon": "rms_norm_eps", "add_qkv_bias": "attention_bias"}  # fmt: skip
    own = {
        "architectures": ["ChatGLMModel"], "model_type": "chatglm", "multi_query_attention": groups < heads,
        "multi_query_group_num": groups, "rope_ratio": fields["rope_parameters"]["rope_theta"] / 10000,
        "add_bias_linear": False, "apply_query_key_layer_scaling": True, "original_rope": True, "rmsnorm": True,
        **{ours: fields[theirs] for ours, theirs in names.items()},
    }  # fmt: skip
    named = {
        "transformer.embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "transformer.encoder.final_layernorm.weight": tensors["model.norm.weight"],
        "transformer.output_layer.weight": tensors["lm_head.weight"],
        "transformer.rotary_pos_emb.inv_freq": torch.ones(fields["head_dim"] // 4),
    }
    for layer in range(fields["num_hidden_layers"]):
        old, new = f"model.layers.{layer}", f"transformer.encoder.layers.{layer}"
        for kind in ("weight", "bias") if fields["attention_bias"] else ("weight",):
            parts = [tensors[f"{old}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
            if groups == heads:
                parts = [torch.stack([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 2)]
            named[f"{new}.self_attention.query_key_value.{kind}"] = torch.cat(parts)
        for theirs, ours in (
            ("self_attn.o_proj", "self_attention.dense"),
            ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
            ("input_layernorm", "input_layernorm"),
            ("post_attention_layernorm", "post_attention_layernorm"),
        ):
            named[f"{new}.{ours}.weight"] = tensors[f"{old}.{theirs}.weight"]
    return own, named


def _baichuan(fields: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    own = {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "tie_word_embeddings": False}
    for name in ("vocab_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings", "rms_norm_eps"):
        own[name] = fields[name]
    named = {name: tensor for name, tensor in tensors.items() if not name.endswith(("q_proj.weight", "k_proj.weight"))}
    for name in [name for name in named if name.endswith("v_proj.weight")]:
        before = name.removesuffix("v_proj.weight")
        parts = [tensors[f"{before}{part}_proj.weight"] for part in "qk"]
        named[f"{before}W_pack.weight"] = torch.cat([*parts, named.pop(name)])
        named[f"{before}rotary_emb.inv_freq"] = torch.ones(4)
    if fields["vocab_size"] >= _BAICHUAN_2_TOKENS:
        tensors["lm_head.weight"] = torch.nn.functional.normalize(named["lm_head.weight"])
    return own, named


def _minicpm(fields: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    layers, rope = fields["num_hidden_layers"], dict(fields["rope_parameters"])
    own = {
        "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": fields["embedding_multiplier"],
        "scale_depth": fields["residual_multiplier"] * layers**0.5, "rope_theta": rope.pop("rope_theta"),
        "dim_model_base": round(fields["hidden_size"] / fields["logits_scaling"]),
        "rope_scaling": rope if rope["rope_type"] != "default" else None,
    }  # fmt: skip
    for name in ("vocab_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "attention_bias",
                 "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):  # fmt: skip
        own[name] = fields[name]
    return own, tensors


def _telechat(fields: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    heads, groups = fields["num_attention_heads"], fields["num_key_value_heads"]
    trained, theta = fields["max_position_embeddings"], fields["rope_parameters"]["rope_theta"]
    own = {
        "architectures": ["TelechatForCausalLM"], "model_type": "telechat", "n_layer": fields["num_hidden_layers"],
        "n_head": heads, "num_key_value_heads": groups, "ffn_hidden_size": fields["intermediate_size"],
        "training_seqlen": trained, "base_seqlen": trained if theta == 10000 else trained // 4,
        "layer_norm_epsilon": fields["rms_norm_eps"], "vocab_size": fields["vocab_size"],
        "tie_word_embeddings": fields["tie_word_embeddings"],
    }  # fmt: skip
    named = {"transformer.word_embeddings.weight": tensors["model.embed_tokens.weight"]}
    named["transformer.ln_f.weight"] = tensors["model.norm.weight"]
    if not fields["tie_word_embeddings"]:
        named["lm_head.weight"] = tensors["lm_head.weight"]
    for layer in range(fields["num_hidden_layers"]):
        old, new = f"model.layers.{layer}", f"transformer.h.{layer}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            tensors[f"{old}.{name}.bias"].zero_()
        pair = [tensors[f"{old}.self_attn.{name}_proj.weight"].unflatten(0, (groups, -1)) for name in "kv"]
        named[f"{new}.self_attention.key_value.weight"] = torch.stack(pair, 1).flatten(0, 2)
        for theirs, ours in (
            ("self_attn.q_proj.weight", "self_attention.query.weight"),
            ("self_attn.o_proj.weight", "self_attention.dense.weight"),
            ("self_attn.o_proj.bias", "self_attention.dense.bias"),
        ):
            named[f"{new}.{ours}"] = tensors[f"{old}.{theirs}"]
        for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "mlp.down_proj.bias",
                     "input_layernorm.weight", "post_attention_layernorm.weight"):  # fmt: skip
            named[f"{new}.{name}"] = tensors[f"{old}.{name}"]
    return own, named


_PLAMO3 = {
    "model.layers.": "model.layers.layers.", "self_attn": "mixer", "input_layernorm": "pre_mixer_norm",
    "post_attention_layernorm": "post_mixer_norm", "pre_feedforward_layernorm": "pre_mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}  # fmt: skip


def _plamo3(fields: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Gemma 3 multiplies embeddings by the root of their size, and adds 1 to the weights of all norms."""
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
            "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
            "eos_token_id")  # fmt: skip
    full, window = (fields["rope_parameters"][kind] for kind in ("full_attention", "sliding_attention"))
    own = {name: fields[name] for name in kept} | {
        "architectures": ["Plamo3ForCausalLM"],
        "model_type": "plamo3",
        "hidden_activation": "swiglu",
        "window_size": fields["sliding_window"],
        "sliding_window_pattern": fields["layer_types"].index("full_attention") + 1,
        "rope_theta": full["rope_theta"],
        "rope_local_theta": window["rope_theta"],
        "rope_scaling_factor": full.get("factor", 1),
        "initial_context_length": full.get("original_max_position_embeddings"),
    }
    named: Tensors = {}
    for name, tensor in tensors.items():
        new = name
        for theirs, ours in _PLAMO3.items():
            new = new.replace(theirs, ours)
        offset = 1 / 5 if "post_mixer_norm" in new else 1 / 5**1.5 if "post_mlp_norm" in new else 1.0
        scale = fields["hidden_size"] ** 0.5 if "embed_tokens" in name else 1.0
        named[new] = tensor * scale + (1.0 - offset)
    for first, parts, joined in (
        ("q_proj", ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        ("gate_proj", ("gate_proj", "up_proj"), "gate_up_proj"),
    ):
        for name in [name for name in named if f".{first}." in name]:
            each = [named.pop(name.replace(first, part)) for part in parts]
            named[name.replace(first, joined)] = torch.cat(each)
    return own, named


RENAMED = {
    "plamo3": partial(_write, "gemma3", _plamo3),
    "chatglm": partial(_write, "glm", _chatglm),
    "baichuan": partial(_write, "llama", _baichuan),
    "minicpm": partial(_write, "granite", _minicpm),
    "telechat": partial(_write, "llama", _telechat),
}
