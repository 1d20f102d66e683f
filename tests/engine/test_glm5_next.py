"""GLM-5.3-Flash: both names of its tensors, its weights in FP8, and its configs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from baton_engine.config import ConfigError
from baton_engine.layers.hyper_connections import Mixing
from baton_engine.models.glm5_next_config import Glm5NextConfig
from baton_engine.models.registry import parse_model_config
from tests.conftest import MakeModel
from tests.models import reference_choices
from tests.packing import Tensors, fp8

from .test_hy_v4 import PROMPT, change, tokens

# The fields of the published text_config, of which transformers does not know all.
FLASH: dict[str, Any] = {
    "attention_bias": False, "dtype": "bfloat16", "first_k_dense_replace": 3, "hc_eps": 1e-06, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "head_dim": 0, "hidden_act": "silu", "hidden_size": 4096, "index_head_dim": 128,
    "index_kpool": 4, "index_kpool_always_select_tail": True, "index_kpool_compress": True, "index_n_heads": 32,
    "index_topk": 2048, "indexer_rope_interleave": True, "indexer_types": ["full"] * 45, "intermediate_size": 12288,
    "kv_lora_rank": 512, "layer_types": ["deepseek_sparse_attention" if at % 4 == 3 else "linear_attention"
                                         for at in range(45)],
    "linear_attn_config": {"gate_lower_bound": -5.0, "head_dim": 128, "num_heads": 64, "short_conv_kernel_size": 4},
    "max_position_embeddings": 1048576, "mhc": True, "mla_use_nope": True,
    "mlp_layer_types": [*["dense"] * 3, *["sparse"] * 42], "model_type": "glm5_next_text",
    "moe_intermediate_size": 2048, "moe_router_dtype": "float32", "n_group": 1, "n_routed_experts": 288,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
    "num_hidden_layers": 45, "num_key_value_heads": 64, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "qk_head_dim": 256, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "rms_norm_eps": 1e-05,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "swiglu_limit": 10.0, "topk_group": 1,
    "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
# What checkpoints call tensors, and what transformers calls them in memory.
NAMES = (
    (r"self_attn\.(f_._proj|dt_bias|A_log)", r"self_attn.forget_gate.\1"), (r"\.hc_(attn|ffn)_", r".\1_hc."),
)  # fmt: skip
TILED = r"self_attn\.(q_a|q_b|kv_a\w+|o)_proj|mlp\.(\w+\.)*(gate|up|down)_proj"
FORM = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


def parse(**fields: Any) -> Glm5NextConfig:
    config = parse_model_config({"architectures": ["Glm5NextForConditionalGeneration"], "text_config": fields})
    assert isinstance(config, Glm5NextConfig)
    return config


def test_names_of_transformers(tiny_model: MakeModel, tmp_path: Path) -> None:
    """transformers writes the names of checkpoints, which the tests of equality read."""
    base = tiny_model("glm5_next")
    written = load_file(base / "model.safetensors")
    convolutions = {
        name: torch.cat([written[name.replace("q_conv1d", f"{part}_conv1d")] for part in "qkv"])
        for name in written
        if ".q_conv1d." in name
    }
    assert convolutions

    def internal(name: str, tensor: torch.Tensor) -> Tensors:
        if name in convolutions:
            return {name.replace("q_conv1d", "conv1d"): convolutions[name]}
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        return {} if "_conv1d." in name else {name: tensor}

    folder = change(base, tmp_path / "model", internal)
    names = set(load_file(folder / "model.safetensors"))
    inside = "model.language_model.layers.0."
    assert {f"{inside}{name}" for name in ("attn_hc.fn", "self_attn.forget_gate.A_log", "ffn_hc.base")} <= names
    assert len(names) < len(written)
    outputs = tokens(folder)
    assert outputs == reference_choices(base, PROMPT, outputs)


def test_the_text_part_alone(tiny_model: MakeModel, tmp_path: Path) -> None:
    base = tiny_model("glm5_next")
    text = json.loads((base / "config.json").read_text())["text_config"]

    def alone(name: str, tensor: torch.Tensor) -> Tensors:
        return {} if ".visual." in name else {name.replace("model.language_model.", "model."): tensor}

    folder = change(base, tmp_path / "model", alone)
    (folder / "config.json").write_text(json.dumps({**text, "architectures": ["Glm5NextTextModel"]}))
    outputs = tokens(folder)
    assert outputs == reference_choices(base, PROMPT, outputs)


def test_fp8_beside_16_bits(tiny_model: MakeModel, tmp_path: Path) -> None:
    """The authors quantize neither the delta rule nor indexers, routers, connections and the expansion of latents."""
    base = tiny_model("glm5_next", num_hidden_layers=3, indexer_types=["full"] * 3, mlp_layer_types=["sparse"] * 3,
                      layer_types=["linear_attention", "full_attention", "linear_attention"])  # fmt: skip

    def coded(name: str, tensor: torch.Tensor, is_code: bool) -> Tensors:
        in_state = any(f"layers.{layer}.self_attn" in name for layer in (0, 2))
        if ".visual." in name or in_state or not re.search(rf"({TILED})\.weight$", name):
            return {name: tensor}
        parts = fp8(tensor, (32, 32), "weight_scale_inv")
        numbers = parts.pop("numbers")
        return {name.replace("weight", end): part for end, part in parts.items()} if is_code else {name: numbers}

    folder = change(base, tmp_path / "coded", lambda *each: coded(*each, True), quantization_config=FORM)
    stored = {str(tensor.dtype) for tensor in load_file(folder / "model.safetensors").values()}
    assert stored == {"torch.float8_e4m3fn", "torch.float32"}
    outputs = tokens(folder)
    # The inputs of products with codes in FP8 are rounded, too, so that other tokens follow at some time.
    assert outputs[:3] == tokens(change(base, tmp_path / "numbers", lambda *each: coded(*each, False)))[:3]


def test_the_published_model() -> None:
    config = parse(**FLASH)
    assert config.state_layers == {layer for layer in range(45) if layer % 4 != 3}
    assert config.selecting == {*range(3, 45, 4)}
    latent = config.latent
    assert (latent.rank, latent.rope_dim, latent.key_dim, latent.value_dim) == (512, 0, 256, 256)
    assert (latent.selected, latent.group, latent.index_heads, latent.index_dim) == (2048, 4, 32, 128)
    assert [latent.attended(tokens) for tokens in (3, 2048, 2051, 2052, 2055)] == [3, 2048, 2051, 2048, 2051]
    assert config.states is not None
    assert (config.states.value_heads, config.states.key_dim, config.states.length, config.least) == (64, 128, 4, -5.0)
    assert (config.mixing, config.rounds, config.limit) == (Mixing(4, 1e-5, 1e-6, 2.0), 20, 10.0)
    assert (config.routing.sigmoid, config.routing.normalize, config.routing.scale) == (True, True, 2.5)
    assert config.dense_layers == {0, 1, 2}
    assert config.stream_size == 4 * 4096
    layout = config.kv_layout("bfloat16")
    assert layout.token_bytes == 11 * (512 + 2 * 128) * 2
    assert layout.block_size(16) % 16 == 0
    # A block has the places of the layers with states, of which each needs half a block of numbers in 4 bytes.
    assert layout.block_size(16) * 256 * 2 >= 32 * 128 * 128 * 4
    assert layout.windows.count(2) == 34


def test_fields_that_are_absent_have_the_defaults_of_transformers() -> None:
    ours, theirs = parse(model_type="glm5_next_text"), transformers.Glm5NextTextConfig()
    assert (ours.vocab_size, ours.hidden_size, ours.num_layers) == (154880, 4096, 45)
    kinds = ["linear_attention" if layer in ours.state_layers else "indexed_attention" for layer in range(45)]
    assert kinds == theirs.layer_types
    assert [layer in ours.dense_layers for layer in range(45)] == [kind == "dense" for kind in theirs.mlp_layer_types]
    assert (ours.latent.group, ours.latent.selected, ours.least) == (16, 2048, -5.0)
    assert (ours.num_experts, ours.low_rank, ours.shared_size) == (288, 1536, 2048)
    # The text fields may lie beside those of the whole model.
    flat = parse_model_config({"architectures": ["Glm5NextForConditionalGeneration"], **FLASH})
    assert flat == parse(**FLASH)


@pytest.mark.parametrize(
    ("fields", "least"),
    [
        ({"linear_lower_bound": None}, 0.0),
        ({"linear_lower_bound": -3.0}, -3.0),
        ({"linear_attn_config": {"gate_lower_bound": None}}, -5.0),
        ({"linear_attn_config": {"gate_lower_bound": None, "safe_gate": False}}, 0.0),
        ({"linear_attn_config": {}, "linear_lower_bound": -2.5}, -2.5),
    ],
)
def test_bounds_of_decays(fields: dict[str, Any], least: float) -> None:
    assert parse(**fields).least == least
    assert (transformers.Glm5NextTextConfig(**fields).linear_lower_bound or 0.0) == least


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"index_kpool": 0}, "index_kpool in config.json is 0; it must be an integer of at least 1"),
        ({"index_kpool": 128}, "index_kpool in config.json is 128; it must be at most 64"),
        ({"index_topk": 30}, "index_topk in config.json is 30; it must be a multiple of index_kpool, 16"),
        (
            {"index_kpool_always_select_tail": False},
            "index_kpool_always_select_tail False in config.json is not served",
        ),
        ({"index_kpool_compress": False}, "index_kpool_compress False in config.json is not served"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim 64 in config.json is not served"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8 in config.json is not served"),
        ({"mhc": False}, "mhc False in config.json is not served"),
        ({"swiglu_limit": 0}, "swiglu_limit in config.json is 0.0; it must be above 0"),
        ({"hidden_act": "gelu"}, "hidden_act in config.json is 'gelu'"),
        ({"hc_mult": 0}, "hc_mult in config.json is 0"),
        ({"hc_mult": 100}, "hc_mult in config.json is 100; it must be at most 16"),
        ({"hc_sinkhorn_iters": -1}, "hc_sinkhorn_iters in config.json is -1"),
        ({"linear_lower_bound": 1.0}, "linear_lower_bound in config.json is 1.0; it must be less than 0"),
        ({"linear_lower_bound": "low"}, "linear_lower_bound in config.json is 'low'"),
        ({"linear_attn_config": []}, "linear_attn_config in config.json is"),
        ({"linear_conv_kernel_dim": 99}, "linear_conv_kernel_dim in config.json is 99"),
        ({"linear_num_heads": 0}, "linear_num_heads in config.json is 0"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types in config.json names no layer with attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types in config.json is"),
        (
            {"indexer_types": ["full", "full", "full", "shared"]},
            "indexer_types in config.json gives layer 3 no indexer",
        ),
        ({"indexer_types": ["half"] * 4}, "indexer_types in config.json must be full or shared"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types in config.json must be a list of dense or sparse"),
        ({"index_head_dim": 3}, "index_head_dim in config.json is 3; it must be even"),
        ({"n_group": 5}, "n_group in config.json is 5"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(num_hidden_layers=4, **fields)
