"""Facts of a model folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_cli.model_facts import ModelFacts, model_facts
from baton_engine.config import ConfigError
from baton_engine.memory_estimate import Card, fit
from baton_engine.models.registry import parse_model_config
from tests.conftest import MakeModel
from tests.models import reference_model

GIB = 1 << 30
L4 = Card("l4", 22 * GIB)


@pytest.fixture
def folder(tiny_model: MakeModel, tmp_path: Path) -> Path:
    """A model to be changed."""
    return Path(shutil.copytree(tiny_model("llama", tie_word_embeddings=False), tmp_path / "model"))


def facts_of(folder: Path, dtype: str = "auto", *cards: Card) -> ModelFacts:
    return model_facts(folder, dtype, cards)


def edit(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("family", "overrides"), [("llama", {"tie_word_embeddings": True}), ("gpt2", {}), ("gemma3", {})]
)
def test_parameters_are_those_that_transformers_counts(
    tiny_model: MakeModel, family: str, overrides: dict[str, Any]
) -> None:
    folder = tiny_model(family, **overrides)
    served = facts_of(folder).served
    assert served is not None
    model = reference_model(folder)
    assert served.parameters == served.active == sum(p.numel() for p in model.parameters())
    assert served.weights_bytes == 4 * served.parameters
    half = facts_of(folder, "bfloat16").served
    assert half is not None
    # Gemma keeps its norms in float32.
    exact = sum(p.numel() * (4 if family == "gemma3" and p.dim() == 1 else 2) for p in model.parameters())
    assert half.weights_bytes == exact


def test_a_token_uses_a_part_of_the_experts(tiny_model: MakeModel) -> None:
    folder = tiny_model("qwen2_moe", mlp_only_layers=[0], num_hidden_layers=3)
    served = facts_of(folder).served
    assert served is not None
    experts = {name: p.numel() for name, p in reference_model(folder).named_parameters() if ".experts." in name}
    assert served.parameters == sum(p.numel() for p in reference_model(folder).parameters())
    # Two of six experts; layer 0 has none.
    assert served.active == served.parameters - sum(experts.values()) * 4 // 6
    assert facts_of(folder).not_served is None


def test_facts_of_a_folder(folder: Path) -> None:
    (folder / "LICENSE.txt").write_text("\n\n   Apache License  \nVersion 2.0\n")
    (folder / "README.md").write_text("---\nlicense: other\nlicense_name: 'tiny'\ntags:\n- a\n---\nlicense: no\n")
    facts = facts_of(folder)
    tensors = load_file(folder / "model.safetensors")
    assert facts.architecture == "LlamaForCausalLM"
    assert facts.not_served is None
    assert (facts.layers, facts.hidden_size, facts.heads, facts.kv_heads, facts.head_dim) == (2, 64, 4, 2, 16)
    assert (facts.vocabulary, facts.context) == (512, 512)
    assert facts.files is not None
    assert facts.files.bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert facts.files.dtypes == {"F32": facts.files.elements}
    assert facts.licence.file == "LICENSE.txt"
    assert facts.licence.first_line == "Apache License"
    assert facts.licence.declared == {"license": "other", "license_name": "tiny"}
    assert facts.chat_template == "chat_template.jinja"
    assert facts.served is not None
    assert facts.served.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4


def test_a_folder_without_weights_licence_or_template_has_facts_too(folder: Path) -> None:
    before = facts_of(folder)
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    facts = facts_of(folder)
    assert facts.files is facts.chat_template is facts.licence.file is facts.licence.first_line is None
    assert facts.licence.declared == {}
    assert facts.served == before.served
    (folder / "pytorch_model.bin").touch()
    assert facts_of(folder).not_served == "weights in pickle files are not read"


def test_windows_hold_only_what_they_see(tiny_model: MakeModel) -> None:
    served = facts_of(tiny_model("gemma3"), "bfloat16").served
    assert served is not None
    layer = 2 * 2 * 32 * 2  # bytes: keys and values of two heads
    assert served.windows == {19: 2}
    assert served.kv_bytes_per_token == layer
    assert served.kv_window_bytes == 2 * 19 * layer


def test_states_are_counted_apart_from_windows(tiny_model: MakeModel) -> None:
    served = facts_of(tiny_model("qwen3_next"), "bfloat16").served
    assert served is not None
    layer = 2 * 2 * 16 * 2  # bytes: keys and values of two heads
    assert (served.windows, served.kv_window_bytes, served.states) == ({}, 0, 2)
    assert served.kv_bytes_per_token == 2 * layer
    # The plane of values has a state of 8 x 8 numbers and four inputs of 32 channels, with four bytes each.
    assert served.kv_state_bytes == 2 * layer * (4 * (64 + 128) // (16 * 2))


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip


def test_what_fits_is_what_the_engine_would_have_room_for() -> None:
    model = parse_model_config(LLAMA_8B)
    weights = 16_060_522_496
    large = fit(model, weights, torch.bfloat16, Card("large", 80 * GIB), 4096)
    assert large.weights_fit
    assert large.problem is None
    assert large.kv_tokens == large.kv_bytes // (32 * 2 * 8 * 128 * 2)
    # Weights, a step of 8,192 tokens, draws of 256 sequences, graphs and libraries: about 18 GiB of 92 %.
    assert 0.92 * 80 - 19 < large.kv_bytes / GIB < 0.92 * 80 - 17
    assert large.full == large.kv_tokens // 131072 == 3
    assert large.brief == large.kv_tokens // 4096
    in_fp8 = fit(model, weights, torch.bfloat16, Card("large", 80 * GIB), 4096, "fp8")
    assert in_fp8.kv_tokens == pytest.approx(2 * large.kv_tokens, rel=1e-3)
    assert in_fp8.full == 6
    small = fit(model, weights, torch.bfloat16, L4, 4096)
    assert small.weights_fit
    assert (small.full, small.longest) == (0, small.kv_tokens)
    assert small.problem is not None
    assert f"--max-model-len {small.longest}" in small.problem
    none = fit(model, weights, torch.bfloat16, Card("12GiB", 12 * GIB), 4096)
    assert not none.weights_fit
    assert none.kv_tokens == none.brief == 0
    assert "2.96 GiB are missing" in str(none.problem)


def test_what_is_not_served_comes_with_the_reason(folder: Path) -> None:
    edit(folder, architectures=["LlamaForTokenClassification"], num_attention_heads="many")
    facts = facts_of(folder, "auto", L4)
    assert "unknown architecture LlamaForTokenClassification, whose nearest relative" in str(facts.not_served)
    assert facts.served is None
    assert (facts.layers, facts.heads, facts.context) == (2, None, 512)
    assert facts.files is not None


def test_a_tensor_that_the_model_lacks_is_a_reason(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    facts = facts_of(folder)
    assert "no tensor 'model.layers.1.mlp.up_proj.weight'" in str(facts.not_served)
    assert facts.served is not None


def test_damaged_folders_are_errors_that_name_the_file(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a whole safetensors file"):
        facts_of(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json is not a JSON object"):
        facts_of(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match="is not a model folder"):
        facts_of(folder)
