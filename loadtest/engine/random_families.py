"""Small random models of every family, as transformers writes them, in which each token depends on the context."""

import math
from pathlib import Path
from typing import Any

import torch
import transformers

from loadtest.common.qwen_model import write_qwen

# The ratio of the spread of a product's outputs to that of its inputs: so large that the next token depends on the
# context, and so small that it does not depend on rounding.
LAYER_GAIN, HEAD_GAIN = 1.5, 3.0
EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 352, "shared_expert_intermediate_size": 704}
MANY_EXPERTS = {
    "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 352,
}  # fmt: skip
LATENT = {
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 352,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
# Layers with recurrent states.
DELTA = {
    "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
MAMBA = {**HEADS, "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
# So few tokens are selected that prompts are several times longer.
INDEXED = {"index_topk": 64, "index_n_heads": 32, "index_head_dim": 128, "num_key_value_heads": 16}
# So few blocks of keys are selected that prompts are several times longer.
MINIMAX_M3 = {
    **MANY_EXPERTS, "rotary_dim": 64, "index_n_heads": 2, "index_head_dim": 128, "index_block_size": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "index_topk_blocks": 4, "layer_types": ["full_attention", *("minimax_m3_sparse",) * 5],
    "mlp_layer_types": ["dense", *("sparse",) * 5], "dense_intermediate_size": 704, "intermediate_size": 352,
    "shared_intermediate_size": 352,
}  # fmt: skip
# By transformers' name of the model type. Head size and queries per KV head vary as they do among real models.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen2": {"head_dim": 64, "num_attention_heads": 14, "num_key_value_heads": 2},
    "qwen3": {"head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8},
    "qwen": {"num_attention_heads": 8},
    "mistral": {"head_dim": 80, "num_attention_heads": 12, "num_key_value_heads": 12, "sliding_window": 96},
    "bloom": {"num_attention_heads": 16},
    "falcon": {"num_attention_heads": 16},
    "gemma2": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 96},
    "gpt2": {"num_attention_heads": 16},
    "gpt_neox": {"num_attention_heads": 16},
    "granite": {"num_attention_heads": 8, "num_key_value_heads": 2, "residual_multiplier": 0.5},
    "mixtral": {"num_attention_heads": 8, "num_key_value_heads": 2, "num_local_experts": 8, "pad_token_id": None},
    "olmo2": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "olmoe": {"num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 4},
    "phi3": {"num_attention_heads": 8, "num_key_value_heads": 2, "pad_token_id": None},
    "qwen2_moe": {"num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 12, **EXPERTS},
    "qwen3_moe": {"num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 32, **EXPERTS},
    "gpt_oss": {
        "head_dim": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "sliding_window": 96,
        "num_local_experts": 16,
        "pad_token_id": None,
    },
    "glm4_moe": {
        "head_dim": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "n_routed_experts": 32,
        "n_group": 4,
        "topk_group": 2,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 2.5,
        **{name: size for name, size in EXPERTS.items() if name != "shared_expert_intermediate_size"},
    },
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "n_routed_experts": 32},
    "deepseek_v3": {**LATENT, "q_lora_rank": 384, "n_routed_experts": 32, "n_group": 4, "topk_group": 2},
    "smollm3": {"num_attention_heads": 8, "num_key_value_heads": 2, "pad_token_id": None},
    "gemma3_text": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 96,
        "_sliding_window_pattern": 3,
    },
    "gemma3n_text": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "sliding_window": 96,
        "num_kv_shared_layers": 1,
        "vocab_size_per_layer_input": 8192,
    },
    "gemma4_text": {
        "head_dim": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "global_head_dim": 256,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 96,
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 4,
        "moe_intermediate_size": 352,
    },
    "gemma": {"head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1},
    "glm": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "pad_token_id": None},
    "glm4": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "pad_token_id": None},
    "olmo": {"num_attention_heads": 8, "num_key_value_heads": 8, "clip_qkv": 8.0},
    "olmo3": {"num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 96},
    "cohere": {"num_attention_heads": 8, "num_key_value_heads": 2, "use_qk_norm": True},
    "cohere2": {"num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 96},
    "cohere2_moe": {
        "head_dim": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "sliding_window": 96,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_shared_experts": 1,
        "expert_selection_fn": "sigmoid",
        "first_k_dense_replace": 1,
    },
    "starcoder2": {"num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 96},
    "stablelm": {"num_attention_heads": 16, "num_key_value_heads": 4, "qk_layernorm": True},
    "phi": {"num_attention_heads": 16, "num_key_value_heads": 16},
    "nemotron": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "arcee": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "seed_oss": {"head_dim": 128, "num_attention_heads": 10, "num_key_value_heads": 2},
    "ernie4_5": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "ernie4_5_moe": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "moe_num_experts": 16,
        "moe_k": 4,
        "moe_intermediate_size": 352,
    },
    "exaone4": {"num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 96},
    "ministral": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 96},
    "minimax_m2": {**MANY_EXPERTS, "rotary_dim": 64},
    "minimax_m3_vl_text": MINIMAX_M3,
    "dots1": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "n_routed_experts": 32,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 352,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    "ministral3": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "exaone_moe": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "sliding_window": 96,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 352,
    },
    "flex_olmo": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "pad_token_id": None,
    },
    "opt": {"num_attention_heads": 8, "ffn_dim": 2816},
    "gptj": {"num_attention_heads": 8, "rotary_dim": 16},
    "codegen": {"num_attention_heads": 8, "rotary_dim": 16},
    "gpt_bigcode": {"num_attention_heads": 8},
    "mpt": {"num_attention_heads": 8},
    "phimoe": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_local_experts": 16,
        "attention_bias": True,
        "lm_head_bias": True,
        "pad_token_id": None,
    },
    "dbrx": {
        "num_attention_heads": 8,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500000.0},
        "ffn_config": {"ffn_hidden_size": 704, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "apertus": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "helium": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "vaultgemma": {
        "head_dim": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "sliding_window": 96,
    },
    "persimmon": {"num_attention_heads": 16},
    "xglm": {"num_attention_heads": 16, "ffn_dim": 2816},
    "biogpt": {"num_attention_heads": 8},
    "gpt_neox_japanese": {"num_attention_heads": 8},
    "llama4_text": {
        "head_dim": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_local_experts": 16,
        "intermediate_size_mlp": 2816,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 96,
        "floor_scale": 64,
    },
    "gpt_neo": {
        "num_attention_heads": 8,
        "num_hidden_layers": 6,
        "attention_types": [[["global", "local"], 3]],
        "window_size": 96,
    },
    "openai-gpt": {"num_attention_heads": 16},
    "jetmoe": {"num_key_value_heads": 8, "kv_channels": 128, "num_local_experts": 8},
    "diffllama": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "bitnet": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "nanochat": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "hyperclovax": {"num_attention_heads": 8, "num_key_value_heads": 2, "residual_multiplier": 0.5},
    "mellum": {
        **MANY_EXPERTS,
        "sliding_window": 96,
        "num_hidden_layers": 6,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
    },
    "afmoe": {**MANY_EXPERTS, "sliding_window": 96, "route_scale": 2.5},
    "hy_v3": MANY_EXPERTS,
    "hy_v4": {**LATENT, **INDEXED, "q_lora_rank": 384, "n_routed_experts": 32},
    "kolibri1": {**MANY_EXPERTS, **EXPERTS, "num_experts_per_tok": 6, "sliding_window": 96},
    "laguna": {
        **MANY_EXPERTS,
        **EXPERTS,
        "sliding_window": 96,
        "num_hidden_layers": 6,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
        "num_attention_heads_per_layer": [8, 16] * 3,
    },
    "mimo_v2_flash": {
        "head_dim": 192,
        "v_head_dim": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 352,
        "sliding_window": 97,
        "num_hidden_layers": 6,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.375}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "flint": {**MANY_EXPERTS, **EXPERTS, "num_experts_per_tok": 6, "sliding_window": 96},
    "axk1": {**LATENT, "q_lora_rank": 384, "n_routed_experts": 32, "n_group": 4, "topk_group": 2},
    "deepseek_v32": {**LATENT, **INDEXED, "q_lora_rank": 384, "n_routed_experts": 32, "n_group": 4, "topk_group": 2},
    "glm_moe_dsa": {**LATENT, **INDEXED, "q_lora_rank": 384, "n_routed_experts": 32, "index_topk_freq": 2},
    "longcat_flash": {
        **LATENT,
        "q_lora_rank": 384,
        "num_layers": 3,
        "n_routed_experts": 24,
        "zero_expert_num": 8,
        "moe_topk": 4,
        "expert_ffn_hidden_size": 352,
        "ffn_hidden_size": 2816,
    },
    "aria_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 352,
        "moe_num_experts": 16,
        "moe_topk": 4,
    },
    "minicpm3": {**LATENT, "q_lora_rank": 384, "num_key_value_heads": 16},
    "granite_swa": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "sliding_window": 96,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.5,
    },
    "hunyuan_v1_dense": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "hunyuan_v1_moe": {
        "head_dim": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_experts": 16,
        "moe_topk": 4,
    },
    "qwen3_next": {**DELTA, "num_experts": 16, **EXPERTS},
    "qwen3_5_text": DELTA,
    "bamba": {**MAMBA, "attn_layer_indices": [1, 4], "pad_token_id": None},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 2048, "mamba_d_state": 256, "head_dim": 128},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["mamba", "mamba", "attention"] * 2,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "shared_intermediate_size": 704,
    },
    "nemotron_h": {
        **HEADS,
        "head_dim": 128,
        "layers_block_type": ["mamba", "moe", "mamba", "attention", "mamba", "moe"],
        "mamba_num_heads": 32,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 2,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 352,
        "moe_shared_expert_intermediate_size": 704,
    },
    "minimax": {
        **HEADS,
        "head_dim": 64,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
    },
    "jamba": {**HEADS, "attn_layer_period": 3, "attn_layer_offset": 2, "num_experts": 8, "use_mamba_kernels": False},
    "mamba": {"state_size": 16},
    "falcon_mamba": {"state_size": 16},
    "mamba2": {"num_heads": 32, "head_dim": 64, "n_groups": 1},
    "recurrent_gemma": {"num_attention_heads": 8, "num_key_value_heads": 1, "attention_window_size": 96},
    "lfm2": {**HEADS, "layer_types": ["conv", "conv", "full_attention"] * 2},
}
REAL = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "vocab_size": 8192}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
TINY_HEADS = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}


def tiny_heads(own: dict[str, Any]) -> dict[str, int]:
    """Return the heads of a tiny model of a family with these fields. If the family has as many KV heads as query
    heads, so has the model."""
    heads = {name: value for name, value in TINY_HEADS.items() if name in own}
    if own.get("num_key_value_heads") == own.get("num_attention_heads") and "num_key_value_heads" in own:
        heads["num_key_value_heads"] = heads["num_attention_heads"]
    return heads


def make_model(folder: Path, family: str, fields: dict[str, Any], seed: int) -> None:
    """Write a random model of a family, its configuration and weights as transformers itself writes them."""
    if family == "qwen":
        heads = {"num_key_value_heads": fields["num_attention_heads"]}
        make_model(folder / "reference", "qwen2", {**fields, **heads}, seed)
        write_qwen(folder, folder / "reference", torch_dtype="bfloat16")
        return
    if family == "dbrx":
        # Its class derives other sizes from d_model before it sees hidden_size, which is the same.
        fields = {**fields, "d_model": fields["hidden_size"]}
    # A head that is the embedding again mostly answers with the last token, whatever the layers compute.
    common = {"max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(family, **common | fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        embeddings = {
            f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)
        }
        corrections = [entry for entry in model.named_buffers() if entry[0].endswith("correction_bias")]
        for name, parameter in (*model.named_parameters(), *corrections):
            # Other buffers are not rounded: they are computed, but transformers reads them from the checkpoint.
            parameter.data = parameter.data.bfloat16()
            # Fresh biases are zero and fresh norms one: a model that lost either would give the same tokens.
            if name.endswith("bias"):
                # With much larger ones, all tokens get the same answer.
                parameter.normal_(std=0.2)
            elif name in embeddings or name.endswith("sinks"):
                parameter.normal_()
            elif "lambda_" in name:
                # The exponentials of products of larger ones overflow.
                parameter.normal_(std=0.1)
            elif name.endswith("A_log"):
                # Some states forget within a few tokens, others hardly.
                parameter.uniform_(-5.0, 1.0)
            elif name.endswith("recurrent_param"):
                parameter.uniform_(-9.0, 0.0)  # as above
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                gain = HEAD_GAIN if "lm_head" in name else LAYER_GAIN
                parameter.normal_(std=gain / math.sqrt(parameter.shape[1]))
    model.save_pretrained(folder)
