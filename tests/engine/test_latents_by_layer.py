"""Latent attention whose sizes and windows differ by layer, and dots3-note as its authors publish it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.attention import triton_latent
from baton_engine.config import ConfigError
from baton_engine.models.registry import parse_model_config
from tests.conftest import MakeModel
from tests.models import reference_choices, reference_greedy

from .fake_cuda import pretend
from .handover import Pair
from .harness import assert_idle, generate, make_engine, make_prompt, make_request


def test_kernels_give_the_tokens_of_the_reference(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs the kernels of the layer with a window, for chunks and for decodes beyond it."""
    names = ("plan_parts", "latent_decode", "absorb_queries", "values_of", "gather_latents", "latent_prefill")
    kernels = {name: getattr(triton_latent, name) for name in names}
    pretend(monkeypatch)
    used: set[str] = set()

    def noted(name: str) -> Any:
        return lambda *given: (used.add(name), kernels[name](*given))[1]  # type: ignore[func-returns-value]

    for name in names:
        monkeypatch.setattr(triton_latent, name, noted(name))
    folder = tiny_model(
        "dots3_note_text", num_hidden_layers=2, layer_types=["indexed_attention", "sliding_attention"],
        swa_num_attention_heads=2, swa_num_key_value_heads=2,
    )  # fmt: skip
    engine = make_engine(
        folder, block_size=4, max_num_batched_tokens=24, max_num_seqs=1, max_model_len=48, num_blocks=64,
        enforce_eager=True, chunk_ms=0.0,
    )  # fmt: skip
    prompt = make_prompt(33, seed=3)
    transcript = generate(engine, [make_request(0, prompt, 2)])
    assert transcript.tokens[0, 0] == reference_greedy(folder, prompt, 2)
    assert used == set(names)


def test_how_layers_lie_in_the_cache(latents_by_layer: Path) -> None:
    layout = make_engine(latents_by_layer).runner.cache.layout
    assert [plane.dim for plane in layout.planes] == [36 + 8, 12]
    assert layout.heads == ((1, 24 + 8, 12), (1, 36 + 8, 12)) * 2
    assert [(group.window, group.layers) for group in layout.groups] == [(None, (0, 2)), (19, (1, 3))]


@pytest.mark.parametrize(("prefill_block", "decode_block"), [(16, 16), (24, 10)])
def test_latents_of_both_sizes_are_handed_over(latents_by_layer: Path, prefill_block: int, decode_block: int) -> None:
    prefill = make_engine(latents_by_layer, max_num_batched_tokens=24, block_size=prefill_block)
    pair = Pair(prefill, make_engine(latents_by_layer, block_size=decode_block), seed=decode_block)
    prompts = [make_prompt(length, seed=3) for length in (1, 16, 90)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 16))
    transcript = pair.run()
    for id, prompt in enumerate(prompts):
        assert transcript.tokens[id, 0] == reference_greedy(latents_by_layer, prompt, 16)
    for engine in (pair.prefill, pair.decode):
        assert_idle(engine)


def test_latents_of_other_sizes_have_another_fingerprint(tiny_model: MakeModel, latents_by_layer: Path) -> None:
    facts = [
        make_engine(folder).model.fingerprint_facts()
        for folder in (
            latents_by_layer,
            tiny_model("dots3_note_text", swa_kv_lora_rank=32),
            tiny_model("dots3_note_text", sliding_window=20),
            tiny_model("dots3_note_text", rope="linear"),
        )
    ]
    assert all(other != facts[0] for other in facts[1:])


# Fields of the authors' config.json, in which text fields are beside those of other parts.
AUTHORS: dict[str, Any] = {
    "architectures": ["Dots3NoteForCausalLM"], "model_type": "dots3_note", "use_dsa": True, "use_sliding_window": True,
    "layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": None, "sliding_window_size": 19,
    "swa_num_attention_heads": 8, "swa_num_key_value_heads": 8, "swa_q_lora_rank": 28, "swa_kv_lora_rank": 36,
    "swa_qk_nope_head_dim": 12, "swa_qk_rope_head_dim": 8, "swa_v_head_dim": 16, "swa_head_dim": 20,
    "rope_theta": 1e4, "swa_rope_theta": 500.0, "rope_parameters": None, "rope_scaling": None, "per_layer_config": None,
    "mlp_layer_types": None, "first_k_dense_replace": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "moe_shared_expert_intermediate_size": 56, "shared_experts_intermediate_size": None,
    "attention_gate_type": "headwise", "swa_attention_gate_type": "headwise", "apply_mla_qkv_lora_rescale": True,
    "vision_config": {"embed_dim": 32}, "audio_config": {"encoder_type": "dots"}, "image_token_id": 500,
}  # fmt: skip


def test_the_config_and_tensors_of_the_authors(latents_by_layer: Path, tmp_path: Path) -> None:
    """With a layer for multi-token prediction and other parts, which are not read."""
    shutil.copytree(latents_by_layer, tmp_path / "model")
    fields = json.loads((latents_by_layer / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**fields, **AUTHORS}))
    more = ("model.layers.4.eh_proj.weight", "model.mtp.embed_tokens.weight", "vision_encoder.norm.weight")
    tensors = load_file(latents_by_layer / "model.safetensors")
    save_file({**tensors, **{name: torch.zeros(4) for name in more}}, tmp_path / "model" / "model.safetensors")
    prompt = make_prompt(60, seed=4)
    tokens = generate(make_engine(tmp_path / "model"), [make_request(0, prompt, 16)]).tokens[0, 0]
    assert tokens == reference_choices(latents_by_layer, prompt, tokens)


def test_the_names_within_transformers(tiny_model: MakeModel, tmp_path: Path) -> None:
    """transformers writes the names of the authors, but reads both."""
    folder, requests = tiny_model("dots3_note"), [make_request(0, make_prompt(30), 12)]
    shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    inside = {name: f"model.language_model.{name[6:]}" for name in tensors if name.startswith("model.")}
    assert inside["model.norm.weight"] == "model.language_model.norm.weight"
    moved = {inside.get(name, name): tensor for name, tensor in tensors.items()}
    save_file(moved, tmp_path / "model" / "model.safetensors")
    outputs = [generate(make_engine(each), requests).tokens for each in (folder, tmp_path / "model")]
    assert outputs[0] == outputs[1]


def test_all_layers_of_one_kind(tiny_model: MakeModel) -> None:
    for kind in ("sliding_attention", "indexed_attention"):
        folder, prompt = tiny_model("dots3_note_text", layer_types=[kind] * 4), make_prompt(50, seed=4)
        tokens = generate(make_engine(folder), [make_request(0, prompt, 12)]).tokens[0, 0]
        assert tokens == reference_greedy(folder, prompt, 12)


def test_layers_that_attend_to_all_tokens(tiny_model: MakeModel) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    folder = tiny_model(
        "dots3_note_text", use_dsa=False, layer_types=["full_attention", "sliding_attention"] * 2,
        rope_parameters={"full_attention": rope, "sliding_attention": rope},
    )  # fmt: skip
    prompt = make_prompt(50, seed=4)
    tokens = generate(make_engine(folder), [make_request(0, prompt, 12)]).tokens[0, 0]
    assert tokens == reference_greedy(folder, prompt, 12)


PUBLISHED: dict[str, Any] = {
    **AUTHORS, "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 46,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1024, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 524288,
    "rms_norm_eps": 1e-5, "rope_theta": 8e7, "swa_rope_theta": 5e4, "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 64, "swa_q_lora_rank": 1024, "swa_kv_lora_rank": 1024, "swa_qk_nope_head_dim": 192,
    "swa_qk_rope_head_dim": 64, "swa_head_dim": None, "sliding_window_size": 513, "index_n_heads": 64,
    "index_head_dim": 128, "index_topk": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "moe_intermediate_size": 1536, "moe_shared_expert_intermediate_size": None, "num_experts_per_tok": 8,
    "layer_types": [
        "full_attention" if layer < 2 or layer % 4 == 1 else "sliding_attention" for layer in range(46)
    ],
    "swa_v_head_dim": 128, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip


def test_the_published_config() -> None:
    config: Any = parse_model_config(PUBLISHED)
    full, window = config.kinds[0], config.kinds[2]
    assert (full.heads, full.latent.latent_dim, full.latent.selected, full.rope.theta) == (128, 576, 2048, 8e7)
    assert (window.heads, window.latent.latent_dim, window.latent.window) == (64, 1088, 513)
    assert (window.rope.theta, window.latent.query_dim, window.low_rank) == (5e4, 256, 1024)
    assert sum(window is None for window in config.sliding_windows) == 13
    assert config.dense_layers == {0}
    # Its authors count 280 billion parameters, without the layer that predicts further tokens.
    total = config.num_layers * config.layer_weights_read(1e6) + 2 * config.vocab_size * config.hidden_size
    assert total == pytest.approx(280e9, rel=0.02)
    assert config.kv_layout("bfloat16").layer_bytes == 2 * (1088 + 128)
    assert config.query_shapes == ((128, 192), (64, 256))
    # Fields that are absent have the defaults of transformers, which are those of this model but for the window.
    plain: Any = parse_model_config({"architectures": ["Dots3NoteForCausalLM"]})
    assert plain.kinds[0] == full
    assert plain.kinds[2].latent.window == 512
    assert [kind.latent.window is None for kind in plain.kinds] == [window is None for window in config.sliding_windows]
    assert (plain.shared_size, plain.routing, plain.dense_layers) == (1536, config.routing, {0})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"swa_kv_lora_rank": 0}, "swa_kv_lora_rank in config.json is 0; it must be an integer of at least 1"),
        ({"swa_kv_lora_rank": 33}, "swa_kv_lora_rank in config.json is 33; it must be even"),
        ({"swa_num_key_value_heads": 8}, "swa_num_key_value_heads in config.json is 8; it must be 64"),
        ({"num_key_value_heads": 1}, "num_key_value_heads in config.json is 1; it must be 128"),
        ({"swa_qk_rope_head_dim": 32}, "swa_head_dim in config.json is 256; it must be 224"),
        ({"swa_qk_rope_head_dim": 32, "swa_head_dim": 224}, "swa_qk_rope_head_dim in config.json is 32; it must be 64"),
        ({"swa_qk_nope_head_dim": 128, "swa_head_dim": 192, "swa_v_head_dim": 64}, "v_head_dim in config.json is 128"),
        ({"swa_head_dim": 100}, "config.json has no 'swa_qk_rope_head_dim'"),
        ({"layer_types": ["linear_attention"] * 46}, "layer_types in config.json is"),
        ({"sliding_window": "wide"}, "sliding_window in config.json is 'wide'"),
        ({"moe_layer_freq": [1, 2]}, "moe_layer_freq in config.json is \\[1, 2\\]; it must be 0 or 1"),
        ({"moe_layer_freq": []}, "moe_layer_freq in config.json is \\[\\]; it must be 0 or 1"),
        ({"n_shared_experts": 0}, "n_shared_experts in config.json is 0"),
        ({"n_group": 3}, "n_group in config.json is 3"),
        ({"index_head_dim": 32}, "index_head_dim in config.json is 32"),
        ({"attention_gate_type": "elementwise"}, "attention_gate_type 'elementwise' in config.json is not served"),
        ({"apply_mla_qkv_lora_rescale": False}, "apply_mla_qkv_lora_rescale False in config.json is not served"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope type 'proportional' in config.json is not served"),
        ({"rope_parameters": {"sliding_attention": 3}}, "sliding_attention in config.json is 3; it must be an object"),
        ({"rope_parameters": [1]}, "rope_parameters in config.json is"),
        ({"per_layer_config": [1]}, "per_layer_config in config.json is"),
        ({"per_layer_config": {"46": {}}}, "per_layer_config in config.json has '46'"),
        ({"per_layer_config": {"2": 3}}, "2 in config.json is 3; it must be an object"),
        (
            {"per_layer_config": {"2": {"hidden_size": 3}}},
            "per_layer_config.2.hidden_size in config.json is not served",
        ),
        ({"per_layer_config": {"2": {"q_lora_rank": "a"}}}, "per_layer_config.2.q_lora_rank in config.json is 'a'"),
    ],
)
def test_configs_that_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_model_config({"architectures": ["Dots3NoteForCausalLM"], **fields})
