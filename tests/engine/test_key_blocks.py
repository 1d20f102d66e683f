"""Grouped-query attention over blocks of keys that an indexer selects."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from baton_engine.attention import triton_key_blocks
from baton_engine.attention_spec import AttentionSpec, KeyBlockSpec
from baton_engine.config import ConfigError
from baton_engine.models.minimax_m3 import MiniMaxM3Config
from baton_engine.models.registry import parse_model_config
from tests.models import is_greedy, reference_greedy

from .fake_cuda import pretend
from .handover import Pair
from .harness import assert_idle, generate, make_engine, make_prompt, make_request
from .pools import MakeEngine


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_give_the_tokens_of_the_reference(
    key_blocks: Path, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter runs the kernels themselves, for chunks in several calls and in groups, and for decodes."""
    names = ("plan_parts", "decode_attention", "key_block_scores", "select_block_slots")
    kernels = {name: getattr(triton_key_blocks, name) for name in names}
    pretend(monkeypatch)
    used: set[Any] = set()

    def scores(q: torch.Tensor, *arguments: Any) -> torch.Tensor:
        used.add(arguments[6])
        # The reference of the operation before it returns a view.
        return kernels["key_block_scores"](q.contiguous(), *arguments)  # type: ignore[no-any-return]

    monkeypatch.setattr(triton_key_blocks, "_MOST_QUERIES", 20)
    # The interpreter is slow with programs that have no work.
    monkeypatch.setattr(triton_key_blocks, "_PROGRAMS", 8)
    engine = make_engine(
        key_blocks, block_size=4, max_num_batched_tokens=32, max_num_seqs=2, max_model_len=64, num_blocks=64,
        enforce_eager=True, chunk_ms=0.0, deterministic=deterministic,
    )  # fmt: skip
    # The interpreter would take minutes for the steps that an engine measures at start.
    for name in names:
        monkeypatch.setattr(triton_key_blocks, name, scores if name == "key_block_scores" else kernels[name])
    prompts = [make_prompt(length, seed=3) for length in (5, 50)]
    transcript = generate(engine, [make_request(id, prompt, 3) for id, prompt in enumerate(prompts)])
    for id, prompt in enumerate(prompts):
        assert transcript.tokens[id, 0] == reference_greedy(key_blocks, prompt, 3)
    assert used == ({1} if deterministic else {1, 8})


@pytest.mark.parametrize(("prefill_block", "decode_block"), [(16, 16), (24, 10)])
def test_index_keys_are_handed_over(key_blocks: Path, prefill_block: int, decode_block: int) -> None:
    prefill = make_engine(key_blocks, max_num_batched_tokens=24, block_size=prefill_block)
    pair = Pair(prefill, make_engine(key_blocks, block_size=decode_block), seed=decode_block)
    layout = pair.decode.runner.cache.layout
    # A key, a value and an index key for each of two heads, in float32.
    assert layout.token_bytes == layout.num_layers * 3 * 2 * 16 * 4
    prompts = [make_prompt(length, seed=3) for length in (1, 16, 90)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 16, n=2 if id == 2 else 1))
    transcript = pair.run()
    for id, prompt in enumerate(prompts):
        expected = reference_greedy(key_blocks, prompt, 16)
        assert all(tokens == expected for (at, _), tokens in transcript.tokens.items() if at == id)
    for engine in (pair.prefill, pair.decode):
        assert_idle(engine)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 4)])
def test_index_keys_go_to_another_number_of_ranks(
    key_blocks: Path, divided: MakeEngine, prefill: int, decode: int
) -> None:
    settings: dict[str, Any] = {"max_num_batched_tokens": 24, "num_blocks": 256, "block_size": 8}
    pair = Pair(divided(key_blocks, prefill, **settings), divided(key_blocks, decode, **settings), seed=1)
    prompts = [make_prompt(length, seed=3) for length in (17, 90)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 12))
    transcript = pair.run()
    for id, prompt in enumerate(prompts):
        assert is_greedy(key_blocks, prompt, transcript.tokens[id, 0])
    assert pair.prefill.fingerprint_facts() == pair.decode.fingerprint_facts()


def test_stages_divide_the_layers(key_blocks: Path, divided: MakeEngine) -> None:
    """The second stage has only layers with an indexer."""
    prompt = make_prompt(60, seed=3)
    engine = divided(key_blocks, 1, pipeline_parallel=2)
    assert is_greedy(key_blocks, prompt, generate(engine, [make_request(0, prompt, 8)]).tokens[0, 0])


def test_layers_with_an_indexer_are_in_the_fingerprint(key_blocks: Path) -> None:
    model = make_engine(key_blocks).model
    swapped = msgspec.structs.replace(model, attention=model.attention[::-1])
    assert swapped.fingerprint_facts() != model.fingerprint_facts()


def test_which_blocks_are_selected_changes_tokens(key_blocks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise equality with transformers would say nothing about the indexer."""
    prompt = make_prompt(70, seed=4)
    expected = reference_greedy(key_blocks, prompt, 12)
    plain = "baton_engine.attention.torch_key_blocks.key_block_scores_reference"

    def tokens(change: Any) -> list[int]:
        from baton_kernels.reference.key_blocks import key_block_scores_reference

        monkeypatch.setattr(plain, lambda *given: change(key_block_scores_reference(*given)))
        return generate(make_engine(key_blocks), [make_request(0, prompt, 12)]).tokens[0, 0]

    assert tokens(lambda scores: scores) == expected
    # The last blocks instead of those with the highest scores; the blocks of another head; no block of its own.
    assert tokens(lambda scores: torch.where(scores.isfinite(), 0.0, scores).flip(-1).cumsum(-1).flip(-1)) != expected
    assert tokens(lambda scores: scores.flip(-2)) != expected
    assert tokens(lambda scores: scores.nan_to_num(posinf=-1e30, neginf=float("-inf"))) != expected


def test_fp8_is_refused(key_blocks: Path) -> None:
    with pytest.raises(ConfigError, match="the cache of MiniMaxM3VLForCausalLM also holds index keys"):
        make_engine(key_blocks, kv_cache_dtype="fp8")


_SPARSE = [0, 0, 0, *[1] * 57]
# The text part of MiniMax-M3, with the names of its authors.
M3: dict[str, Any] = {
    "architectures": ["MiniMaxM3VLForCausalLM"], "dense_intermediate_size": 12288, "head_dim": 128,
    "hidden_act": "swigluoai", "hidden_size": 6144, "intermediate_size": 3072, "max_position_embeddings": 524288,
    "model_type": "minimax_m3_vl_text", "moe_layer_freq": _SPARSE, "n_shared_experts": 1, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 60, "num_key_value_heads": 4, "num_local_experts": 128,
    "partial_rotary_factor": 0.5, "qk_norm_type": "per_head", "rms_norm_eps": 1e-6, "rope_theta": 5000000,
    "rotary_dim": 64, "routed_scaling_factor": 2.0, "scoring_func": "sigmoid", "shared_intermediate_size": 3072,
    "sparse_attention_config": {
        "sparse_attention_freq": _SPARSE, "sparse_block_size": 128, "sparse_disable_index_value": _SPARSE,
        "sparse_index_dim": 128, "sparse_init_block": 0, "sparse_local_block": 1, "sparse_num_index_heads": 4,
        "sparse_score_type": "max", "sparse_topk_blocks": 16, "use_sparse_attention": True,
    },
    "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "use_gemma_norm": True, "use_qk_norm": True, "use_routing_bias": True,
    "vocab_size": 200064,
}  # fmt: skip


def parse(fields: dict[str, Any]) -> MiniMaxM3Config:
    config = parse_model_config(fields)
    assert isinstance(config, MiniMaxM3Config)
    return config


def test_the_published_model() -> None:
    config = parse(M3)
    spec = KeyBlockSpec(scale=128**-0.5, selected_blocks=16, block_keys=128, local_blocks=1)
    assert config.attention == (*[AttentionSpec(scale=128**-0.5)] * 3, *[spec] * 57)
    assert config.selecting == list(range(3, 60))
    assert config.dense_layers == {0, 1, 2}
    assert config.rope.rotary_dim(config.head_dim) == 64
    assert config.attention_lengths(100_000) == [2048, 100_000]
    assert config.attention_lengths(1024) == [1024]
    assert config.kv_layout("bfloat16").layer_bytes == 3 * 4 * 128 * 2
    # A query, the keys, values and results of its heads, and the queries and the key of the indexer.
    attention = 6144 * 128 * (64 + 4 + 4 + 64)
    experts = 57 * (6144 * 128 + 3 * 6144 * 3072 * 129) + 3 * 3 * 6144 * 12288
    total = config.num_layers * config.layer_weights_read(1e9)
    assert total == pytest.approx(60 * attention + 57 * 6144 * 128 * 5 + experts, rel=1e-6)
    # A field that is absent has the default of transformers, which is the published value.
    names = ("architectures", "moe_layer_freq", "partial_rotary_factor", "hidden_act")
    fewer = {name: M3[name] for name in names}
    freq = {"sparse_attention_freq": _SPARSE}
    assert parse({**fewer, "sparse_attention_config": freq}) == config
    # transformers' own names.
    saved = transformers.MiniMaxM3VLTextConfig(**{**M3, "architectures": None}).to_dict()
    assert parse({**saved, "architectures": M3["architectures"]}) == msgspec.structs.replace(
        config, eos_token_ids=(200020,)
    )
    whole = {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "text_config": M3}
    assert parse(whole) == msgspec.structs.replace(config, architecture="MiniMaxM3SparseForConditionalGeneration")


def test_a_model_without_indexers() -> None:
    config = parse({**M3, "sparse_attention_config": None})
    assert not config.selecting
    assert [plane.name for plane in config.kv_layout("bfloat16").planes] == ["key", "value"]
    assert config.attention_lengths(100_000) == [100_000]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"layer_types": ["sliding_attention"] * 60}, "layer_types in config.json .* minimax_m3_sparse"),
        ({"moe_layer_freq": [0, 1]}, "moe_layer_freq in config.json has 2 numbers; it must have one for each of 60"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"rotary_dim": 128}, "rotary_dim in config.json is 128, but by partial_rotary_factor 64 of the 128"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"swiglu_limit": 0}, "swiglu_limit in config.json is 0"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"qk_norm_type": "per_layer"}, "qk_norm_type 'per_layer'"),
        ({"use_gemma_norm": False}, "use_gemma_norm False"),
        ({"n_shared_experts": 2}, "n_shared_experts 2"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok .* at most 128"),
        ({"sparse": {"sparse_attention_freq": [1]}}, "sparse_attention_freq in config.json has 1 numbers"),
        ({"sparse": {"sparse_num_index_heads": 8}}, "index_n_heads in config.json is 8; Baton serves 4"),
        ({"sparse": {"sparse_index_dim": 64}}, "index_head_dim in config.json is 64; Baton serves 128, the head_dim"),
        ({"sparse": {"sparse_local_block": 0}}, "index_local_blocks .* at least 1"),
        ({"sparse": {"sparse_local_block": 17}}, "index_local_blocks .* at most 16"),
        ({"sparse": {"sparse_topk_blocks": 0}}, "index_topk_blocks .* at least 1"),
        ({"sparse": {"sparse_block_size": "128"}}, "index_block_size .* integer"),
        ({"sparse": {"sparse_init_block": 1}}, "sparse_init_block 1"),
        ({"sparse": {"sparse_score_type": "mean"}}, "sparse_score_type 'mean'"),
        ({"sparse": {"use_sparse_attention": False}}, "use_sparse_attention False"),
        ({"sparse": {"sparse_disable_index_value": [0] * 60}}, "sparse_disable_index_value"),
    ],
)
def test_what_cannot_be_served_is_said(given: dict[str, Any], words: str) -> None:
    own = {**M3["sparse_attention_config"], **given.get("sparse", {})}
    with pytest.raises(ConfigError, match=words):
        parse_model_config({**M3, **given, "sparse_attention_config": own})
