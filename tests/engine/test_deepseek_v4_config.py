"""Configs of DeepSeek-V4: those of its authors, and what cannot be served."""

from typing import Any

import msgspec
import pytest
import torch
import transformers

from baton_engine.compressed_spec import CompressedSpec, Entries
from baton_engine.config import ConfigError
from baton_engine.models.deepseek_v4_config import DeepseekV4Config
from baton_engine.models.registry import parse_model_config

# DeepSeek-V4-Flash. The authors also list the compression of a layer that predicts several tokens.
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "compress_rope_theta": 160000, "expert_dtype": "fp4",
    "hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 512, "hidden_act": "silu", "hidden_size": 4096,
    "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512, "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4", "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 6, "num_hidden_layers": 43,
    "num_hash_layers": 3, "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": 8, "o_lora_rank": 1024,
    "q_lora_rank": 1024, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 128,
    "swiglu_limit": 10.0, "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "vocab_size": 129280,
}  # fmt: skip


def parse(fields: dict[str, Any]) -> DeepseekV4Config:
    config = parse_model_config(fields)
    assert isinstance(config, DeepseekV4Config)
    return config


def test_the_published_model() -> None:
    config = parse(FLASH)
    assert len(config.places) == 43
    assert config.compressed(1) == CompressedSpec(scale=512**-0.5, window=128, sinks=True)
    # Three layers that select entries share a layer of the cache, with up to eight of the others.
    selected, others = (config.compressed(number).entries for number in (6, 7))
    assert selected == Entries(layer=14, place=2, rate=4, selected=512, index_dim=128)
    assert others == Entries(layer=15, place=2, rate=128)
    assert config.table_layers == {0, 1, 2}
    assert config.attention_lengths(100_000) == [2048, 100_000]
    assert config.attention_lengths(1024) == [1024]
    assert (config.rope.theta, config.rope.type, config.rope.rotary_dim(512)) == (10000, "default", 64)
    rope = config.entry_rope
    assert (rope.theta, rope.type, rope.factor, rope.attention_factor) == (160000, "yarn", 16, 1.0)
    layout = config.kv_layout("bfloat16")
    assert layout.block_size(16) == 16
    [whole] = [group for group in layout.groups if group.window is None]
    # 21 layers with an indexer share 7 layers, and as many are there for the others.
    assert len(whole.layers) == layout.depth == 14
    assert layout.slot_bytes == 14 * 512 * 2
    assert config.stream_size == 4 * 4096


def test_weights_are_counted() -> None:
    config = parse(FLASH)
    with torch.device("meta"):
        model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**{**FLASH, "architectures": None}))
    inside = sum(tensor.numel() for name, tensor in model.named_parameters() if "layers" in name)
    assert config.num_layers * config.layer_weights_read(1e9) == pytest.approx(inside, rel=1e-3)
    attention = sum(
        tensor.numel() for name, tensor in model.named_parameters() if "self_attn" in name or "_hc." in name
    )
    assert config.num_layers * config.attention_weights == pytest.approx(attention, rel=1e-2)
    unused = 43 * (256 - 6) * 3 * 4096 * 2048
    assert config.num_layers * config.layer_weights == pytest.approx(inside - unused, rel=1e-2)
    assert config.num_layers * config.mlp_units == 43 * 7 * 2048


def test_other_forms_of_the_same_config() -> None:
    config = parse(FLASH)
    saved = transformers.DeepseekV4Config(**{**FLASH, "architectures": None}).to_dict()
    assert "compress_ratios" not in saved
    assert parse({**saved, "architectures": FLASH["architectures"]}) == config
    # A field that is absent has the default of transformers.
    names = ("architectures", "compress_ratios", "rope_scaling", "torch_dtype", "eos_token_id")
    assert parse({name: FLASH[name] for name in names}) == config
    kinds = transformers.DeepseekV4Config(num_hidden_layers=7).layer_types
    fewer = parse({"architectures": FLASH["architectures"], "num_hidden_layers": 7})
    rates = {"sliding_attention": None, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    for number, kind in enumerate(kinds):
        entries = fewer.compressed(number).entries
        assert (None if entries is None else entries.rate) == rates[kind]
    older = parse({**FLASH, "compress_rate_hca": 64, "compress_rate_csa": 8})
    assert {entries.rate for entries in older._entries} == {8, 64}


def test_what_is_in_the_fingerprint() -> None:
    facts = parse(FLASH).fingerprint_facts()
    for change in (
        {"compress_rates": {"heavily_compressed_attention": 64}}, {"index_topk": 100}, {"sliding_window": 64},
        {"compress_ratios": [0, 4, *[4, 128] * 20, 4, 0]}, {"compress_rope_theta": 10000}, {"index_head_dim": 64},
        {"qk_rope_head_dim": 32},
    ):  # fmt: skip
        assert parse({**FLASH, **change}).fingerprint_facts() != facts


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"compress_ratios": [4]}, r"compress_ratios in config.json is \[4\]; it must have one of 0, 4, 128 for each"),
        ({"compress_ratios": [5] * 43}, "compress_ratios in config.json"),
        ({"compress_ratios": "4"}, "compress_ratios in config.json is '4'"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types in config.json"),
        ({"mlp_layer_types": ["moe"]}, "mlp_layer_types in config.json"),
        ({"compress_rates": [4, 128]}, "compress_rates in config.json"),
        ({"compress_rates": {"compressed_sparse_attention": 0}}, "compressed_sparse_attention in config.json is 0"),
        ({"compress_rates": {"compressed_sparse_attention": 3}}, "in compress_rates in config.json is 3; it must be"),
        ({"compress_rate_hca": -1}, "compress_rate_hca in config.json is -1"),
        ({"index_head_dim": 32}, "index_head_dim in config.json is 32; .* at least the 64 rotated elements"),
        ({"index_head_dim": 1024}, "index_head_dim in config.json is 1024; .* at most head_dim, 512"),
        ({"index_head_dim": 65}, "index_head_dim in config.json is 65; it must be even"),
        ({"index_topk": 0}, "index_topk in config.json is 0"),
        ({"sliding_window": 0}, "sliding_window in config.json is 0"),
        ({"o_groups": 7}, "o_groups in config.json is 7; it must divide the 64 attention heads"),
        ({"head_dim": 511}, "head_dim"),
        ({"qk_rope_head_dim": 63}, "partial_rotary_factor in config.json rotates 63 of the 512"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor in config.json rotates 1024 of the 512"),
        ({"rope_scaling": {"type": "llama3"}}, "rope type 'llama3' in config.json is not served"),
        ({"rope_scaling": "yarn"}, "rope_scaling in config.json is 'yarn'"),
        ({"scoring_func": "softmax"}, "scoring_func in config.json is 'softmax'"),
        ({"swiglu_limit": 0}, "swiglu_limit in config.json is 0"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok .* at most 256"),
        ({"num_hash_layers": -1}, "num_hash_layers in config.json is -1"),
        ({"hc_mult": 0}, "hc_mult in config.json is 0"),
        ({"hc_mult": 100}, "hc_mult in config.json is 100; it must be at most 16"),
        ({"compress_rate_hca": 2048}, "compress_rate_hca in config.json is 2048; it must be at most 1024"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters in config.json is 0"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 in config.json is not served"),
        ({"n_shared_experts": 2}, "n_shared_experts 2 in config.json is not served"),
        ({"norm_topk_prob": False}, "norm_topk_prob False in config.json is not served"),
        ({"mlp_bias": True}, "mlp_bias True in config.json is not served"),
        ({"hidden_act": "gelu"}, "hidden_act in config.json is 'gelu'"),
    ],
)
def test_what_cannot_be_served_is_said(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse({**FLASH, **given})


def test_ropes_apart() -> None:
    rope = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25}
    config = parse({**FLASH, "rope_scaling": None, "rope_parameters": {"main": rope, "compress": rope}})
    assert config.entry_rope == config.rope
    assert config.rope.rotary_dim(512) == 128
    assert msgspec.structs.replace(config, entry_rope=config.rope) == config
