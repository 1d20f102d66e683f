"""config.json as the engine reads it, against transformers' own configuration classes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from baton_engine.config import ConfigError
from baton_engine.layers.rope import inverse_frequencies
from baton_engine.models.bloom import alibi_slopes
from baton_engine.models.gemma3 import Gemma3Config
from baton_engine.models.ministral3 import Ministral3Config
from baton_engine.models.registry import load_model_config, parse_model_config
from baton_engine.models.rotary_config import RotaryConfig
from tests.conftest import MakeModel
from tests.models import FAMILIES, reference_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def raw(family: str = "llama", **fields: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [f"{FAMILIES[family]}ForCausalLM"], **fields}


def reference(family: str, **fields: Any) -> Any:
    """Return transformers' configuration of the same config.json."""
    own = {name: value for name, value in raw(family, **fields).items() if name != "architectures"}
    return getattr(transformers, f"{FAMILIES[family]}Config")(**own)


ROPE_FIELDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "llama3 as in Llama 3.2": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn as in Qwen": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn with betas": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn untruncated": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "yarn with its own attention factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.8,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 64,
        "long_factor": [2.0] * 64,
        "original_max_position_embeddings": 64,
    },
    "yarn of no width": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 900.0,
        "beta_slow": 800.0,
    },
}


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [32, 80, 128])
@pytest.mark.parametrize("name", ROPE_FIELDS)
def test_inverse_frequencies_are_those_of_transformers_to_the_bit(name: str, head_dim: int, theta: float) -> None:
    parameters = {**ROPE_FIELDS[name], "rope_theta": theta}
    for factors in {"short_factor", "long_factor"} & parameters.keys():
        parameters[factors] = [1.0 + pair / 7 for pair in range(head_dim // 2)]
    fields = {"head_dim": head_dim, "rope_parameters": parameters}
    config = reference("llama", **fields)
    if name == "default":
        embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
        expected, factor = embedding.compute_default_rope_parameters(config)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    ours = parse_model_config(raw(**fields))
    assert torch.equal(inverse_frequencies(ours.rope, ours.head_dim), expected)
    assert ours.rope.attention_factor == factor


@pytest.mark.parametrize("original", [None, 128])
@pytest.mark.parametrize("truncate", [{}, {"truncate": False}])
@pytest.mark.parametrize("name", [name for name in ROPE_FIELDS if name not in ("default", "longrope")])
def test_ropes_of_kinds_of_layers_are_those_of_transformers(name: str, truncate: Any, original: int | None) -> None:
    kinds = {"full_attention": {**ROPE_FIELDS[name], "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    fields = {
        "rope_parameters": {**kinds, **truncate},
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 512,
        "head_dim": 64,
        **({} if original is None else {"original_max_position_embeddings": original}),
    }
    config = transformers.Gemma3TextConfig(num_hidden_layers=2, **copy.deepcopy(fields))
    expected, factor = ROPE_INIT_FUNCTIONS[kinds["full_attention"]["rope_type"]](config, layer_type="full_attention")
    ours = parse_model_config({**GEMMA, "num_hidden_layers": 2, **fields})
    assert torch.equal(inverse_frequencies(ours.rope, 64), expected)
    assert ours.rope.attention_factor == factor


@pytest.mark.parametrize("fields", [{}, {"original_max_position_embeddings": 64}])
def test_phi_3_has_an_original_context_by_default(fields: dict[str, Any]) -> None:
    factors = {"short_factor": [1.5] * 8, "long_factor": [2.5] * 8, "original_max_position_embeddings": 128}
    given = {"max_position_embeddings": 8192, "rope_scaling": {"type": "longrope", **factors}, **fields}
    config = transformers.Phi3Config(**copy.deepcopy({**given, "hidden_size": 64, "num_attention_heads": 4}))
    _, factor = ROPE_INIT_FUNCTIONS["longrope"](config)
    ours = parse_model_config({**LLAMA, "architectures": ["Phi3ForCausalLM"], **given})
    assert ours.rope.attention_factor == factor


@pytest.mark.parametrize("name", ROPE_FIELDS)
def test_the_older_form_of_rope_is_the_same_rope(name: str) -> None:
    parameters = ROPE_FIELDS[name]
    new = parse_model_config(raw(rope_parameters={**parameters, "rope_theta": 70000.0}))
    old = parse_model_config(raw(rope_theta=70000.0, rope_scaling=parameters))
    oldest_scaling = {"type" if key == "rope_type" else key: value for key, value in parameters.items()}
    oldest = parse_model_config(raw(rope_theta=70000.0, rope_scaling=oldest_scaling))
    assert new.rope == old.rope == oldest.rope
    assert new.rope.theta == 70000.0


def test_no_rope_fields_are_the_plain_rope() -> None:
    assert parse_model_config(raw()).rope == parse_model_config(raw(rope_scaling=None, rope_theta=10000)).rope
    assert parse_model_config(raw()).rope.type == "default"


WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2 off": ("qwen2", {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 2}),
    "qwen2 from a layer on": ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}),
    "qwen2 by default": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen2 beyond its layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 32}),
    "qwen2 types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "qwen3 off": ("qwen3", {"sliding_window": 32}),
    "qwen3 from a layer on": ("qwen3", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}),
    "qwen3 types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["full_attention", "full_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_by_layer(name: str) -> None:
    family, fields = WINDOWS[name]
    config = reference(family, **fields)
    types = getattr(config, "layer_types", None) or ["full_attention"] * 4
    expected = tuple(config.sliding_window if kind == "sliding_attention" else None for kind in types)
    assert parse_model_config(raw(family, **fields)).sliding_windows == expected


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 24}, {"sliding_window": None}])
def test_mistral_has_its_window_in_every_layer(fields: dict[str, Any]) -> None:
    expected = (reference("mistral", **fields).sliding_window,) * 4
    assert parse_model_config(raw("mistral", **fields)).sliding_windows == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_are_not_there_have_the_defaults_of_transformers(family: str) -> None:
    given = {
        name: value
        for name, value in raw(family).items()
        if name not in ("num_key_value_heads", "max_position_embeddings")
    }
    given["num_attention_heads"] = 32
    expected = getattr(transformers, f"{FAMILIES[family]}Config")(
        **{name: value for name, value in given.items() if name != "architectures"}
    )
    ours = parse_model_config(given)
    assert ours.num_kv_heads == expected.num_key_value_heads
    assert ours.max_position_embeddings == expected.max_position_embeddings
    assert ours.rms_norm_eps == expected.rms_norm_eps
    assert ours.tie_word_embeddings == expected.tie_word_embeddings
    assert ours.rope.theta == expected.rope_parameters["rope_theta"]
    assert ours.head_dim == (getattr(expected, "head_dim", None) or 64 // 32)


@pytest.mark.parametrize(
    ("given", "expected"), [(None, ()), (2, (2,)), ([2, 5], (2, 5)), (0, (0,))], ids=["none", "one", "two", "zero"]
)
def test_end_tokens(given: Any, expected: tuple[int, ...]) -> None:
    assert parse_model_config(raw(eos_token_id=given)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["T5ForCausalLM"]}, ["unknown architecture T5ForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": None}, ["unknown architecture"]),
        ({"architectures": ["MixtralNextForCausalLM"]}, ["nearest relative by name is MixtralForCausalLM"]),
        ({"architectures": ["GPTNeoXForTokenClassification"]}, ["nearest relative by name is GPTNeoXForCausalLM"]),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": "8"}, ["clip_qkv", "'8'", "a number"]),
        ({"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9}, ["num_experts_per_tok", "at most 8"]),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": 3}, ["mlp_only_layers", "list of integers"]),
        ({"architectures": ["HYV3ForCausalLM"], "num_shared_experts": 0}, ["num_shared_experts", "at least 1"]),
        ({"architectures": ["GptOssForCausalLM"], "swiglu_limit": 0}, ["swiglu_limit", "above 0"]),
        ({"architectures": ["Glm4MoeForCausalLM"], "n_group": 3}, ["n_group", "3", "divide the 128 experts"]),
        (
            {"architectures": ["Glm4MoeForCausalLM"], "n_group": 64, "topk_group": 2},
            ["n_group", "64", "128 experts", "at least 4"],
        ),
        ({"architectures": ["Glm4MoeForCausalLM"], "n_group": 4, "topk_group": 5}, ["topk_group", "at most 4"]),
        ({"architectures": ["Glm4MoeForCausalLM"], "partial_rotary_factor": 0.45}, ["partial_rotary_factor", "even"]),
        ({"rope_parameters": {"rope_type": "ntk"}}, ["rope type 'ntk' is unknown", "yarn"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["short_factor", "a list of numbers"]),
        ({"rope_scaling": {"type": "linear"}}, ["'linear' needs a factor"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5", "LlamaForCausalLM"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "'yarn'", "object"]),
        ({"num_key_value_heads": 3}, ["4 attention heads", "3 key-value heads"]),
        ({"head_dim": 33}, ["head_dim", "33", "even"]),
    ],
)
def test_what_cannot_be_served_is_said(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_model_config(raw(**fields))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_missing_field_is_named(field: str) -> None:
    given = raw()
    del given[field]
    with pytest.raises(ConfigError, match=f"config.json has no '{field}'"):
        parse_model_config(given)


def test_a_folder_without_a_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a model folder: it has no config\.json"):
        load_model_config(tmp_path)
    with pytest.raises(ConfigError, match="not a model folder"):
        load_model_config(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "", "[]"])
def test_a_config_that_is_not_an_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is not"):
        load_model_config(tmp_path)


GEMMA: dict[str, Any] = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "num_hidden_layers": 7}
GEMMA_ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4},
        {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}},
    ),
    "scaled": (
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_theta": 1e4},
        },
    ),
}


@pytest.mark.parametrize("name", GEMMA_ROPES)
def test_both_forms_of_the_ropes_of_gemma(name: str) -> None:
    old, new = GEMMA_ROPES[name]
    ours = parse_model_config({**GEMMA, **old})
    assert isinstance(ours, Gemma3Config)
    theirs = parse_model_config({**GEMMA, "rope_parameters": new})
    assert isinstance(theirs, Gemma3Config)
    assert (ours.rope, ours.window_rope) == (theirs.rope, theirs.window_rope)
    expected = transformers.Gemma3TextConfig(rope_parameters=new).rope_parameters
    for rope, kind in ((ours.rope, "full_attention"), (ours.window_rope, "sliding_attention")):
        assert rope.theta == expected[kind]["rope_theta"]
        assert rope.factor == expected[kind].get("factor", 1.0)


@pytest.mark.parametrize(
    "fields", [{}, {"sliding_window_pattern": 3}, {"layer_types": ["full_attention"] + ["sliding_attention"] * 6}]
)
def test_layers_of_gemma_with_a_window(fields: dict[str, Any]) -> None:
    own = {key: value for key, value in {**GEMMA, **fields}.items() if key != "architectures"}
    types = transformers.Gemma3TextConfig(**own).layer_types
    ours = parse_model_config({**GEMMA, **fields})
    assert [window is None for window in ours.sliding_windows] == [kind == "full_attention" for kind in types]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rotary_pct": 1.0},
        {"rotary_pct": 0.5, "rotary_emb_base": 20000},
        {"rotary_pct": 0.5, "rotary_emb_base": 20000, "partial_rotary_factor": 0.75, "rope_theta": 500.0},
        {"partial_rotary_factor": 0.75, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
@pytest.mark.parametrize("name", ["GPTNeoX", "GPTNeoXJapanese"])
def test_the_older_form_of_the_rope_of_neox(name: str, fields: dict[str, Any]) -> None:
    own = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512, **fields}
    expected = getattr(transformers, f"{name}Config")(**copy.deepcopy(own)).rope_parameters
    ours = parse_model_config({**own, "architectures": [f"{name}ForCausalLM"]})
    assert isinstance(ours, RotaryConfig)
    assert (ours.rope.type, ours.rope.theta) == (expected["rope_type"], expected["rope_theta"])
    assert ours.rope.rotary_dim(16) == int(16 * expected["partial_rotary_factor"])


@pytest.mark.parametrize("name", ["Apertus", "GptOss", "Ministral3"])
def test_rope_theta_beside_a_default_that_scales(name: str) -> None:
    own = {key: value for key, value in LLAMA.items() if key != "architectures"} | {"pad_token_id": None}
    own["rope_theta"] = 500.0
    expected = getattr(transformers, f"{name}Config")(**own).rope_parameters
    ours = parse_model_config({**own, "architectures": [f"{name}ForCausalLM"]})
    assert isinstance(ours, RotaryConfig)
    assert (ours.rope.type, ours.rope.theta) == (expected["rope_type"], expected["rope_theta"])
    assert ours.rope.factor == expected["factor"]
    assert ours.rope.original_max_position_embeddings == expected["original_max_position_embeddings"]
    if isinstance(ours, Ministral3Config):
        assert ours.growth == expected["llama_4_scaling_beta"]


def test_rope_scaling_that_transformers_does_not_read() -> None:
    fields = {**LLAMA, "architectures": ["Cohere2MoeForCausalLM"], "rope_scaling": {"type": "linear", "factor": 2.0}}
    with pytest.raises(ConfigError, match="rope_scaling"):
        parse_model_config(fields)


SMOLLM3_WINDOWS = {"use_sliding_window": True, "sliding_window": 9}


@pytest.mark.parametrize(
    ("fields", "count"),
    [({}, 2), ({"no_rope_layer_interval": 3}, 2), ({"num_hidden_layers": 3}, 0), (SMOLLM3_WINDOWS, 2)],
)
def test_layers_of_smollm3_that_do_not_rotate(fields: dict[str, Any], count: int) -> None:
    own = {**LLAMA, "num_hidden_layers": 8, "pad_token_id": None, **fields}
    own.pop("architectures")
    ours = parse_model_config({**own, "architectures": ["SmolLM3ForCausalLM"]})
    theirs = transformers.SmolLM3Config(**own)
    assert [window is not None for window in ours.sliding_windows] == [
        kind == "sliding_attention" for kind in theirs.layer_types
    ]
    expected = theirs.no_rope_layers
    assert [ours.rope_of(layer) is not None for layer in range(ours.num_layers)] == [bool(entry) for entry in expected]
    assert expected.count(0) == count


GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_local_experts": 32,
}
GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "head_dim": 128,
    "num_attention_heads": 96,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000,
    "vocab_size": 151552,
}
GLM_4_5: dict[str, Any] = {
    **GLM,
    "first_k_dense_replace": 3,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_hidden_layers": 92,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
GLM_4_5_AIR: dict[str, Any] = {
    **GLM, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
}  # fmt: skip
# With the parameters that their authors publish: all, and those that a token uses without its embedding.
PUBLISHED = {
    "gpt-oss-20b": (GPT_OSS, 20.91e9, 3.61e9),
    "gpt-oss-120b": ({**GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128}, 116.83e9, 5.13e9),
    "GLM-4.5": (GLM_4_5, 355e9, 32e9),
    "GLM-4.5-Air": (GLM_4_5_AIR, 106e9, 12e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_with_experts(name: str) -> None:
    fields, parameters, active = PUBLISHED[name]
    ours = parse_model_config(fields)
    embedding = ours.vocab_size * ours.hidden_size
    assert ours.num_layers * ours.layer_weights + embedding == pytest.approx(active, rel=0.07)
    everything = ours.num_layers * ours.layer_weights_read(1e6) + 2 * embedding
    assert everything == pytest.approx(parameters, rel=0.01)
    assert ours.layer_weights_read(1) == pytest.approx(ours.layer_weights)


@pytest.mark.parametrize("family", ["SmolLM3", "Mixtral", "Cohere", "Cohere2"])
def test_a_config_without_a_rope_has_the_theta_of_transformers(family: str) -> None:
    expected = getattr(transformers, f"{family}Config")(pad_token_id=None).rope_parameters["rope_theta"]
    assert parse_model_config({**LLAMA, "architectures": [f"{family}ForCausalLM"]}).rope.theta == expected


def test_qwen3_omni_normalizes_weights_of_experts_unless_its_config_says_otherwise() -> None:
    fields = {"architectures": ["Qwen3OmniMoeThinkerForConditionalGeneration"], "text_config": LLAMA}
    assert parse_model_config(fields).routing.normalize
    within = {**fields, "architectures": ["Qwen3OmniMoeForConditionalGeneration"]}
    assert parse_model_config(within).routing.normalize


@pytest.mark.parametrize("fields", [{}, {"layer_types": ["full_attention"] * 24}, {"sliding_window": 64}])
def test_what_a_config_of_gpt_oss_lacks_has_the_defaults_of_transformers(fields: dict[str, Any]) -> None:
    own = {**GPT_OSS, **fields}
    expected = transformers.GptOssConfig(**{name: own[name] for name in own if name != "architectures"})
    ours = parse_model_config(own)
    windows = [expected.sliding_window if kind == "sliding_attention" else None for kind in expected.layer_types]
    assert list(ours.sliding_windows) == windows
    assert all(spec.sinks for spec in ours.attention)
    assert (ours.num_kv_heads, ours.head_dim) == (expected.num_key_value_heads, expected.head_dim)
    assert ours.max_position_embeddings == expected.max_position_embeddings
    assert ours.rms_norm_eps == expected.rms_norm_eps
    assert ours.qkv_bias == ours.output_bias == expected.attention_bias
    assert (ours.clamp.alpha, ours.clamp.limit) == (expected.swiglu_alpha, expected.swiglu_limit)
    assert ours.routing.count == expected.num_experts_per_tok
    assert ours.rope.theta == expected.rope_parameters["rope_theta"]
    inverse, factor = ROPE_INIT_FUNCTIONS["yarn"](expected)
    assert torch.equal(inverse_frequencies(ours.rope, ours.head_dim), inverse)
    assert ours.rope.attention_factor == factor


@pytest.mark.parametrize("fields", [{}, {"n_group": 4, "topk_group": 2}, {"norm_topk_prob": False}])
def test_what_a_config_of_glm_lacks_has_the_defaults_of_transformers(fields: dict[str, Any]) -> None:
    own = {**LLAMA, "num_attention_heads": 16, "head_dim": 16, **fields}
    for name in ("architectures", "num_key_value_heads", "max_position_embeddings"):
        del own[name]
    expected = transformers.Glm4MoeConfig(**own)
    ours = parse_model_config({**own, "architectures": ["Glm4MoeForCausalLM"]})
    assert ours.num_kv_heads == expected.num_key_value_heads
    assert ours.max_position_embeddings == expected.max_position_embeddings
    assert ours.rms_norm_eps == expected.rms_norm_eps
    assert (ours.qkv_bias, ours.qk_norm) == (expected.attention_bias, expected.use_qk_norm)
    assert ours.rope.partial == expected.rope_parameters["partial_rotary_factor"]
    assert ours.num_experts == expected.n_routed_experts
    assert ours.expert_size == expected.moe_intermediate_size
    assert ours.shared_size == expected.n_shared_experts * expected.moe_intermediate_size
    assert ours.dense_layers == set(range(expected.first_k_dense_replace))
    routing = ours.routing
    assert (routing.groups, routing.used_groups) == (expected.n_group, expected.topk_group)
    assert (routing.count, routing.scale) == (expected.num_experts_per_tok, expected.routed_scaling_factor)
    assert routing.normalize == expected.norm_topk_prob


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 112])
def test_slopes_of_bloom(heads: int) -> None:
    # The bias of the key at position 1 is the slope.
    expected = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(torch.tensor(alibi_slopes(heads)), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping 50.0", "Gemma3ForCausalLM"]),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "final_logit_softcapping": 30.0},
            ["final_logit_softcapping 30.0", "Gemma3ForConditionalGeneration"],
        ),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "one for each of 7 layers"]),
        ({"num_attention_heads": "4"}, ["num_attention_heads", "'4'", "integer"]),
        ({"rms_norm_eps": True}, ["rms_norm_eps", "a number"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings", "true or false"]),
        ({"eos_token_id": ["1"]}, ["eos_token_id"]),
        ({"dtype": "float8"}, ["dtype", "float8", "bfloat16"]),
    ],
)
def test_a_field_of_another_kind_is_named(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_model_config({**GEMMA, **fields})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("dense", [[], [1]])
def test_weights_that_are_read(tiny_model: MakeModel, dense: list[int]) -> None:
    """With many tokens all matrices are read; one token reads its own experts alone."""
    folder = tiny_model("qwen2_moe", mlp_only_layers=dense)
    config, layers = load_model_config(folder), reference_model(folder).model.layers
    matrices = {name: value.numel() for name, value in layers.named_parameters() if value.ndim > 1}
    experts = sum(count for name, count in matrices.items() if ".experts." in name)
    # The product that weights the shared expert is left out as too small to matter.
    others = sum(count for name, count in matrices.items() if "expert" not in name or "shared_expert." in name)
    assert config.num_layers * config.layer_weights_read(1e6) == pytest.approx(others + experts)
    assert config.num_layers * config.layer_weights_read(1) == pytest.approx(others + experts * 2 / 6)
    assert config.num_layers * config.layer_weights == pytest.approx(others + experts * 2 / 6)
    sizes = [96 if layer in dense else 2 * 40 + 56 for layer in range(2)]
    assert config.num_layers * config.mlp_units == sum(sizes)
