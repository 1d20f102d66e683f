"""config.json of DeepSeek's models, against transformers and against what their authors publish."""

import math
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from baton_engine.config import ConfigError
from baton_engine.layers.rope import inverse_frequencies
from baton_engine.models.deepseek_v2 import DeepseekConfig
from baton_engine.models.registry import parse_model_config
from loadtest.engine.device import Card
from loadtest.engine.limits import Limits

YARN = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
# As published, without what changes nothing here.
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {**YARN, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
V2: dict[str, Any] = {
    **V2_LITE,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
KIMI_K2: dict[str, Any] = {
    **V3,
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "rope_scaling": {**YARN, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
# With the parameters that their authors publish: all, and those that a token uses.
PUBLISHED = {
    "V2-Lite": (V2_LITE, 15.7e9, 2.4e9),
    "V2": (V2, 236e9, 21e9),
    "V3": (V3, 671e9, 37e9),
    "Kimi-K2": (KIMI_K2, 1.03e12, 32.5e9),
}


def parse(fields: dict[str, Any]) -> DeepseekConfig:
    config = parse_model_config(fields)
    assert isinstance(config, DeepseekConfig)
    return config


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    fields, parameters, active = PUBLISHED[name]
    ours = parse(fields)
    head = ours.vocab_size * ours.hidden_size
    assert ours.num_layers * ours.layer_weights_read(1e6) + 2 * head == pytest.approx(parameters, rel=0.01)
    assert ours.num_layers * ours.layer_weights + head == pytest.approx(active, rel=0.05)
    assert ours.kv_layout("bfloat16").layer_bytes == 1152
    assert (ours.latent.rank, ours.latent.rope_dim, ours.latent.key_dim, ours.latent.value_dim) == (512, 64, 128, 128)
    growth = 0.1 * fields["rope_scaling"]["mscale_all_dim"] * math.log(fields["rope_scaling"]["factor"]) + 1
    assert ours.latent.scale == pytest.approx(192**-0.5 * growth**2)
    assert ours.dense_layers == set(range(fields["first_k_dense_replace"]))
    routing = ours.routing
    assert (routing.groups, routing.used_groups, routing.scale) == (
        fields["n_group"], fields["topk_group"], fields.get("routed_scaling_factor", 1.0),
    )  # fmt: skip
    assert routing.sigmoid == routing.normalize == ours.corrected == (fields["architectures"] == V3["architectures"])
    assert ours.rope.attention_factor == 1.0
    own = {key: value for key, value in fields.items() if key not in ("architectures", "model_type")}
    kind = transformers.DeepseekV3Config if routing.sigmoid else transformers.DeepseekV2Config
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](kind(**own))
    assert torch.equal(inverse_frequencies(ours.rope, ours.rotary_dim), expected)


def test_greedy_routing_knows_no_groups() -> None:
    assert parse({**V2_LITE, "n_group": 8, "topk_group": 2}).routing.groups == 1


@pytest.mark.parametrize("fields", [V2_LITE, V3])
def test_fields_that_are_not_there_have_the_defaults_of_transformers(fields: dict[str, Any]) -> None:
    names = ("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    least = {name: fields[name] for name in (*names, "num_attention_heads", "moe_intermediate_size")}
    ours = parse({**least, "topk_method": fields["topk_method"]})
    kind = transformers.DeepseekV3Config if fields is V3 else transformers.DeepseekV2Config
    theirs = kind(**{name: value for name, value in least.items() if name != "architectures"})
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert (ours.low_rank, ours.latent.rank) == (theirs.q_lora_rank, theirs.kv_lora_rank)
    assert ours.num_experts == theirs.n_routed_experts
    assert ours.shared_size == theirs.n_shared_experts * theirs.moe_intermediate_size
    assert ours.dense_layers == set(range(theirs.first_k_dense_replace))
    assert (ours.routing.groups, ours.routing.used_groups) == (theirs.n_group or 1, theirs.topk_group or 1)
    assert ours.routing.scale == theirs.routed_scaling_factor
    assert ours.routing.normalize == theirs.norm_topk_prob
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.latent.scale == (theirs.qk_nope_head_dim + theirs.qk_rope_head_dim) ** -0.5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({**V2_LITE, "norm_topk_prob": True}, ["norm_topk_prob", "DeepseekV2ForCausalLM"]),
        ({**V2_LITE, "scoring_func": "sigmoid"}, ["scoring_func", "sigmoid", "softmax"]),
        ({**V2_LITE, "topk_method": "noaux_tc"}, ["topk_method", "noaux_tc", "group_limited_greedy"]),
        ({**V3, "topk_method": "greedy"}, ["topk_method", "greedy", "noaux_tc"]),
        ({**V3, "mlp_bias": True}, ["mlp_bias", "DeepseekV3ForCausalLM"]),
        ({**V3, "n_group": 7}, ["n_group", "7", "256 experts"]),
        ({**V3, "qk_rope_head_dim": 63}, ["qk_rope_head_dim", "63", "even"]),
        ({**V3, "kv_lora_rank": 0}, ["kv_lora_rank", "at least 1"]),
        ({**V3, "kv_lora_rank": "512"}, ["kv_lora_rank", "'512'", "integer"]),
        ({**V3, "moe_layer_freq": [0, 1]}, ["moe_layer_freq", "integer"]),
        ({**V3, "q_lora_rank": -1}, ["q_lora_rank", "-1"]),
        ({**V3, "rope_scaling": {**V3["rope_scaling"], "mscale_all_dim": "1"}}, ["mscale_all_dim", "'1'", "a number"]),
    ],
)
def test_what_cannot_be_served_is_said(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_model_config(fields)
    for word in words:
        assert word in str(error.value)


def test_limits_of_latent_attention() -> None:
    limits = Limits(parse(V2_LITE), 2, Card(4e12, 800e12))
    tokens = 32 * 4096
    # Few heads share a latent, so that its bytes take longer than its products.
    assert limits.decode_attention([4096] * 32) == pytest.approx(27 * tokens * 1152 / 4e12)
    operations = 27 * 2 * 16 * (192 + 128) * 4096 * 4097 / 2
    assert limits.prefill_attention([4096]) == pytest.approx(operations / 800e12)
    wide = Limits(parse(V2), 2, Card(4e12, 800e12))
    assert wide.decode_attention([4096] * 32) == pytest.approx(60 * tokens * 2 * 128 * (576 + 512) / 800e12)
