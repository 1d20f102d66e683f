"""Greedy tokens of the engine are those of transformers in float32, one for one."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.config import ConfigError
from tests.conftest import MakeModel
from tests.models import ROPES, reference_choices, reference_greedy, reference_model

from .harness import assert_idle, generate, make_engine, make_prompt, make_request

LONGROPE: dict[str, Any] = {
    "pad_token_id": None,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + pair / 10 for pair in range(6)],
        "long_factor": [1.5 + pair for pair in range(6)],
    },
}
GROWTH = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.3,
}  # fmt: skip
GROWTH_OF_TELECHAT = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
}  # fmt: skip
SELECTED = "compressed_sparse_attention"
# Together they have each family with each kind of rope, each head size and each number of heads per KV head.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-plain": ("llama", {"num_key_value_heads": 4, "head_dim": 32}),
    "llama-tied-linear": ("llama", {"head_dim": 64, "rope": "linear", "tie_word_embeddings": True}),
    "llama-biases-llama3": (
        "llama",
        {"num_key_value_heads": 1, "head_dim": 80, "rope": "llama3", "attention_bias": True, "mlp_bias": True},
    ),
    "llama-sharded-yarn": (
        "llama",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "rope": "yarn",
            "shard_size": "200KB",
        },
    ),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-derived-head-size": ("llama", {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 128}),
    "qwen2-quick-gelu": ("qwen2", {"hidden_act": "quick_gelu"}),
    "qwen2-tied": ("qwen2", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64, "rope": "yarn"}),
    "qwen2-late-windows": (
        "qwen2",
        {
            "num_key_value_heads": 4,
            "head_dim": 80,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 1,
        },
    ),
    "qwen2-sharded-llama3": (
        "qwen2",
        {"num_key_value_heads": 1, "head_dim": 128, "rope": "llama3", "shard_size": "150KB"},
    ),
    "qwen": ("qwen", {}),
    "chatglm": ("chatglm", {"rms_norm_eps": 1e-5}),
    "chatglm-a-key-per-head-far": (
        "chatglm",
        {
            "num_key_value_heads": 4,
            "head_dim": 32,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        },
    ),
    "baichuan": ("baichuan", {"num_key_value_heads": 4}),
    "baichuan-2": ("baichuan", {"num_key_value_heads": 4, "vocab_size": 125696}),
    "minicpm": (
        "minicpm",
        {
            "embedding_multiplier": 12,
            "residual_multiplier": 1.4 / 2**0.5,
            "logits_scaling": 4,
            "attention_multiplier": 0.25,
            "tie_word_embeddings": True,
        },
    ),
    "minicpm-longrope-biases": (
        "minicpm",
        {
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.5 + pair for pair in range(8)],
                "long_factor": [1.5 + pair for pair in range(8)],
            },
        },
    ),
    "telechat": ("telechat", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "telechat-groups-tied-longer": (
        "telechat",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0 * 7 ** (16 / 14)},
        },
    ),
    "qwen3-plain": ("qwen3", {"num_key_value_heads": 1, "head_dim": 128}),
    "qwen3-tied-bias-yarn": (
        "qwen3",
        {"head_dim": 80, "rope": "yarn", "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3-windows-in-turn": (
        "qwen3",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 19,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-linear": ("qwen3", {"num_key_value_heads": 4, "head_dim": 64, "rope": "linear"}),
    "mistral-window": ("mistral", {"head_dim": 32, "sliding_window": 24}),
    "mistral-no-window-yarn": (
        "mistral",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 80,
            "rope": "yarn",
            "sliding_window": None,
        },
    ),
    "mistral-narrow-window-tied-sharded": (
        "mistral",
        {
            "num_key_value_heads": 4,
            "head_dim": 128,
            "rope": "llama3",
            "sliding_window": 5,
            "tie_word_embeddings": True,
            "shard_size": "200KB",
        },
    ),
    "bloom-tied": ("bloom", {"n_layer": 3, "seed": 2}),
    "bloom-twelve-heads-residual-after-norm-untied": (
        "bloom",
        {
            "hidden_size": 192,
            "n_head": 12,
            "seed": 2,
            "apply_residual_connection_post_layernorm": True,
            "tie_word_embeddings": False,
            "shard_size": "400KB",
        },
    ),
    "gemma2-tied": (
        "gemma2",
        {
            "initializer_range": 0.1,
            "num_hidden_layers": 3,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 19,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "granite-biases": (
        "granite",
        {
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.4,
            "logits_scaling": 7.0,
        },
    ),
    "smollm3-layers-with-windows": (
        "smollm3",
        {
            "sliding_window": 11,
            "layer_types": ["full_attention", "sliding_attention"],
            "no_rope_layers": [1, 1],
            "tie_word_embeddings": False,
            "pad_token_id": None,
        },
    ),
    "smollm3": (
        "smollm3",
        {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "tie_word_embeddings": False,
            "pad_token_id": None,
        },
    ),
    "olmo2": ("olmo2", {"num_key_value_heads": 2}),
    "olmo2-biases-yarn": ("olmo2", {"num_key_value_heads": 4, "attention_bias": True, "rope": "yarn"}),
    "mixtral-window": ("mixtral", {"sliding_window": 21}),
    "qwen2-moe-dense-layer-normalized": (
        "qwen2_moe",
        {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 32, "norm_topk_prob": True, "seed": 5}),
    "qwen3-moe-every-second-layer": ("qwen3_moe", {"num_hidden_layers": 3, "decoder_sparse_step": 2}),
    "olmoe": ("olmoe", {}),
    "mixtral-gelu": ("mixtral", {"hidden_act": "gelu"}),
    "qwen2-moe-relu2": ("qwen2_moe", {"hidden_act": "relu2"}),
    "qwen3-vl-moe-relu": ("qwen3_vl_moe", {"hidden_act": "relu"}),
    "deepseek-v3-quick-gelu": ("deepseek_v3", {"hidden_act": "quick_gelu"}),
    "minicpm3-gelu": ("minicpm3", {"hidden_act": "gelu"}),
    "mistral4-gelu": (
        "mistral4",
        {"hidden_act": "gelu", "rope_parameters": {**GROWTH, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "granitemoe-shared-gelu": ("granitemoeshared", {"hidden_act": "gelu", "shared_intermediate_size": 56}),
    "llama4-gelu-new": ("llama4", {"hidden_act": "gelu_new", "interleave_moe_layer_step": 2}),
    "aria-gelu": ("aria_text", {"hidden_act": "gelu"}),
    "dbrx-gelu": (
        "dbrx",
        {"ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 6, "ffn_act_fn": {"name": "gelu"}}},
    ),
    "jetmoe-relu": ("jetmoe", {"activation_function": "relu"}),
    "longcat-flash-relu": ("longcat_flash", {"hidden_act": "relu"}),
    "muse-spark-gelu": ("muse_spark", {"hidden_act": "gelu"}),
    "olmoe-limited": ("olmoe", {"clip_qkv": 0.7}),
    "gpt-oss": ("gpt_oss", {"seed": 1}),
    "gpt-oss-low-limit-yarn": ("gpt_oss", {"swiglu_limit": 0.8, "rope": "yarn", "num_key_value_heads": 1}),
    "glm4-moe-groups": (
        "glm4_moe",
        {"n_routed_experts": 12, "n_group": 3, "topk_group": 2, "use_qk_norm": True, "routed_scaling_factor": 1.5},
    ),
    "glm4-moe-dense-layers-biases": (
        "glm4_moe",
        {"first_k_dense_replace": 2, "attention_bias": True, "norm_topk_prob": False, "n_shared_experts": 2},
    ),
    "deepseek-v2-groups": (
        "deepseek_v2",
        {
            "rope": "yarn of DeepSeek",
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
        },
    ),
    "deepseek-v2-lite": ("deepseek_v2", {"q_lora_rank": None, "first_k_dense_replace": 0, "n_shared_experts": 1}),
    "deepseek-v3-groups": (
        "deepseek_v3",
        {"rope": "yarn of DeepSeek", "n_group": 2, "topk_group": 1, "rms_norm_eps": 0.1},
    ),
    "deepseek-v3-plain-pairs": (
        "deepseek_v3",
        {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "num_attention_heads": 2},
    ),
    "deepseek-v3-biases": ("deepseek_v3", {"attention_bias": True}),
    "deepseek-v2-biases-plain-queries": ("deepseek_v2", {"q_lora_rank": None, "attention_bias": True}),
    "deepseek-v32": ("deepseek_v32", {"rope": "yarn of DeepSeek", "n_group": 2, "topk_group": 1}),
    "deepseek-v32-all-selected": ("deepseek_v32", {"index_topk": 600, "norm_topk_prob": False, "attention_bias": True}),
    "glm-5": ("glm_moe_dsa", {"index_head_dim": 8, "attention_bias": True}),
    "glm-5-shared-selections": (
        "glm_moe_dsa",
        {"num_hidden_layers": 5, "index_topk_freq": 2, "index_skip_topk_offset": 1},
    ),
    "phi3-window": ("phi3", {"sliding_window": 21, "pad_token_id": None}),
    "phi3-a-part-rotated-tied": (
        "phi3",
        {
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
            "tie_word_embeddings": True,
            "pad_token_id": None,
        },
    ),
    "phi3-longrope-short": ("phi3", {**LONGROPE, "original_max_position_embeddings": 512}),
    "falcon-7b": ("falcon", {"tie_word_embeddings": False}),
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False}),
    "falcon-one-norm": (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-in-turn": (
        "falcon",
        {"multi_query": False, "parallel_attn": False, "bias": True, "tie_word_embeddings": False},
    ),
    "falcon-alibi": (
        "falcon",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "tie_word_embeddings": False},
    ),
    "falcon-quick-gelu": ("falcon", {"activation": "quick_gelu"}),
    "gpt2": ("gpt2", {"tie_word_embeddings": False}),
    "gpt2-scaled-by-layer": (
        "gpt2",
        {"n_layer": 4, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False},
    ),
    "gpt2-unscaled-silu": (
        "gpt2",
        {"scale_attn_weights": False, "reorder_and_upcast_attn": True, "activation_function": "silu", "seed": 1},
    ),
    "gpt2-tied-relu": ("gpt2", {"n_inner": 100, "activation_function": "relu", "n_head": 2}),
    "gpt-neox": (
        "gpt_neox",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
    ),
    "gpt-neox-in-turn-all-rotated": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 1.0},
        },
    ),
    "gemma": ("gemma", {"initializer_range": 0.2, "head_dim": 32, "tie_word_embeddings": False}),
    "glm": ("glm", {}),
    "glm4-whole-heads-yarn": ("glm4", {"rope": "yarn"}),
    "glm4-half-heads": (
        "glm4",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "olmo-limited": ("olmo", {"clip_qkv": 1.5}),
    "olmo3-yarn": ("olmo3", {"rope": "yarn"}),
    "cohere": ("cohere", {}),
    "cohere-norms-untied": (
        "cohere",
        {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.3, "tie_word_embeddings": False},
    ),
    "cohere2": ("cohere2", {}),
    "command-a-plus": (
        "cohere2_moe",
        {
            "expert_selection_fn": "sigmoid",
            "num_shared_experts": 2,
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 120,
            "sliding_window_pattern": 3,
        },
    ),
    "command-a-plus-rms-norms": (
        "cohere2_moe",
        {
            "rms_norm_eps": 1e-5,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "prefix_dense_sliding_window_pattern": 2,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "starcoder2-window": ("starcoder2", {"sliding_window": 21, "tie_word_embeddings": False}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-norms-one-key": ("stablelm", {"qk_layernorm": True, "num_key_value_heads": 1}),
    "stablelm-parallel-norms": (
        "stablelm",
        {
            "seed": 1,
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
    ),
    "phi": (
        "phi",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "phi-head-norms-tied": (
        "phi",
        {
            "qk_layernorm": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "nemotron": (
        "nemotron",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "arcee": ("arcee", {"mlp_bias": True}),
    "seed-oss": ("seed_oss", {"attention_out_bias": True}),
    "ernie4-5-biases": ("ernie4_5", {"use_bias": True}),
    "ernie4-5-moe": ("ernie4_5_moe", {"num_hidden_layers": 3}),
    "ernie4-5-moe-biases": ("ernie4_5_moe", {"use_bias": True, "tie_word_embeddings": False}),
    "ernie4-5-moe-biases-tied": ("ernie4_5_moe", {"use_bias": True}),
    "exaone4-windows": ("exaone4", {}),
    "exaone4-no-windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone4-no-windows-no-rotation": ("exaone4", {"layer_types": ["full_attention"] * 4}),
    "ministral": ("ministral", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    "minimax-m2": ("minimax_m2", {"rotary_dim": 8}),
    "minimax-m3": ("minimax_m3", {}),
    "minimax-m3-text-part-alone": ("minimax_m3_text", {"rope": "yarn"}),
    "minimax-m3-more-local-blocks-a-key-per-head": (
        "minimax_m3_text",
        {
            "num_key_value_heads": 4,
            "index_n_heads": 4,
            "index_block_size": 6,
            "index_topk_blocks": 5,
            "index_local_blocks": 3,
            "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse", "full_attention"],
        },
    ),
    "minimax-m3-all-selected": ("minimax_m3_text", {"index_topk_blocks": 75, "tie_word_embeddings": True}),
    "dots1": ("dots1", {"n_shared_experts": 2, "norm_topk_prob": True, "first_k_dense_replace": 1}),
    "ministral3-growth": ("ministral3", {"rope_parameters": GROWTH}),
    "glm4-moe-lite": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True},
    ),
    "deepseek-moe": ("deepseek", {}),
    "deepseek-moe-biases-every-second-layer": (
        "deepseek",
        {
            "num_hidden_layers": 4,
            "mlp_only_layers": [0, 1, 3],
            "moe_layer_freq": 2,
            "norm_topk_prob": True,
            "attention_bias": True,
            "num_key_value_heads": 2,
            "n_shared_experts": 0,
            "rope": "linear",
        },
    ),
    "ling": ("bailing_moe", {"norm_topk_prob": True}),
    "ling-biases-normed-head": (
        "bailing_moe",
        {
            "norm_head": True,
            "use_bias": True,
            "use_qkv_bias": True,
            "head_dim": 32,
            "first_k_dense_replace": 1,
            "mlp_only_layers": [0],
            "rope": "yarn",
        },
    ),
    "ling-2": ("bailing_moe_v2", {}),
    "ling-2-biases-one-group": (
        "bailing_moe_v2",
        {
            "use_bias": True,
            "use_qk_norm": False,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "num_nextn_predict_layers": 0,
            "tie_word_embeddings": True,
            "rope": "yarn",
        },
    ),
    "minicpm-v-2": (
        "minicpm_v_2",
        {
            "embedding_multiplier": 12,
            "residual_multiplier": 0.7,
            "logits_scaling": 4,
            "attention_multiplier": 0.25,
            "tie_word_embeddings": True,
        },
    ),
    "minicpm-v-2-5": ("minicpm_v_2_5", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "minicpm-v-2-6": ("minicpm_v_2_6", {}),
    "minicpm-v-4": ("minicpm_v_4", {"tie_word_embeddings": True, "head_dim": 32}),
    "minicpm-v-4-5": ("minicpm_v_4_5", {"head_dim": 32}),
    "minicpm-o-2-6": ("minicpm_o_2_6", {}),
    "minicpm-o-4-5": ("minicpm_o_4_5", {"head_dim": 32}),
    "keye": ("keye", {"head_dim": 32}),
    "keye-1-5-tied": ("keye_1_5", {"tie_word_embeddings": True}),
    "phi3-v-su": (
        "phi3_v",
        {
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + pair / 10 for pair in range(8)],
                "long_factor": [1.5 + pair for pair in range(8)],
            },
        },
    ),
    "phi4-mm": ("phi4_mm", {**LONGROPE, "original_max_position_embeddings": 512, "tie_word_embeddings": True}),
    "molmo": ("molmo", {}),
    "molmo-olmo": ("molmo_olmo", {"num_key_value_heads": 4}),
    "nemotron-super": ("decilm", {}),
    "nemotron-51b-biases": (
        "decilm",
        {
            "num_attention_heads": 8,
            "num_hidden_layers": 6,
            "intermediate_size": 512,
            "blocks": [(None, 256), ("linear", "linear"), (2, 512), (4, 256), (2, None)],
            "biased_mlp": True,
            "attention_bias": True,
            "form": "ffn_mult",
            "tie_word_embeddings": True,
            "rope": "llama3",
            "initializer_range": 0.2,
        },
    ),
    "decilm-7b": (
        "decilm",
        {
            "num_hidden_layers": 3,
            "blocks": [(4, 96), (1, 96), (2, 96)],
            "form": "num_key_value_heads_per_layer",
            "rope": "linear",
        },
    ),
    "exaone-moe": ("exaone_moe", {}),
    "flex-olmo": ("flex_olmo", {}),
    "hunyuan-alpha": (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}},
    ),
    "hunyuan-biases": ("hunyuan_v1_dense", {"attention_bias": True, "rms_norm_eps": 0.1}),
    "hunyuan-moe": ("hunyuan_v1_moe", {}),
    "opt": ("opt", {"tie_word_embeddings": False}),
    "opt-no-final-norm": ("opt", {"_remove_final_layer_norm": True, "activation_function": "gelu_new"}),
    "opt-350m": (
        "opt",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 40, "tie_word_embeddings": True},
    ),
    "opt-galactica": (
        "opt",
        {"activation_function": "gelu", "enable_bias": False, "layer_norm_elementwise_affine": False},
    ),
    "gptj": ("gptj", {}),
    "gptj-tied": ("gptj", {"tie_word_embeddings": True, "seed": 5}),
    "codegen": ("codegen", {"n_inner": 100}),
    "gpt-bigcode": ("gpt_bigcode", {"tie_word_embeddings": False}),
    "gpt-bigcode-unscaled": ("gpt_bigcode", {"scale_attn_weights": False, "tie_word_embeddings": False}),
    "gpt-bigcode-a-key-per-head": ("gpt_bigcode", {"multi_query": False, "activation_function": "gelu"}),
    "mpt": ("mpt", {"tie_word_embeddings": False}),
    "mpt-limited-twelve-heads": (
        "mpt",
        {
            "d_model": 96,
            "n_heads": 12,
            "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.3},
            "tie_word_embeddings": False,
        },
    ),
    "phimoe-biases": ("phimoe", {"attention_bias": True, "lm_head_bias": True, "sliding_window": 21}),
    "phimoe-tied-biases": ("phimoe", {"tie_word_embeddings": True, "lm_head_bias": True}),
    "phimoe-longrope": (
        "phimoe",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + pair / 10 for pair in range(8)],
                "long_factor": [1.5 + pair for pair in range(8)],
                "short_mscale": 1.2,
                "long_mscale": 1.2,
                "original_max_position_embeddings": 512,
            },
        },
    ),
    "dbrx": ("dbrx", {}),
    "apertus": ("apertus", {}),
    "apertus-relu2": ("apertus", {"hidden_act": "relu2"}),
    "apertus-biases-llama3": ("apertus", {"attention_bias": True, "rope": "llama3"}),
    "lfm2": ("lfm2", {}),
    "lfm2-biases-longer": (
        "lfm2",
        {"conv_bias": True, "conv_L_cache": 5, "tie_word_embeddings": False, "num_key_value_heads": 4},
    ),
    "lfm2-units-as-they-are": ("lfm2", {"block_auto_adjust_ff_dim": False, "layer_types": None, "full_attn_idxs": [1]}),
    "bamba": ("bamba", {}),
    "jamba": ("jamba", {}),
    "jamba-biases-no-experts": (
        "jamba",
        {
            "attn_layer_period": 2,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "mamba_dt_rank": "auto",
            "mamba_expand": 1,
            "mamba_proj_bias": True,
            "num_experts": 1,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
    "jamba-experts-in-each-layer": (
        "jamba",
        {"expert_layer_period": 1, "expert_layer_offset": 0, "num_experts_per_tok": 1, "num_key_value_heads": 4},
    ),
    "recurrent-gemma": ("recurrent_gemma", {}),
    "recurrent-gemma-biases-longer-untied": (
        "recurrent_gemma",
        {
            "attention_bias": True,
            "block_types": ["attention", "recurrent"],
            "conv1d_width": 5,
            "head_dim": 24,
            "hidden_size": 64,
            "lru_width": 64,
            "logits_soft_cap": 5.0,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
            "tie_word_embeddings": False,
        },
    ),
    "recurrent-gemma-no-attention": ("recurrent_gemma", {"block_types": ["recurrent"], "num_key_value_heads": 2}),
    "recurrent-gemma-no-states": ("recurrent_gemma", {"block_types": ["attention"], "hidden_activation": "gelu"}),
    "mamba2": ("mamba2", {}),
    "mamba2-biases-a-group-longer": (
        "mamba2",
        {"use_bias": True, "n_groups": 1, "conv_kernel": 6, "state_size": 24, "tie_word_embeddings": True},
    ),
    "mamba": ("mamba", {}),
    "mamba-biases-longer-untied": (
        "mamba",
        {
            "conv_kernel": 5,
            "intermediate_size": 72,
            "time_step_rank": "auto",
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-mamba": ("falcon_mamba", {"mixer_rms_eps": 0.1, "tie_word_embeddings": False}),
    "olmo-hybrid": ("olmo_hybrid", {}),
    "olmo-hybrid-unrotated": (
        "olmo_hybrid",
        {"rope_parameters": None, "linear_allow_neg_eigval": False, "num_key_value_heads": 4, "attention_bias": True},
    ),
    "minimax": ("minimax", {}),
    "minimax-without-factors": (
        "minimax",
        {
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "num_key_value_heads": 4,
            **{f"{part}_factor": 1 for part in ("full_attn_alpha", "full_attn_beta", "linear_attn_alpha")},
            **{f"{part}_factor": 1 for part in ("linear_attn_beta", "mlp_alpha")},
        },
    ),
    "kimi-linear": ("kimi_linear", {}),
    "kimi-linear-low-rank-queries": (
        "kimi_linear",
        {"q_lora_rank": 20, "linear_num_heads": 2, "linear_head_dim": 20, "linear_conv_kernel_dim": 3},
    ),
    "ling3": ("bailing_hybrid", {}),
    "ling3-unbounded": ("bailing_hybrid", {"kda_safe_gate": False, "rope": "yarn", "head_dim": 16}),
    "falcon-h1": ("falcon_h1", {}),
    "falcon-h1-biases-norms": (
        "falcon_h1",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mamba_rms_norm": True,
            "mamba_n_groups": 2,
            "num_key_value_heads": 4,
            "head_dim": 16,
        },
    ),
    "falcon-h1-norms-after-gates": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_ssm": None, "num_hidden_layers": 3},
    ),
    "zamba2": ("zamba2", {}),
    "zamba2-adapters-of-attention-biases": (
        "zamba2",
        {
            "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
            "num_hidden_layers": 6,
            "num_mem_blocks": 3,
            "add_bias_linear": True,
            "hidden_act": "silu",
            "mamba_ngroups": 2,
            "n_mamba_heads": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "rms_norm_eps": 0.01,
            "rope": "linear",
            "use_mem_rope": True,
            "use_shared_attention_adapter": True,
        },
    ),
    "zamba2-grouped-queries": (
        "zamba2",
        {"num_mem_blocks": 1, "num_key_value_heads": 2, "mamba_ngroups": 4, "mamba_d_conv": 3, "use_mem_rope": True},
    ),
    "nemotron-h": ("nemotron_h", {}),
    "nemotron-h-biases-mlp-first": (
        "nemotron_h",
        {
            "layers_block_type": [
                "mlp",
                "linear_attention",
                "full_attention",
                "mlp",
                "linear_attention",
                "full_attention",
            ],
            "mlp_bias": True,
            "initializer_range": 0.2,
            "use_bias": True,
            "use_conv_bias": False,
            "n_groups": 1,
        },
    ),
    "nemotron-h-experts-groups": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "num_key_value_heads": 4,
        },
    ),
    "nemotron-h-latent-experts-first-biases": (
        "nemotron_h",
        {
            "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"],
            "moe_latent_size": 32,
            "mlp_bias": True,
            "norm_topk_prob": False,
            "mlp_hidden_act": "gelu",
            "initializer_range": 0.2,
        },
    ),
    "bamba-biases-groups": (
        "bamba",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "mamba_n_groups": 4,
            "num_key_value_heads": 4,
        },
    ),
    "qwen3-next": ("qwen3_next", {}),
    "qwen3-next-narrow": (
        "qwen3_next",
        {"linear_conv_kernel_dim": 2, "linear_value_head_dim": 12, "linear_num_value_heads": 6, "mlp_only_layers": [1]},
    ),
    "qwen3-5": ("qwen3_5_text", {}),
    "qwen3-5-shorter-filter": ("qwen3_5_text", {"linear_conv_kernel_dim": 3, "linear_num_key_heads": 4}),
    "qwen3-5-moe": ("qwen3_5_moe_text", {"num_key_value_heads": 4, "linear_num_key_heads": 4}),
    "lfm2-moe": ("lfm2_moe", {"routed_scaling_factor": 1.5, "num_key_value_heads": 4}),
    "granite-4": ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope"}),
    "granite-4-mamba": (
        "granitemoehybrid",
        {"num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    ),
    "granite-4-mamba-only": ("granitemoehybrid", {"layer_types": ["mamba", "mamba"]}),
    "granite-4-mamba-biases-groups": (
        "granitemoehybrid",
        {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "num_key_value_heads": 4,
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
        },
    ),
    "granite-4-unrotated": ("granitemoehybrid", {"num_local_experts": 0, "attention_bias": True}),
    "granite-4-experts": (
        "granitemoehybrid",
        {"num_local_experts": 6, "intermediate_size": 24, "embedding_multiplier": 1.0},
    ),
    "lfm3": ("lfm3", {"num_key_value_heads": 4}),
    "lfm3-biases-ungated": (
        "lfm3",
        {
            "attention_bias": True,
            "conv_bias": True,
            "use_attention_gate": False,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "conv", "full_attention", "sliding_attention", "conv"],
        },
    ),
    "lfm2-moe-uncorrected": ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False, "conv_L_cache": 4}),
    "helium-relu": ("helium", {"hidden_act": "relu"}),
    "helium-biases": ("helium", {"attention_bias": True, "mlp_bias": True}),
    "vaultgemma": (
        "vaultgemma",
        {
            "initializer_range": 0.2,
            "sliding_window": 19,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": False,
        },
    ),
    "persimmon": ("persimmon", {"initializer_range": 0.2}),
    "persimmon-no-head-norms": ("persimmon", {"qk_layernorm": False}),
    "xglm": ("xglm", {"tie_word_embeddings": False}),
    "xglm-padding-among-positions": ("xglm", {"tie_word_embeddings": False, "pad_token_id": 7}),
    "xglm-tied-unscaled": ("xglm", {"scale_embedding": False, "activation_function": "relu"}),
    "gpt-neo": ("gpt_neo", {"tie_word_embeddings": False}),
    "cwm-llama3": ("cwm", {"rope": "llama3"}),
    "solar-open": ("solar_open", {"attention_bias": True, "n_shared_experts": 2, "routed_scaling_factor": 1.5}),
    "nanochat": ("nanochat", {"final_logit_softcapping": 5.0, "rms_norm_eps": 0.1}),
    "nanochat-biases": ("nanochat", {"attention_bias": True, "final_logit_softcapping": None}),
    "hyperclovax": (
        "hyperclovax",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.125, "mlp_bias": True},
    ),
    "hyperclovax-no-post-norms": ("hyperclovax", {"use_post_norm": False, "attention_multiplier": 0.1}),
    "jais2": ("jais2", {}),
    "youtu": ("youtu", {"tie_word_embeddings": False, "attention_bias": True}),
    "mellum": ("mellum", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "rope": "yarn"}),
    "afmoe": ("afmoe", {"mup_enabled": True, "route_scale": 1.5}),
    "afmoe-biases": ("afmoe", {"attention_bias": True, "num_dense_layers": 2, "num_shared_experts": 1}),
    "beam": ("beam", {"rope": "yarn", "rms_norm_eps": 0.02}),
    "beam-biases-tied": (
        "beam",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
            "final_logit_softcapping": None,
            "hidden_act": "gelu",
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "minicpm3": (
        "minicpm3",
        {"scale_emb": 3, "dim_model_base": 8, "tie_word_embeddings": False, "attention_bias": True},
    ),
    "mistral4": (
        "mistral4",
        {
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "seed": 1,
            "attention_bias": True,
            "rope_parameters": {**GROWTH, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "mistral-large-4": ("mistral_large4", {"rope": "yarn", "n_shared_experts": 2, "final_logit_softcapping": 8.0}),
    "mistral-large-4-shared": (
        "mistral_large4",
        {
            "num_hidden_layers": 6,
            "kv_source_layers": [0, 1, 0, 3, 4, 3],
            "indexer_types": ["full", "shared", "full", "full", "full", "shared"],
            "attention_bias": True,
            "n_group": 2,
            "topk_group": 1,
            "hidden_act": "gelu",
            "routed_scaling_factor": 1.5,
        },
    ),
    "dots3-note": ("dots3_note", {"rope": "yarn", "n_group": 2, "topk_group": 1}),
    "dots3-note-text-part-alone": (
        "dots3_note_text",
        {
            "attention_bias": True,
            "index_head_dim": 8,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": False,
            "rms_norm_eps": 0.1,
            "moe_layer_freq": [1, 0, 1, 1],
        },
    ),
    "hy3": ("hy_v3", {"attention_bias": True, "num_shared_experts": 2}),
    "hy4-low-limit": (
        "hy_v4",
        {
            "swiglu_limit": 0.3,
            "hc_mult": 3,
            "index_head_dim": 8,
            "attention_bias": True,
            "indexer_types": ["full", "shared", "full"],
        },
    ),
    "hy4-shared-selections": (
        "hy_v4",
        {
            "num_hidden_layers": 4,
            "indexer_types": ["full", "shared", "full", "shared"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "hc_magnitude": 1.5,
            "hc_eps": 0.1,
            "rms_norm_eps": 0.1,
            "n_shared_experts": 2,
            "n_group": 2,
            "rope": "yarn of DeepSeek",
        },
    ),
    "hy4-all-selected-tied": (
        "hy_v4",
        {"index_topk": 600, "norm_topk_prob": False, "tie_word_embeddings": True, "num_attention_heads": 2},
    ),
    "glm5-next": ("glm5_next", {}),
    "glm5-next-unbounded-low-limit": (
        "glm5_next",
        {
            "linear_lower_bound": None,
            "linear_conv_kernel_dim": 3,
            "swiglu_limit": 0.3,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 3,
            "hc_eps": 0.05,
            "rms_norm_eps": 0.05,
            "index_kpool": 6,
            "index_topk": 30,
            "n_shared_experts": 2,
            "n_group": 2,
            "attention_bias": True,
        },
    ),
    "glm5-next-no-states": (
        "glm5_next",
        {
            "layer_types": ["full_attention"] * 4,
            "indexer_types": ["full", "shared"] * 2,
            "num_hidden_layers": 4,
            "mlp_layer_types": ["sparse", "dense"] * 2,
            "index_kpool": 1,
            "norm_topk_prob": False,
        },
    ),
    "deepseek-v4": ("deepseek_v4", {}),
    "deepseek-v4-sigmoid-yarn-few-rows": (
        "deepseek_v4",
        {
            "rope": "yarn",
            "scoring_func": "sigmoid",
            "swiglu_limit": 0.3,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
            "hc_eps": 0.05,
            "rms_norm_eps": 0.05,
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 6},
            "compress_rate_hca": None,
            "sliding_window": 19,
            "o_groups": 2,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-v4-shared-entries": (
        "deepseek_v4",
        {
            "num_hidden_layers": 5,
            "layer_types": [SELECTED, SELECTED, "sliding_attention", SELECTED, "heavily_compressed_attention"],
            "num_hash_layers": 2,
            "routed_scaling_factor": 0.7,
        },
    ),
    "deepseek-v4-all-selected": (
        "deepseek_v4",
        {"index_topk": 600, "layer_types": [SELECTED] * 3, "num_hash_layers": 0},
    ),
    "deepseek-v4-no-entries": (
        "deepseek_v4",
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "qk_rope_head_dim": 16},
    ),
    "axk1": ("axk1", {"rope": "yarn of DeepSeek", "n_group": 2, "topk_group": 1, "attention_bias": True}),
    "axk2": ("axk2", {"rope": "yarn of DeepSeek", "attention_bias": True, "gated_norm_rank": 6}),
    "axk2-groups-gelu": (
        "axk2",
        {"n_group": 2, "topk_group": 1, "hidden_act": "gelu", "norm_topk_prob": False, "first_k_dense_replace": 2},
    ),
    "granite-swash": ("granite_swa", {"residual_multiplier": 0.4, "attention_multiplier": 0.2}),
    "granite-swash-experts": (
        "granitemoe_swa",
        {"shared_intermediate_size": 48, "attention_multiplier": 0.2, "layer_rope_theta": [0, 1e4, 500, 1e4]},
    ),
    "biogpt": ("biogpt", {"tie_word_embeddings": False}),
    "biogpt-unscaled": ("biogpt", {"scale_embedding": False, "hidden_act": "relu"}),
    "gpt-neox-japanese": ("gpt_neox_japanese", {"intermediate_multiple_size": 2, "num_hidden_layers": 3}),
    "llama4": ("llama4", {"interleave_moe_layer_step": 2}),
    "llama4-no-head-norms-llama3": (
        "llama4",
        {
            "rope": "llama3",
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "no_rope_layers": [1, 0, 1, 0],
            "attention_chunk_size": 7,
        },
    ),
    "llama4-two-experts": ("llama4", {"num_experts_per_tok": 2}),
    "llama4-and-images": ("llama4_mm", {"moe_layers": [0, 3]}),
    "kimi-k2-5": ("kimi_k25", {}),
    "granitemoe": ("granitemoe", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 7.0}),
    "granitemoe-shared": ("granitemoeshared", {"shared_intermediate_size": 48, "attention_multiplier": 0.2}),
    "qwen3-vl-moe": (
        "qwen3_vl_moe",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [4, 2, 2]},
        },
    ),
    "gemma3-and-images": ("gemma3_mm", {"initializer_range": 0.1}),
    "mistral3-and-images": ("mistral3", {"rope_parameters": GROWTH, "tie_word_embeddings": True}),
    "qwen2-5-vl": ("qwen2_5_vl", {"rope_parameters": {"rope_theta": 1e4, "type": "mrope", "mrope_section": [2, 3, 3]}}),
    "qwen3-vl": (
        "qwen3_vl",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [4, 2, 2]},
        },
    ),
    "llava": ("llava", {"num_key_value_heads": 4}),
    "internvl-experts": ("internvl", {"head_dim": 16}),
    "aya-vision": ("aya_vision", {}),
    "lfm2-vl": ("lfm2_vl", {}),
    "qwen3-5-vl": ("qwen3_5", {}),
    "minicpm-v-4-6": ("minicpmv4_6", {}),
    "qwen3-5-moe-vl": ("qwen3_5_moe", {}),
    "lfm3-vl": ("lfm3_vl", {}),
    "idefics3": ("idefics3", {}),
    "glm4v": (
        "glm4v",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            },
        },
    ),
    "glm4v-moe": (
        "glm4v_moe",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [4, 2, 2],
            },
        },
    ),
    "voxtral": ("voxtral", {"head_dim": 32}),
    "qwen2-5-omni": (
        "qwen2_omni",
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 3, 3]}},
    ),
    "qwen3-omni": (
        "qwen3_omni",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [4, 2, 2]},
        },
    ),
    "glm-ocr": (
        "glm_ocr",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
    ),
    "hunyuan-vl": (
        "hunyuan_vl",
        {
            "rope_parameters": {
                "rope_type": "xdrope",
                "rope_theta": 1e4,
                "alpha": 50.0,
                "factor": 1.0,
                "xdrope_section": [2, 2, 2, 2],
            },
        },
    ),
    "paddleocr-vl": (
        "paddleocr_vl",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}, "use_bias": True},
    ),
    "got-ocr2": ("got_ocr2", {}),
    "lighton-ocr": ("lighton_ocr", {"head_dim": 16}),
    "fast-vlm": ("fast_vlm", {}),
    "granite4-vision": ("granite4_vision", {"embedding_multiplier": 3.0, "attention_multiplier": 0.1}),
    "aria": ("aria", {"attention_bias": True, "moe_num_shared_experts": 1}),
    "aria-text": ("aria_text", {"rope": "linear", "tie_word_embeddings": True}),
    "kolibri1": ("kolibri1", {"rope": "yarn", "norm_topk_prob": True}),
    "kolibri1-default-layers": ("kolibri1", {"layer_types": None, "num_hidden_layers": 5, "sliding_window": 7}),
    "flint": ("flint", {}),
    "flint-biases-dense-layers": (
        "flint",
        {
            "attention_bias": True,
            "norm_topk_prob": False,
            "rope": "yarn",
            "layer_types": ["sliding_attention", "full_attention", *("sliding_attention",) * 3],
            "mlp_only_layers": None,
            "decoder_sparse_step": 2,
        },
    ),
    "laguna": ("laguna", {"rope": "yarn", "moe_routed_scaling_factor": 2.5}),
    "laguna-biases-a-gate-per-element": (
        "laguna",
        {
            "attention_bias": True,
            "gating": "per-element",
            "moe_router_logit_softcapping": 1.5,
            "mlp_layer_types": ["sparse", "sparse", "dense", "sparse"],
            "num_attention_heads_per_layer": None,
        },
    ),
    # With a tied head this model repeats its first token.
    "openai-gpt": ("openai_gpt", {"tie_word_embeddings": False}),
    "openai-gpt-silu": ("openai_gpt", {"tie_word_embeddings": False, "afn": "silu"}),
    "jetmoe": ("jetmoe", {"tie_word_embeddings": False}),
    "jetmoe-yarn": ("jetmoe", {"rope": "yarn", "num_experts_per_tok": 1, "rms_norm_eps": 1e-2}),
    "diffllama": ("diffllama", {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16}),
    "diffllama-biases-linear": ("diffllama", {"attention_bias": True, "rope": "linear", "head_dim": 32}),
    "ctrl": ("ctrl", {"tie_word_embeddings": False, "seed": 1}),
    "doge": ("doge", {}),
    "doge-biases-window-yarn-tied": (
        "doge",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "sliding_window": 19,
            "rope": "yarn",
            "head_dim": 40,
            "keep_window_size": 300,
            "tie_word_embeddings": True,
        },
    ),
    "hrm-text": ("hrm_text", {}),
    "hrm-text-more-cycles-linear": (
        "hrm_text",
        {"rope": "linear", "H_cycles": 3, "L_cycles": 1, "head_dim": 32, "initializer_range": 0.2},
    ),
    "modernbert-decoder": ("modernbert_decoder", {"tie_word_embeddings": False}),
    "modernbert-decoder-biases-tied": (
        "modernbert_decoder",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope": "yarn",
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "classifier_bias": True,
            "classifier_activation": "silu",
        },
    ),
    "bitnet": ("bitnet", {"tie_word_embeddings": True}),
    "bitnet-biases-llama3": ("bitnet", {"attention_bias": True, "rope": "llama3", "hidden_act": "silu"}),
    "step3p7": ("step3p7", {"rope": "llama3", "moe_router_scaling_factor": 3.0}),
    "step3p7-biases-one-number-of-heads": (
        "step3p7",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "query_pre_attn_scalar": 24,
            "num_sliding_attention_heads": None,
            "swiglu_limits": None,
            "swiglu_limits_shared": None,
        },
    ),
    "mimo-v2-flash": ("mimo_v2_flash", {"rope": "yarn"}),
    "mimo-v2-flash-biases-groups": (
        "mimo_v2_flash",
        {
            "attention_bias": True,
            "attention_value_scale": None,
            "num_attention_heads": 16,
            "n_routed_experts": 8,
            "n_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
            "layer_types": ["sliding_attention"] * 4,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "v_head_dim": 32,
        },
    ),
    "mimo-v2-flash-scaled-whole-heads": (
        "mimo_v2_flash",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "longcat-flash": ("longcat_flash", {}),
    "longcat-flash-yarn": ("longcat_flash", {"rope": "yarn of DeepSeek", "zero_expert_num": 0, "attention_bias": True}),
    "perception-lm": ("perception_lm", {"rope": "llama3"}),
    "video-llama3": ("video_llama3", {}),
    "janus": ("janus", {"num_key_value_heads": 4}),
    "deepseek-vl": ("deepseek_vl", {}),
    "deepseek-vl-hybrid": ("deepseek_vl_hybrid", {}),
    "hyperclovax-vision": ("hyperclovax_vision", {"residual_multiplier": 0.4, "logits_scaling": 0.125}),
    "qianfan-ocr": ("qianfan_ocr", {"head_dim": 16}),
    "granite-docling": ("granite_docling", {"embedding_multiplier": 3.0, "pad_token_id": None}),
    "deepseek-ocr2": ("deepseek_ocr2", {"routed_scaling_factor": 1.5, "attention_bias": True}),
    "deepseek-ocr2-groups": (
        "deepseek_ocr2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "rope": "yarn"},
    ),
    "ernie4-5-vl": ("ernie4_5_vl", {"use_bias": True}),
    "ernie4-5-vl-layers": (
        "ernie4_5_vl",
        {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"], "moe_num_shared_experts": 0},
    ),
    "molmo2": ("molmo2", {"attention_bias": True}),
    "molmo2-olmo": (
        "molmo2",
        {
            "qk_norm_type": "olmo",
            "norm_after": True,
            "rope": "yarn",
            "num_hidden_layers": 4,
            "rope_scaling_layers": [1, 3],
        },
    ),
    "muse-glimmer": ("muse_glimmer", {}),
    "muse-glimmer-biases": (
        "muse_glimmer",
        {
            "rope": "yarn",
            "attention_bias": True,
            "layer_types": ["full_attention", *("sliding_attention",) * 4],
            "layer_rope_theta": [1e4, 0, 1e4, 1e4, 0],
            "post_norm_eps": 1e-2,
        },
    ),
    "muse-spark": ("muse_spark", {"output_multiplier": 0.7}),
    "muse-spark-biases": (
        "muse_spark",
        {
            "rope": "yarn",
            "attention_bias": True,
            "mlp_layer_types": None,
            "layer_rope_theta": [1e4, 0, 1e4, 1e4, 0],
            "post_norm_eps": 1e-2,
            "residual_gate_temperature": 1.5,
            "routed_scaling_factor": 2.0,
        },
    ),
    "mllama": ("mllama", {"rope": "llama3"}),
    "mllama-text": ("mllama_text", {"cross_attention_layers": [0, 1, 7]}),
    "cohere-compass": ("cohere_compass", {}),
    "cohere-compass-text": (
        "cohere_compass_text",
        {
            "attention_bias": True,
            "logit_scale": None,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "sliding_attention": None,
                "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0},
            },
        },
    ),
    "chameleon": ("chameleon", {}),
    "chameleon-norms-after-biases": (
        "chameleon",
        {"swin_norm": True, "attention_bias": True, "mlp_bias": True, "rope": "yarn", "num_hidden_layers": 4},
    ),
    "emu3": ("emu3", {}),
    "emu3-text": ("emu3_text", {"rope": "linear", "attention_bias": True, "mlp_bias": True}),
    "fuyu": ("fuyu", {"initializer_range": 0.25}),
    "phi4-multimodal": ("phi4_multimodal", {**LONGROPE, "tie_word_embeddings": True}),
    "plamo3": (
        "plamo3",
        {
            "initializer_range": 0.1,
            "hidden_activation": "silu",
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": False,
        },
    ),
    "plamo3-yarn": (
        "plamo3",
        {
            "initializer_range": 0.1,
            "hidden_activation": "silu",
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": GROWTH_OF_TELECHAT,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "truncate": False,
            },
        },
    ),
    "gemma3-tied": ("gemma3", {"initializer_range": 0.1}),
    "gemma3-gelu": ("gemma3", {"initializer_range": 0.1, "hidden_activation": "gelu"}),
    "gemma3n-silu": ("gemma3n", {"initializer_range": 0.1, "hidden_activation": "silu"}),
    "gemma4-small-silu": ("gemma4_small", {"initializer_range": 0.1, "hidden_activation": "silu"}),
    "gemma3-softcap": ("gemma3", {"initializer_range": 0.1, "final_logit_softcapping": 5.0}),
    "gemma3n": ("gemma3n", {"initializer_range": 0.1}),
    "gemma3n-untied-sizes": (
        "gemma3n",
        {
            "initializer_range": 0.1,
            "intermediate_size": [96, 64, 128, 32, 96],
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": None,
            "altup_active_idx": 1,
            "altup_num_inputs": 3,
            "altup_correct_scale": False,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4-tied": ("gemma4", {"initializer_range": 0.05}),
    "gemma4-experts-untied": (
        "gemma4",
        {
            "initializer_range": 0.1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "global_head_dim": 24,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4-values-biases": (
        "gemma4",
        {
            "initializer_range": 0.15,
            "attention_k_eq_v": False,
            "attention_bias": True,
            "num_hidden_layers": 7,
            "layer_types": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4-small": ("gemma4_small", {"initializer_range": 0.1}),
    "gemma4-small-one-key": ("gemma4_small", {"initializer_range": 0.1, "num_key_value_heads": 1}),
    "gemma4-12b": ("gemma4_unified", {"initializer_range": 0.05}),
    "gemma4-and-images": ("gemma4_mm", {"initializer_range": 0.1}),
    "gemma3-linear-biases-untied-wide-heads": (
        "gemma3",
        {
            "rope": "linear",
            "attention_bias": True,
            "tie_word_embeddings": False,
            "head_dim": 80,
            "num_key_value_heads": 1,
            "sliding_window": 5,
            "num_hidden_layers": 7,
            "layer_types": None,
        },
    ),
    "internlm2": ("internlm2", {}),
    "internlm2-biases-linear": (
        "internlm2",
        {"num_attention_heads": 8, "num_key_value_heads": 1, "attention_bias": True, "rope": "linear"},
    ),
    "internlm3": ("internlm3", {}),
    "internlm3-biases": ("internlm3", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "internlm3-biases-of-queries": ("internlm3_qkv_bias", {}),
    "internlm-biases": ("internlm", {"attention_bias": True}),
    "exaone-llama3": ("exaone", {"rope": "llama3"}),
    "exaone-tied": ("exaone", {"tie_word_embeddings": True, "num_key_value_heads": 1, "num_hidden_layers": 3}),
    "orion": ("orion", {}),
    "mimo": ("mimo", {}),
    "aquila": ("aquila", {}),
    "xverse": ("xverse", {}),
    "llama-first": ("llama_first", {}),
    "telechat3": (
        "telechat3",
        {"rope_parameters": {**GROWTH_OF_TELECHAT, "attention_factor": 0.07 * math.log(8.0) + 1.0}, "head_dim": 32},
    ),
    "telechat3-plain-biases": ("telechat3", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "iquest-coder": ("iquest_coder", {"attention_bias": True, "rope": "llama3", "head_dim": 32}),
    "teleflm": ("teleflm", {"embedding_multiplier": 3.0, "logits_scaling": 7.0, "num_key_value_heads": 4}),
    "ouro": ("ouro", {}),
    "ouro-tied-two-passes-linear": (
        "ouro",
        {"total_ut_steps": 2, "num_hidden_layers": 3, "tie_word_embeddings": True, "rope": "linear"},
    ),
    "stablelm-epoch": ("stablelm_epoch", {}),
    "pangu-embedded-biases": ("pangu_embedded", {"attention_bias": True}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_tokens_of_transformers(tiny_model: MakeModel, shape: str) -> None:
    family, overrides = SHAPES[shape]
    folder = tiny_model(family, **overrides)
    if "shard_size" in overrides:
        assert len(list(folder.glob("*.safetensors"))) > 1
    # Prompts of one token, of a block less one token, a block, a block and one token, and several chunks.
    prompts = [make_prompt(length, seed=3) for length in (1, 15, 16, 17, 90)]
    engine = make_engine(folder, block_size=16, max_num_batched_tokens=40)
    transcript = generate(engine, [make_request(i, prompt, 40) for i, prompt in enumerate(prompts)])
    for id, prompt in enumerate(prompts):
        tokens = transcript.tokens[id, 0]
        assert len(tokens) == 40
        assert tokens == reference_choices(folder, prompt, tokens)
    drawn = {token for tokens in transcript.tokens.values() for token in tokens}
    assert len(drawn) > 15, "the model repeats itself and tests little"
    assert_idle(engine)


def test_experts_that_are_stored_with_their_inputs_first(tiny_model: MakeModel, tmp_path: Path) -> None:
    """As Qwen3-VL was published."""
    folder = tiny_model("qwen3_vl_moe", **SHAPES["qwen3-vl-moe"][1])
    shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    turned = {name: each.mT.contiguous() if ".experts." in name else each for name, each in tensors.items()}
    save_file(turned, tmp_path / "model" / "model.safetensors")
    outputs = [
        generate(make_engine(each), [make_request(0, make_prompt(20), 20)]).tokens
        for each in (folder, tmp_path / "model")
    ]
    assert outputs[0] == outputs[1]


def test_projections_that_are_stored_apart(tiny_model: MakeModel, tmp_path: Path) -> None:
    """transformers writes HRM-Text with joined ones, and reads both."""
    folder = tiny_model("hrm_text", **SHAPES["hrm-text"][1])
    shutil.copytree(folder, tmp_path / "model")
    tensors: dict[str, torch.Tensor] = {}
    parts = {"attn.gqkv_proj": [f"self_attn.{part}_proj" for part in ("gate", "q", "k", "v")],
             "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"], "attn.o_proj": ["self_attn.o_proj"]}  # fmt: skip
    for name, tensor in load_file(folder / "model.safetensors").items():
        joined = next((joined for joined in parts if f".{joined}." in name), None)
        names = [name.replace(joined, part) for part in parts[joined]] if joined else [name]
        tensors |= {part: each.clone() for part, each in zip(names, tensor.chunk(len(names)), strict=True)}
    assert "model.H_module.layers.1.self_attn.gate_proj.weight" in tensors
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    outputs = [
        generate(make_engine(each), [make_request(0, make_prompt(20), 20)]).tokens
        for each in (folder, tmp_path / "model")
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("shape", "architecture", "place", "prefix"),
    [
        ("qwen2-5-omni", "Qwen2_5OmniModel", "thinker_config", "thinker."),
        ("qwen3-omni", "Qwen3OmniMoeForConditionalGeneration", "thinker_config", "thinker."),
        ("internvl-experts", "InternVLChatModel", "llm_config", ""),
        ("internvl-experts", "InternS1ForConditionalGeneration", "text_config", ""),
        ("internlm2", "InternVLChatModel", "llm_config", "language_model."),
        ("qwen2-yarn", "SkyworkR1VChatModel", "llm_config", "language_model."),
        ("mistral-window", "H2OVLChatModel", "llm_config", "language_model."),
        ("qwen3-linear", "RForConditionalGeneration", "text_config", "language_model."),
        ("qwen3-linear", "BeeForConditionalGeneration", "text_config", "language_model."),
        ("llama-plain", "TarsierForConditionalGeneration", "text_config", "language_model."),
        ("qwen2-yarn", "Eagle2_5_VLForConditionalGeneration", "text_config", "language_model."),
        ("qwen2-yarn", "NVLM_D", "llm_config", "language_model."),
        ("qwen2-yarn", "OpenCUAForConditionalGeneration", "text_config", "language_model."),
        ("llama-plain", "KananaVForConditionalGeneration", "text_config", "language_model."),
        ("qwen3-linear", "StepVLForConditionalGeneration", "text_config", ""),
        ("qwen3-linear", "IsaacForConditionalGeneration", "text_config", ""),
        ("qwen2-yarn", "Tarsier2ForConditionalGeneration", "text_config", "language_model."),
        ("llama-plain", "HCXVisionForCausalLM", "text_config", "language_model."),
        ("hyperclovax", "HCXVisionForCausalLM", "text_config", "language_model."),
        ("llama-plain", "Llama_Nemotron_Nano_VL", "llm_config", "language_model."),
        ("deepseek-moe", "DeepseekOCRForCausalLM", "language_config", ""),
        ("deepseek-moe", "DeepseekVLV2ForCausalLM", "language_config", "language."),
        ("deepseek-v2-lite", "DeepseekVLV2ForCausalLM", "language_config", "language."),
        ("qwen2-tied", "Ovis", "llm_config", "llm."),
        ("gemma2-tied", "Ovis", "llm_config", "llm."),
        ("qwen3-tied-bias-yarn", "Ovis2_5", "llm_config", "llm."),
        ("qwen3-tied-bias-yarn", "Ovis2_6ForCausalLM", "llm_config", "llm."),
        ("qwen3-moe", "Ovis2_6_MoeForCausalLM", "llm_config", "llm."),
        ("qwen2-yarn", "NVLM_D_Model", "text_config", "language_model."),
    ],
)
def test_text_parts_within_other_parts(
    tiny_model: MakeModel, tmp_path: Path, shape: str, architecture: str, place: str, prefix: str
) -> None:
    """As these models were published."""
    family, overrides = SHAPES[shape]
    folder = tiny_model(family, **overrides)
    fields = json.loads((folder / "config.json").read_text())
    part = fields if place == "thinker_config" else fields.get("text_config", fields)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], place: part}))
    tensors = load_file(folder / "model.safetensors")
    save_file({prefix + name: each for name, each in tensors.items()}, tmp_path / "model.safetensors")
    outputs = [
        generate(make_engine(each), [make_request(0, make_prompt(20), 20)]).tokens for each in (folder, tmp_path)
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("shape", "part", "tensor"),
    [("qwen", "visual", "transformer.visual.proj"), ("chatglm", "vision_config", "transformer.vision.boi")],
)
def test_a_part_for_images_beside_the_text_part(
    tiny_model: MakeModel, tmp_path: Path, shape: str, part: str, tensor: str
) -> None:
    """As Qwen-VL and GLM-4V were published."""
    family, overrides = SHAPES[shape]
    folder = tiny_model(family, **overrides)
    fields = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, part: {"image_size": 448}}))
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, tensor: torch.zeros(4)}, tmp_path / "model.safetensors")
    prompt = make_prompt(20)
    tokens = generate(make_engine(tmp_path), [make_request(0, prompt, 20)]).tokens[0, 0]
    assert tokens == reference_greedy(folder, prompt, 20)


def test_a_text_part_that_is_a_whole_model_within_another(tiny_model: MakeModel, tmp_path: Path) -> None:
    """As HyperCLOVA X SEED Think was published."""
    folder = tiny_model("hyperclovax_vision", **SHAPES["hyperclovax-vision"][1])
    shutil.copytree(folder, tmp_path / "model")
    inside, head = "model.language_model.", "model.language_model.lm_head.weight"
    tensors = load_file(folder / "model.safetensors")
    assert head in tensors
    moved = {name if name == head else name.replace(inside, f"{inside}model."): each for name, each in tensors.items()}
    save_file(moved, tmp_path / "model" / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    published = {**fields, "architectures": ["HCXVisionV2ForCausalLM"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(published))
    outputs = [
        generate(make_engine(each), [make_request(0, make_prompt(20), 20)]).tokens
        for each in (folder, tmp_path / "model")
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ("mllama", "language_model"),
        ("emu3", "text_model"),
        ("fuyu", "language_model"),
        ("minimax-m3", "language_model"),
    ],
)
def test_text_parts_by_the_names_within_transformers(
    tiny_model: MakeModel, tmp_path: Path, shape: str, part: str
) -> None:
    """transformers writes other names than those of its classes, but reads both."""
    family, overrides = SHAPES[shape]
    folder = tiny_model(family, **overrides)
    shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    moved = {
        name.replace(f"{part}.model.", f"model.{part}.").replace(f"{part}.lm_head", "lm_head"): each
        for name, each in tensors.items()
    }
    assert {f"model.{part}.embed_tokens.weight", "lm_head.weight"} <= moved.keys()
    save_file(moved, tmp_path / "model" / "model.safetensors")
    outputs = [
        generate(make_engine(each), [make_request(0, make_prompt(20), 20)]).tokens
        for each in (folder, tmp_path / "model")
    ]
    assert outputs[0] == outputs[1]


def test_sinks_of_layers_that_see_all_tokens(tiny_model: MakeModel, tmp_path: Path) -> None:
    """transformers has them in layers with a window alone. A score far below all others changes nothing."""
    folder = tiny_model("mimo_v2_flash")
    shutil.copytree(folder, tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**fields, "add_full_attention_sink_bias": True}))
    tensors, requests = load_file(folder / "model.safetensors"), [make_request(0, make_prompt(20), 20)]
    outputs = []
    for score in (-1e4, 5.0):
        names = [f"model.layers.{layer}.self_attn.attention_sink_bias" for layer in (0, 2)]
        sinks = {name: torch.full((fields["num_attention_heads"],), score) for name in names}
        save_file({**tensors, **sinks}, tmp_path / "model" / "model.safetensors")
        outputs.append(generate(make_engine(tmp_path / "model"), requests).tokens)
    assert outputs[0] == generate(make_engine(folder), requests).tokens != outputs[1]


_SARVAM_MLA = {
    "num_experts": 8, "n_routed_experts": None, "num_shared_experts": 1, "n_shared_experts": None,
    "rope_parameters": None, "rope_scaling": {**ROPES["yarn of DeepSeek"], "rope_type": "deepseek_yarn"},
}  # fmt: skip

_MINIMAX_TEXT = {
    "layer_types": None, "attn_type_list": [1, 0, 1, 0], "postnorm": True, "rotary_dim": 12,
    **{f"{part}_factor": None for part in ("full_attn_alpha", "full_attn_beta", "linear_attn_alpha")},
    **{f"{part}_factor": None for part in ("linear_attn_beta", "mlp_alpha", "mlp_beta")},
    "layernorm_full_attention_alpha": 1.5, "layernorm_full_attention_beta": 0.7, "layernorm_mlp_alpha": 1.3,
    "layernorm_linear_attention_alpha": 1.2, "layernorm_linear_attention_beta": 0.8, "layernorm_mlp_beta": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "overrides", "architecture", "changed"),
    [
        ("bailing_moe_v2", {}, "SarvamMoEForCausalLM", {}),
        (
            "bailing_moe_v2",
            {"n_shared_experts": 2},
            "Param2MoEForCausalLM",
            {"moe_shared_expert_intermediate_size": 80},
        ),
        ("deepseek_v3", {"rope": "yarn of DeepSeek"}, "SarvamMLAForCausalLM", _SARVAM_MLA),
        ("minimax", {}, "MiniMaxText01ForCausalLM", _MINIMAX_TEXT),
        ("qwen2", {}, "DotsOCRForCausalLM", {"vision_config": {"embed_dim": 32}}),
    ],
)
def test_the_weights_of_a_family_with_another_config(
    tiny_model: MakeModel, tmp_path: Path, family: str, overrides: Any, architecture: str, changed: Any
) -> None:
    folder = tiny_model(family, **overrides)
    shutil.copytree(folder, tmp_path / "model")
    fields = {**json.loads((folder / "config.json").read_text()), "architectures": [architecture], **changed}
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    outputs = [
        generate(make_engine(each), [make_request(0, make_prompt(40), 20)]).tokens
        for each in (folder, tmp_path / "model")
    ]
    assert outputs[0] == outputs[1]


def test_biases_of_routed_experts_are_not_served(tiny_model: MakeModel, tmp_path: Path) -> None:
    """The authors' code of ERNIE 4.5 has them, and transformers has not."""
    folder = tiny_model("ernie4_5_moe", use_bias=True)
    shutil.copytree(folder, tmp_path / "model")
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.experts.0.gate_proj"
    assert f"{name}.weight" in tensors
    save_file({**tensors, f"{name}.bias": torch.zeros(40)}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name} has a bias"):
        make_engine(tmp_path / "model")


@pytest.mark.parametrize("shape", ["molmo", "molmo-olmo"])
def test_limits_of_molmo(tiny_model: MakeModel, shape: str) -> None:
    """As in the authors' code. The models of transformers that stand for it have no limits of their own."""
    family, overrides = SHAPES[shape]
    folder = tiny_model(family, **overrides, clip_qkv=0.7)
    for name, module in reference_model(folder).named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            module.register_forward_hook(lambda module, inputs, output: output.clamp(-0.7, 0.7))
    prompt = make_prompt(40)
    tokens = generate(make_engine(folder), [make_request(0, prompt, 40)]).tokens[0, 0]
    assert len(set(tokens)) > 3
    assert tokens == reference_greedy(folder, prompt, 40)
    assert tokens != reference_greedy(tiny_model(family, **overrides), prompt, 40)


def test_longrope_beyond_the_original_context(tiny_model: MakeModel) -> None:
    """transformers chooses the factors by the present length, the engine by its longest. Beyond the original context
    they agree."""
    folder = tiny_model("phi3", **LONGROPE, original_max_position_embeddings=8)
    prompts = [make_prompt(length, seed=3) for length in (9, 16, 90)]
    transcript = generate(make_engine(folder), [make_request(id, prompt, 64) for id, prompt in enumerate(prompts)])
    for id, prompt in enumerate(prompts):
        assert transcript.tokens[id, 0] == reference_greedy(folder, prompt, 64)
    within = make_engine(folder, max_model_len=8)
    assert within.fingerprint_facts() != make_engine(folder).fingerprint_facts(), (
        "such pods would decode each other's keys into garbage"
    )
    prompt = make_prompt(3)
    assert generate(within, [make_request(0, prompt, 5)]).tokens[0, 0] == reference_greedy(folder, prompt, 5)


@pytest.mark.parametrize("heads", [4, 12])
def test_alibi_of_falcon_is_rounded(tiny_model: MakeModel, heads: int) -> None:
    """The products of slopes and positions are in bfloat16, and so are positions beyond 256."""
    sizes = {"num_attention_heads": heads, "hidden_size": 16 * heads, "multi_query": False, "parallel_attn": False}
    folder = tiny_model("falcon", alibi=True, tie_word_embeddings=False, bias=True, **sizes)
    prompts = [make_prompt(length, seed=3) for length in (1, 90, 300)]
    engine = make_engine(folder, max_num_batched_tokens=64)
    transcript = generate(engine, [make_request(id, prompt, 64) for id, prompt in enumerate(prompts)])
    for id, prompt in enumerate(prompts):
        tokens = transcript.tokens[id, 0]
        assert tokens == reference_choices(folder, prompt, tokens)


def test_chunks_of_attention_and_cached_prefixes(tiny_model: MakeModel) -> None:
    """A prefix ends before, at and after the first token of a chunk of 24 tokens."""
    folder = tiny_model("llama4")
    engine = make_engine(folder, block_size=4, max_num_batched_tokens=13)
    prompt = make_prompt(90)
    generate(engine, [make_request(0, prompt, 8)])
    for id, (shared, new) in enumerate([(20, 2), (47, 3), (48, 1), (49, 30), (72, 40)], start=1):
        again = prompt[:shared] + make_prompt(new, seed=id)
        transcript = generate(engine, [make_request(id, again, 30)])
        assert transcript.first(id).cached_tokens == shared // 4 * 4
        assert transcript.tokens[id, 0] == reference_greedy(folder, again, 30)
    assert_idle(engine)


@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("budget", [1, 2, 5, 16, 17, 33, 1024])
def test_tokens_do_not_depend_on_block_size_or_budget(windowed: Path, block_size: int, budget: int) -> None:
    lengths = [1, block_size - 1, block_size, block_size + 1, 2 * budget + 1, 3 * block_size + 2]
    prompts = [make_prompt(min(length, 70), seed=5) for length in lengths]
    engine = make_engine(windowed, block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=16)
    transcript = generate(engine, [make_request(i, prompt, 12 + 3 * i) for i, prompt in enumerate(prompts)])
    for id, prompt in enumerate(prompts):
        tokens = transcript.tokens[id, 0]
        assert len(tokens) == 12 + 3 * id
        assert tokens == reference_choices(windowed, prompt, tokens)
    assert_idle(engine)


@pytest.mark.parametrize("budget", [9, 10, 11])
def test_chunks_of_one_token_beside_others(llama: Path, budget: int) -> None:
    """The first prompt leaves one token of the budget to the second one, which then continues in longer chunks."""
    prompts = [make_prompt(length, seed=7) for length in (budget - 1, 20, 10, 1, 9)]
    engine = make_engine(llama, block_size=4, max_num_batched_tokens=budget, enable_prefix_caching=False)
    for id, prompt in enumerate(prompts):
        engine.add(make_request(id, prompt, 8, priority=id))
    counts: list[list[int]] = []
    schedule = engine.scheduler.schedule

    def observed() -> Any:
        step = schedule()
        counts.append(list(step.plan.counts))
        return step

    engine.scheduler.schedule = observed  # type: ignore[method-assign]
    transcript = generate(engine, [])
    for id, prompt in enumerate(prompts):
        tokens = transcript.tokens[id, 0]
        assert tokens == reference_choices(llama, prompt, tokens)
    assert any(step[-1] == 1 and max(step) > 1 for step in counts), "no step ended in a chunk of one token"
    assert max(map(sum, counts)) <= budget


def test_32_requests_of_mixed_lengths_at_once(windowed: Path) -> None:
    prompts = [make_prompt(1 + 7 * i % 83, seed=i) for i in range(32)]
    engine = make_engine(windowed, num_blocks=512, max_num_batched_tokens=64)
    transcript = generate(engine, [make_request(i, prompt, 8 + i) for i, prompt in enumerate(prompts)])
    for id, prompt in enumerate(prompts):
        tokens = transcript.tokens[id, 0]
        assert len(tokens) == 8 + id
        assert tokens == reference_choices(windowed, prompt, tokens)
    assert_idle(engine)


def test_requests_that_join_later_change_no_tokens(llama: Path) -> None:
    engine = make_engine(llama, max_num_batched_tokens=24)
    transcript = generate(engine, [])
    prompts = [make_prompt(5 + 11 * i, seed=i) for i in range(6)]
    for id, prompt in enumerate(prompts):
        engine.add(make_request(id, prompt, 20))
        for _ in range(3):
            transcript.take(engine.step().deltas)
    while engine.has_work:
        transcript.take(engine.step().deltas)
    for id, prompt in enumerate(prompts):
        tokens = transcript.tokens[id, 0]
        assert len(tokens) == 20
        assert tokens == reference_choices(llama, prompt, tokens)


def test_the_whole_context_can_be_used(llama: Path) -> None:
    engine = make_engine(llama, max_model_len=96, num_blocks=6)
    prompt = make_prompt(60)
    assert engine.request_error(make_request(0, prompt, 37)) is not None
    tokens = generate(engine, [make_request(0, prompt, 36)]).tokens[0, 0]
    assert tokens == reference_greedy(llama, prompt, 36)
    assert_idle(engine)


def test_decodes_attend_in_parts_as_they_do_together(windowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [make_prompt(length) for length in (3, 40, 90, 17, 18)]
    requests = [make_request(id, prompt) for id, prompt in enumerate(prompts)]
    monkeypatch.setattr("baton_engine.attention.torch_sdpa._MOST_KEYS", 64)
    transcript = generate(make_engine(windowed), requests)
    for id, prompt in enumerate(prompts):
        assert transcript.tokens[id, 0] == reference_greedy(windowed, prompt, 16)
