"""Latent attention over the tokens that an indexer selects."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from baton_engine.attention import triton_indexed
from baton_engine.config import ConfigError
from baton_engine.context import Context
from baton_engine.models.deepseek_v32 import IndexedConfig
from baton_engine.models.registry import parse_model_config
from tests.conftest import MakeModel
from tests.models import is_greedy, reference_greedy

from .fake_cuda import pretend
from .handover import Pair
from .harness import assert_idle, generate, make_engine, make_prompt, make_request
from .pools import MakeEngine


@pytest.mark.parametrize(
    ("model", "deterministic"),
    [("indexed", False), ("indexed", True), ("shared_latents", False), ("selecting_with_sinks", False)],
)
def test_kernels_give_the_tokens_of_the_reference(
    request: pytest.FixtureRequest, model: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter runs the kernels themselves, for chunks in several calls and in groups, and for decodes."""
    folder = request.getfixturevalue(model)
    names = ("plan_parts", "latent_decode", "absorb_queries", "values_of", "index_scores", "select_slots")
    kernels = {name: getattr(triton_indexed, name) for name in names}
    pretend(monkeypatch)
    used: set[Any] = set()

    def scores(*arguments: Any) -> torch.Tensor:
        used.add(arguments[6])
        return kernels["index_scores"](*arguments)  # type: ignore[no-any-return]

    for name in names:
        monkeypatch.setattr(triton_indexed, name, scores if name == "index_scores" else kernels[name])
    monkeypatch.setattr(triton_indexed, "_MOST_QUERIES", 20)
    engine = make_engine(
        folder, block_size=4, max_num_batched_tokens=32, max_num_seqs=2, max_model_len=48, num_blocks=64,
        enforce_eager=True, chunk_ms=0.0, deterministic=deterministic,
    )  # fmt: skip
    prompts = [make_prompt(length, seed=3) for length in (5, 26)]
    transcript = generate(engine, [make_request(id, prompt, 2) for id, prompt in enumerate(prompts)])
    for id, prompt in enumerate(prompts):
        assert transcript.tokens[id, 0] == reference_greedy(folder, prompt, 2)
    assert used == ({1} if deterministic else {1, 8})


@pytest.mark.parametrize(
    ("model", "prefill_block", "decode_block"),
    [("indexed", 16, 16), ("indexed", 24, 10), ("shared_latents", 16, 10), ("selecting_with_sinks", 24, 10)],
)
def test_index_keys_are_handed_over(
    request: pytest.FixtureRequest, model: str, prefill_block: int, decode_block: int
) -> None:
    folder = request.getfixturevalue(model)
    prefill = make_engine(folder, max_num_batched_tokens=24, block_size=prefill_block)
    pair = Pair(prefill, make_engine(folder, block_size=decode_block), seed=decode_block)
    layout = pair.decode.runner.cache.layout
    # The model's kv_lora_rank, qk_rope_head_dim and index_head_dim, in float32.
    assert layout.token_bytes == layout.num_layers * (24 + 8 + 12) * 4
    prompts = [make_prompt(length, seed=3) for length in (1, 16, 90)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 16, n=2 if id == 2 else 1))
    transcript = pair.run()
    for id, prompt in enumerate(prompts):
        expected = reference_greedy(folder, prompt, 16)
        assert all(tokens == expected for (at, _), tokens in transcript.tokens.items() if at == id)
    for engine in (pair.prefill, pair.decode):
        assert_idle(engine)


def test_layers_that_read_the_latents_of_others_report_what_they_write(
    shared_latents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hand-over by layers waits for each number."""
    engine, written = make_engine(shared_latents), []
    begin = Context.__init__

    def with_written(self: Context, *given: Any, **names: Any) -> None:
        begin(self, *given, **names)
        self._written = written.append

    monkeypatch.setattr(Context, "__init__", with_written)
    generate(engine, [make_request(0, make_prompt(9), 1)])
    assert written == [0, 1, 2, 3]


def test_index_keys_of_another_size_have_another_fingerprint(indexed: Path) -> None:
    model = make_engine(indexed).model
    changed = msgspec.structs.replace(model, latent=msgspec.structs.replace(model.latent, index_dim=16))
    assert changed.fingerprint_facts() != model.fingerprint_facts()


def test_which_tokens_are_selected_changes_tokens(indexed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise equality with transformers would say nothing about the indexer."""
    prompt = make_prompt(70, seed=4)
    expected = reference_greedy(indexed, prompt, 12)
    monkeypatch.setattr(
        "baton_engine.attention.torch_indexed.index_scores_reference",
        lambda q, weights, keys: torch.arange(keys.shape[1]).expand(*q.shape[:2], -1).float(),
    )
    assert generate(make_engine(indexed), [make_request(0, prompt, 12)]).tokens[0, 0] != expected


def test_no_stage_begins_with_a_layer_without_an_indexer(
    indexed: Path, tiny_model: MakeModel, divided: MakeEngine
) -> None:
    """The layers 0 and 2 select tokens."""
    prompt = make_prompt(40, seed=3)
    engine = divided(indexed, 1, pipeline_parallel=2)
    assert is_greedy(indexed, prompt, generate(engine, [make_request(0, prompt, 8)]).tokens[0, 0])
    with pytest.raises(ConfigError, match="before layer 1, which attends to the tokens that an earlier layer selects"):
        divided(indexed, 1, pipeline_parallel=4)


V32: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"], "attention_bias": False, "ep_size": 1, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v32",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
GLM_5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "ep_size": 1, "first_k_dense_replace": 3,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32,
    "index_topk": 2048, "indexer_rope_interleave": True, "intermediate_size": 12288, "kv_lora_rank": 512,
    "max_position_embeddings": 202752, "model_type": "glm_moe_dsa", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 78, "num_key_value_heads": 64, "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5,
    "rope_interleave": True, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc",
    "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
# With the parameters that their authors publish.
PUBLISHED = {"DeepSeek-V3.2": (V32, 671e9), "GLM-5": (GLM_5, 744e9)}


def parse(fields: dict[str, Any]) -> IndexedConfig:
    config = parse_model_config(fields)
    assert isinstance(config, IndexedConfig)
    return config


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    fields, parameters = PUBLISHED[name]
    config = parse(fields)
    total = config.num_layers * config.layer_weights_read(1e6) + 2 * config.vocab_size * config.hidden_size
    assert total == pytest.approx(parameters, rel=0.01)
    assert config.kv_layout("bfloat16").layer_bytes == 1152 + 256
    assert (config.latent.selected, config.latent.index_dim) == (2048, 128)
    assert config.selecting == set(range(config.num_layers))
    assert config.index_interleaved == (name == "GLM-5")
    assert config.attention_lengths(100_000) == [2048, 100_000]
    assert config.attention_lengths(1024) == [1024]
    # A field that is absent has the default of transformers, which is the published value.
    names = ("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "moe_intermediate_size", "rope_scaling", "rope_parameters", "n_group",
             "topk_group")  # fmt: skip
    assert parse({field: value for field, value in fields.items() if field in names}) == config


@pytest.mark.parametrize(
    ("given", "selecting"),
    [
        ({"index_topk_freq": 3}, {0, 1, 4, 7}),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, {0, 2, 4, 6}),
        ({"index_topk_pattern": "FSSFSFFS"}, {0, 3, 5, 6}),
        ({"indexer_types": ["full", *("shared",) * 7], "index_topk_freq": 2}, {0}),
    ],
)
def test_which_layers_have_an_indexer(given: dict[str, Any], selecting: set[int]) -> None:
    fields = {**GLM_5, "num_hidden_layers": 8, **given}
    assert parse(fields).selecting == selecting
    theirs = transformers.GlmMoeDsaConfig(**{name: fields[name] for name in ("num_hidden_layers", *given)})
    assert [kind == "full" for kind in theirs.indexer_types] == [layer in selecting for layer in range(8)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"indexer_types": ["shared"] * 78}, "the first layer in config.json has no indexer"),
        ({"indexer_types": ["full"]}, "indexer_types in config.json must be full or shared for each of the 78 layers"),
        ({"index_topk_pattern": "F" * 77 + "X"}, "index_topk_pattern F or S"),
        ({"index_topk_freq": 0}, "index_topk_freq .* at least 1"),
        ({"index_head_dim": 62}, "index_head_dim in config.json is 62; it must be even and at least 64"),
        ({"index_head_dim": 65}, "index_head_dim in config.json is 65; it must be even"),
        ({"index_topk": 0}, "index_topk .* at least 1"),
        ({"index_n_heads": "32"}, "index_n_heads .* integer"),
        ({"q_lora_rank": None, "mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"scoring_func": "softmax"}, "scoring_func"),
    ],
)
def test_what_cannot_be_served_is_said(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_model_config({**GLM_5, **given})
