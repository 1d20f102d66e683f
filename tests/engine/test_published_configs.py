"""Fields of config.json as models were published with them, some in forms that transformers no longer writes."""

import math
from typing import Any

import msgspec
import pytest
import torch
import transformers
from transformers.activations import ACT2FN
from transformers.models.beam import modeling_beam

from baton_engine.config import ConfigError
from baton_engine.kv_dtype import choose_kv_dtype
from baton_engine.layers.hyper_connections import Mixing
from baton_engine.layers.rope import Rope, inverse_frequencies
from baton_engine.models.afmoe import AfmoeConfig
from baton_engine.models.axk2 import AxK2Config
from baton_engine.models.baichuan import BaichuanConfig
from baton_engine.models.bailing_moe import BailingConfig
from baton_engine.models.beam import BeamConfig, query_scales
from baton_engine.models.chameleon import ChameleonConfig
from baton_engine.models.chatglm import ChatGlmConfig
from baton_engine.models.cohere2_moe import Cohere2MoeConfig
from baton_engine.models.cohere_compass import CohereCompassConfig
from baton_engine.models.decilm import Block, DeciLmConfig
from baton_engine.models.deepseek_v2 import DeepseekConfig
from baton_engine.models.diffllama import DiffLlamaConfig
from baton_engine.models.doge import DogeConfig
from baton_engine.models.falcon_h1 import FalconH1Config
from baton_engine.models.gemma3n import Gemma3nConfig
from baton_engine.models.gemma4_config import Gemma4Config
from baton_engine.models.granite import GraniteConfig, Multipliers
from baton_engine.models.hrm_text import HrmTextConfig
from baton_engine.models.hy_v4 import HyV4Config
from baton_engine.models.hyperclovax import HyperClovaXConfig
from baton_engine.models.jais import JaisConfig
from baton_engine.models.jamba import JambaConfig, JambaMoeConfig
from baton_engine.models.jetmoe import JetMoeConfig
from baton_engine.models.laguna import LagunaConfig
from baton_engine.models.latent_states import LatentStatesConfig
from baton_engine.models.layer_norm_llama import LayerNormConfig
from baton_engine.models.lfm2 import Lfm2MoeConfig
from baton_engine.models.llama import HIDDEN_ACTS, LlamaConfig
from baton_engine.models.llama4 import Llama4Config
from baton_engine.models.longcat_flash import LongcatFlashConfig
from baton_engine.models.mamba import MambaConfig
from baton_engine.models.mamba2 import Mamba2Config
from baton_engine.models.mimo_v2_flash import MiMoV2FlashConfig
from baton_engine.models.minicpm import MiniCpmConfig
from baton_engine.models.minicpm3 import MiniCpm3Config
from baton_engine.models.minimax import MiniMaxConfig
from baton_engine.models.mistral_large4 import MistralLarge4Config
from baton_engine.models.mllama import MllamaConfig
from baton_engine.models.modernbert_decoder import ModernBertDecoderConfig
from baton_engine.models.molmo import MolmoConfig
from baton_engine.models.molmo2 import Molmo2Config
from baton_engine.models.muse_glimmer import MuseGlimmerConfig
from baton_engine.models.muse_spark import MuseSparkConfig
from baton_engine.models.nanochat import NanoChatConfig
from baton_engine.models.nemotron_h import NemotronHConfig, NemotronHMoeConfig
from baton_engine.models.olmo_hybrid import OlmoHybridConfig
from baton_engine.models.opt import OptConfig
from baton_engine.models.plamo3 import Plamo3Config
from baton_engine.models.qwen import QwenConfig
from baton_engine.models.recurrent_gemma import RecurrentGemmaConfig
from baton_engine.models.registry import parse_model_config
from baton_engine.models.sparse_config import SparseConfig
from baton_engine.models.step3 import Step3Config
from baton_engine.models.step3p5 import Step3p5Config
from baton_engine.models.zamba2 import Zamba2Config
from baton_engine.shard import RankNumber
from baton_kernels.reference.activation import ACTIVATIONS
from baton_kernels.reference.recurrence import StateShape
from baton_kernels.reference.selective_scan import ChannelShape

SIZES = {
    "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def parse(architecture: str, **fields: Any) -> LlamaConfig:
    config = parse_model_config({**SIZES, "architectures": [architecture], **fields})
    assert isinstance(config, LlamaConfig)
    return config


def test_command_r7b() -> None:
    config = parse(
        "Cohere2ForCausalLM", layer_norm_eps=1e-5, logit_scale=0.25, rope_theta=50000, sliding_window=4096,
        sliding_window_pattern=4, position_embedding_type="rope_gptj", rotary_pct=1.0, head_dim=128, layer_switch=4,
    )  # fmt: skip
    assert [window is None for window in config.sliding_windows] == [False, False, False, True] * 2
    assert [config.rope_of(layer) is None for layer in range(8)] == [False, False, False, True] * 2
    assert config.tie_word_embeddings
    assert (config.rope.theta, config.rope.interleaved, config.rms_norm_eps) == (50000, True, 1e-5)


def test_command_r_for_128k_tokens() -> None:
    fields = {"max_position_embeddings": 8192, "rope_theta": 8000000.0, "logit_scale": 0.0625}
    longer = parse("CohereForCausalLM", **fields, model_max_length=131072)
    assert (longer.default_model_len, longer.rope.theta) == (131072, 8e6)
    # As Aya 23 has it.
    assert parse("CohereForCausalLM", **fields).default_model_len == 8192


def test_command_a_plus() -> None:
    fields: dict[str, Any] = {
        "expert_selection_fn": "sigmoid", "first_k_dense_replace": 2, "layer_norm_eps": 1e-5, "logit_scale": 0.25,
        "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 4,
        "prefix_dense_intermediate_size": 4096, "prefix_dense_sliding_window_pattern": 1, "rope_theta": 50000,
        "shared_expert_combination_strategy": "average", "sliding_window": 4096, "sliding_window_pattern": 3,
    }  # fmt: skip
    config = parse("Cohere2MoeForCausalLM", **fields)
    assert isinstance(config, Cohere2MoeConfig)
    windows = [window is not None for window in config.sliding_windows]
    assert windows == [False, False, True, True, False, True, True, False]
    rotating = [config.rope_of(layer) is not None for layer in range(8)]
    assert rotating == [True, True, True, True, False, True, True, False]
    assert (config.head_dim, config.intermediate_size, config.expert_size, config.shared_size) == (
        128,
        4096,
        1024,
        4096,
    )
    assert (config.dense_layers, config.averaged, config.rms, config.rope.theta) == ({0, 1}, True, False, 50000)
    assert (config.routing.sigmoid, config.routing.normalize, config.routing.count) == (True, True, 8)
    plain = parse("Cohere2MoeForCausalLM", rms_norm_eps=1e-6, layer_types=["full_attention"] * 8)
    assert isinstance(plain, Cohere2MoeConfig)
    assert (plain.rms, plain.rms_norm_eps, plain.averaged, plain.rope_of(0)) == (True, 1e-6, False, None)
    for name, value in (
        ("expert_selection_fn", "top"),
        ("shared_expert_combination_strategy", "max"),
        ("num_experts", 4),
    ):
        with pytest.raises(ConfigError, match="num_experts_per_tok" if name == "num_experts" else name):
            parse("Cohere2MoeForCausalLM", **{**fields, name: value})


def test_ettin() -> None:
    fields: dict[str, Any] = {
        "attention_bias": False, "classifier_activation": "gelu", "classifier_bias": False, "decoder_bias": True,
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "hidden_activation": "gelu",
        "local_attention": 128, "local_rope_theta": 160000.0, "max_position_embeddings": 7999, "norm_bias": False,
        "norm_eps": 1e-5, "num_key_value_heads": None,
    }  # fmt: skip
    config = parse("ModernBertDecoderForCausalLM", **fields)
    assert isinstance(config, ModernBertDecoderConfig)
    assert config.sliding_windows == (None, 64, 64, None, 64, 64, None, 64)
    assert (config.rope.theta, config.window_rope.theta, config.rms_norm_eps) == (160000.0, 160000.0, 1e-5)
    assert (config.num_kv_heads, config.activation, config.head_activation) == (4, "gelu", "gelu")
    assert (config.norm_bias, config.last_bias, config.head_bias, config.tie_word_embeddings) == (
        False, False, True, True,
    )  # fmt: skip
    for name, value in (("local_attention", 1), ("rope_scaling", {"rope_type": "linear", "factor": 2.0})):
        with pytest.raises(ConfigError, match=name):
            parse("ModernBertDecoderForCausalLM", **{**fields, name: value})


def test_doge() -> None:
    fields = {"max_position_embeddings": 4096, "keep_window_size": 2048, "num_key_value_heads": None, "is_moe": False}
    config = parse("DogeForCausalLM", **fields)
    assert isinstance(config, DogeConfig)
    assert (config.default_model_len, config.num_kv_heads, config.head_dim, config.value_dim) == (2048, 4, 136, 128)
    assert config.rope.rotary_dim(config.head_dim) == 128
    assert config.attention[0].scale == 128**-0.5
    for name, value, message in (("is_moe", True, "is_moe"), ("head_dim", 33, "head_dim is 33")):
        with pytest.raises(ConfigError, match=message):
            parse("DogeForCausalLM", **{**fields, name: value})


def test_ctrl() -> None:
    sizes = {"n_embd": 1280, "n_head": 16, "n_layer": 48, "dff": 8192, "n_positions": 50000, "vocab_size": 246534}
    fields = {**sizes, "architectures": ["CTRLLMHeadModel"], "layer_norm_epsilon": 1e-6, "n_ctx": 512}
    config = parse_model_config(fields)
    assert (config.num_layers, config.num_kv_heads, config.head_dim, config.intermediate_size) == (48, 16, 80, 8192)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (50000, True)
    with pytest.raises(ConfigError, match="layer_norm_epsilon"):
        parse_model_config({**fields, "layer_norm_epsilon": 1e-5})


def test_hrm_text() -> None:
    fields = {"num_hidden_layers": 16, "H_cycles": 2, "L_cycles": 3, "initializer_range": 0.02, "head_dim": 128}
    config = parse("HrmTextForCausalLM", **fields, num_key_value_heads=None)
    assert isinstance(config, HrmTextConfig)
    assert (config.num_layers, config.stack_layers, config.num_kv_heads) == (128, 16, 4)
    assert config.embedding_scale == 50.0
    written = {**fields, "num_hidden_layers": 128, "num_layers_per_stack": 16}
    assert parse("HrmTextForCausalLM", **written).num_layers == 128
    for changed in ({"num_hidden_layers": 16}, {"attention_bias": True}):
        with pytest.raises(ConfigError, match=next(iter(changed))):
            parse("HrmTextForCausalLM", **{**written, **changed})


def test_ouro() -> None:
    fields: dict[str, Any] = {
        "early_exit_threshold": 1.0, "total_ut_steps": 4, "head_dim": 128, "layer_types": ["full_attention"] * 8,
        "max_position_embeddings": 65536, "max_window_layers": 8, "rope_theta": 1e6, "sliding_window": None,
        "use_sliding_window": False,
    }  # fmt: skip
    config = parse("OuroForCausalLM", **fields)
    assert (config.num_layers, [config.place_of(layer) for layer in (0, 7, 8, 31)]) == (32, [0, 7, 0, 7])
    assert (config.rope.theta, any(config.sliding_windows), config.qkv_bias) == (1e6, False, False)
    with pytest.raises(ConfigError, match="early_exit_threshold"):
        parse("OuroForCausalLM", **{**fields, "early_exit_threshold": 0.9})


def test_deepseek_vl2_and_ocr() -> None:
    """All three sizes of VL2 call their text part DeepseekV2ForCausalLM."""
    tiny = {
        **SIZES, "first_k_dense_replace": 1, "kv_lora_rank": None, "moe_intermediate_size": 896, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "num_key_value_heads": 4,
        "q_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "topk_group": 1, "topk_method": "greedy",
        "use_mla": False, "v_head_dim": 0,
    }  # fmt: skip
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "use_mla": True, "v_head_dim": 128}
    large = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
    for architecture, part, family in (
        ("DeepseekOCRForCausalLM", tiny, "DeepseekOcr2TextModel"),
        ("DeepseekVLV2ForCausalLM", tiny, "DeepseekOcr2TextModel"),
        ("DeepseekVLV2ForCausalLM", {**tiny, **latent}, "DeepseekV2ForCausalLM"),
        ("DeepseekVLV2ForCausalLM", {**tiny, **latent, **large}, "DeepseekV3ForCausalLM"),
    ):
        named = {**part, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
        config = parse_model_config({"architectures": [architecture], "language_config": named})
        assert config.architecture == f"{architecture}/{family}"
        assert (config.num_layers, config.num_experts) == (8, 64)


def test_jais() -> None:
    fields: dict[str, Any] = {
        "activation_function": "swiglu", "architectures": ["JAISLMHeadModel"], "embeddings_scale": 14.6,
        "layer_norm_epsilon": 1e-5, "n_embd": 5120, "n_head": 40, "n_inner": 13653, "n_layer": 40, "n_positions": 2048,
        "position_embedding_type": "alibi", "reorder_and_upcast_attn": False, "scale_attn_weights": True,
        "scale_qk_dot_by_d": True, "vocab_size": 84992, "width_scale": 0.11100000000000002,
    }  # fmt: skip
    config = parse_model_config(fields)
    assert isinstance(config, JaisConfig)
    assert (config.head_dim, config.intermediate_size, config.attention[0].scale) == (128, 13653, 1 / 128)
    assert (config.embedding_scale, config.logit_scale, config.activation) == (14.6, 0.11100000000000002, "silu")
    assert config.attention[0].alibi is not None
    for name, value in (
        ("activation_function", "gelu"),
        ("position_embedding_type", "learned"),
        ("alibi_scaling", {"factor": 4.0}),
    ):
        with pytest.raises(ConfigError, match=name):
            parse_model_config({**fields, name: value})


def test_step_3() -> None:
    enumerated = ",".join(map(str, range(4, 60)))
    fields: dict[str, Any] = {
        "head_dim": 256, "hidden_size": 7168, "intermediate_size": 18432, "max_position_embedding": 65536,
        "max_seq_len": 65536, "moe_intermediate_size": 5120, "moe_layers_enum": enumerated, "moe_num_experts": 48,
        "moe_top_k": 3, "norm_expert_weight": False, "num_attention_groups": 1, "num_attention_heads": 64,
        "num_hidden_layers": 61, "rms_norm_eps": 1e-5, "rope_theta": 500000, "share_expert_dim": 5120,
        "share_q_dim": 2048, "vocab_size": 128815,
    }  # fmt: skip
    for whole in (
        {"architectures": ["Step3TextForCausalLM"], **fields},
        {"architectures": ["Step3VLForConditionalGeneration"], "text_config": fields},
    ):
        config = parse_model_config(whole)
        assert isinstance(config, Step3Config)
        assert (config.num_heads, config.num_kv_heads, config.head_dim, config.query_rank) == (64, 1, 256, 2048)
        assert (config.num_experts, config.expert_size, config.shared_size) == (48, 5120, 5120)
        assert config.dense_layers == {0, 1, 2, 3, 60}
        assert (config.routing.count, config.routing.normalize, config.default_model_len) == (3, False, 65536)
    for name, value in (("norm_expert_weight", True), ("num_attention_groups", 8)):
        with pytest.raises(ConfigError, match=name):
            parse_model_config({"architectures": ["Step3TextForCausalLM"], **fields, name: value})


def test_plamo_3() -> None:
    fields: dict[str, Any] = {
        "head_dim": 128, "initial_context_length": None, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_local_theta": 10000, "rope_scaling_factor": 1, "rope_theta": 1000000, "sliding_window_pattern": 8,
        "tie_word_embeddings": False, "window_size": 2048,
    }  # fmt: skip
    config = parse("Plamo3ForCausalLM", **fields)
    assert isinstance(config, Plamo3Config)
    assert config.sliding_windows == (*(2048,) * 7, None)
    assert (config.rope.theta, config.rope.type, config.window_rope.theta) == (1e6, "default", 10000)
    assert (config.norm_offset, config.qk_norm, config.tie_word_embeddings) == (1.0, True, False)
    longer = parse("Plamo3ForCausalLM", **{**fields, "rope_scaling_factor": 8, "initial_context_length": 4096})
    assert (longer.rope.type, longer.rope.factor, longer.rope.truncate) == ("yarn", 8.0, False)
    assert longer.rope.original_max_position_embeddings == 4096
    for name, value in (("rope_scaling_factor", 0.5), ("attention_bias", True), ("scale_embedding", True)):
        with pytest.raises(ConfigError, match=name):
            parse("Plamo3ForCausalLM", **{**fields, name: value})
    with pytest.raises(ConfigError, match="window_size"):
        parse("Plamo3ForCausalLM", **{**fields, "window_size": None})


def test_arctic() -> None:
    fields: dict[str, Any] = {
        "moe_layer_frequency": 1, "num_experts_per_tok": 2, "num_local_experts": 128, "parallel_attn_mlp_res": True,
        "rope_theta": 10000, "rms_norm_eps": 1e-5, "sliding_window": None, "use_residual": True,
    }  # fmt: skip
    config = parse("ArcticForCausalLM", **fields)
    assert isinstance(config, SparseConfig)
    assert (config.num_experts, config.expert_size, config.shared_size, config.dense_layers) == (128, 1024, 512, set())
    assert (config.routing.count, config.routing.normalize, config.rope.theta) == (2, True, 10000)
    for name, value in (("parallel_attn_mlp_res", None), ("use_residual", False), ("sliding_window", 4096)):
        with pytest.raises(ConfigError, match=name):
            parse("ArcticForCausalLM", **{**fields, name: value})


def test_olmo_3() -> None:
    scaling = {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
        "beta_slow": 1.0, "attention_factor": 1.2079441541679836,
    }  # fmt: skip
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * 2
    config = parse(
        "Olmo3ForCausalLM", rope_theta=500000, rope_scaling=scaling, sliding_window=4096, layer_types=kinds,
        max_position_embeddings=65536,
    )  # fmt: skip
    ropes = [config.rope_of(layer) for layer in range(8)]
    assert [rope.type for rope in ropes if rope] == (["default"] * 3 + ["yarn"]) * 2
    assert {rope.theta for rope in ropes if rope} == {500000.0}


@pytest.mark.parametrize(
    ("architecture", "fields", "rotated"),
    [
        ("PhiForCausalLM", {"partial_rotary_factor": 0.4, "head_dim": 80, "num_key_value_heads": None}, 32),
        ("StableLmForCausalLM", {"partial_rotary_factor": 0.25, "use_qkv_bias": True}, 32),
        ("NemotronForCausalLM", {"partial_rotary_factor": 0.5, "norm_eps": 1e-5, "hidden_act": "relu2"}, 64),
        ("Glm4ForCausalLM", {"partial_rotary_factor": 0.5, "attention_bias": False}, 64),
        ("MiniMaxM2ForCausalLM", {"rotary_dim": 64, "scoring_func": "sigmoid", "qk_norm_type": "per_layer"}, 64),
    ],
)
def test_heads_of_which_a_part_rotates(architecture: str, fields: dict[str, Any], rotated: int) -> None:
    config = parse(architecture, **fields)
    assert config.rope.rotary_dim(config.head_dim) == rotated


def test_dynamic_scaling_begins_beyond_the_positions_that_are_served() -> None:
    assert parse("LlamaForCausalLM", rope_scaling={"type": "dynamic", "factor": 2.0}).rope.type == "default"


def test_windows_of_exaone() -> None:
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * 2
    config = parse(
        "Exaone4ForCausalLM", sliding_window=4096, sliding_window_pattern="LLLG", layer_types=kinds, head_dim=128
    )
    assert [config.rope_of(layer) is None for layer in range(8)] == [False, False, False, True] * 2
    small = parse("Exaone4ForCausalLM", sliding_window=None, sliding_window_pattern=None, layer_types=None)
    assert all(small.rope_of(layer) for layer in range(8))


def test_experts() -> None:
    ernie = parse(
        "Ernie4_5_MoeForCausalLM", moe_num_experts=64, moe_k=6, moe_layer_start_index=1, moe_layer_end_index=6,
        moe_layer_interval=1, moe_num_shared_experts=2, moe_intermediate_size=1536, use_bias=False, rope_theta=500000.0,
    )  # fmt: skip
    assert isinstance(ernie, SparseConfig)
    assert (ernie.dense_layers, ernie.shared_size, ernie.routing.count) == ({0, 7}, 3072, 6)
    flash = parse(
        "Glm4MoeLiteForCausalLM", first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="noaux_tc",
        partial_rotary_factor=1.0, kv_lora_rank=512, q_lora_rank=768, qk_rope_head_dim=64, num_key_value_heads=20,
    )  # fmt: skip
    assert isinstance(flash, SparseConfig)
    assert (flash.dense_layers, flash.routing.count, flash.routing.scale, flash.routing.sigmoid) == ({0}, 4, 1.8, True)
    with pytest.raises(ConfigError, match="mlp_layer_types"):
        parse("Glm4MoeLiteForCausalLM", mlp_layer_types=["dense"])


def test_hunyuan() -> None:
    scaling = {
        "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "type": "dynamic",
    }  # fmt: skip
    common: dict[str, Any] = {
        "attention_head_dim": 128, "rope_theta": 10000.0, "rope_scaling": scaling, "max_position_embeddings": 32768,
        "use_qk_norm": True, "use_cla": False, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    dense = parse("HunYuanDenseV1ForCausalLM", num_experts=1, use_mixed_mlp_moe=False, **common)
    assert dense.rope.theta == 10000.0 * 1000.0 ** (128 / 126)
    assert (dense.head_dim, dense.rope.type, dense.rms_norm_eps) == (128, "default", 1e-5)
    experts = {
        "num_experts": 64, "moe_topk": [8] * 8, "num_shared_expert": [1] * 8, "moe_intermediate_size": [1024] * 8,
        "use_mixed_mlp_moe": True, "norm_topk_prob": True, "moe_layer_num_skipped": 0,
    }  # fmt: skip
    sparse = parse("HunYuanMoEV1ForCausalLM", **experts, **common)
    assert isinstance(sparse, SparseConfig)
    assert (sparse.routing.count, sparse.expert_size, sparse.shared_size) == (8, 1024, 1024)
    for name, value in (("moe_topk", [8] * 7 + [4]), ("use_cla", True), ("norm_topk_prob", False)):
        with pytest.raises(ConfigError, match=name):
            parse("HunYuanMoEV1ForCausalLM", **{**experts, **common, name: value})
    with pytest.raises(ConfigError, match="rope type 'yarn'"):
        parse("HunYuanDenseV1ForCausalLM", **{**common, "rope_scaling": {"type": "yarn", "factor": 4.0}})


def test_older_models_without_gates() -> None:
    opt = {
        "activation_function": "relu", "ffn_dim": 3072, "do_layer_norm_before": True, "word_embed_proj_dim": 512,
        "_remove_final_layer_norm": False, "max_position_embeddings": 2048,
    }  # fmt: skip
    config = parse("OPTForCausalLM", **opt)
    assert isinstance(config, OptConfig)
    assert (config.intermediate_size, config.num_kv_heads, config.activation) == (3072, 4, "relu")
    assert (config.tie_word_embeddings, config.qkv_bias, config.rope_of(0)) == (True, True, None)
    galactica = {"activation_function": "gelu", "enable_bias": False, "layer_norm_elementwise_affine": False}
    assert parse("OPTForCausalLM", **{**opt, **galactica}).mlp_bias is False
    small = parse("OPTForCausalLM", **{**opt, "do_layer_norm_before": False, "word_embed_proj_dim": 256})
    assert isinstance(small, OptConfig)
    assert (small.post_norm, small.embedding_size, small.hidden_size) == (True, 256, 512)
    assert (small.has_final_norm, config.has_final_norm) == (False, True)
    gptj = {
        "activation_function": "gelu_new", "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28,
        "n_positions": 2048, "rotary": True, "rotary_dim": 64, "scale_attn_weights": True, "tie_word_embeddings": False,
        "layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    for architecture in ("GPTJForCausalLM", "CodeGenForCausalLM"):
        config = parse(architecture, **gptj)
        assert (config.num_layers, config.head_dim, config.intermediate_size) == (28, 256, 16384)
        assert (config.rope.rotary_dim(256), config.rope.interleaved, config.activation) == (64, True, "gelu_tanh")
        with pytest.raises(ConfigError, match="scale_attn_weights"):
            parse(architecture, **{**gptj, "scale_attn_weights": False})
    with pytest.raises(ConfigError, match="n_head"):
        parse("CodeGenForCausalLM", **{**gptj, "n_head": 2})
    with pytest.raises(ConfigError, match="n_embd 4095 is not a multiple"):
        parse("GPTJForCausalLM", **{**gptj, "n_embd": 4095})
    starcoder = {
        "activation_function": "gelu", "attention_softmax_in_fp32": True, "multi_query": True, "n_embd": 6144,
        "n_head": 48, "n_inner": 24576, "n_layer": 40, "n_positions": 8192, "scale_attn_weights": True,
        "layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    config = parse("GPTBigCodeForCausalLM", **starcoder)
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (1, 128, 8192)


def test_falcon_of_refinedweb() -> None:
    config = parse_model_config({
        "alibi": True, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
        "bias": True, "hidden_size": 2048, "layer_norm_epsilon": 1e-5, "multi_query": False,
        "new_decoder_architecture": False, "num_attention_heads": 32, "num_hidden_layers": 24, "parallel_attn": False,
        "vocab_size": 50304,
    })  # fmt: skip
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (32, 64, 2048)
    slopes = config.attention[0].alibi
    assert slopes is not None
    # They are rounded to bfloat16, and so is their product with a position.
    assert (slopes[0], slopes[3], slopes[31]) == (0.83984375, 0.5, 2.0**-8)
    assert config.attention[0].rounded_alibi


def test_mpt() -> None:
    attention = {
        "alibi": True, "alibi_bias_max": 16, "attn_impl": "torch", "attn_pdrop": 0, "attn_type": "multihead_attention",
        "attn_uses_sequence_id": False, "clip_qkv": 6, "prefix_lm": False, "qk_ln": False, "softmax_scale": None,
    }  # fmt: skip
    fields: dict[str, Any] = {
        "d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 65536, "expansion_ratio": 4, "no_bias": True,
        "logit_scale": None, "norm_type": "low_precision_layernorm", "learned_pos_emb": True,
    }  # fmt: skip
    # The architecture's name in the first versions, before transformers had the family.
    config = parse("MPTForCausalLM", attn_config=attention, **fields)
    assert (config.num_layers, config.head_dim, config.intermediate_size) == (32, 128, 16384)
    assert config.attention[0].alibi == tuple(2.0 ** (-head / 2) for head in range(1, 33))
    for name, value in (("alibi", False), ("qk_ln", True), ("attn_type", "multiquery_attention")):
        with pytest.raises(ConfigError, match=name):
            parse("MptForCausalLM", attn_config={**attention, name: value}, **fields)
    for name, value in (("no_bias", False), ("norm_type", "rmsnorm"), ("logit_scale", "inv_sqrt_d_model")):
        with pytest.raises(ConfigError, match=name):
            parse("MptForCausalLM", attn_config=attention, **{**fields, name: value})


def test_phi_3_5_moe() -> None:
    scaling = {
        "long_factor": [2.0] * 64, "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 64, "short_mscale": 1.243163121016122, "type": "longrope",
    }  # fmt: skip
    fields: dict[str, Any] = {
        "attention_bias": True, "lm_head_bias": True, "num_local_experts": 16, "num_experts_per_tok": 2,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_scaling": scaling, "rope_theta": 10000.0,
        "router_jitter_noise": 0.01, "input_jitter_noise": 0.01, "sliding_window": 131072, "tie_word_embeddings": False,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip
    config = parse("PhiMoEForCausalLM", **fields)
    assert isinstance(config, SparseConfig)
    assert (config.rope.type, config.rope.attention_factor, config.rope.theta) == ("longrope", 1.243163121016122, 1e4)
    assert (config.routing.count, config.routing.near, config.output_bias) == (2, 0.02, True)
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        parse("PhimoeForCausalLM", **{**fields, "num_experts_per_tok": 4})
    with pytest.raises(ConfigError, match="long_mscale"):
        parse("PhimoeForCausalLM", **{**fields, "rope_scaling": {**scaling, "long_mscale": 1.5}})


def test_dbrx() -> None:
    fields: dict[str, Any] = {
        "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768, "tie_word_embeddings": False,
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
    }  # fmt: skip
    ffn = {
        "ffn_hidden_size": 10752, "model_type": "", "moe_jitter_eps": 0.01, "moe_loss_weight": 0.05,
        "moe_num_experts": 16, "moe_top_k": 4,
    }  # fmt: skip
    config = parse("DbrxForCausalLM", ffn_config=ffn, **fields)
    assert isinstance(config, SparseConfig)
    assert (config.num_layers, config.num_kv_heads, config.head_dim, config.rope.theta) == (40, 8, 128, 500000)
    assert (config.expert_size, config.routing.count, config.routing.normalize) == (10752, 4, True)
    plain = parse("DbrxForCausalLM", ffn_config={**ffn, "moe_normalize_expert_weights": None}, **fields)
    assert isinstance(plain, SparseConfig)
    assert not plain.routing.normalize
    for name, value in (("moe_normalize_expert_weights", 2), ("ffn_act_fn", {"name": "tanh"})):
        with pytest.raises(ConfigError, match="hidden_act" if name == "ffn_act_fn" else name):
            parse("DbrxForCausalLM", ffn_config={**ffn, name: value}, **fields)
    with pytest.raises(ConfigError, match="ffn_config"):
        parse("DbrxForCausalLM", ffn_config=[], **fields)


def test_apertus() -> None:
    scaling = {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }  # fmt: skip
    fields: dict[str, Any] = {
        "hidden_act": "xielu", "max_position_embeddings": 65536, "mlp_bias": False, "attention_bias": False,
        "post_norm": False, "qk_norm": True, "rms_norm_eps": 1e-5, "rope_theta": 12000000,
    }  # fmt: skip
    config = parse("ApertusForCausalLM", rope_scaling=scaling, **fields)
    assert (config.rope.type, config.rope.theta, config.qk_norm) == ("llama3", 12e6, True)
    assert parse("ApertusForCausalLM", **fields).rope == config.rope
    for name, value in (("hidden_act", "tanh"), ("qk_norm", False), ("mlp_bias", True)):
        with pytest.raises(ConfigError, match=name):
            parse("ApertusForCausalLM", **{**fields, name: value})


def test_vaultgemma() -> None:
    fields: dict[str, Any] = {
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256, "sliding_window": 512,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rope_theta": 10000.0,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    }  # fmt: skip
    config = parse("VaultGemmaForCausalLM", **fields)
    assert config.sliding_windows == (512, None) * 4
    assert {(spec.softcap, spec.scale) for spec in config.attention} == {(50.0, 1 / 16)}
    assert (config.activation, config.tie_word_embeddings) == ("gelu_tanh", True)
    with pytest.raises(ConfigError, match="hidden_act"):
        parse("VaultGemmaForCausalLM", **{**fields, "hidden_activation": "tanh"})


def test_granite_4() -> None:
    fields: dict[str, Any] = {
        "attention_multiplier": 0.015625, "embedding_multiplier": 12, "hidden_size": 2560, "intermediate_size": 8192,
        "layer_types": ["attention"] * 8, "logits_scaling": 10, "mamba_n_heads": 128, "max_position_embeddings": 131072,
        "num_attention_heads": 40, "num_experts_per_tok": 0, "num_key_value_heads": 8, "num_local_experts": 0,
        "position_embedding_type": "rope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_theta": 10000000,
        "shared_intermediate_size": 8192, "tie_word_embeddings": True,
    }  # fmt: skip
    config = parse("GraniteMoeHybridForCausalLM", **fields)
    assert (config.intermediate_size, config.head_dim, config.attention[0].scale) == (8192, 64, 1 / 64)
    rope = config.rope_of(0)
    assert rope is not None
    assert rope.theta == 1e7
    unrotated = parse("GraniteMoeHybridForCausalLM", **{**fields, "position_embedding_type": "nope"})
    assert unrotated.rope_of(0) is None
    assert unrotated.fingerprint_facts() != config.fingerprint_facts()
    experts = {**fields, "num_local_experts": 62, "num_experts_per_tok": 6, "shared_intermediate_size": None}
    sparse = parse("GraniteMoeHybridForCausalLM", **experts)
    assert isinstance(sparse, SparseConfig)
    assert (sparse.expert_size, sparse.shared_size, sparse.routing.count) == (8192, 1024, 6)
    fields |= {"mamba_d_head": 40, "mamba_d_state": 128, "mamba_n_groups": 1}
    for kinds in (["mamba"] * 7 + ["attention"], ["linear_attention"] * 7 + ["full_attention"]):
        hybrid = parse("GraniteMoeHybridForCausalLM", **{**fields, "layer_types": kinds})
        layout = hybrid.kv_layout("bfloat16")
        assert (layout.state_layers, hybrid.sliding_windows) == (tuple(range(7)), (2,) * 7 + (None,))
        # 8 heads of 128 x 40 numbers and 4 inputs of the 640 + 256 channels of a group are in a plane of 64 elements.
        assert (layout.state_rows, layout.block_size(64)) == (1392, 1408)
    assert parse("GraniteMoeHybridForCausalLM", **{**fields, "layer_types": None}).recent_tokens == 2
    assert (config.recent_tokens, config.kv_layout("bfloat16").state_rows) == (1, 0)
    for wrong, what in (
        ({"mamba_d_head": 64}, "mamba_n_heads 128 times mamba_d_head 64 in config.json is not 5120"),
        ({"mamba_n_groups": 3}, "multiple of the 3 groups and of the 8 parts of the 8 key-value heads"),
        ({"mamba_d_conv": 1}, "mamba_d_conv in config.json is 1; it must be from 2 to 9"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
    ):
        with pytest.raises(ConfigError, match=what):
            parse("GraniteMoeHybridForCausalLM", **{**fields, "layer_types": kinds, **wrong})


def test_falcon_h1_nemotron_h_and_olmo_hybrid() -> None:
    falcon = parse(
        "FalconH1ForCausalLM", attention_in_multiplier=1.0, attention_out_multiplier=0.9375,
        embedding_multiplier=5.656854249492381, key_multiplier=0.390625, lm_head_multiplier=0.0390625, head_dim=128,
        mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=64, mamba_d_ssm=1536, mamba_d_state=128, mamba_expand=2,
        mamba_n_groups=1, mamba_n_heads=24, mamba_norm_before_gate=False, mamba_proj_bias=False, mamba_rms_norm=False,
        mlp_multipliers=[0.8838834764831844, 0.5859375], num_hidden_layers=36, num_key_value_heads=2,
        projectors_bias=False, rope_theta=100000000000.0, ssm_in_multiplier=1.25, ssm_out_multiplier=0.23570226,
        ssm_multipliers=[0.35355339, 0.25, 0.35355339, 0.5, 0.35355339], vocab_size=32784,
    )  # fmt: skip
    assert (falcon.num_layers, falcon.sliding_windows[:2], falcon.recent_tokens) == (72, (None, 2), 2)
    assert falcon.attention[0].scale == pytest.approx(128**-0.5 * 0.390625)
    assert isinstance(falcon, FalconH1Config)
    assert (falcon.mamba.norm, falcon.mamba.factor, falcon.states.key_heads) == ("", 1.25, 2)
    assert falcon.factors.gates == 0.8838834764831844
    with pytest.raises(ConfigError, match=r"ssm_multipliers in config.json is \[1.0\]; it must be a list of 5 numbers"):
        parse("FalconH1ForCausalLM", mamba_d_ssm=1536, mamba_n_heads=24, num_key_value_heads=2, ssm_multipliers=[1.0])
    default = parse("FalconH1ForCausalLM", mamba_n_heads=16, num_key_value_heads=2)
    assert isinstance(default, FalconH1Config)
    assert default.states.values == 1024
    nano: dict[str, Any] = {
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "mamba_head_dim": 80,
        "mamba_hidden_act": "silu", "mamba_num_heads": 128, "mlp_hidden_act": "relu2", "n_groups": 8, "expand": 2,
        "num_attention_heads": 40, "num_hidden_layers": 56, "num_key_value_heads": 8, "ssm_state_size": 128,
        "use_bias": False, "conv_kernel": 4,
    }  # fmt: skip
    nemotron = parse("NemotronHForCausalLM", **nano)
    assert isinstance(nemotron, NemotronHConfig)
    assert (nemotron.num_layers, len(nemotron.state_layers), nemotron.activation) == (31, 27, "relu2")
    assert nemotron.blocks[3] == (("linear_attention", 6),)
    assert nemotron.blocks[8] == (("full_attention", 14), ("mlp", 15))
    assert nemotron.rope_of(0) is None
    with pytest.raises(ConfigError, match="it must name the block of each layer"):
        parse("NemotronHForCausalLM", **{**nano, "hybrid_override_pattern": "MXM*"})
    with pytest.raises(ConfigError, match="has no layer with Mamba or attention"):
        parse("NemotronHForCausalLM", **{**nano, "hybrid_override_pattern": "--"})
    olmo = parse("OlmoHybridForCausalLM", hidden_size=3840, num_attention_heads=30, num_hidden_layers=8)
    assert isinstance(olmo, OlmoHybridConfig)
    assert (olmo.states.key_dim, olmo.states.value_dim, olmo.states.key_heads, olmo.most) == (96, 192, 30, 2.0)
    assert (olmo.state_layers, olmo.rotates) == ({0, 1, 2, 4, 5, 6}, False)
    bamba = parse(
        "BambaForCausalLM", attn_layer_indices=[3, 7], mamba_d_head=64, mamba_d_state=128, mamba_n_heads=128,
        mamba_n_groups=1, num_attention_heads=32, num_hidden_layers=8, num_key_value_heads=8, hidden_size=4096,
    )  # fmt: skip
    assert (bamba.rope.partial, bamba.recent_tokens, bamba.sliding_windows[3]) == (0.5, 2, None)


def test_zamba2() -> None:
    places = [6, 12, 18, 24, 30, 36, 42, 47, 51]
    fields: dict[str, Any] = {
        "adapter_rank": 128, "add_bias_linear": False, "attention_head_dim": 160, "attention_hidden_size": 5120,
        "chunk_size": 256, "hidden_act": "gelu", "hidden_size": 2560, "hybrid_layer_ids": places,
        "intermediate_size": 10240, "kv_channels": 80, "mamba_d_conv": 4, "mamba_d_state": 64, "mamba_expand": 2,
        "mamba_headdim": 64, "mamba_ngroups": 1, "max_position_embeddings": 4096, "n_mamba_heads": 80,
        "num_attention_heads": 32, "num_hidden_layers": 54, "num_key_value_heads": 32, "num_mem_blocks": 2,
        "rms_norm_eps": 1e-05, "rope_theta": 10000, "time_step_limit": None, "time_step_min": 0.001,
        "use_conv_bias": True, "use_long_context": False, "use_mem_rope": False, "use_shared_attention_adapter": False,
        "vocab_size": 32000, "layers_block_type": ["hybrid" if at in places else "mamba" for at in range(54)],
    }  # fmt: skip
    small = parse("Zamba2ForCausalLM", **fields)
    assert isinstance(small, Zamba2Config)
    assert [layer for layer, window in enumerate(small.sliding_windows) if window is None] == [
        place + use for use, place in enumerate(places)
    ]
    assert (small.num_layers, small.head_dim, small.attention[0].scale) == (63, 160, 80**-0.5)
    assert (small.blocks, small.rank, small.adapts_attention, small.rope_of(6)) == (2, 128, False, None)
    assert (small.tie_word_embeddings, small.activation, small.mlp_units) == (True, "gelu", 10240 * 9 / 63)
    assert small.projections == [(3 * 5120, 5120), (2560, 5120)]
    # 80 heads cannot be divided into 32 groups, but into 16, which have the places of two key-value heads each.
    assert small.states == StateShape(16, 16, 80, 64, 64, 4)
    # A group has three states in its part of a row of keys, which has 640 bytes.
    assert small.kv_layout("bfloat16").state_rows == -(-3 * 64 * 64 * 4 // 640)
    assert small.part(RankNumber(1, 4)).states == StateShape(4, 4, 20, 64, 64, 4)
    with pytest.raises(ConfigError, match="--tensor-parallel 32 does not divide the 16 groups of Mamba's heads"):
        small.part(RankNumber(0, 32))
    mini = parse("Zamba2ForCausalLM", **{
        **fields, "attention_head_dim": 128, "attention_hidden_size": 4096, "hidden_size": 2048, "n_mamba_heads": 64,
        "hybrid_layer_ids": [5], "layers_block_type": [*("linear_attention",) * 5, "hybrid", "linear_attention"],
        "mamba_d_state": 128, "num_hidden_layers": 7, "num_mem_blocks": 1, "use_mem_rope": True,
        "use_shared_attention_adapter": True,
    })  # fmt: skip
    assert isinstance(mini, Zamba2Config)
    assert (mini.states, mini.rope_of(5)) == (StateShape(32, 32, 64, 128, 64, 4), Rope("default", 10000.0))
    assert (mini.hybrid, mini.state_layers) == ((False,) * 5 + (True, False), {0, 1, 2, 3, 4, 6, 7})
    large = parse("Zamba2ForCausalLM", **{
        **fields, "attention_head_dim": 224, "attention_hidden_size": 7168, "hidden_size": 3584, "mamba_ngroups": 2,
        "n_mamba_heads": 112, "use_mem_rope": True,
    })  # fmt: skip
    assert isinstance(large, Zamba2Config)
    assert (large.states, large.mamba.groups) == (StateShape(16, 16, 112, 64, 64, 4), 2)
    for wrong, message in (
        ({"layers_block_type": None}, "has no 'layers_block_type'"),
        ({"layers_block_type": ["mamba"]}, "one for each of 54 layers"),
        ({"hybrid_layer_ids": [6]}, r"hybrid_layer_ids \[6\] in config.json is not served"),
        ({"attention_hidden_size": 2560}, "attention_hidden_size 2560"),
        ({"attention_head_dim": 80}, "attention_head_dim 80"),
        ({"mamba_headdim": 32}, "mamba_headdim 32"),
        ({"num_attention_heads": 24}, "twice hidden_size 2560 in config.json is not a multiple of the 24 heads"),
        ({"use_shared_attention_adapter": True, "num_key_value_heads": 8}, "but num_key_value_heads is 8"),
        ({"use_conv_bias": False}, "use_conv_bias False"),
        ({"use_long_context": True}, "use_long_context True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False"),
        ({"mamba_ngroups": 3}, "multiple of the 3 groups and of the 16 parts of the 32 key-value heads"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse("Zamba2ForCausalLM", **{**fields, **wrong})


def test_jamba() -> None:
    fields: dict[str, Any] = {
        "attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1, "expert_layer_period": 2,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "mamba_conv_bias": True,
        "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_proj_bias": False,
        "max_position_embeddings": 262144, "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "vocab_size": 65536,
    }  # fmt: skip
    mini = parse("JambaForCausalLM", **fields)
    assert isinstance(mini, JambaMoeConfig)
    assert [layer for layer, window in enumerate(mini.sliding_windows) if window is None] == [4, 12, 20, 28]
    assert (mini.dense_layers, mini.num_experts, mini.expert_size) == (set(range(0, 32, 2)), 16, 14336)
    assert (mini.routing.count, mini.routing.normalize, mini.mamba.rank, mini.rope_of(4)) == (2, False, 256, None)
    assert mini.states == ChannelShape(8, 8192, 16, 4)
    # A group has the states of 1,024 channels, and its part of a row of keys has 256 bytes.
    assert mini.kv_layout("bfloat16").state_rows == 1024 * 16 * 4 // 256
    assert mini.part(RankNumber(0, 4)).states == ChannelShape(2, 2048, 16, 4)
    small = parse("JambaForCausalLM", **{**fields, "num_experts": 1, "mamba_dt_rank": "auto", "hidden_size": 2560})
    assert isinstance(small, JambaConfig)
    assert (small.num_experts, small.mamba.rank) == (0, 160)
    for wrong, message in {
        "attn_layer_offset": r"attn_layer_offset in config.json is 99; it must be less than attn_layer_period, 8",
        "expert_layer_offset": r"expert_layer_offset in config.json is 99; it must be less than expert_layer_period, 2",
        "mamba_d_conv": r"mamba_d_conv in config.json is 99; it must be from 2 to 9",
        "mamba_dt_rank": r"mamba_dt_rank in config.json is -1; it must be an integer of at least 1",
        "num_experts_per_tok": r"num_experts_per_tok in config.json is 99; it must be at most 16",
        "mamba_inner_layernorms": r"mamba_inner_layernorms False in config.json is not served",
        "hidden_act": r"hidden_act in config.json is 'gelu'; it must be one of silu, swish",
        "num_key_value_heads": r"8192 channels of Mamba in config.json cannot be divided among 3 key-value heads",
    }.items():
        given = {"mamba_dt_rank": -1, "mamba_inner_layernorms": False, "hidden_act": "gelu", "num_key_value_heads": 3}
        with pytest.raises(ConfigError, match=message):
            parse("JambaForCausalLM", **{**fields, wrong: given.get(wrong, 99)})


def test_recurrent_gemma() -> None:
    fields: dict[str, Any] = {
        "attention_bias": False, "attention_window_size": 2048, "block_types": ["recurrent", "recurrent", "attention"],
        "bos_token_id": 2, "conv1d_width": 4, "embeddings_scale_by_sqrt_dim": True, "eos_token_id": 1, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2560, "intermediate_size": 15360,
        "logits_soft_cap": 30.0, "lru_width": 2560, "max_position_embeddings": None, "num_attention_heads": 10,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0, "vocab_size": 256000,
    }  # fmt: skip
    small = parse("RecurrentGemmaForCausalLM", **fields)
    assert isinstance(small, RecurrentGemmaConfig)
    assert [layer for layer, window in enumerate(small.sliding_windows) if window == 2048] == list(range(2, 26, 3))
    assert small.state_layers == set(range(26)) - set(range(2, 26, 3))
    assert small.states == ChannelShape(1, 2560, 1, 4)
    assert (small.intermediate_size, small.activation, small.norm_offset, small.logit_softcap) == (
        7680, "gelu_tanh", 1.0, 30.0,
    )  # fmt: skip
    assert (small.rope.theta, small.rope.partial, small.attention[2].scale) == (10000.0, 0.5, 1 / 16)
    assert (small.default_model_len, small.tie_word_embeddings, small.eos_token_ids) == (8192, True, (1,))
    # Four inputs of each channel are in a plane of 256 elements of two bytes.
    layout = small.kv_layout("bfloat16")
    assert (layout.state_rows, layout.block_size(16)) == (2560 * 4 * 4 // 512, 80)
    big = {"hidden_size": 4096, "intermediate_size": 24576, "lru_width": 4096, "num_attention_heads": 16}
    large = parse("RecurrentGemmaForCausalLM", **{**fields, **big, "num_hidden_layers": 38})
    assert isinstance(large, RecurrentGemmaConfig)
    assert (large.states, len(large.state_layers), large.head_dim) == (ChannelShape(1, 4096, 1, 4), 26, 256)
    with pytest.raises(ConfigError, match=r"--tensor-parallel 2 does not divide the 1 key-value heads"):
        large.part(RankNumber(0, 2))
    for wrong, message in {
        "block_types": r"block_types in config.json is \['mlp'\]; it must be a list of recurrent and attention",
        "conv1d_width": r"conv1d_width in config.json is 99; it must be from 2 to 9",
        "hidden_activation": r"hidden_act in config.json is 'tanh'",
        "lru_width": r"lru_width in config.json is 99; it must be a multiple of 10 heads",
        "rope_scaling": r"rope type 'linear' in config.json is not served for RecurrentGemmaForCausalLM",
    }.items():
        given = {"block_types": ["mlp"], "hidden_activation": "tanh", "rope_scaling": {"type": "linear", "factor": 2.0}}
        with pytest.raises(ConfigError, match=message):
            parse("RecurrentGemmaForCausalLM", **{**fields, wrong: given.get(wrong, 99)})


def test_codestral_mamba() -> None:
    fields: dict[str, Any] = {
        "conv_kernel": 4, "expand": 2, "head_dim": 64, "hidden_size": 4096, "layer_norm_epsilon": 1e-05, "n_groups": 8,
        "norm_before_gate": True, "num_heads": 128, "num_hidden_layers": 64, "rms_norm": True, "state_size": 128,
        "tie_word_embeddings": False, "time_step_limit": [0.0, float("inf")], "time_step_rank": 256, "use_bias": False,
        "use_conv_bias": True, "vocab_size": 32768,
    }  # fmt: skip
    config = parse("Mamba2ForCausalLM", **fields)
    assert isinstance(config, Mamba2Config)
    assert (config.states, config.default_model_len) == (StateShape(8, 8, 128, 128, 64, 4), 4096)
    assert config.layer_weights == 4096 * (3 * 8192 + 2 * 8 * 128 + 128)
    layout = config.kv_layout("bfloat16")
    # A group of 16 heads has 8 states in each plane, in rows of 256 numbers of two bytes, and inputs of 1,280 channels.
    assert (layout.state_rows, layout.planes[0].dim, layout.planes[1].dim) == (512, 256, 276)
    with pytest.raises(ConfigError, match=r"mamba_n_heads 128 times mamba_d_head 32 in config.json is not 8192"):
        parse("Mamba2ForCausalLM", **{**fields, "head_dim": 32})


def test_mamba() -> None:
    fields: dict[str, Any] = {
        "conv_kernel": 4, "expand": 16, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 8192,
        "layer_norm_epsilon": 1e-05, "num_hidden_layers": 64, "state_size": 16, "tie_word_embeddings": False,
        "time_step_rank": 256, "use_bias": False, "use_conv_bias": True, "vocab_size": 65024,
    }  # fmt: skip
    falcon = parse("FalconMambaForCausalLM", **fields)
    assert isinstance(falcon, MambaConfig)
    assert (falcon.states, falcon.mamba.rank) == (ChannelShape(8, 8192, 16, 4), 256)
    assert (falcon.mixer_eps, falcon.default_model_len, falcon.tie_word_embeddings) == (1e-6, 8192, False)
    # All matrices of a layer: to channels and gates, from the channels and to them, and back to the hidden size.
    assert falcon.layer_weights == 8192 * (2 * 4096 + (256 + 2 * 16) + 256 + 4096)
    layout = falcon.kv_layout("bfloat16")
    assert (layout.state_layers, layout.state_rows, layout.token_bytes) == (tuple(range(64)), 256, 0)
    # A block has the states and four inputs of all channels, as float32, and no other bytes.
    assert 256 * layout.layer_bytes == 8192 * (16 + 4) * 4
    assert falcon.part(RankNumber(1, 8)).states == ChannelShape(1, 1024, 16, 4)
    with pytest.raises(ConfigError, match=r"8 groups of Mamba's states cannot be divided among 16 ranks"):
        falcon.part(RankNumber(1, 16))
    mamba = parse("MambaForCausalLM", hidden_size=2560, intermediate_size=None, time_step_rank="auto")
    assert isinstance(mamba, MambaConfig)
    assert (mamba.states.channels, mamba.mamba.rank, mamba.mixer_eps, mamba.default_model_len) == (
        5120,
        160,
        None,
        2048,
    )
    with pytest.raises(ConfigError, match=r"conv_kernel in config.json is 12; it must be from 2 to 9"):
        parse("MambaForCausalLM", **{**fields, "conv_kernel": 12})
    with pytest.raises(ConfigError, match=r"hidden_act in config.json is 'relu'; it must be one of silu, swish"):
        parse("MambaForCausalLM", **{**fields, "hidden_act": "relu"})
    with pytest.raises(ConfigError, match=r"state_size in config.json is 0; it must be an integer of at least 1"):
        parse("FalconMambaForCausalLM", **{**fields, "state_size": 0})


def test_kimi_linear_and_ling_3() -> None:
    full = [4, 8, 12, 16, 20, 24, 27]
    linear: dict[str, Any] = {
        "full_attn_layers": full, "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [layer for layer in range(1, 28) if layer not in full],
    }  # fmt: skip
    fields: dict[str, Any] = {
        "first_k_dense_replace": 1, "head_dim": 72, "hidden_size": 2304, "intermediate_size": 9216, "kv_lora_rank": 512,
        "linear_attn_config": linear, "mla_use_nope": True, "model_max_length": 1048576, "moe_intermediate_size": 1024,
        "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 32, "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8,
        "num_hidden_layers": 27, "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "topk_group": 1, "use_grouped_topk": True,
        "v_head_dim": 128, "vocab_size": 163840,
    }  # fmt: skip
    kimi = parse("KimiLinearForCausalLM", **fields)
    assert isinstance(kimi, LatentStatesConfig)
    assert (kimi.max_position_embeddings, kimi.dense_layers, kimi.least) == (1048576, {0}, 0.0)
    assert (kimi.routing.count, kimi.routing.scale, kimi.routing.sigmoid, kimi.shared_size) == (8, 2.446, True, 1024)
    assert [layer + 1 for layer, window in enumerate(kimi.sliding_windows) if window is None] == full
    assert (kimi.rope.partial, kimi.states) == (0.0, StateShape(1, 32, 32, 128, 128, 4))
    layout = kimi.kv_layout("bfloat16")
    # A row of latents has 1,152 bytes. There are 16 states in each half, beside 4 inputs of 12,288 channels.
    assert layout.state_rows == -(-(16 << 16) // 1152) + -(-((16 << 16) + 4 * 4 * 12288) // 1152)
    assert kimi.part(RankNumber(0, 4)).kv_layout("bfloat16") == layout
    with pytest.raises(ConfigError, match=r"kda_layers and full_attn_layers in config.json must name each of the 27"):
        parse("KimiLinearForCausalLM", **{**fields, "linear_attn_config": {**linear, "kda_layers": [1, 1]}})
    with pytest.raises(ConfigError, match=r"mla_use_nope False in config.json is not served"):
        parse("KimiLinearForCausalLM", **{**fields, "mla_use_nope": False})
    with pytest.raises(ConfigError, match=r"length of the convolution in config.json is 12; it must be from 2 to 9"):
        parse("KimiLinearForCausalLM", **{**fields, "linear_attn_config": {**linear, "short_conv_kernel_size": 12}})
    ling = parse("BailingHybridForCausalLM", num_hidden_layers=12, n_group=4, num_experts=64)
    assert isinstance(ling, LatentStatesConfig)
    assert [layer for layer, window in enumerate(ling.sliding_windows) if window is None] == [5, 11]
    assert (ling.dense_layers, ling.least, ling.states.key_dim, ling.rope.theta) == ({0, 1}, -5.0, 128, 6e6)
    assert (ling.routing.groups, ling.routing.used_groups, ling.num_experts) == (4, 4, 64)
    with pytest.raises(ConfigError, match=r"kda_lower_bound in config.json is 0.0; it must be less than 0"):
        parse("BailingHybridForCausalLM", num_hidden_layers=12, n_group=4, num_experts=64, kda_lower_bound=0)


def test_hy4() -> None:
    fields: dict[str, Any] = {
        "attention_bias": False, "enable_ihc": True, "enable_lm_head_fp32": True, "first_k_dense_replace": 1,
        "gated_mla": True, "gating_type": "elementwise", "hc_eps": 1e-06, "hc_magnitude": 2.0, "hc_mult": 4,
        "hidden_act": "silu", "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
        "indexer_types": ["full", *(["full", "shared", "shared", "shared"] * 20)[:77]], "intermediate_size": 18432,
        "kv_lora_rank": 512, "layer_types": ["deepseek_sparse_attention"] * 78, "learnable_sink": True,
        "learnable_sink_init": 0.0, "max_position_embeddings": 1048576, "mlp_layer_types": ["dense", *["sparse"] * 77],
        "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 256, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 78,
        "num_key_value_heads": 64, "num_nextn_predict_layers": 1, "q_lora_rank": 2048, "qk_head_dim": 256,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 10000000.0, "rope_type": "default"}, "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid", "swiglu_limit": 10.0, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256,
        "vocab_size": 120832,
    }  # fmt: skip
    config = parse("HYV4ForCausalLM", **fields)
    assert isinstance(config, HyV4Config)
    # Its authors count 770 billion parameters, without the layer that predicts further tokens.
    total = config.num_layers * config.layer_weights_read(1e6) + 2 * config.vocab_size * config.hidden_size
    assert total == pytest.approx(770e9, rel=0.01)
    assert (config.mixing, config.stream_size, config.limit) == (Mixing(4, 1e-5, 1e-6, 2.0), 24576, 10.0)
    assert (config.latent.selected, config.latent.index_heads, config.latent.sinks) == (2048, 32, True)
    assert config.selecting == {0, *range(1, 78, 4)}
    assert config.interleaved
    assert config.index_interleaved
    assert config.kv_layout("bfloat16").layer_bytes == 1152 + 256
    # A field that is absent has the default of transformers.
    ours, theirs = parse("HYV4ForCausalLM", **dict.fromkeys(SIZES)), transformers.HYV4Config()
    assert isinstance(ours, HyV4Config)
    assert (ours.vocab_size, ours.hidden_size, ours.num_layers, ours.num_heads) == (120832, 2816, 34, 32)
    assert [layer in ours.selecting for layer in range(34)] == [kind == "full" for kind in theirs.indexer_types]
    assert [layer in ours.dense_layers for layer in range(34)] == [kind == "dense" for kind in theirs.mlp_layer_types]
    assert (ours.low_rank, ours.latent.key_dim, ours.latent.value_dim) == (1536, 192, 256)
    assert (ours.latent.index_heads, ours.latent.index_dim, ours.interleaved) == (16, 128, False)
    assert (ours.routing.scale, ours.routing.normalize, ours.routing.count) == (2.827, True, 8)
    assert (ours.mixing, ours.limit) == (config.mixing, 10.0)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("swiglu_limit", 0, "swiglu_limit in config.json is 0.0; it must be above 0"),
        ("gating_type", "headwise", "gating_type 'headwise' in config.json is not served for HYV4ForCausalLM"),
        ("gated_mla", False, "gated_mla False in config.json is not served"),
        ("learnable_sink", False, "learnable_sink False in config.json is not served"),
        ("enable_ihc", False, "enable_ihc False in config.json is not served"),
        ("enable_lm_head_fp32", False, "enable_lm_head_fp32 False in config.json is not served"),
        ("hidden_act", "gelu", "hidden_act in config.json is 'gelu'; it must be one of silu, swish"),
        ("layer_types", ["full_attention"] * 8, "layer_types in config.json is"),
        ("indexer_types", ["shared"] * 8, "the first layer in config.json has no indexer"),
        ("hc_mult", 0, "hc_mult in config.json is 0; it must be an integer of at least 1"),
    ],
)
def test_what_hy4_is_refused_with(field: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse("HYV4ForCausalLM", **{field: value})


def test_minimax() -> None:
    fields: dict[str, Any] = {
        "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10, "head_dim": 128, "hidden_size": 6144,
        "intermediate_size": 9216, "layernorm_full_attention_alpha": 3.5565588200778455,
        "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_alpha": 3.5565588200778455,
        "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_alpha": 3.5565588200778455, "layernorm_mlp_beta": 1.0,
        "max_position_embeddings": 10240000, "num_attention_heads": 64, "num_experts_per_tok": 2,
        "num_hidden_layers": 80, "num_key_value_heads": 8, "num_local_experts": 32, "postnorm": True,
        "rms_norm_eps": 1e-05, "rope_theta": 10000000, "rotary_dim": 64, "shared_intermediate_size": 0,
        "sliding_window": None, "vocab_size": 200064,
    }  # fmt: skip
    config = parse("MiniMaxM1ForCausalLM", **fields)
    assert isinstance(config, MiniMaxConfig)
    assert [layer for layer in range(80) if layer not in config.state_layers] == list(range(7, 80, 8))
    assert (config.rope.partial, config.rope.theta, config.routing.count) == (0.5, 1e7, 2)
    assert config.factors == ((3.5565588200778455, 1.0),) * 3
    assert config.states is not None
    # A group of 8 heads has 4 states in each plane, and no inputs of a convolution.
    assert config.states.plane_elements == (4 << 14, 4 << 14)
    assert config.kv_layout("bfloat16").state_rows == 1024
    with pytest.raises(ConfigError, match=r"postnorm in config.json must be true"):
        parse("MiniMaxM1ForCausalLM", **{**fields, "postnorm": False})
    with pytest.raises(ConfigError, match=r"attn_type_list in config.json must have 0 or 1 for each layer"):
        parse("MiniMaxM1ForCausalLM", **{**fields, "attn_type_list": [0, 1, 2] + [1] * 77})
    with pytest.raises(ConfigError, match=r"sliding_window 99 in config.json is not served"):
        parse("MiniMaxForCausalLM", **{**fields, "sliding_window": 99})


def test_nemotron_3() -> None:
    nano: dict[str, Any] = {
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_head_dim": 64,
        "mamba_num_heads": 64, "n_groups": 8, "num_attention_heads": 32, "num_hidden_layers": 52, "head_dim": 128,
        "ssm_state_size": 128, "hidden_size": 2688, "intermediate_size": 1856, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128, "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    config = parse("NemotronHForCausalLM", **nano)
    assert isinstance(config, NemotronHMoeConfig)
    assert (config.num_layers, len(config.state_layers), config.num_experts, config.latent) == (29, 23, 128, 0)
    assert config.blocks[2] == (("linear_attention", 4),)
    assert config.blocks[3] == (("full_attention", 5), ("moe", 6))
    assert (config.routing.count, config.routing.scale, config.routing.normalize) == (6, 2.5, True)
    assert config.mlp_units * 29 == pytest.approx(23 * (6 * 1856 + 3712))
    # An expert has two matrices.
    around, each = 29 * config.attention_weights + 23 * 2688 * (128 + 2 * 3712), 23 * 2 * 2688 * 1856
    assert config.layer_weights * 29 == pytest.approx(around + 6 * each, abs=29)
    assert config.layer_weights_read(1e6) * 29 == pytest.approx(around + 128 * each)
    latent = parse("NemotronHForCausalLM", **nano, moe_latent_size=1024)
    projections, narrower = 23 * 2 * 2688 * 1024, 128 * 23 * 2 * 1024 * 1856
    assert latent.layer_weights_read(1e6) * 29 == pytest.approx(around + projections + narrower)
    with pytest.raises(ConfigError, match=r"n_group in config.json is 3; it must divide the 128 experts"):
        parse("NemotronHForCausalLM", **{**nano, "n_group": 3})
    with pytest.raises(ConfigError, match=r"num_experts_per_tok in config.json is 129; it must be at most 128"):
        parse("NemotronHForCausalLM", **{**nano, "num_experts_per_tok": 129})


def test_qwen3_next() -> None:
    fields: dict[str, Any] = {
        "attention_bias": False, "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256,
        "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True,
        "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
        "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512, "vocab_size": 151936,
    }  # fmt: skip
    config = parse("Qwen3NextForCausalLM", **fields)
    assert [layer for layer, window in enumerate(config.sliding_windows) if window is None] == list(range(3, 48, 4))
    assert (config.rope.theta, config.rope.partial, config.norm_offset, config.head_dim) == (1e7, 0.25, 1.0, 256)
    layout = config.kv_layout("bfloat16")
    assert [len(group.layers) for group in layout.groups] == [12] * 4
    # A group of 16 heads has 8 states in the plane of values, beside 4 inputs of 4,096 channels.
    assert (layout.state_rows, layout.block_size(64)) == ((8 * 128 * 128 + 4 * 4096) // 128, 1152)
    assert layout.token_bytes == 12 * 2 * 2 * 256 * 2
    assert config.part(RankNumber(1, 2)).kv_layout("bfloat16").state_rows == layout.state_rows
    with pytest.raises(ConfigError, match="--tensor-parallel 4 does not divide the 2 key-value heads"):
        config.part(RankNumber(0, 4))
    with pytest.raises(ConfigError, match="convolutions or recurrent states"):
        choose_kv_dtype("fp8", config, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"linear_num_key_heads .* is 5; it must be a multiple of the 2"):
        parse("Qwen3NextForCausalLM", **{**fields, "linear_num_key_heads": 5})
    with pytest.raises(ConfigError, match="layer_types"):
        parse("Qwen3NextForCausalLM", **fields, layer_types=["sliding_attention"] * 48)
    with pytest.raises(ConfigError, match="attn_output_gate"):
        parse("Qwen3NextForCausalLM", **fields, attn_output_gate=False)
    dense = parse("Qwen3_5ForCausalLM", **{**fields, "num_key_value_heads": 4, "num_hidden_layers": 32})
    assert dense.num_experts == 0
    assert dense.fingerprint_facts()["state_layers"] == [layer for layer in range(32) if layer % 4 < 3]


def test_lfm2() -> None:
    fields: dict[str, Any] = {
        "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256, "conv_L_cache": 3, "conv_bias": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "hidden_size": 2048, "intermediate_size": 12288, "max_position_embeddings": 128000, "norm_eps": 1e-05,
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1000000.0,
        "tie_embedding": True, "vocab_size": 65536,
    }  # fmt: skip
    config = parse("Lfm2ForCausalLM", **fields)
    assert [layer for layer, window in enumerate(config.sliding_windows) if window is None] == [2, 5, 8, 10, 12, 14]
    assert (config.sliding_windows[0], config.intermediate_size, config.head_dim) == (3, 8192, 64)
    assert (config.rms_norm_eps, config.rope.theta, config.tie_word_embeddings) == (1e-5, 1e6, True)
    layout = config.kv_layout("bfloat16")
    assert (layout.heads[0], layout.heads[2]) == ((8, 128, 128), (8, 64, 64))
    assert (config.recent_tokens, [plane.dim for plane in layout.planes]) == (3, [128, 128])
    with pytest.raises(ConfigError, match="hidden_size 2040 is not a multiple of twice the 8 key-value heads"):
        parse("Lfm2ForCausalLM", **{**fields, "hidden_size": 2040, "head_dim": 64})
    with pytest.raises(ConfigError, match=r"layer_types in config.json is .* full_attention or conv"):
        parse("Lfm2ForCausalLM", **fields, layer_types=["conv"] * 15 + ["mamba"])
    with pytest.raises(ConfigError, match="--tensor-parallel 16 does not divide the 8 key-value heads"):
        config.part(RankNumber(0, 16))
    with pytest.raises(ConfigError, match="the cache of Lfm2ForCausalLM also holds the inputs of convolutions"):
        choose_kv_dtype("fp8", config, torch.bfloat16)
    experts = parse(
        "Lfm2MoeForCausalLM", conv_L_cache=3, conv_bias=False, layer_types=["conv"] * 7 + ["full_attention"],
        moe_intermediate_size=1792, norm_eps=1e-5, norm_topk_prob=True, num_dense_layers=2, num_experts=32,
        num_experts_per_tok=4, num_hidden_layers=8, routed_scaling_factor=1.0, use_expert_bias=True,
    )  # fmt: skip
    assert isinstance(experts, Lfm2MoeConfig)
    assert (experts.routing.count, experts.routing.added) == (4, 1e-6)
    assert (experts.dense_layers, experts.corrected) == ({0, 1}, True)


def test_helium_persimmon_and_xglm() -> None:
    helium = parse("HeliumForCausalLM", head_dim=128, rms_norm_eps=1e-8, rope_theta=100000.0, attention_bias=False)
    assert (helium.rope.theta, helium.rope.interleaved, helium.rms_norm_eps) == (1e5, True, 1e-8)
    persimmon = parse(
        "PersimmonForCausalLM", hidden_act="relu2", layer_norm_eps=1e-5, max_position_embeddings=16384,
        qk_layernorm=True, rope_theta=25000.0, tie_word_embeddings=False,
    )  # fmt: skip
    assert (persimmon.num_kv_heads, persimmon.rope.rotary_dim(128), persimmon.rope.theta) == (4, 64, 25000.0)
    xglm = parse(
        "XGLMForCausalLM", activation_function="gelu", attention_heads=16, d_model=1024, ffn_dim=4096, num_layers=24,
        max_position_embeddings=2048, scale_embedding=True, decoder_start_token_id=2, layerdrop=0.0,
    )  # fmt: skip
    assert (xglm.num_layers, xglm.head_dim, xglm.intermediate_size, xglm.tie_word_embeddings) == (24, 64, 4096, True)


def test_biogpt_and_gpt_neox_japanese() -> None:
    biogpt = parse(
        "BioGptForCausalLM", hidden_act="gelu", layer_norm_eps=1e-12, max_position_embeddings=1024,
        scale_embedding=True, vocab_size=42384,
    )  # fmt: skip
    assert (biogpt.num_kv_heads, biogpt.rms_norm_eps, biogpt.tie_word_embeddings) == (4, 1e-5, True)
    fields: dict[str, Any] = {
        "hidden_act": "gelu", "hidden_size": 2560, "intermediate_multiple_size": 4, "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32, "rotary_emb_base": 10000,
        "rotary_pct": 0.5,
    }  # fmt: skip
    japanese = parse("GPTNeoXJapaneseForCausalLM", **fields)
    assert (japanese.intermediate_size, japanese.num_kv_heads, japanese.rope.rotary_dim(80)) == (10240, 32, 40)
    for name, value in (("intermediate_multiple_size", 0), ("hidden_act", "tanh"), ("num_attention_heads", 7)):
        with pytest.raises(ConfigError, match="attention heads" if name == "num_attention_heads" else name):
            parse("GPTNeoXJapaneseForCausalLM", **{**fields, name: value})


def test_llama_4() -> None:
    scaling = {
        "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }  # fmt: skip
    text: dict[str, Any] = {
        **SIZES, "attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": 4,
        "floor_scale": 8192, "head_dim": 128, "hidden_act": "silu", "interleave_moe_layer_step": 1,
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760,
        "model_type": "llama4_text", "moe_layers": None, "no_rope_layers": [], "num_experts_per_tok": 1,
        "num_local_experts": 16, "rms_norm_eps": 1e-5, "rope_scaling": scaling, "rope_theta": 500000.0,
        "use_qk_norm": True,
    }  # fmt: skip
    scout = parse("Llama4ForConditionalGeneration", text_config=text, tie_word_embeddings=False)
    assert isinstance(scout, Llama4Config)
    assert [spec.reach for spec in scout.attention] == [(8192, True), (8192, True), (8192, True), (0, False)] * 2
    assert [scout.rope_of(layer) is None for layer in range(8)] == [False, False, False, True] * 2
    assert (scout.dense_layers, scout.expert_size, scout.shared_size, scout.growth) == (set(), 8192, 8192, 0.1)
    assert inverse_frequencies(scout.rope, 128).isfinite().all()
    assert (scout.default_model_len, scout.max_position_embeddings) == (131072, 10485760)
    fields = {"interleave_moe_layer_step": 2, "num_local_experts": 128, "use_qk_norm": False, "rope_scaling": None}
    maverick = parse("Llama4ForConditionalGeneration", text_config={**text, **fields})
    assert isinstance(maverick, Llama4Config)
    assert (maverick.dense_layers, maverick.qk_norm, maverick.intermediate_size) == ({0, 2, 4, 6}, False, 16384)
    yarn = "rope_scaling", {"rope_type": "yarn", "factor": 4.0}
    newer = {"layer_types": ["full_attention"] * 8, "attn_temperature_tuning": False, "moe_layers": [7]}
    config = parse("Llama4ForCausalLM", **{**text, **newer})
    assert isinstance(config, Llama4Config)
    assert (config.sliding_windows, config.growth, len(config.dense_layers)) == ((None,) * 8, 0.0, 7)
    for name, value in (("num_experts_per_tok", 17), ("layer_types", ["sliding_attention"] * 8), yarn):
        with pytest.raises(ConfigError, match="rope" if name == "rope_scaling" else name):
            parse("Llama4ForCausalLM", **{**text, name: value})


def test_gpt_neo() -> None:
    fields: dict[str, Any] = {
        "activation_function": "gelu_new", "attention_layers": ["global", "local"] * 12, "hidden_size": 2048,
        "attention_types": [[["global", "local"], 12]], "intermediate_size": None, "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048, "num_heads": 16, "num_layers": 24, "vocab_size": 50257, "window_size": 256,
    }  # fmt: skip
    config = parse("GPTNeoForCausalLM", **fields)
    assert (config.num_kv_heads, config.head_dim, config.intermediate_size) == (16, 128, 8192)
    assert config.sliding_windows == (None, 256) * 12
    assert {spec.scale for spec in config.attention} == {1.0}
    assert (config.qkv_bias, config.output_bias, config.tie_word_embeddings) == (False, True, True)
    for kinds in ([[["global"], 23]], [["global", "local"], 12], [[["global", "wide"], 12]], "global", [3]):
        with pytest.raises(ConfigError, match="attention_types"):
            parse("GPTNeoForCausalLM", **{**fields, "attention_types": kinds})


def test_cwm() -> None:
    scaling = {
        "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }  # fmt: skip
    fields: dict[str, Any] = {
        "head_dim": 128, "max_position_embeddings": 131072, "mlp_bias": False, "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0, "sliding_window": 8192, "tie_word_embeddings": False,
    }  # fmt: skip
    kinds = ["full_attention", *["sliding_attention"] * 3] * 2
    config = parse("CwmForCausalLM", **fields, layer_types=kinds, rope_scaling=scaling)
    assert config.sliding_windows == (None, 8192, 8192, 8192) * 2
    assert (config.rope.type, config.rope.theta) == ("llama3", 1e6)
    assert parse("CwmForCausalLM") == config
    with pytest.raises(ConfigError, match="attention_bias"):
        parse("CwmForCausalLM", **fields, attention_bias=True)


def test_solar_open() -> None:
    fields: dict[str, Any] = {
        "attention_bias": False, "first_k_dense_replace": 0, "head_dim": 128, "intermediate_size": 10240,
        "max_position_embeddings": 131072, "moe_intermediate_size": 1280, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "topk_group": 1,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
        "use_qk_norm": False,
    }  # fmt: skip
    config = parse("SolarOpenForCausalLM", **fields)
    assert isinstance(config, SparseConfig)
    assert (config.dense_layers, config.expert_size, config.shared_size) == (set(), 1280, 1280)
    assert (config.rope.type, config.rope.theta, config.rope.partial) == ("yarn", 1e6, 1.0)
    assert (config.qk_norm, config.routing.sigmoid, config.routing.count) == (False, True, 8)
    for name, value in (("first_k_dense_replace", 1), ("use_qk_norm", True)):
        with pytest.raises(ConfigError, match=name):
            parse("SolarOpenForCausalLM", **{**fields, name: value})


def test_nanochat_and_jais_2() -> None:
    fields: dict[str, Any] = {"final_logit_softcapping": 15.0, "hidden_act": "relu2", "rope_theta": 10000.0}
    config = parse("NanoChatForCausalLM", **fields, num_key_value_heads=None, tie_word_embeddings=False)
    assert isinstance(config, NanoChatConfig)
    assert (config.num_kv_heads, config.logit_softcap, config.max_position_embeddings) == (4, 15.0, 2048)
    assert parse("NanoChatForCausalLM", num_key_value_heads=None) == config
    with pytest.raises(ConfigError, match="hidden_act"):
        parse("NanoChatForCausalLM", **{**fields, "hidden_act": "tanh"})
    with pytest.raises(ConfigError, match="rope"):
        parse("NanoChatForCausalLM", **fields, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    jais = parse("Jais2ForCausalLM", hidden_act="relu2", layer_norm_eps=1e-5, rope_theta=500000.0, head_dim=128)
    assert (jais.qkv_bias, jais.output_bias, jais.mlp_bias, jais.norm_offset) == (True, True, True, 0.0)
    assert (jais.rope.theta, jais.rope.partial, jais.rms_norm_eps) == (500000.0, 1.0, 1e-5)


def test_hyperclova_x() -> None:
    config = parse(
        "HyperCLOVAXForCausalLM", attention_bias=False, attention_multiplier=0.0078125, embedding_multiplier=10.0,
        head_dim=128, logits_scaling=0.125, max_position_embeddings=131072, mlp_bias=False, residual_multiplier=1.0,
        rms_norm_eps=1e-5, rope_scaling=None, rope_theta=100000000, use_post_norm=True,
    )  # fmt: skip
    assert isinstance(config, HyperClovaXConfig)
    assert (config.post_norm, config.multipliers.logits, config.rope.theta) == (True, 0.125, 1e8)
    assert {spec.scale for spec in config.attention} == {1 / 128}
    assert {spec.scale for spec in parse("HyperCLOVAXForCausalLM").attention} == {128**-0.5}


def test_youtu() -> None:
    config = parse(
        "YoutuForCausalLM", kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, max_position_embeddings=131072, rope_theta=1600000, rope_interleave=True, mlp_bias=False,
        attention_bias=False, tie_word_embeddings=True, num_key_value_heads=4,
    )  # fmt: skip
    assert isinstance(config, DeepseekConfig)
    assert (config.low_rank, config.interleaved, config.rope.theta) == (1536, True, 1600000.0)
    assert (config.dense_layers, config.mlp_units) == (set(range(8)), 1024)
    assert config.layer_weights == config.layer_weights_read(1e9)
    assert parse("YoutuForCausalLM").tie_word_embeddings
    assert isinstance(low := parse("YoutuForCausalLM", q_lora_rank=None), DeepseekConfig)
    assert low.low_rank is None


def test_mellum() -> None:
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * 2
    ropes = {
        "full_attention": {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 16.0,
                           "original_max_position_embeddings": 8192},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    config = parse(
        "MellumForCausalLM", layer_types=kinds, rope_parameters=ropes, sliding_window=1024, num_local_experts=64,
        num_experts_per_tok=8, moe_intermediate_size=896, norm_topk_prob=True, head_dim=128,
        mlp_layer_types=["dense"] + ["sparse"] * 7,
    )  # fmt: skip
    assert isinstance(config, SparseConfig)
    assert [rope.type for rope in map(config.rope_of, range(8)) if rope] == (["default"] * 3 + ["yarn"]) * 2
    assert (config.num_experts, config.dense_layers, config.routing.normalize) == (64, {0}, True)
    plain = parse("MellumForCausalLM")
    assert (plain.sliding_windows, plain.rope.theta) == ((None,) * 8, 500000.0)


def test_trinity() -> None:
    fields: dict[str, Any] = {
        "global_attn_every_n_layers": 4, "head_dim": 128, "load_balance_coeff": 0.001, "moe_intermediate_size": 256,
        "mup_enabled": True, "n_group": 1, "num_dense_layers": 2, "num_expert_groups": 1, "num_experts": 128,
        "num_experts_per_tok": 8, "num_limited_groups": 1, "num_shared_experts": 1, "rms_norm_eps": 1e-5,
        "rope_scaling": None, "rope_theta": 10000, "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid",
        "sliding_window": 2048, "topk_group": 1, "use_grouped_mm": True,
    }  # fmt: skip
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * 2
    config = parse("AfmoeForCausalLM", **fields, layer_types=kinds)
    assert isinstance(config, AfmoeConfig)
    assert parse("AfmoeForCausalLM", **fields) == config
    assert config.sliding_windows == (2048, 2048, 2048, None) * 2
    assert [config.rope_of(layer) is None for layer in range(8)] == [False, False, False, True] * 2
    assert (config.dense_layers, config.shared_size, config.multiplier) == ({0, 1}, 256, 512**0.5)
    assert (config.routing.scale, config.routing.sigmoid, config.routing.normalize) == (2.826, True, True)
    for name, value in (("score_func", "softmax"), ("n_group", 2), ("route_norm", False)):
        with pytest.raises(ConfigError, match=name):
            parse("AfmoeForCausalLM", **{**fields, name: value})


def test_hy_3() -> None:
    fields: dict[str, Any] = {
        "enable_lm_head_fp32": True, "enable_moe_fp32_combine": False, "expert_hidden_dim": 1536,
        "first_k_dense_replace": 1, "head_dim": 128, "max_position_embeddings": 262144, "mlp_bias": False,
        "moe_intermediate_size": 1536, "moe_router_enable_expert_bias": True, "moe_router_use_sigmoid": True,
        "num_experts": 192, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "num_shared_experts": 1,
        "qk_norm": True, "rms_norm_eps": 1e-5, "route_norm": True, "router_scaling_factor": 2.826,
        "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
    }  # fmt: skip
    config = parse("HYV3ForCausalLM", **fields)
    assert isinstance(config, SparseConfig)
    assert (config.num_experts, config.dense_layers, config.shared_size) == (192, {0}, 1536)
    assert (config.routing.scale, config.routing.sigmoid, config.rope.theta) == (2.826, True, 11158840.0)
    assert parse("HYV3ForCausalLM").rope == config.rope
    for name, value in (("qk_norm", False), ("mlp_bias", True), ("route_norm", False)):
        with pytest.raises(ConfigError, match=name):
            parse("HYV3ForCausalLM", **{**fields, name: value})


def test_beam() -> None:
    theirs = transformers.BeamConfig(architectures=["BeamForCausalLM"], bos_token_id=None)
    config = parse_model_config(theirs.to_dict())
    assert isinstance(config, BeamConfig)
    sizes = {name: getattr(theirs, name) for name in SIZES}
    assert parse_model_config({**sizes, "architectures": ["BeamForCausalLM"]}) == config
    assert [window is None for window in config.sliding_windows] == [
        kind == "full_attention" for kind in theirs.layer_types
    ]
    assert [config.rope_of(layer) is None for layer in (4, 5, 51)] == [False, True, True]
    assert (config.dense_layers, config.softcap, config.routing.groups, config.routing.scale) == (
        {0, 1, 2},
        30.0,
        8,
        2.5,
    )
    positions = torch.tensor([[0, 100, 5000]])
    expected = modeling_beam.compute_attention_scaling(positions).flatten()
    torch.testing.assert_close(query_scales(8192, torch.device("cpu"))[positions[0]], expected)
    for ropes in ({"sliding_attention": None, "full_attention": None}, {"full_attention": {"rope_theta": 1e4}}):
        with pytest.raises(ConfigError, match="full_attention without a rotation"):
            parse("BeamForCausalLM", rope_parameters=ropes)


def test_axk1() -> None:
    config = parse(
        "AXK1ForCausalLM", first_k_dense_replace=1, kv_lora_rank=512, moe_intermediate_size=2048, moe_layer_freq=1,
        n_group=8, n_routed_experts=192, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8,
        q_lora_rank=1536, routed_scaling_factor=2.5, scoring_func="sigmoid", topk_group=4, num_key_value_heads=64,
    )  # fmt: skip
    assert isinstance(config, DeepseekConfig)
    assert parse("AXK1ForCausalLM", moe_intermediate_size=2048) == config
    assert (config.dense_layers, config.low_rank, config.routing.groups, config.max_position_embeddings) == (
        {0}, 1536, 8, 32768,
    )  # fmt: skip
    named = parse("AXK1ForCausalLM", moe_intermediate_size=2048, mlp_layer_types=["dense", "sparse"] * 4)
    assert isinstance(named, DeepseekConfig)
    assert named.dense_layers == {0, 2, 4, 6}
    with pytest.raises(ConfigError, match="scoring_func"):
        parse("AXK1ForCausalLM", moe_intermediate_size=2048, scoring_func="softmax")


def test_axk2() -> None:
    theirs = transformers.AXK2Config(architectures=["AXK2ForCausalLM"])
    config = parse_model_config({**theirs.to_dict(), "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    assert isinstance(config, AxK2Config)
    sizes = {name: getattr(theirs, name) for name in SIZES}
    assert parse_model_config({**sizes, "architectures": ["AXK2ForCausalLM"]}) == msgspec.structs.replace(
        config, eos_token_ids=()
    )
    assert (config.dense_layers, config.routing.groups, config.norm_rank) == ({0}, 1, 16)
    assert (config.index_interleaved, len(config.selecting)) == (False, config.num_layers)
    with torch.device("meta"):
        parameters = sum(each.numel() for each in transformers.AXK2ForCausalLM(theirs).parameters())
    total = config.num_layers * config.layer_weights_read(1e6) + 2 * config.vocab_size * config.hidden_size
    assert total == pytest.approx(parameters, rel=1e-3)
    grouped = parse_model_config({**theirs.to_dict(), "n_group": 8, "topk_group": 4})
    assert isinstance(grouped, AxK2Config)
    assert (grouped.routing.groups, grouped.routing.used_groups, grouped.routing.group_best) == (8, 4, 2)


def test_mistral_4() -> None:
    rope = {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 128.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 8192, "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0, "rope_type": "yarn", "type": "yarn",
    }  # fmt: skip
    text: dict[str, Any] = {
        **SIZES, "first_k_dense_replace": 0, "head_dim": 128, "kv_lora_rank": 256, "model_type": "mistral4",
        "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_experts_per_tok": 4, "q_lora_rank": 1024, "qk_head_dim": 128,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "rope_interleave": True, "rope_parameters": rope,
        "routed_scaling_factor": 1.0, "topk_group": 1, "v_head_dim": 128,
    }  # fmt: skip
    config = parse("Mistral3ForConditionalGeneration", text_config=text)
    assert isinstance(config, DeepseekConfig)
    assert (config.growth, config.low_rank, config.latent.rank, config.dense_layers) == (0.1, 1024, 256, set())
    assert (config.routing.sigmoid, config.routing.normalize, config.corrected) == (False, True, False)
    alone = parse("Mistral4ForCausalLM")
    assert isinstance(alone, DeepseekConfig)
    assert (alone.rope, alone.growth, alone.latent) == (config.rope, 0.1, config.latent)
    for name, changed in (("partial_rotary", {"partial_rotary_factor": 0.25}), ("scaling_beta", {"type": "default"})):
        with pytest.raises(ConfigError, match=name):
            parse("Mistral4ForCausalLM", **{**text, "rope_parameters": {**rope, "rope_type": None, **changed}})


def test_mistral_large_4() -> None:
    architecture = "MistralLarge4ForConditionalGeneration"
    theirs = transformers.MistralLarge4TextConfig()
    config = parse_model_config({"architectures": [architecture], "text_config": theirs.to_dict()})
    assert isinstance(config, MistralLarge4Config)
    alone = parse_model_config({"architectures": [architecture], "text_config": {"eos_token_id": 2}})
    assert alone == msgspec.structs.replace(config, dtype=alone.dtype)
    assert [int(rotates) for rotates in config.rotating] == theirs.no_rope_layers
    assert (config.sources, config.dense_layers, config.softcap) == (tuple(range(72)), {0}, 30.0)
    assert (config.latent.latent_dim, config.latent.query_dim, config.latent.index_heads) == (576, 128, 32)
    assert config.query_shapes == ((64, 128), (64, 192))
    with torch.device("meta"):
        model = transformers.MistralLarge4TextModel(theirs)
    parameters = sum(each.numel() for each in model.parameters())
    total = config.num_layers * config.layer_weights_read(1e6) + config.vocab_size * config.hidden_size
    assert total == pytest.approx(parameters, rel=1e-3)
    unserved = ([0, 1, 2, 0], [0, 0, 1], [0, 2, 2], [0, 1, 0, 3, 1])
    for sources in ([0], [*range(71), 72], *([*given, *range(len(given), 72)] for given in unserved)):
        with pytest.raises(ConfigError, match=r"kv_source_layers .* each of the 72 layers"):
            parse_model_config({"architectures": [architecture], "text_config": {"kv_source_layers": sources}})


def test_queries_that_grow_from_an_unknown_position_on() -> None:
    with pytest.raises(ConfigError, match="llama_4_scaling_beta"):
        parse("Ministral3ForCausalLM", rope_parameters={"rope_type": "default", "llama_4_scaling_beta": 0.1})


def test_minicpm3() -> None:
    fields: dict[str, Any] = {
        "dim_model_base": 256, "kv_lora_rank": 256, "max_position_embeddings": 32768, "num_key_value_heads": 4,
        "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "rms_norm_eps": 1e-5, "scale_depth": 1.4,
        "scale_emb": 12,
    }  # fmt: skip
    scaling = {
        "type": "longrope", "long_factor": [1.5] * 16, "short_factor": [1.0] * 16,
        "original_max_position_embeddings": 32768,
    }  # fmt: skip
    config = parse("MiniCPM3ForCausalLM", **fields, rope_scaling=scaling)
    assert isinstance(config, MiniCpm3Config)
    assert (config.multipliers.embeddings, config.multipliers.logits) == (12.0, 2.0)
    assert config.multipliers.residual == pytest.approx(1.4 / 8**0.5)
    assert (config.latent.value_dim, config.interleaved, config.tie_word_embeddings) == (128, False, True)
    assert (config.rope.type, config.rope.attention_factor) == ("longrope", 1.0)
    plain = parse("MiniCPM3ForCausalLM", **{**fields, "scale_depth": None, "dim_model_base": None, "q_lora_rank": None})
    assert isinstance(plain, MiniCpm3Config)
    assert (plain.multipliers.residual, plain.multipliers.logits, plain.low_rank) == (1.0, 1.0, None)


def test_granite_swash() -> None:
    fields: dict[str, Any] = {
        "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "logits_scaling": 8, "residual_multiplier": 0.22,
        "sliding_window": 128, "layer_rope_theta": [0, 10000.0, 10000.0, 1e6] * 2,
    }  # fmt: skip
    config = parse("GraniteSWAForCausalLM", **fields)
    assert config.sliding_windows == (None, 128, 128, 128) * 2
    assert [rope and rope.theta for rope in map(config.rope_of, range(8))] == [None, 1e4, 1e4, 1e6] * 2
    assert all(spec.sinks for spec in config.attention)
    assert config.tie_word_embeddings
    sparse = parse("GraniteMoeSWAForCausalLM", **{**fields, "layer_rope_theta": None}, rope_theta=5e5)
    assert isinstance(sparse, SparseConfig)
    assert (sparse.rope_of(0), sparse.tie_word_embeddings) == (sparse.rope, False)
    for thetas in ([1e4], "1e4", [-1.0] * 8):
        with pytest.raises(ConfigError, match="layer_rope_theta"):
            parse("GraniteSWAForCausalLM", **{**fields, "layer_rope_theta": thetas})


def test_gemma_3n() -> None:
    text = {
        "activation_sparsity_pattern": [*[0.95] * 10, *[0.0] * 20], "altup_num_inputs": 4, "hidden_size": 2048,
        "intermediate_size": [8192] * 30, "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 6,
        "max_position_embeddings": 32768, "model_type": "gemma3n_text", "num_hidden_layers": 30,
        "num_kv_shared_layers": 10, "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0, "sliding_window": 512,
        "vocab_size": 262400,
    }  # fmt: skip
    config = parse_model_config({"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text})
    assert isinstance(config, Gemma3nConfig)
    assert (config.kv_layers, config.kv_layer(28), config.kv_layer(29), config.input_vocab) == (20, 18, 19, 262144)
    assert (config.rope.theta, config.window_rope.theta, config.logit_softcap) == (1e6, 1e4, 30.0)
    bare = parse_model_config({**text, "architectures": ["Gemma3nForCausalLM"], "final_logit_softcapping": None})
    assert isinstance(bare, Gemma3nConfig)
    assert bare.logit_softcap == 0.0
    assert config.kv_layout("bfloat16").token_bytes == 20 * 2 * 2 * 256 * 2
    for fields, message in (
        ({"intermediate_size": [8192] * 29}, "intermediate_size"),
        ({"activation_sparsity_pattern": [1.0] * 30}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": "most"}, "activation_sparsity_pattern"),
        ({"altup_active_idx": 4}, "altup_active_idx is 4"),
        ({"num_kv_shared_layers": 27}, "num_kv_shared_layers is 27"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_model_config(
                {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": {**text, **fields}}
            )


GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "attention_k_eq_v": True, "dtype": "bfloat16", "final_logit_softcapping": 30.0, "global_head_dim": 512,
        "head_dim": 256, "hidden_size": 5376, "hidden_size_per_layer_input": 0, "intermediate_size": 21504,
        "max_position_embeddings": 262144, "model_type": "gemma4_text", "num_attention_heads": 32,
        "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16, "num_kv_shared_layers": 0,
        "sliding_window": 1024, "use_bidirectional_attention": "vision", "vocab_size": 262144,
    },
}  # fmt: skip


def test_gemma_4() -> None:
    config = parse_model_config(GEMMA4)
    assert isinstance(config, Gemma4Config)
    assert (config.num_kv_heads, config.head_dim, config.full_kv_heads, config.full_head_dim) == (16, 256, 4, 512)
    assert [layer for layer, spec in enumerate(config.attention) if spec.window is None] == list(range(5, 60, 6))
    assert (config.rope.type, config.rope.partial, config.window_rope.theta) == ("proportional", 0.25, 1e4)
    assert (config.logit_softcap, config.eos_token_ids, config.tie_word_embeddings) == (30.0, (1, 106), True)
    layout = config.kv_layout("bfloat16")
    assert layout.heads[4:6] == ((16, 256, 256), (4, 512, 512))
    assert layout.layer_bytes == 2 * 16 * 256 * 2
    assert config.part(RankNumber(1, 4)).kv_layout("bfloat16").heads[4:6] == ((4, 256, 256), (1, 512, 512))
    assert config.fingerprint_facts() != parse_gemma_4(global_head_dim=256).fingerprint_facts()
    with pytest.raises(ConfigError, match="--tensor-parallel 8 is more than the 4 key-value heads"):
        config.part(RankNumber(0, 8))
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8 needs the same heads"):
        choose_kv_dtype("fp8", config, torch.bfloat16)
    sparse = parse_gemma_4(enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704)
    assert sparse.layer_weights - config.layer_weights == 5376 * (128 + 3 * 8 * 704)
    assert sparse.layer_weights_read(1e6) - config.layer_weights_read(1e6) == 5376 * (128 + 3 * 128 * 704)


def test_small_gemma_4() -> None:
    config = parse_gemma_4(
        attention_k_eq_v=False, hidden_size=1536, hidden_size_per_layer_input=256, intermediate_size=6144,
        layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7, max_position_embeddings=131072,
        num_attention_heads=8, num_global_key_value_heads=None, num_hidden_layers=35, num_key_value_heads=1,
        num_kv_shared_layers=20, sliding_window=512, use_bidirectional_attention=None, use_double_wide_mlp=True,
        vocab_size_per_layer_input=262144,
    )  # fmt: skip
    assert [config.kv_layer(layer) for layer in (13, 14, 15, 19, 33, 34)] == [13, 14, 13, 14, 13, 14]
    assert [config.mlp_size(layer) for layer in (14, 15)] == [6144, 12288]
    layout = config.kv_layout("bfloat16")
    assert (layout.num_layers, layout.heads[13:], layout.windows[13:]) == (
        15,
        ((1, 256, 256), (1, 512, 512)),
        (512, None),
    )
    assert config.part(RankNumber(1, 2)).kv_layout("bfloat16") == layout
    assert config.fingerprint_facts()["kv_layers"] == 15
    twelve = parse_model_config(
        {**GEMMA4, "architectures": ["Gemma4UnifiedForConditionalGeneration"], "text_config": {}}
    )
    assert isinstance(twelve, Gemma4Config)
    assert (twelve.input_size, twelve.attention[0].window, twelve.max_position_embeddings) == (0, 1024, 262144)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input"),
        ({"num_kv_shared_layers": 55}, "num_kv_shared_layers is 55 of 60"),
        ({"num_kv_shared_layers": 60}, "num_kv_shared_layers is 60 of 60"),
        ({"num_kv_shared_layers": 99}, "num_kv_shared_layers is 99 of 60"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
        ({"num_global_key_value_heads": 3}, "do not divide the 16"),
        ({"global_head_dim": 129}, "global_head_dim is 129"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}}, "is 2"),
    ],
)
def test_what_of_gemma_4_is_not_served(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_gemma_4(**fields)


def parse_gemma_4(**fields: Any) -> Gemma4Config:
    config = parse_model_config({**GEMMA4, "text_config": {**GEMMA4["text_config"], **fields}})
    assert isinstance(config, Gemma4Config)
    return config


def test_text_beside_images() -> None:
    gemma = parse_model_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "torch_dtype": "bfloat16",
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
            },
        }
    )  # fmt: skip
    assert (gemma.num_heads, gemma.num_kv_heads, gemma.head_dim, gemma.vocab_size) == (8, 4, 256, 262208)
    assert (gemma.dtype, gemma.eos_token_ids, gemma.tie_word_embeddings) == ("bfloat16", (1, 106), True)
    qwen = parse(
        "Qwen2_5_VLForConditionalGeneration", rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
        rope_theta=1e6, use_sliding_window=False, vision_config={"hidden_size": 1},
    )  # fmt: skip
    assert (qwen.rope.type, qwen.rope.theta, qwen.qkv_bias) == ("default", 1e6, True)
    mistral = parse(
        "Mistral3ForConditionalGeneration",
        text_config={**SIZES, "model_type": "mistral", "rope_theta": 1e9, "sliding_window": None, "head_dim": 128},
    )
    assert (mistral.rope.theta, mistral.tie_word_embeddings) == (1e9, False)
    for broken in ("text", 3, []):
        with pytest.raises(ConfigError, match="text_config"):
            parse("Mistral3ForConditionalGeneration", text_config=broken)


def test_readers_of_documents() -> None:
    scaling = {
        "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "type": "xdrope", "xdrope_section": [16, 16, 16, 16],
    }  # fmt: skip
    hunyuan = parse(
        "HunYuanVLForConditionalGeneration", attention_head_dim=128, mlp_bias=False, num_experts=1, pad_id=-1,
        rope_scaling=scaling, rope_theta=10000.0, use_qk_norm=True, vision_config={"hidden_size": 1152},
    )  # fmt: skip
    assert (hunyuan.rope.type, hunyuan.rope.theta) == ("default", 10000.0 * 1000.0 ** (128 / 126))
    assert (hunyuan.head_dim, hunyuan.tie_word_embeddings) == (128, True)
    paddle = parse(
        "PaddleOCRVLForConditionalGeneration", rope_scaling={"mrope_section": [16, 24, 24], "type": "default"},
        rope_theta=500000, use_bias=False, head_dim=128, tie_word_embeddings=False, rms_norm_eps=1e-5,
    )  # fmt: skip
    assert (paddle.rope.interleaved, paddle.rope.theta, paddle.tie_word_embeddings) == (False, 5e5, False)
    rope = {"rope_type": "default", "mrope_section": [16, 24, 24], "partial_rotary_factor": 1.0, "rope_theta": 10000}
    text = {**SIZES, "attention_bias": False, "head_dim": 128, "model_type": "glm_ocr_text", "rope_parameters": rope}
    glm = parse("GlmOcrForConditionalGeneration", text_config=text, tie_word_embeddings=False)
    assert (glm.head_dim, glm.rope.rotary_dim(128), glm.rope.interleaved, glm.qkv_bias) == (128, 128, True, False)
    with pytest.raises(ConfigError, match="attention_bias"):
        parse("GlmOcrForConditionalGeneration", text_config={**text, "attention_bias": True})
    for architecture, tied in (
        ("GotOcr2ForConditionalGeneration", True), ("LightOnOcrForConditionalGeneration", True),
        ("LightOnOCRForConditionalGeneration", True), ("FastVlmForConditionalGeneration", False),
    ):  # fmt: skip
        config = parse(architecture, text_config=SIZES)
        assert (config.tie_word_embeddings, config.qkv_bias) == (tied, "LightOn" not in architecture)
    with pytest.raises(ConfigError, match="granitemoehybrid"):
        parse("Granite4VisionForConditionalGeneration", text_config={**SIZES, "model_type": "granitemoehybrid"})


def test_text_parts_that_are_named_by_their_type() -> None:
    llava = parse_model_config(
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "text_config": {
                "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"],
                "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-5, "torch_dtype": "float16",
                "vocab_size": 32064,
            },
            "tie_word_embeddings": False,
        }
    )  # fmt: skip
    assert isinstance(llava, LlamaConfig)
    assert (llava.num_layers, llava.hidden_size, llava.intermediate_size, llava.num_kv_heads) == (32, 4096, 11008, 32)
    assert (llava.vocab_size, llava.rms_norm_eps, llava.dtype) == (32064, 1e-5, "float16")
    text: dict[str, Any] = {
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral", "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32064,
    }  # fmt: skip
    mistral = parse("LlavaNextForConditionalGeneration", text_config=text)
    assert (mistral.hidden_size, mistral.num_kv_heads, mistral.rope.theta) == (4096, 8, 1e6)
    assert set(mistral.sliding_windows) == {None}
    idefics = {name: value for name, value in text.items() if name != "sliding_window"}
    assert set(parse("Idefics2ForConditionalGeneration", text_config=idefics).sliding_windows) == {4096}
    audio = {
        "intermediate_size": 11008, "max_position_embeddings": 8192, "model_type": "qwen2", "rms_norm_eps": 1e-5,
        "sliding_window": 32768, "use_mrope": False, "vocab_size": 156032,
    }  # fmt: skip
    qwen = parse("Qwen2AudioForConditionalGeneration", text_config=audio)
    assert (qwen.hidden_size, qwen.num_layers, qwen.num_kv_heads, qwen.qkv_bias) == (4096, 32, 32, True)
    voxtral = parse("VoxtralForConditionalGeneration", text_config={"model_type": "llama"})
    assert (voxtral.hidden_size, voxtral.num_kv_heads, voxtral.rope.theta) == (3072, 8, 1e8)
    aya = parse(
        "AyaVisionForConditionalGeneration",
        text_config={"model_type": "cohere2", "intermediate_size": 24576, "sliding_window": 4096},
    )
    assert (aya.num_layers, aya.intermediate_size, aya.tie_word_embeddings) == (40, 24576, True)
    assert aya.sliding_windows == (4096, 4096, 4096, None) * 10
    chat = parse(
        "InternVLChatModel", llm_config={**SIZES, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        tie_word_embeddings=False,
    )  # fmt: skip
    assert (chat.qkv_bias, chat.tie_word_embeddings) == (True, False)
    assert parse("InternVLForConditionalGeneration", text_config={**SIZES, "model_type": "qwen3"}).tie_word_embeddings
    for kind in ("internlm3", "bert", 3, ["qwen2"]):
        with pytest.raises(ConfigError, match="model_type"):
            parse("InternVLChatModel", llm_config={**SIZES, "model_type": kind})
    with pytest.raises(ConfigError, match="llm_config"):
        parse("InternVLChatModel", llm_config="qwen2")


def test_defaults_of_text_parts() -> None:
    docling = parse_model_config({"architectures": ["GraniteDoclingForConditionalGeneration"], "text_config": {}})
    assert isinstance(docling, GraniteConfig)
    assert (docling.vocab_size, docling.hidden_size, docling.num_kv_heads, docling.head_dim) == (133800, 1024, 4, 64)
    assert docling.multipliers == Multipliers(12.0, 0.263, 4.0)
    assert (docling.tie_word_embeddings, docling.attention[0].scale) == (True, 0.015625)
    factors = {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    phi: dict[str, Any] = {"architectures": ["Phi4MultimodalForCausalLM"], "partial_rotary_factor": 1.0}
    config = parse_model_config({**phi, "rope_scaling": {**factors, "type": "longrope"}})
    assert isinstance(config, LlamaConfig)
    assert (config.num_layers, config.num_kv_heads, config.max_position_embeddings) == (32, 8, 131072)
    assert (config.rope.type, config.rope.original_max_position_embeddings) == ("longrope", 4096)
    assert (config.eos_token_ids, config.tie_word_embeddings) == ((199999, 200020), False)
    with pytest.raises(ConfigError, match="rope type 'su'"):
        parse_model_config({**phi, "rope_scaling": factors})
    for architecture, tied in (
        ("PerceptionLMForConditionalGeneration", False), ("JanusForConditionalGeneration", True),
        ("DeepseekVLForConditionalGeneration", True), ("DeepseekVLHybridForConditionalGeneration", True),
        ("VideoLlama3ForConditionalGeneration", False), ("QianfanOCRForConditionalGeneration", False),
        ("HyperCLOVAXVisionV2ForConditionalGeneration", True), ("AriaForConditionalGeneration", False),
    ):  # fmt: skip
        config = parse(architecture, text_config=SIZES)
        assert (config.tie_word_embeddings, config.qk_norm) == (tied, architecture.startswith("Qianfan"))


def test_experts_of_text_parts() -> None:
    text = {**SIZES, "moe_num_experts": 64, "moe_topk": 6, "rope_theta": 5e6}
    aria = parse("AriaForConditionalGeneration", text_config=text)
    assert isinstance(aria, SparseConfig)
    assert (aria.num_experts, aria.routing.count, aria.expert_size, aria.shared_size) == (64, 6, 1024, 2048)
    for name, other in (("mlp_bias", True), ("moe_intermediate_size", 1664), ("moe_topk", 65)):
        with pytest.raises(ConfigError, match=name):
            parse("AriaForConditionalGeneration", text_config={**text, name: other})
    ocr: dict[str, Any] = {
        **SIZES, "first_k_dense_replace": 1, "moe_intermediate_size": 896, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "topk_group": 1, "topk_method": "greedy",
    }  # fmt: skip
    config = parse("DeepseekOcr2ForConditionalGeneration", text_config=ocr)
    assert isinstance(config, SparseConfig)
    assert (config.dense_layers, config.shared_size, config.routing.normalize) == ({0}, 1792, False)
    for name, value in (
        ("mlp_bias", True), ("head_dim", 64), ("topk_method", "noaux_tc"), ("norm_topk_prob", True),
        ("num_experts_per_tok", None), ("scoring_func", "sigmoid"), ("mlp_layer_types", ["dense"]),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            parse("DeepseekOcr2ForConditionalGeneration", text_config={**ocr, name: value})
    ernie: dict[str, Any] = {
        "moe_num_experts": [64, 64], "moe_intermediate_size": [1536, 512], "moe_layer_start_index": [1, 1],
        "moe_layer_end_index": [29, 28], "moe_layer_interval": 1, "moe_k": 6, "moe_num_shared_experts": 2,
        "rope_scaling": {"mrope_section": [22, 22, 20], "type": "default"}, "rope_theta": 500000, "use_bias": False,
    }  # fmt: skip
    config = parse("Ernie4_5_VLMoeForConditionalGeneration", **ernie)
    assert isinstance(config, SparseConfig)
    assert (config.dense_layers, config.num_experts, config.expert_size, config.shared_size) == ({0}, 64, 1536, 3072)
    assert (config.rope.type, config.rope.interleaved, config.tie_word_embeddings) == ("default", True, True)
    for name, value in (
        ("use_bias", 1), ("rope_scaling", {"type": "yarn", "factor": 4.0}), ("moe_num_experts", []),
        ("mlp_layer_types", ["dense"]),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="type" if name == "rope_scaling" else name):
            parse("Ernie4_5_VLMoeForConditionalGeneration", **{**ernie, name: value})


def test_kolibri_1() -> None:
    fields: dict[str, Any] = {
        "head_dim": 128, "moe_intermediate_size": 512, "norm_topk_prob": False, "num_experts": 384,
        "num_experts_per_tok": 6, "rms_norm_eps": 1e-6, "shared_expert_intermediate_size": 512, "sliding_window": 513,
    }  # fmt: skip
    config = parse("Kolibri1ForCausalLM", **fields)
    assert isinstance(config, SparseConfig)
    assert config.sliding_windows == (513,) * 4 + (None,) + (513,) * 3
    assert [config.rope_of(layer) is None for layer in range(8)] == [False] * 4 + [True] + [False] * 3
    assert (config.routing.sigmoid, config.routing.corrects_logits, config.routing.normalize) == (True, True, False)
    assert (config.mlp_units, config.head_dim, config.rope.theta) == (7 * 512, 128, 10000)
    assert parse("Kolibri1ForCausalLM") == config
    plain = parse_model_config({"architectures": ["Kolibri1ForCausalLM"]})
    assert (plain.num_layers, plain.num_heads, plain.num_kv_heads, plain.hidden_size) == (50, 48, 4, 2560)
    for name, value in (("sliding_window", None), ("hidden_act", "tanh"), ("num_experts_per_tok", 385)):
        with pytest.raises(ConfigError, match=name):
            parse("Kolibri1ForCausalLM", **{**fields, name: value})


def test_flint() -> None:
    fields: dict[str, Any] = {
        "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "mlp_only_layers": [0, 1],
        "moe_intermediate_size": 512, "norm_topk_prob": True, "num_experts": 256, "num_experts_per_tok": 6,
        "shared_expert_intermediate_size": 1024, "sliding_window": 513,
    }  # fmt: skip
    config = parse("FlintForCausalLM", **fields)
    assert isinstance(config, SparseConfig)
    assert config.sliding_windows == (None, None, 513, 513, 513, None, 513, None)
    assert [config.rope_of(layer) is None for layer in range(8)] == [True, True, *[False] * 3, True, False, True]
    assert all(spec.sinks for spec in config.attention)
    assert (config.dense_layers, config.shared_size, config.head_dim) == ({0, 1}, 1024, 128)
    assert (config.routing.sigmoid, config.routing.normalize, config.routing.count) == (True, True, 6)
    assert parse("FlintForCausalLM", **dict.fromkeys(fields)) == config
    assert parse("FlintForCausalLM", **{**fields, "mlp_only_layers": []}).mlp_units == 6 * 512 + 1024
    plain = parse_model_config({"architectures": ["FlintForCausalLM"]})
    assert (plain.num_layers, plain.num_heads, plain.num_kv_heads, plain.intermediate_size) == (49, 32, 4, 6144)
    for name, value in (("mlp_only_layers", 1), ("layer_types", ["full_attention"]), ("sliding_window", 0)):
        with pytest.raises(ConfigError, match=name):
            parse("FlintForCausalLM", **{**fields, name: value})


def test_laguna() -> None:
    kinds = ["full_attention", *("sliding_attention",) * 3] * 2
    fields: dict[str, Any] = {
        "decoder_sparse_step": 1, "gating": "per-head", "gating_types": ["per_head"] * 8, "head_dim": 128,
        "layer_types": kinds, "mlp_layer_types": ["dense"] + ["sparse"] * 7, "mlp_only_layers": [0],
        "moe_apply_router_weight_on_input": False, "moe_intermediate_size": 512, "moe_routed_scaling_factor": 2.5,
        "moe_router_logit_softcapping": 0.0, "norm_topk_prob": True, "num_attention_heads_per_layer": [4, 6, 6, 6] * 2,
        "num_experts": 256, "num_experts_per_tok": 8, "partial_rotary_factor": 0.5, "sliding_window": 512,
        "rope_parameters": {
            "full_attention": {"attention_factor": 1.0, "beta_fast": 64.0, "beta_slow": 1.0, "factor": 32.0,
                               "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.5,
                               "rope_theta": 500000.0, "rope_type": "yarn"},
            "original_max_position_embeddings": 4096,
            "sliding_attention": {"partial_rotary_factor": 1.0, "rope_theta": 10000.0, "rope_type": "default"},
        },
        "shared_expert_intermediate_size": 512, "swa_attention_sink_enabled": False,
    }  # fmt: skip
    config = parse("LagunaForCausalLM", **fields)
    assert isinstance(config, LagunaConfig)
    assert (config.heads, config.num_heads, config.gates_of_head) == ((4, 6, 6, 6) * 2, 6, 1)
    assert config.query_shapes == ((4, 128), (6, 128))
    assert [rope.partial for rope in map(config.rope_of, range(8)) if rope] == [0.5, 1.0, 1.0, 1.0] * 2
    assert (config.rope.type, config.rope.attention_factor, config.dense_layers) == ("yarn", 1.0, {0})
    assert (config.routing.scale, config.routing.softcap, config.shared_size) == (2.5, 0.0, 512)
    # Of queries, keys, values, what attention returns, and gates.
    assert config.attention_weights == 512 * (128 * (5.5 * 2 + 2 * 2) + 5.5)
    assert (half := config.part(RankNumber(1, 2))).heads == (2, 3, 3, 3) * 2
    assert (half.num_heads, half.num_kv_heads) == (3, 1)
    with pytest.raises(ConfigError, match="more than the 4 heads of a layer"):
        config.part(RankNumber(0, 6))
    without = {name: value for name, value in fields.items() if name not in ("mlp_layer_types", "gating")}
    assert parse("LagunaForCausalLM", **without) == config
    plain = parse_model_config({"architectures": ["LagunaForCausalLM"]})
    assert isinstance(plain, LagunaConfig)
    assert (plain.heads, plain.sliding_windows, plain.rope.partial) == ((48,) * 40, (None,) * 40, 0.5)
    for name, value in (
        ("gating", False), ("gating_types", ["per_element"] * 8), ("moe_apply_router_weight_on_input", True),
        ("num_attention_heads_per_layer", [4]), ("num_attention_heads_per_layer", [4, 0] * 4),
        ("rope_parameters", {"full_attention": {"rope_theta": 1e4}}), ("swa_attention_sink_enabled", True),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            parse("LagunaForCausalLM", **{**fields, name: value})
    with pytest.raises(ConfigError, match="5 attention heads cannot share 2"):
        parse("LagunaForCausalLM", **{**fields, "num_attention_heads_per_layer": [4, 5] * 4})


def test_step_3_5_and_3_7_flash() -> None:
    """Lists have entries for the layers that predict further tokens, too."""
    kinds = ["full_attention", *("sliding_attention",) * 3] * 2 + ["sliding_attention"]
    fields: dict[str, Any] = {
        "att_impl_type": "GQA", "head_dim": 128, "layer_types": kinds, "max_position_embeddings": 262144,
        "attention_other_setting": {"attention_type": "sliding_attention", "head_dim": 128, "num_attention_groups": 2,
                                    "num_attention_heads": 6, "true_head_dim": 128},
        "moe_intermediate_size": 1280, "moe_layers_enum": "3,4,5,6,7", "moe_num_experts": 288, "moe_top_k": 8,
        "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "norm_expert_weight": True,
        "num_attention_groups": 2, "num_nextn_predict_layers": 1, "partial_rotary_factors": [0.5, 1, 1, 1] * 2 + [1],
        "rope_scaling": {"factor": 2.0, "high_freq_factor": 32.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 131072, "rope_type": "llama3"},
        "rope_theta": [5e6, 1e4, 1e4, 1e4] * 2 + [1e4], "share_expert_dim": 1280, "sliding_window": 512,
        "swiglu_limits": [0.0] * 7 + [7, 0.0], "swiglu_limits_shared": [0.0] * 7 + [16.0, 0.0],
        "use_head_wise_attn_gate": True, "use_moe_router_bias": True, "yarn_only_types": ["full_attention"],
    }  # fmt: skip
    config = parse("Step3p5ForCausalLM", **fields)
    assert isinstance(config, Step3p5Config)
    assert (config.heads, config.num_kv_heads, config.dense_layers) == ((4, 6, 6, 6) * 2, 2, {0, 1, 2})
    assert config.sliding_windows == (None, 512, 512, 512) * 2
    assert (config.rope.type, config.rope.theta, config.rope.partial) == ("llama3", 5e6, 0.5)
    assert (config.window_rope.type, config.window_rope.theta, config.window_rope.partial) == ("default", 1e4, 1.0)
    assert (config.limits, config.shared_limits) == ((0.0,) * 7 + (7.0,), (0.0,) * 7 + (16.0,))
    assert (config.num_experts, config.routing.count, config.routing.scale, config.shared_size) == (288, 8, 3.0, 1280)
    ropes = {
        "full_attention": {**fields["rope_scaling"], "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    }
    written = {
        "head_dim": 128, "layer_types": kinds[:8], "max_position_embeddings": 262144, "moe_intermediate_size": 1280,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5, "moe_router_scaling_factor": 3.0, "n_routed_experts": 288,
        "num_experts_per_tok": 8, "num_sliding_attention_heads": 6, "rope_parameters": ropes, "share_expert_dim": 1280,
        "per_layer_config": {str(layer): {"num_attention_heads": 6} for layer in (1, 2, 3, 5, 6, 7)},
        "sliding_window": 512, "swiglu_limits": [0.0] * 7 + [7], "swiglu_limits_shared": [0.0] * 7 + [16.0],
    }  # fmt: skip
    assert parse("Step3p5ForCausalLM", **written) == config
    whole = parse("Step3p7ForConditionalGeneration", text_config={**SIZES, **written})
    assert isinstance(whole, Step3p5Config)
    assert whole.limits == config.limits
    plain = parse_model_config({"architectures": ["Step3p5ForCausalLM"]})
    assert (plain.num_layers, plain.num_heads, plain.num_kv_heads, plain.sliding_windows) == (45, 64, 8, (None,) * 45)
    with pytest.raises(ConfigError, match="num_attention_groups"):
        parse("Step3p5ForCausalLM", **{**fields, "attention_other_setting": {"num_attention_groups": 4}})
    for name, value in (
        ("att_impl_type", "MFA"), ("layer_types", kinds[:3]),
        ("moe_layers_enum", "a"), ("norm_expert_weight", False), ("partial_rotary_factors", [0.0] * 9),
        ("per_layer_config", {}), ("rope_theta", ["a"] * 9), ("rope_theta", [*range(9)]),
        ("sliding_window", None), ("swiglu_limits", [1.0]), ("swiglu_limits_shared", [-1.0] * 8),
        ("use_head_wise_attn_gate", False),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name.removesuffix("s")):
            parse("Step3p5ForCausalLM", **{**fields, name: value})


def test_jetmoe() -> None:
    fields: dict[str, Any] = {
        "activation_function": "silu", "aux_loss_coef": 0.01, "hidden_size": 2048, "intermediate_size": 5632,
        "kv_channels": 128, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 24,
        "num_key_value_heads": 16, "num_local_experts": 8, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    config = parse("JetMoeForCausalLM", **fields)
    assert isinstance(config, JetMoeConfig)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.tie_word_embeddings) == (32, 16, 128, True)
    assert (config.rms_norm_eps, config.final_eps, config.expert_size) == (1e-6, 1e-5, 5632)
    assert config.attention_weights == 2048 * 2048 * (2 * 8 + 2)
    assert config.part(RankNumber(1, 4)).num_heads == 8
    with pytest.raises(ConfigError, match="more than the 16 key-value heads"):
        config.part(RankNumber(0, 32))
    default = parse_model_config({"architectures": ["JetMoeForCausalLM"]})
    assert (default.num_layers, default.hidden_size, default.num_heads, default.num_experts) == (12, 2048, 32, 8)
    for name, value in (("num_experts_per_tok", 9), ("activation_function", "tanh")):
        with pytest.raises(ConfigError, match="hidden_act" if name == "activation_function" else name):
            parse("JetMoeForCausalLM", **{**fields, name: value})


def test_diffllama() -> None:
    config = parse("DiffLlamaForCausalLM", lambda_std_dev=0.1, rms_norm_eps=1e-5, attention_bias=False)
    assert isinstance(config, DiffLlamaConfig)
    # The cache has each key and each value twice.
    assert (config.num_heads, config.num_kv_heads, config.pairs, config.queries, config.head_dim) == (8, 4, 1, 2, 128)
    assert config.attention_weights == 512 * 128 * (4 + 2 * 2 + 4)
    with pytest.raises(ConfigError, match="--tensor-parallel 2 does not divide the 1 pairs of key-value heads"):
        config.part(RankNumber(0, 2))
    default = parse_model_config({"architectures": ["DiffLlamaForCausalLM"]})
    assert (default.num_layers, default.hidden_size, default.num_kv_heads, default.head_dim) == (16, 2048, 64, 64)
    for name, value in (("num_key_value_heads", 1), ("hidden_act", "tanh")):
        with pytest.raises(ConfigError, match=name):
            parse("DiffLlamaForCausalLM", **{name: value})


def test_openai_gpt() -> None:
    fields = {"afn": "gelu", "n_ctx": 512, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 512}
    config = parse_model_config({"architectures": ["OpenAIGPTLMHeadModel"], "vocab_size": 40478, **fields})
    assert isinstance(config, LlamaConfig)
    assert (config.num_layers, config.head_dim, config.intermediate_size, config.activation) == (
        12, 64, 3072, "gelu_tanh",
    )  # fmt: skip
    assert (config.tie_word_embeddings, config.max_position_embeddings) == (True, 512)
    assert parse_model_config({"architectures": ["OpenAIGPTLMHeadModel"]}) == config
    with pytest.raises(ConfigError, match="hidden_act"):
        parse("OpenAIGPTLMHeadModel", afn="tanh")


def test_bitnet() -> None:
    config = parse("BitNetForCausalLM", hidden_act="relu2", rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=True)
    assert (config.activation, config.rms_norm_eps, config.rope.theta, config.head_dim) == ("relu2", 1e-5, 5e5, 128)
    for name, value in (("hidden_act", "tanh"), ("head_dim", 64)):
        with pytest.raises(ConfigError, match=name):
            parse("BitNetForCausalLM", **{name: value})


def test_internlm() -> None:
    bare = parse("InternLMForCausalLM", rotary={"base": 50000, "type": "origin"}, num_key_value_heads=4)
    assert (bare.qkv_bias, bare.output_bias, bare.mlp_bias, bare.rope) == (True, True, False, Rope("default", 50000.0))
    larger = parse("InternLMForCausalLM", bias=False, rotary={"base": 10000, "type": "dynamic"}, pretraining_tp=1)
    assert (larger.qkv_bias, larger.output_bias, larger.rope.theta) == (False, False, 10000.0)
    with pytest.raises(ConfigError, match="type"):
        parse("InternLMForCausalLM", rotary={"base": 10000, "type": "linear"})


def test_internlm2() -> None:
    fields: dict[str, Any] = {
        "attn_implementation": "eager", "hidden_act": "silu", "max_position_embeddings": 32768, "pad_token_id": 2,
        "model_type": "internlm2", "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_theta": 1000000,
        "rope_scaling": {"type": "dynamic", "factor": 2.0}, "tie_word_embeddings": False,
    }  # fmt: skip
    config = parse("InternLM2ForCausalLM", **fields, bias=False)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.rms_norm_eps) == (False, False, False, 1e-5)
    assert (config.rope, config.default_model_len) == (Rope("default", 1e6), 32768)
    assert parse("InternLM2ForCausalLM", **fields).qkv_bias
    inside = parse("InternVLChatModel", llm_config={**SIZES, **fields, "bias": False})
    assert (inside.rope, inside.qkv_bias, inside.num_kv_heads) == (config.rope, False, 2)


def test_internlm3() -> None:
    fields: dict[str, Any] = {
        "bias": False, "head_dim": 64, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 50000000,
        "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "tie_word_embeddings": False,
    }  # fmt: skip
    config = parse("InternLM3ForCausalLM", **fields, qkv_bias=False)
    assert (config.head_dim, config.qkv_bias, config.output_bias, config.mlp_bias) == (64, False, False, False)
    assert (config.rope, config.tie_word_embeddings) == (Rope("default", 5e7), False)
    config = parse("InternLM3ForCausalLM", **fields, qkv_bias=True)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, False)


def test_exaone() -> None:
    fields: dict[str, Any] = {
        "architectures": ["ExaoneForCausalLM"], "activation_function": "silu", "vocab_size": 102400,
        "hidden_size": 2560, "intermediate_size": 7168, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_layers": 30, "rope_theta": 1000000,
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    }  # fmt: skip
    config = parse_model_config({**fields, "tie_word_embeddings": True})
    assert isinstance(config, LlamaConfig)
    assert (config.num_layers, config.head_dim, config.intermediate_size) == (30, 80, 7168)
    assert (config.rms_norm_eps, config.tie_word_embeddings, config.qkv_bias) == (1e-5, True, False)
    assert (config.rope.type, config.rope.factor, config.rope.original_max_position_embeddings) == ("llama3", 8.0, 8192)
    bare = parse_model_config({**fields, "intermediate_size": None, "num_key_value_heads": None})
    assert (bare.intermediate_size, bare.num_kv_heads) == (4 * 2560, 32)
    with pytest.raises(ConfigError, match="hidden_act"):
        parse_model_config({**fields, "activation_function": "gelu"})


def test_orion() -> None:
    config = parse("OrionForCausalLM", max_position_embeddings=4096, rms_norm_eps=1e-5, pretraining_tp=1)
    assert isinstance(config, LayerNormConfig)
    assert (config.norm_bias, config.two_norms, config.parallel, config.rope.partial) == (True, True, False, 1.0)
    with pytest.raises(ConfigError, match="attention_bias"):
        parse("OrionForCausalLM", attention_bias=True)


def test_mimo_7b() -> None:
    config = parse(
        "MiMoForCausalLM", attention_bias=True, head_dim=128, num_nextn_predict_layers=1, rms_norm_eps=1e-5,
        rope_theta=640000, use_sliding_window=False,
    )  # fmt: skip
    assert (config.qkv_bias, config.output_bias, config.num_layers, config.rope.theta) == (True, False, 8, 640000)
    assert not any(config.sliding_windows)


def test_openpangu_embedded() -> None:
    fields: dict[str, Any] = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 16000000.0}
    config = parse("PanguEmbeddedForCausalLM", **fields, bias=True, tie_word_embeddings=False)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, True, False)
    assert parse("PanguEmbeddedForCausalLM") == config
    same = {"param_sink_number": 0, "sandwich_norm": False, "is_causal": True, "qkv_bias": True, "mlp_bias": False}
    assert parse("PanguEmbeddedForCausalLM", **same) == config
    for name, value in (
        ("param_sink_number", 128), ("sandwich_norm", True), ("interleaved_sliding_window", [512, 131072]),
        ("is_causal", False), ("qkv_bias", False), ("mlp_bias", True),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            parse("PanguEmbeddedForCausalLM", **{name: value})


def test_k_exaone_of_two_generations() -> None:
    for name in ("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"):
        config = parse(name, sliding_window=128, n_group=1, topk_group=1, num_experts=128, num_experts_per_tok=8)
        assert isinstance(config, SparseConfig)
        assert [window is None for window in config.sliding_windows] == [False, False, False, True] * 2
    for name, value in (("sliding_windows", [128] * 8), ("swiglu_limits", [7.0] * 8)):
        with pytest.raises(ConfigError, match=name):
            parse("ExaoneMoEForCausalLM", **{name: value})


def test_qwen_with_fields_of_other_models() -> None:
    for name, value in (("qk_norm", True), ("is_causal", False)):
        assert parse("Qwen2ForCausalLM", **{name: not value}) == parse("Qwen2ForCausalLM")
        with pytest.raises(ConfigError, match=name):
            parse("Qwen2ForCausalLM", **{name: value})
    with pytest.raises(ConfigError, match="is_causal"):
        parse("Qwen3ForCausalLM", is_causal=False)


def test_qwen_for_1m_tokens_is_served_within_a_chunk() -> None:
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    for family in ("Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe"):
        name, fields = f"{family}ForCausalLM", {"max_position_embeddings": 1010000, "rope_theta": 1e7}
        assert parse(name, **fields).default_model_len == 1010000
        assert parse(name, **fields, dual_chunk_attention_config=chunks).default_model_len == 253952
        shorter = {**fields, "max_position_embeddings": 32768, "dual_chunk_attention_config": chunks}
        assert parse(name, **shorter).default_model_len == 32768
    for changed in ({"local_size": 262144}, {"chunk_size": None}):
        with pytest.raises(ConfigError, match=next(iter(changed))):
            parse("Qwen2ForCausalLM", max_position_embeddings=1010000, dual_chunk_attention_config=chunks | changed)


def test_mimo_v2_flash() -> None:
    fields: dict[str, Any] = {
        "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "attention_bias": False,
        "attention_chunk_size": 128, "attention_value_scale": 0.707, "head_dim": 192, "hidden_size": 4096,
        "hybrid_block_size": None, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1, 1], "intermediate_size": 16384,
        "layernorm_epsilon": 1e-5, "max_position_embeddings": 262144, "moe_intermediate_size": 2048,
        "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1], "n_group": 1, "n_routed_experts": 256, "n_shared_experts": None,
        "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_key_value_heads": 4,
        "partial_rotary_factor": 0.334, "rope_scaling": None, "rope_theta": 5000000, "routed_scaling_factor": None,
        "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_size": 128, "swa_head_dim": 192,
        "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_rope_theta": 10000, "swa_v_head_dim": 128,
        "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 152576,
    }  # fmt: skip
    config = parse("MiMoV2FlashForCausalLM", **fields)
    assert isinstance(config, MiMoV2FlashConfig)
    assert (config.num_heads, config.num_kv_heads, config.full_kv_heads) == (64, 8, 4)
    assert (config.head_dim, config.value_dim, config.value_factor, config.rms_norm_eps) == (192, 128, 0.707, 1e-5)
    assert config.sliding_windows == (None, *(129,) * 4, None, 129, 129)
    assert [spec.sinks for spec in config.attention] == [window is not None for window in config.sliding_windows]
    assert [rope.rotary_dim(192) for rope in (config.rope, config.window_rope)] == [64, 64]
    assert (config.rope.theta, config.window_rope.theta) == (5e6, 1e4)
    assert (config.dense_layers, config.routing.count, config.routing.scale) == ({0}, 8, 1.0)
    layout = config.kv_layout("bfloat16")
    assert layout.heads[:2] == ((4, 192, 128), (8, 192, 128))
    assert layout.layer_bytes == 8 * (192 + 128) * 2
    assert config.pair_operations(False) == 2 * 64 * (192 + 128)
    # Of queries, keys, values and what attention returns.
    kv_heads = (4 * 2 + 8 * 6) / 8
    assert config.attention_weights == 4096 * (64 * (192 + 128) + kv_heads * (192 + 128))
    assert config.part(RankNumber(1, 4)).kv_layout("bfloat16").heads[:2] == ((1, 192, 128), (2, 192, 128))
    with pytest.raises(ConfigError, match="--tensor-parallel 8 is more than the 4 key-value heads"):
        config.part(RankNumber(0, 8))
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8 needs the same heads"):
        choose_kv_dtype("fp8", config, torch.bfloat16)
    alike = parse("MiMoV2FlashForCausalLM", **{**fields, "swa_num_key_value_heads": 4})
    assert choose_kv_dtype("fp8", alike, torch.bfloat16) == torch.float8_e4m3fn
    assert alike.fingerprint_facts() != config.fingerprint_facts()
    odd = {**fields, "swa_num_key_value_heads": 4, "v_head_dim": 66, "swa_v_head_dim": 66}
    with pytest.raises(ConfigError, match="fp8 needs a v_head_dim that is a multiple of 4, this model has 66"):
        choose_kv_dtype("fp8", parse("MiMoV2FlashForCausalLM", **odd), torch.bfloat16)
    small = parse("MiMoV2FlashForCausalLM", **{**fields, "v_head_dim": 64, "swa_v_head_dim": 64})
    assert small.fingerprint_facts() != config.fingerprint_facts()
    # A cache has no room for heads of layers that do not exist.
    full = parse("MiMoV2FlashForCausalLM", **{**fields, "hybrid_layer_pattern": [0] * 8})
    assert [(plane.heads, plane.dim) for plane in full.kv_layout("bfloat16").planes] == [(4, 192), (4, 128)]
    plain = parse_model_config({"architectures": ["MiMoV2FlashForCausalLM"]})
    assert isinstance(plain, MiMoV2FlashConfig)
    assert [layer for layer, window in enumerate(plain.sliding_windows) if window is None] == [0, *range(5, 48, 6)]
    assert (plain.attention[1].window, plain.num_kv_heads, plain.value_factor, plain.rope.theta) == (129, 8, 0.707, 5e6)
    without = parse("MiMoV2FlashForCausalLM", **{**fields, "attention_value_scale": None})
    assert isinstance(without, MiMoV2FlashConfig)
    assert without.value_factor == 1.0
    for name, value in (
        ("hybrid_block_size", 6), ("hybrid_layer_pattern", [0, 1]), ("hybrid_layer_pattern", [2] * 8),
        ("moe_layer_freq", 1), ("mlp_layer_types", ["sparse"]), ("layer_types", ["full_attention"]),
        ("n_shared_experts", 1), ("n_group", 3), ("partial_rotary_factor", 1.5), ("partial_rotary_factor", 0.33),
        ("rope_scaling", {"type": "yarn", "factor": 2.0}), ("scoring_func", "softmax"), ("swa_head_dim", 128),
        ("swa_num_attention_heads", 32), ("swa_v_head_dim", 192), ("topk_method", "greedy"), ("v_head_dim", 127),
        ("attention_value_scale", "small"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            parse("MiMoV2FlashForCausalLM", **{**fields, name: value})
    with pytest.raises(ConfigError, match="4 key-value heads of layers that see all tokens do not divide the 6"):
        parse("MiMoV2FlashForCausalLM", **{**fields, "num_attention_heads": 12, "swa_num_attention_heads": 12,
                                           "swa_num_key_value_heads": 6})  # fmt: skip


def test_longcat_flash() -> None:
    fields: dict[str, Any] = {
        "attention_bias": False, "attention_method": "MLA", "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12288,
        "hidden_size": 6144, "kv_lora_rank": 512, "mla_scale_kv_lora": True, "mla_scale_q_lora": True, "moe_topk": 12,
        "n_routed_experts": 512, "num_attention_heads": 64, "num_layers": 28, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e7, "router_bias": False,
        "routed_scaling_factor": 6.0, "v_head_dim": 128, "vocab_size": 131072, "zero_expert_num": 256,
        "zero_expert_type": "identity",
    }  # fmt: skip
    config = parse_model_config({"architectures": ["LongcatFlashForCausalLM"], **fields})
    assert isinstance(config, LongcatFlashConfig)
    assert (config.num_layers, config.num_experts, config.identities, config.routing.count) == (56, 512, 256, 12)
    assert (config.latent.scale, config.latent_scale) == (192**-0.5 * 2, 12**0.5)
    assert (config.rope.theta, config.routing.scale, config.mlp_units) == (1e7, 6.0, 12288 + 12 * 2048 / 2)
    assert parse_model_config({"architectures": ["LongcatFlashForCausalLM"]}) == config
    for name, value in (
        ("router_bias", True), ("zero_expert_type", "copy"), ("attention_method", "GQA"), ("mla_scale_q_lora", False),
        ("qk_head_dim", 64), ("head_dim", 128), ("attention_bias", 1),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            parse_model_config({"architectures": ["LongcatFlashForCausalLM"], **fields, name: value})


def test_molmo_2() -> None:
    text: dict[str, Any] = {
        **SIZES, "additional_vocab_size": 128, "head_dim": 128, "hidden_act": "silu", "layer_norm_eps": 1e-5,
        "model_type": "molmo2_text", "norm_after": False, "qk_norm_type": "qwen3", "qkv_bias": True, "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
        "rope_scaling_layers": [3, 7], "use_qk_norm": True,
    }  # fmt: skip
    config = parse("Molmo2ForConditionalGeneration", text_config=text)
    assert isinstance(config, Molmo2Config)
    assert (config.rms_norm_eps, config.qkv_bias, config.output_bias, config.norm_after) == (1e-5, True, False, False)
    ropes = [rope.type for layer in range(8) if (rope := config.rope_of(layer))]
    assert ropes == (["default"] * 3 + ["yarn"]) * 2
    all_layers = parse("Molmo2ForConditionalGeneration", text_config={**text, "rope_scaling_layers": None})
    assert {all_layers.rope_of(layer) for layer in range(8)} == {config.rope}
    with pytest.raises(ConfigError, match="qk_norm_type"):
        parse("Molmo2ForConditionalGeneration", text_config={**text, "qk_norm_type": "gemma"})
    with pytest.raises(ConfigError, match="use_qk_norm"):
        parse("Molmo2ForConditionalGeneration", text_config={**text, "use_qk_norm": False})


def test_muse_glimmer() -> None:
    config = parse_model_config({"architectures": ["MuseGlimmerForConditionalGeneration"], "text_config": {}})
    assert isinstance(config, MuseGlimmerConfig)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (52, 32, 2, 128)
    assert config.sliding_windows == (2048, 2048, 2048, None) * 13
    assert config.rotated == {layer for layer in range(52) if layer % 4 != 3}
    text: dict[str, Any] = {**SIZES, "num_hidden_layers": 6, "rope_parameters": {"rope_theta": 5e5}}
    config = parse_model_config(
        {"architectures": ["MuseGlimmerForConditionalGeneration"], "text_config": {**text, "sliding_window": 64}}
    )
    assert isinstance(config, MuseGlimmerConfig)
    assert config.sliding_windows == (64, None, 64, 64, 64, None)
    assert config.rotated == {0, 2, 3, 4}
    for name, value in (
        ("final_logit_softcapping", 0.0), ("layer_rope_theta", [1e4] * 6), ("layer_rope_theta", [0]),
        ("hidden_activation", "tanh"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="hidden_act" if name == "hidden_activation" else name):
            parse("MuseGlimmerForConditionalGeneration", text_config={**text, name: value})


def test_muse_spark() -> None:
    architecture = "MuseSparkForConditionalGeneration"
    config = parse_model_config({"architectures": [architecture], "text_config": {}})
    assert isinstance(config, MuseSparkConfig)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (62, 128, 16, 64)
    assert (config.sliding_windows[-4:], config.sliding_windows[1]) == ((2048, 2048, 2048, None), None)
    assert config.rotated == {layer for layer in range(62) if layer % 4 != 1}
    assert (config.num_experts, config.expert_size, config.expert_dim, config.rope.theta) == (256, 4096, 4096, 5e5)
    assert (config.routing.sigmoid, config.routing.normalize, config.routing.count) == (True, True, 8)
    # Queries, keys, values, what attention returns, a router, and experts between two projections.
    attention, experts = 8192 * 64 * (2 * 128 + 2 * 16), 8 * 3 * 4096 * 4096
    assert config.layer_weights == attention + 8192 * 256 + experts + 2 * 8192 * 4096
    text: dict[str, Any] = {**SIZES, "mlp_layer_types": ["dense"] + ["sparse"] * 7}
    config = parse_model_config({"architectures": [architecture], "text_config": text})
    assert isinstance(config, MuseSparkConfig)
    assert (config.dense_layers, config.temperature, config.post_norm_eps) == ({0}, 0.3, 1e-8)
    for name, value in (
        ("hidden_act", "tanh"), ("layer_rope_theta", [1e4] * 8), ("mlp_layer_types", ["dense"]), ("moe_hidden_size", 0),
        ("num_experts_per_tok", 257), ("residual_gate_temperature", 0),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            parse(architecture, text_config={**text, name: value})


def test_llama_3_2_vision() -> None:
    text: dict[str, Any] = {
        **SIZES, "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38], "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu", "num_hidden_layers": 40, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "vocab_size": 128256,
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    }  # fmt: skip
    config = parse("MllamaForConditionalGeneration", text_config=text)
    assert isinstance(config, MllamaConfig)
    assert (config.num_layers, config.kv_layers, len(config.attention)) == (32, 32, 32)
    assert config.places[:5] == (0, 1, 2, 4, 5)
    assert config.places[-1] == 39
    assert (config.vocab_size, config.known_tokens, config.eos_token_ids) == (128256, 128264, (128001, 128008, 128009))
    default = parse_model_config({"architectures": ["MllamaForCausalLM"]})
    assert isinstance(default, MllamaConfig)
    assert (default.places, default.num_kv_heads, default.head_dim, default.rope.theta) == (config.places, 8, 128, 5e5)
    all_layers = parse("MllamaForCausalLM", cross_attention_layers=[], tie_word_embeddings=True)
    assert (all_layers.num_layers, all_layers.tie_word_embeddings) == (8, False)
    for name, value in (
        ("cross_attention_layers", [-1]), ("cross_attention_layers", 3), ("hidden_act", "tanh"), ("head_dim", 64),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            parse("MllamaForCausalLM", **{name: value})


def test_north_micro_vision() -> None:
    ropes: dict[str, Any] = {
        "full_attention": None, "rope_theta": 50000.0, "rope_type": "default",
        "sliding_attention": {"mrope_section": [24, 20, 20], "rope_theta": 50000.0, "rope_type": "default"},
    }  # fmt: skip
    text: dict[str, Any] = {
        **SIZES, "layer_norm_eps": 1e-5, "rope_parameters": ropes, "sliding_window": 64,
        "layer_types": [*("sliding_attention",) * 3, "full_attention"] * 2,
    }  # fmt: skip
    config = parse("CohereCompassForConditionalGeneration", text_config=text)
    assert isinstance(config, CohereCompassConfig)
    assert config.sliding_windows == (64, 64, 64, None) * 2
    assert [config.rope_of(layer) for layer in range(3, 5)] == [None, Rope("default", 50000.0)]
    assert (config.logit_scale, config.norm_bias, config.parallel, config.two_norms) == (1.0, False, True, False)
    assert config.tie_word_embeddings
    full = parse("CohereCompassForCausalLM", rope_parameters={"full_attention": {"rope_theta": 1e6}}, logit_scale=0.25)
    assert isinstance(full, CohereCompassConfig)
    assert (full.rope_of(0), full.logit_scale, set(full.sliding_windows)) == (Rope("default", 1e6), 0.25, {None})
    for name, value in (
        ("full_attention", {"rope_parameters": {"sliding_attention": None}}),
        ("full_attention", {"rope_parameters": {"rope_theta": 1e4}}),
        ("full_attention", {"rope_parameters": None}),
        ("rope_theta", {"rope_parameters": {**ropes, "sliding_attention": {}}}),
        ("partial_rotary_factor", {"rope_parameters": {**ropes, "full_attention": {"partial_rotary_factor": 0.5}}}),
        ("sliding_window", {"sliding_window": None}), ("layer_types", {"layer_types": ["full_attention"]}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            parse("CohereCompassForConditionalGeneration", text_config={**text, **value})


def test_chameleon() -> None:
    names = {"<s>": 0, "<image>": 8711, "<racm3:break>": 8197, "IMGIMGBAZ": 4, "IMGIMGAZ": 999}
    config = parse_model_config({"architectures": ["ChameleonForConditionalGeneration"], "vocabulary_map": names})
    assert isinstance(config, ChameleonConfig)
    assert (config.vocab_size, config.num_layers, config.num_kv_heads, config.rms_norm_eps) == (65536, 32, 32, 1e-5)
    assert (config.image_tokens, config.norm_after, config.max_position_embeddings) == ((4, 999), False, 4096)
    fields: dict[str, Any] = {"vocabulary_map": names, "swin_norm": True, "model_parallel_size": 4, "rope_theta": 1e4}
    config = parse("ChameleonForConditionalGeneration", **fields)
    assert isinstance(config, ChameleonConfig)
    assert config.norm_after
    for name, value in (
        ("vocabulary_map", None), ("vocabulary_map", [4]), ("vocabulary_map", {"IMGIMGAZ": 1000}),
        ("vocabulary_map", {"IMGIMGAZ": "4"}), ("swin_norm", "yes"), ("head_dim", 64),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            parse("ChameleonForConditionalGeneration", **{**fields, name: value})


def test_emu3() -> None:
    emu = parse_model_config({"architectures": ["Emu3ForConditionalGeneration"], "text_config": {}})
    assert isinstance(emu, LlamaConfig)
    assert (emu.vocab_size, emu.num_layers, emu.num_kv_heads, emu.rms_norm_eps) == (184622, 32, 8, 1e-5)
    assert (emu.max_position_embeddings, emu.rope.theta, emu.eos_token_ids) == (9216, 1e6, (151850,))
    assert not emu.tie_word_embeddings


def test_fuyu() -> None:
    """Fields of the text part are beside the others."""
    fuyu = parse(
        "FuyuForCausalLM", hidden_act="relu2", image_size=300, layer_norm_eps=1e-5, model_type="fuyu",
        num_channels=3, num_key_value_heads=4, patch_size=30, qk_layernorm=True, rope_scaling=None, rope_theta=25000.0,
    )  # fmt: skip
    assert (fuyu.num_kv_heads, fuyu.rope.rotary_dim(128), fuyu.rope.theta) == (4, 64, 25000.0)
    assert (fuyu.max_position_embeddings, fuyu.eos_token_ids) == (16384, (2,))


def test_glm_4v() -> None:
    mrope = {"type": "default", "mrope_section": [8, 12, 12]}
    flash = {
        **SIZES, "attention_bias": True, "attention_dropout": 0.0, "model_type": "glm4v_text", "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5, "rope_scaling": mrope, "rope_theta": 10000.0, "image_token_id": 151343,
    }  # fmt: skip
    config = parse("Glm4vForConditionalGeneration", text_config=flash, tie_word_embeddings=False)
    assert (config.head_dim, config.qkv_bias, config.output_bias) == (128, True, False)
    assert (config.rope.partial, config.rope.interleaved, config.rope.type) == (0.5, True, "default")
    for name, value in (("head_dim", 64), ("attention_bias", False)):
        with pytest.raises(ConfigError, match=name):
            parse("Glm46VForConditionalGeneration", text_config={**flash, name: value})
    air = {
        **SIZES, "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128, "model_type": "glm4v_moe_text",
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_experts_per_tok": 8, "partial_rotary_factor": 0.5, "rope_scaling": mrope,
        "routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False,
    }  # fmt: skip
    for architecture in ("Glm4vMoeForConditionalGeneration", "Glm46VForConditionalGeneration"):
        sparse = parse(architecture, text_config=air)
        assert isinstance(sparse, SparseConfig)
        assert (sparse.num_experts, sparse.dense_layers, sparse.rope.partial) == (128, {0}, 0.5)


def test_omni_and_kimi_vl() -> None:
    text = {
        **SIZES, "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
        "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    omni = parse("Qwen2_5OmniModel", thinker_config={"text_config": text}, torch_dtype="bfloat16", talker_config={})
    assert (omni.num_layers, omni.qkv_bias, omni.dtype, omni.rope.theta) == (8, True, "bfloat16", 1e6)
    with pytest.raises(ConfigError, match="thinker_config"):
        parse("Qwen2_5OmniModel", thinker_config=[])
    latent = {
        **SIZES, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_shared_experts": 2, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "routed_scaling_factor": 2.446, "rope_scaling": None, "model_type": "deepseek_v3",
    }  # fmt: skip
    kimi = parse("KimiVLForConditionalGeneration", text_config=latent)
    assert isinstance(kimi, DeepseekConfig)
    assert (kimi.low_rank, kimi.num_experts, kimi.shared_size) == (None, 64, 2816)


def test_deepseek_moe() -> None:
    fields = {
        "attention_bias": False, "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944,
        "max_position_embeddings": 4096, "model_type": "deepseek", "moe_intermediate_size": 1408, "moe_layer_freq": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 28, "num_key_value_heads": 16, "pretraining_tp": 1,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000, "scoring_func": "softmax", "seq_aux": True,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 102400,
    }  # fmt: skip
    config = parse("DeepseekForCausalLM", **fields)
    assert isinstance(config, SparseConfig)
    assert (config.num_experts, config.expert_size, config.shared_size, config.head_dim) == (64, 1408, 2816, 128)
    assert (config.dense_layers, config.routing.count, config.routing.normalize) == ({0}, 6, False)
    assert (config.max_position_embeddings, config.eos_token_ids, config.rms_norm_eps) == (4096, (100001,), 1e-6)
    sparser = parse("DeepseekForCausalLM", **{**fields, "moe_layer_freq": 7, "n_shared_experts": None})
    assert isinstance(sparser, SparseConfig)
    assert (28 - len(sparser.dense_layers), sparser.shared_size) == (3, 0)
    for name, value in (
        ("n_routed_experts", None), ("routed_scaling_factor", 16.0), ("scoring_func", "sigmoid"), ("head_dim", 64),
        ("topk_method", "group_limited_greedy"), ("mlp_bias", True), ("num_experts_per_tok", None),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            parse("DeepseekForCausalLM", **{**fields, name: value})


def test_ling() -> None:
    fields = {
        "attention_dropout": 0.0, "embedding_dropout": 0.0, "eos_token_id": 126081, "first_k_dense_replace": 0,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1408, "max_position_embeddings": 32768,
        "model_type": "bailing_moe", "moe_intermediate_size": 1408, "norm_head": False, "norm_softmax": False,
        "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 6,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "num_shared_experts": 2, "output_router_logits": False,
        "pad_token_id": 126081, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 600000,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_bias": False, "use_qkv_bias": False,
        "vocab_size": 126464,
    }  # fmt: skip
    config = parse("BailingMoeForCausalLM", **fields)
    assert isinstance(config, BailingConfig)
    assert (config.num_experts, config.shared_size, config.head_dim, config.dense_layers) == (64, 2816, 128, set())
    assert (config.routing.count, config.routing.normalize, config.routing.sigmoid) == (6, True, False)
    assert (config.qkv_bias, config.output_bias, config.qk_norm, config.rope.theta) == (False, False, False, 6e5)
    # The family's defaults.
    least = parse("BailingMoeForCausalLM", moe_intermediate_size=64)
    assert isinstance(least, BailingConfig)
    assert (least.num_experts, least.routing.count, least.shared_size, least.norm_head) == (16, 2, 0, False)
    assert (least.qkv_bias, least.output_bias, least.rms_norm_eps, least.rope.theta) == (False, True, 1e-5, 1e4)
    for name, given in (
        ("norm_head", {"norm_head": True, "tie_word_embeddings": True}),
        ("use_sliding_window", {"use_sliding_window": True}),
        ("num_key_value_heads", {"num_key_value_heads": None}),
        ("use_qk_norm", {"use_qk_norm": True}),
        ("score_function", {"score_function": "sigmoid"}),
        ("moe_router_enable_expert_bias", {"moe_router_enable_expert_bias": True}),
    ):
        with pytest.raises(ConfigError, match=name):
            parse("BailingMoeForCausalLM", **{**fields, **given})


def test_ling_2() -> None:
    fields = {
        "embedding_dropout": 0.0, "eos_token_id": 156892, "first_k_dense_replace": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120, "max_position_embeddings": 32768,
        "max_window_layers": 20, "model_type": "bailing_moe", "moe_intermediate_size": 512,
        "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 512, "n_group": 8,
        "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
        "num_hidden_layers": 20, "num_key_value_heads": 4, "num_nextn_predict_layers": 1, "num_shared_experts": 1,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 600000,
        "routed_scaling_factor": 2.5, "router_dtype": "fp32", "score_function": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 4, "torch_dtype": "bfloat16", "use_bias": False,
        "use_qk_norm": True, "use_qkv_bias": False, "use_rmsnorm": True, "vocab_size": 157184,
    }  # fmt: skip
    config = parse("BailingMoeV2ForCausalLM", **fields)
    assert isinstance(config, SparseConfig)
    routing = config.routing
    assert (routing.count, routing.groups, routing.used_groups, routing.group_best) == (8, 8, 4, 2)
    assert (routing.sigmoid, routing.normalize, routing.scale) == (True, True, 2.5)
    assert (config.num_layers, config.dense_layers, config.shared_size, config.qk_norm) == (20, {0}, 512, True)
    assert (config.rope.rotary_dim(128), config.rope.theta, config.rope.interleaved) == (64, 6e5, False)
    least = parse_model_config({"architectures": ["BailingMoeV2ForCausalLM"]})
    assert isinstance(least, SparseConfig)
    assert (least.num_experts, least.routing.scale, least.rope.partial, least.max_position_embeddings) == (
        256, 1.0, 1.0, 32768,
    )  # fmt: skip
    for name, value in (
        ("score_function", "softmax"), ("norm_topk_prob", False), ("moe_router_enable_expert_bias", False),
        ("layer_group_size", 5), ("moe_shared_expert_intermediate_size", 1024), ("norm_head", True), ("n_group", 7),
        ("use_sliding_window", True), ("use_rmsnorm", False),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            parse("BailingMoeV2ForCausalLM", **{**fields, name: value})


def test_sarvam_and_param_2() -> None:
    least = parse_model_config({"architectures": ["SarvamMoEForCausalLM"]})
    assert isinstance(least, SparseConfig)
    assert (least.num_experts, least.routing.count, least.routing.scale, least.head_dim) == (128, 6, 2.5, 256)
    assert (least.rope.theta, least.max_position_embeddings, least.num_kv_heads) == (1e4, 4096, 4)
    param = {"moe_intermediate_size": 512, "num_shared_experts": 2, "moe_shared_expert_intermediate_size": 1024}
    config = parse_model_config({"architectures": ["Param2MoEForCausalLM"], **param})
    assert isinstance(config, SparseConfig)
    assert (config.shared_size, config.num_experts, config.rope.theta) == (1024, 256, 6e5)
    with pytest.raises(ConfigError, match="moe_shared_expert_intermediate_size"):
        parse_model_config({"architectures": ["Param2MoEForCausalLM"], **param, "num_shared_experts": 1})
    latent: dict[str, Any] = {
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "num_attention_heads": 64,
        "rope_scaling": {
            "type": "deepseek_yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    }  # fmt: skip
    config = parse("SarvamMLAForCausalLM", **latent)
    assert isinstance(config, DeepseekConfig)
    assert (config.low_rank, config.num_experts, config.shared_size, config.dense_layers) == (None, 128, 512, {0})
    assert (config.routing.scale, config.routing.groups, config.rope.type) == (2.5, 1, "yarn")
    assert config.latent.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    for name, value in (
        ("rms_norm_eps", 1e-5), ("moe_layer_freq", 2), ("moe_router_enable_expert_bias", False),
        ("score_function", "softmax"), ("moe_shared_expert_intermediate_size", 1024),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            parse("SarvamMLAForCausalLM", **latent, **{name: value})


LLAMA_NEMOTRON = {
    "architectures": ["DeciLMForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": None,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "nemotron-nas", "num_attention_heads": 64,
    "num_key_value_heads": None, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 128256,
}  # fmt: skip
_OFF = {"no_op": False, "replace_with_linear": False, "sparsify": None}
_NO_ATTENTION = {"n_heads_in_group": None, "num_sink_tokens": None, "unshifted_sink": False, "window_length": None}


def parse_llama_nemotron(*blocks: tuple[dict[str, Any], dict[str, Any]], **fields: Any) -> DeciLmConfig:
    """Return the config of layers with these attentions and MLPs."""
    each = [
        {"attention": {**_OFF, **_NO_ATTENTION, **attention}, "ffn": {**_OFF, "ffn_mult": None, **mlp}}
        for attention, mlp in blocks
    ]
    given = {**LLAMA_NEMOTRON, "num_hidden_layers": len(each), "block_configs": each, **fields}
    config = parse_model_config(given)
    assert isinstance(config, DeciLmConfig)
    return config


def test_llama_nemotron() -> None:
    eight, none, mlp = {"n_heads_in_group": 8}, {"no_op": True}, {"ffn_mult": 2.625}
    config = parse_llama_nemotron((eight, mlp), (none, {"ffn_mult": 1.0}), (eight, none), (none, none), (eight, mlp))
    assert config.blocks == (
        (Block("attention", 0, 8), Block("mlp", 0, 14336), Block("mlp", 1, 5632)),
        (Block("attention", 2, 8),),
        (Block("attention", 4, 8), Block("mlp", 4, 14336)),
    )
    assert (config.num_layers, config.num_kv_heads, config.head_dim, config.intermediate_size) == (3, 8, 128, 14336)
    assert (config.rope.type, config.rope.theta, config.max_position_embeddings) == ("llama3", 5e5, 131072)
    assert config.layer_weights == config.attention_weights + (2 * 14336 + 5632) * 8192
    assert not config.kv_layout("bfloat16").heads
    linear = {"replace_with_linear": True}
    others = parse_llama_nemotron(
        (none, mlp), (linear, linear), ({"n_heads_in_group": 16}, {"intermediate_size": 5000}), (eight, mlp)
    )
    assert others.blocks == (
        (
            Block("mlp", 0, 14336), Block("linear_attn", 1), Block("linear_mlp", 1), Block("attention", 2, 4),
            Block("mlp", 2, 5000),
        ),
        (Block("attention", 3, 8), Block("mlp", 3, 14336)),
    )  # fmt: skip
    layout = others.kv_layout("bfloat16")
    assert layout.heads == ((4, 128, 128), (8, 128, 128))
    assert {(plane.heads, plane.dim) for plane in layout.planes} == {(8, 128)}
    half = others.part(RankNumber(1, 2))
    assert (half.num_kv_heads, half.of_layer(0).num_kv_heads, half.of_layer(1).num_kv_heads) == (4, 2, 4)
    with pytest.raises(ConfigError, match="--tensor-parallel 8"):
        others.part(RankNumber(0, 8))
    assert config.part(RankNumber(3, 16)).of_layer(0).num_kv_heads == 1


@pytest.mark.parametrize(
    ("attention", "mlp", "match"),
    [
        ({"n_heads_in_group": 8, "window_length": 4096}, {"ffn_mult": 1.0}, "window_length"),
        ({"n_heads_in_group": 8, "num_sink_tokens": 4}, {"ffn_mult": 1.0}, "num_sink_tokens"),
        ({"n_heads_in_group": 8, "unshifted_sink": True}, {"ffn_mult": 1.0}, "unshifted_sink"),
        ({"n_heads_in_group": 7}, {"ffn_mult": 1.0}, "n_heads_in_group 7"),
        ({"n_heads_in_group": None}, {"ffn_mult": 1.0}, "n_heads_in_group"),
        ({"n_heads_in_group": 8, "mamba": {}}, {"ffn_mult": 1.0}, "mamba"),
        ({"n_heads_in_group": 8}, {"ffn_mult": None}, "ffn_mult"),
        ({"n_heads_in_group": 8}, {"ffn_mult": 0.0}, "ffn_mult"),
        ({"n_heads_in_group": 8}, {"ffn_mult": 1.0, "gated": False}, "gated"),
        ({"n_heads_in_group": 8}, {"ffn_mult": 1.0, "moe": {"num_local_experts": 8}}, "moe"),
        ({"no_op": True}, {"ffn_mult": 1.0}, "no layer with attention"),
    ],
)
def test_llama_nemotron_without_what_is_not_served(attention: dict[str, Any], mlp: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_llama_nemotron((attention, mlp))


def test_llama_nemotron_without_its_layers() -> None:
    for blocks in (None, [], [{"attention": {}}, 3], {}):
        with pytest.raises(ConfigError, match="block_configs"):
            parse_llama_nemotron(num_hidden_layers=2, block_configs=blocks)
    block = ({"n_heads_in_group": 8}, {"ffn_mult": 1.0})
    assert parse_llama_nemotron(block, position_embedding_type="rope") == parse_llama_nemotron(block)
    with pytest.raises(ConfigError, match="position_embedding_type"):
        parse_llama_nemotron(block, position_embedding_type="rope_llama4")
    with pytest.raises(ConfigError, match="not served together"):
        parse_llama_nemotron(
            *(({"n_heads_in_group": group}, {"no_op": True}) for group in (3, 4)), num_attention_heads=24
        )


def test_decilm_7b() -> None:
    fields = {
        **SIZES, "architectures": ["DeciLMForCausalLM"], "model_type": "deci", "num_hidden_layers": 3,
        "num_attention_heads": 32, "num_key_value_heads_per_layer": [4, 2, 1],
    }  # fmt: skip
    config = parse_model_config(fields)
    assert isinstance(config, DeciLmConfig)
    assert (config.sizes("attention"), config.sizes("mlp"), config.num_kv_heads) == ([4, 2, 1], [1024] * 3, 4)
    for heads in ([4, 2], [4, 3, 1], [0, 1, 1]):
        with pytest.raises(ConfigError, match="num_key_value_heads_per_layer"):
            parse_model_config({**fields, "num_key_value_heads_per_layer": heads})


def test_gemma_1_says_gelu_and_means_its_approximation() -> None:
    assert parse("GemmaForCausalLM", hidden_act="gelu").activation == "gelu_tanh"
    with pytest.raises(ConfigError, match="hidden_act"):
        parse("GemmaForCausalLM", hidden_act="tanh")


def test_swish_is_silu() -> None:
    assert parse("LlamaForCausalLM", hidden_act="swish").activation == "silu"


@pytest.mark.parametrize("name", HIDDEN_ACTS)
def test_activations_are_those_of_transformers(name: str) -> None:
    x = torch.randn(1000, dtype=torch.float64) * 4
    assert torch.allclose(ACTIVATIONS[HIDDEN_ACTS[name]](x), ACT2FN[name](x), rtol=1e-6, atol=1e-6)


def test_families_whose_code_has_one_gate_alone_or_is_not_in_transformers() -> None:
    for name in ("GptOssForCausalLM", "BaichuanForCausalLM", "InternLMForCausalLM", "ExaoneForCausalLM"):
        with pytest.raises(ConfigError, match="hidden_act"):
            parse(name, hidden_act="gelu", activation_function="gelu")


def test_a_head_that_is_said_to_be_tied_in_one_of_two_places() -> None:
    for whole, text in ((True, None), (None, True), (False, True)):
        given = {"tie_word_embeddings": whole, "text_config": {**SIZES, "tie_word_embeddings": text}}
        assert parse("Qwen3VLForConditionalGeneration", **given).tie_word_embeddings


def test_chatglm_of_three_generations() -> None:
    third = {
        "architectures": ["ChatGLMModel"], "model_type": "chatglm", "add_bias_linear": False, "add_qkv_bias": True,
        "apply_query_key_layer_scaling": True, "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0, "attention_softmax_in_fp32": True, "bias_dropout_fusion": True,
        "ffn_hidden_size": 13696, "fp32_residual_connection": False, "hidden_dropout": 0.0, "hidden_size": 4096,
        "kv_channels": 128, "layernorm_epsilon": 1e-5, "multi_query_attention": True, "multi_query_group_num": 2,
        "num_attention_heads": 32, "num_layers": 28, "original_rope": True, "padded_vocab_size": 65024,
        "post_layer_norm": True, "rmsnorm": True, "seq_length": 8192, "use_cache": True, "torch_dtype": "float16",
        "tie_word_embeddings": False, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    config = parse_model_config(third)
    assert isinstance(config, ChatGlmConfig)
    assert (config.vocab_size, config.num_kv_heads, config.head_dim, config.qkv_bias) == (65024, 2, 128, True)
    assert (config.rope.theta, config.rope.partial, config.rope.interleaved) == (10000.0, 0.5, True)
    assert (config.default_model_len, config.num_layers, config.fused_by_head) == (8192, 28, False)
    # GLM-4-9B-Chat-1M.
    longest = {
        **third, "multi_query_group_num": 4, "rope_ratio": 10000, "seq_length": 1048576, "num_layers": 40,
        "layernorm_epsilon": 1.5625e-07, "padded_vocab_size": 151552, "eos_token_id": [151329, 151336, 151338],
    }  # fmt: skip
    config = parse_model_config(longest)
    assert isinstance(config, ChatGlmConfig)
    assert (config.rope.theta, config.rms_norm_eps, config.num_kv_heads) == (1e8, 1.5625e-07, 4)
    assert parse_model_config({**longest, "vision_config": {"image_size": 1120}}) == config  # as GLM-4V has it
    second = {"_name_or_path": "THUDM/chatglm2-6b-32k", "rope_ratio": 16}
    for changed in (
        {"rmsnorm": False}, {"post_layer_norm": False}, {"apply_residual_connection_post_layernorm": True},
        {"add_bias_linear": True}, {"original_rope": False}, {"pre_seq_len": 128}, {"quantization_bit": 4},
        {"position_encoding_2d": True}, {"rope_ratio": 0}, second,
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=list(changed)[-1]):
            parse_model_config({**third, **changed})


def test_baichuan_of_both_sizes_and_generations() -> None:
    common = {
        "model_type": "baichuan", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "pad_token_id": 0,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "initializer_range": 0.02,
    }  # fmt: skip
    small = {
        **common, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    large = {
        **common, "hidden_size": 5120, "intermediate_size": 13696, "num_attention_heads": 40, "num_hidden_layers": 40,
        "model_max_length": 4096,
    }  # fmt: skip
    for fields, alibi in (
        (small, False), ({**small, "model_max_length": 4096}, False), (large, True),
        # Fine-tuned models may lack the field that the first model had, or have it in addition.
        ({**small, "max_position_embeddings": None}, False), ({**large, "max_position_embeddings": 4096}, True),
    ):  # fmt: skip
        for tokens, unit_head in ((64000, False), (125696, True)):
            config = parse_model_config({**fields, "architectures": ["BaichuanForCausalLM"], "vocab_size": tokens})
            assert isinstance(config, BaichuanConfig)
            assert (config.unit_head, config.default_model_len, config.head_dim) == (unit_head, 4096, 128)
            assert (config.attention[0].alibi is not None, config.rope_of(0) is None) == (alibi, alibi)
    first = parse_model_config({**small, "architectures": ["BaiChuanForCausalLM"], "vocab_size": 64000})
    assert isinstance(first, BaichuanConfig)
    assert first.rope_of(0) == Rope("default", 10000.0)
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        parse("BaichuanForCausalLM", tie_word_embeddings=True)


def test_minicpm_of_three_generations() -> None:
    first = {
        "hidden_size": 2304, "intermediate_size": 5760, "num_attention_heads": 36, "num_hidden_layers": 40,
        "num_key_value_heads": 36, "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4, "vocab_size": 122753,
        "max_position_embeddings": 4096, "rope_scaling": None, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    config = parse("MiniCPMForCausalLM", **first)
    assert isinstance(config, MiniCpmConfig)
    assert config.multipliers == Multipliers(12.0, 1.4 / math.sqrt(40), 9.0)
    assert (config.tie_word_embeddings, config.default_model_len, config.head_dim) == (True, 4096, 64)
    factors = {"long_factor": [1.5] * 64, "short_factor": [1.25] * 64, "original_max_position_embeddings": 32768}
    fourth = {
        "hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 2, "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4, "mup_denominator": 32,
        "max_position_embeddings": 32768, "tie_word_embeddings": False, "vocab_size": 73448,
        "rope_scaling": {"rope_type": "longrope", **factors},
    }  # fmt: skip
    config = parse("MiniCPMForCausalLM", **fourth)
    assert (config.rope.short_factors[0], config.rope.attention_factor) == (1.25, 1.0)
    # The long factors hold for texts of all lengths.
    longer = parse("MiniCPMForCausalLM", **{**fourth, "max_position_embeddings": 131072})
    assert longer.limited(1000).rope.short_factors[0] == 1.5
    assert longer.rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(32768)))
    with pytest.raises(ConfigError, match="original_max_position_embeddings"):
        parse("MiniCPMForCausalLM", **{**fourth, "max_position_embeddings": 4096})
    sparse = parse(
        "MiniCPMForCausalLM", **fourth, sparse_config={"kernel_size": 32, "topk": 64, "dense_len": 8192}
    )  # fmt: skip
    assert (sparse.default_model_len, sparse.limited(8191)) == (8191, sparse)
    for refused in (
        lambda: sparse.limited(8192),
        lambda: parse("MiniCPMForCausalLM", **first, sparse_config={"dense_len": -1}),
    ):
        with pytest.raises(ConfigError, match="sparse_config"):
            refused()
    for name in ("num_experts", "head_dim"):
        with pytest.raises(ConfigError, match=name):
            parse("MiniCPMForCausalLM", **first, **{name: 8})


def test_telechat_of_two_generations() -> None:
    second = {
        "model_type": "telechat", "hidden_size": 4096, "ffn_hidden_size": 12288, "n_layer": 30, "n_head": 32,
        "layer_norm_epsilon": 1e-5, "training_seqlen": 8192, "base_seqlen": 8192, "logn": False, "vocab_size": 160256,
        "apply_residual_connection_post_layernorm": False, "embed_layernorm": False, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "num_key_value_heads": None, "tie_word_embeddings": False, "torch_dtype": "float16",
    }  # fmt: skip
    for name in ("TelechatForCausalLM", "Telechat2ForCausalLM", "TeleChat2ForCausalLM"):
        config = parse_model_config({**second, "architectures": [name]})
        assert isinstance(config, LlamaConfig)
        assert (config.num_kv_heads, config.head_dim, config.default_model_len) == (32, 128, 8192)
        assert (config.rope, config.qkv_bias, config.output_bias) == (Rope("default", 10000.0), False, True)
    longer = parse_model_config({**second, "architectures": ["TelechatForCausalLM"], "training_seqlen": 32768})
    assert isinstance(longer, LlamaConfig)
    assert longer.rope.theta == pytest.approx(10000 * 7 ** (128 / 126))
    # The first two models have base_seqlen in their code instead of in config.json.
    first = {**second, "architectures": ["TelechatForCausalLM"], "base_seqlen": None}
    smaller, larger = (
        parse_model_config({**first, "hidden_size": hidden, "n_layer": layers})
        for hidden, layers in ((4096, 30), (5120, 38))
    )
    assert isinstance(smaller, LlamaConfig)
    assert isinstance(larger, LlamaConfig)
    assert smaller.rope.theta == pytest.approx(10000 * 3 ** (128 / 126))
    assert (larger.rope.theta, larger.head_dim) == (10000.0, 160)
    for refused in ({"embed_layernorm": True}, {"base_seqlen": None, "n_layer": 24}):
        with pytest.raises(ConfigError, match=next(iter(refused))):
            parse_model_config({**second, "architectures": ["TelechatForCausalLM"], **refused})


def test_minicpm_v_and_o() -> None:
    fields: dict[str, Any] = {
        "architectures": ["MiniCPMV"], "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
        "max_position_embeddings": 40960, "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False,
        "vocab_size": 151748, "batch_vision_input": True, "batch_3d_resampler": True, "drop_vision_last_layer": False,
        "image_size": 448, "model_type": "minicpmv", "patch_size": 14, "query_num": 64,
        "slice_config": {"max_slice_nums": 9, "patch_size": 14, "model_type": "minicpmv"}, "slice_mode": True,
        "vision_config": {"hidden_size": 1152, "model_type": "siglip", "num_hidden_layers": 27},
    }  # fmt: skip
    config = parse_model_config({**fields, "version": 4.5})
    assert isinstance(config, LlamaConfig)
    assert (config.architecture, config.qk_norm, config.qkv_bias) == ("MiniCPMV/Qwen3ForCausalLM", True, False)
    assert (config.vocab_size, config.num_layers, config.rope) == (151748, 36, Rope("default", 1e6))
    for kind, version, hidden, text in (
        ("MiniCPMV", None, 2304, "MiniCPM"), ("MiniCPMV", None, 4096, "Llama"), ("MiniCPMV", "2.6", 4096, "Qwen2"),
        ("MiniCPMV", 4.0, 4096, "Llama"), ("MiniCPMO", "2.6", 4096, "Qwen2"), ("MiniCPMO", "4.5", 4096, "Qwen3"),
    ):  # fmt: skip
        own = {"architectures": [kind], "version": version, "hidden_size": hidden, "head_dim": hidden // 32}
        assert parse_model_config({**fields, **own}).architecture == f"{kind}/{text}ForCausalLM"
    for kind, version in (("MiniCPMV", "3.0"), ("MiniCPMV", [4.5]), ("MiniCPMO", None), ("MiniCPMO", "2.5")):
        with pytest.raises(ConfigError, match="version"):
            parse_model_config({**fields, "architectures": [kind], "version": version})


def test_phi_3_vision() -> None:
    fields: dict[str, Any] = {
        "architectures": ["Phi3VForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "embd_layer": {"embedding_cls": "image", "use_hd_transform": True}, "hidden_size": 3072,
        "img_processor": {"image_dim_out": 1024, "num_img_tokens": 144}, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "model_type": "phi3_v", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "vocab_size": 32064,
    }  # fmt: skip
    scaling = {"long_factor": [1.03] * 48, "short_factor": [1.05] * 48, "type": "su"}
    config = parse_model_config({**fields, "rope_scaling": scaling})
    assert isinstance(config, LlamaConfig)
    assert (config.rope.type, config.rope.factor, config.rope.original_max_position_embeddings) == (
        "longrope",
        32.0,
        4096,
    )
    assert config.rope.attention_factor == pytest.approx((1 + 5 / 12) ** 0.5)
    with pytest.raises(ConfigError, match="sue"):
        parse_model_config({**fields, "rope_scaling": {**scaling, "type": "sue"}})


def test_keye() -> None:
    scaling = {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}
    for name in ("KeyeForConditionalGeneration", "KeyeVL1_5ForConditionalGeneration"):
        config = parse(
            name, head_dim=128, rope_scaling=scaling, rope_theta=1000000, vision_config={"hidden_size": 1152}
        )
        assert (config.qk_norm, config.head_dim, config.rope) == (True, 128, Rope("default", 1e6))


def test_qwen_vl() -> None:
    fields: dict[str, Any] = {
        "architectures": ["QWenLMHeadModel"], "bf16": False, "fp16": True, "fp32": False, "hidden_size": 4096,
        "intermediate_size": 22016, "kv_channels": 128, "layer_norm_epsilon": 1e-6, "max_position_embeddings": 8192,
        "model_type": "qwen", "no_bias": True, "num_attention_heads": 32, "num_hidden_layers": 32,
        "rotary_emb_base": 10000, "rotary_pct": 1.0, "scale_attn_weights": True, "seq_length": 2048,
        "tie_word_embeddings": False, "torch_dtype": "float16", "use_dynamic_ntk": True, "use_logn_attn": True,
        "visual": {"heads": 16, "image_size": 448, "image_start_id": 151857, "layers": 48, "output_dim": 4096},
        "vocab_size": 151936,
    }  # fmt: skip
    config = parse_model_config(fields)
    assert isinstance(config, QwenConfig)
    assert (config.default_model_len, config.intermediate_size, config.head_dim) == (2048, 11008, 128)
    assert (config.dtype, config.dynamic_ntk, config.logn) == ("float16", True, True)


def test_ovis() -> None:
    llm = {
        **SIZES, "_attn_implementation_autoset": True, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
        "max_position_embeddings": 32768, "rope_theta": 1000000.0, "tie_word_embeddings": True, "use_cache": True,
    }  # fmt: skip
    whole = {"disable_tie_weight": False, "multimodal_max_length": 32768, "visual_tokenizer_config": {}}
    config = parse("Ovis", llm_config=llm, conversation_formatter_class="QwenConversationFormatter", **whole)
    assert (config.architecture, config.tie_word_embeddings) == ("Ovis/Qwen2ForCausalLM", True)
    assert (config.qkv_bias, config.rope, config.default_model_len) == (True, Rope("default", 1e6), 32768)
    gemma = {**llm, "head_dim": 128, "model_type": "gemma2", "tie_word_embeddings": None}
    assert parse_model_config({"architectures": ["Ovis"], "llm_config": gemma}).tie_word_embeddings
    config = parse("Ovis2_5", llm_config={**SIZES, "head_dim": 128}, vit_config={"hidden_size": 1152})
    assert (config.architecture, config.qk_norm) == ("Ovis2_5/Qwen3ForCausalLM", True)


def test_telechat_3() -> None:
    scaling = {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "telechat3-yarn", "type": "telechat3-yarn",
    }  # fmt: skip
    config = parse(
        "Telechat3ForCausalLM", attention_bias=False, head_dim=128, hidden_act="silu", max_position_embeddings=32768,
        mlp_bias=False, model_type="telechat3", rms_norm_eps=1e-5, rope_scaling=scaling, rope_theta=1e6,
        tie_word_embeddings=False,
    )  # fmt: skip
    assert (config.rope.type, config.rope.factor, config.rope.theta) == ("yarn", 4.0, 1e6)
    assert config.rope.attention_factor == 0.07 * math.log(4.0) + 1.0


@pytest.mark.parametrize(("name", "value"), [("clip_qkv", 8.0), ("use_sliding_window", True)])
def test_iquest_coder(name: str, value: Any) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    fields = {
        **sizes, "architectures": ["IQuestCoderForCausalLM"], "num_attention_heads": 16, "clip_qkv": None,
        "use_sliding_window": False,
    }  # fmt: skip
    config = parse_model_config(fields)
    assert isinstance(config, LlamaConfig)
    assert (config.num_kv_heads, config.head_dim, config.rope.theta, config.rms_norm_eps) == (8, 128, 5e5, 1e-5)
    with pytest.raises(ConfigError, match=name):
        parse_model_config({**fields, name: value})


@pytest.mark.parametrize(
    ("given", "embeddings", "logits"),
    [({}, 2.0, 4.0), ({"use_mup": False}, 1.0, 1.0), ({"output_mult": 4.0}, 2.0, 2.0)],
)
def test_teleflm(given: dict[str, Any], embeddings: float, logits: float) -> None:
    factors = {"use_mup": True, "input_mult": 2.0, "output_mult": 2.0, "mup_scale_factor": 8.0}
    config = parse("TeleFLMForCausalLM", **{**factors, **given})
    assert isinstance(config, GraniteConfig)
    assert config.multipliers == Multipliers(embeddings, 1.0, logits)
    assert config.attention[0].scale == config.head_dim**-0.5
    with pytest.raises(ConfigError, match=r"mup_scale_factor .* must not be 0"):
        parse("TeleFLMForCausalLM", use_mup=True, mup_scale_factor=0.0)


def test_molmo() -> None:
    fields: dict[str, Any] = {
        "architectures": ["MolmoForCausalLM"], "attention_layer_norm": False, "clip_qkv": None,
        "embedding_size": 152064, "hidden_size": 3584, "intermediate_size": 37888, "layer_norm_eps": 1e-6,
        "layer_norm_type": "rms", "max_position_embeddings": 4096, "model_type": "molmo", "norm_after": False,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "qkv_bias": True,
        "rope_theta": 1000000.0, "tie_word_embeddings": False, "torch_dtype": "float32", "use_position_ids": True,
        "vocab_size": 152064, "weight_tying": False,
    }  # fmt: skip
    config = parse_model_config(fields)
    assert isinstance(config, MolmoConfig)
    assert (config.intermediate_size, config.head_dim, config.like_olmo, config.qkv_bias) == (18944, 128, False, True)
    assert (config.rms_norm_eps, config.rope, config.default_model_len) == (1e-6, Rope("default", 1e6), 4096)
    olmo = {"attention_layer_norm": True, "norm_after": True, "vocab_size": 100278, "embedding_size": 100352}
    config = parse_model_config({**fields, **olmo, "tie_word_embeddings": True})
    assert isinstance(config, MolmoConfig)
    assert (config.like_olmo, config.vocab_size, config.tie_word_embeddings) == (True, 100352, False)
    for name, value in (
        ("layer_norm_type", "default"), ("weight_tying", True), ("use_position_ids", False), ("clip_qkv", "8"),
        ("norm_after", True), ("attention_layer_norm", True), ("intermediate_size", 37887),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            parse_model_config({**fields, name: value})
