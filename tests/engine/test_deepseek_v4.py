"""DeepSeek-V4 as its authors publish it: by other names than transformers has, in FP8 with experts in MXFP4."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton_engine.config import ConfigError
from tests.conftest import MakeModel
from tests.models import reference_choices
from tests.packing import Tensors, fp8, mxfp4

from .fake_cuda import pretend
from .test_hy_v4 import PROMPT, change, tokens

# Widths that are whole tiles and groups.
SIZES: dict[str, Any] = {
    "head_dim": 32, "index_head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 32, "o_lora_rank": 32,
    "moe_intermediate_size": 64, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
}  # fmt: skip
# Those of the config that transformers does not write.
PUBLISHED: dict[str, Any] = {
    "compress_ratios": [0, 4, 128, 0], "layer_types": None, "num_hash_layers": 1, "mlp_layer_types": None,
    "rope_parameters": None, "qk_rope_head_dim": 8, "partial_rotary_factor": None, "expert_dtype": "fp4",
}  # fmt: skip
FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
    "weight_block_size": [32, 32],
}  # fmt: skip


def published_name(name: str) -> str:
    for own, other in (("model.embed_tokens", "embed"), ("model.hc_head.hc_", "hc_head_"), ("model.", "")):
        name = name.replace(own, other)
    return re.sub(r"\.attn\.norm\.", ".attn.kv_norm.", name)


# What transformers writes, and what it calls the same tensors in memory.
INTERNAL = (
    (".attn.indexer.compressor.", ".attn.indexer."), (".attn.indexer.", ".self_attn.compressor.indexer."),
    (".attn.", ".self_attn."), (".ffn.", ".mlp."), (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."), ("hc_attn_", "attn_hc."), ("hc_ffn_", "ffn_hc."),
    (".attn_sink", ".sinks"), (".norm.", ".kv_norm."), (".ape", ".position_bias"), (".wq_a.", ".q_a_proj."),
    (".wq_b.", ".q_b_proj."), (".wkv.", ".kv_proj."), (".wgate.", ".gate_proj."), (".wo_a.", ".o_a_proj."),
    (".wo_b.", ".o_b_proj."), (".q_norm.", ".q_a_norm."), (".gate.bias", ".gate.e_score_correction_bias"),
    ("indexer.weights_proj", "indexer.scorer.weights_proj"), (".w1.", ".gate_proj."), (".w2.", ".down_proj."),
    (".w3.", ".up_proj."), ("model.kv_norm.", "model.norm."), ("head.weight", "lm_head.weight"),
)  # fmt: skip


def internal_name(name: str) -> str:
    for own, other in INTERNAL:
        name = name.replace(own, other)
    return name


def is_expert(name: str) -> bool:
    return bool(re.search(r"experts\.\d+\.w[123]\.weight$", name))


def is_tiled(name: str) -> bool:
    return bool(re.search(r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.weight$|shared_experts\.\w+\.weight$", name))


def code(name: str, tensor: torch.Tensor) -> Tensors:
    name = published_name(name)
    scale = name.replace(".weight", ".scale")
    if is_expert(name):
        coded = mxfp4(tensor)
        return {name: coded["blocks"].flatten(1).view(torch.int8), scale: coded["scales"].view(torch.float8_e8m0fnu)}
    if is_tiled(name):
        coded = fp8(tensor, (32, 32), "scale", exponents=True)
        return {name: coded["weight"], scale: coded["scale"]}
    return {name: tensor}


def plain(name: str, tensor: torch.Tensor) -> Tensors:
    return {published_name(name): tensor}


def numbers(name: str, tensor: torch.Tensor) -> Tensors:
    if is_expert(name):
        return {name: mxfp4(tensor)["numbers"]}
    return {name: fp8(tensor, (32, 32), "scale", exponents=True)["numbers"] if is_tiled(name) else tensor}


@pytest.mark.parametrize("rename", [published_name, internal_name])
def test_other_names(tiny_model: MakeModel, tmp_path: Path, rename: Any) -> None:
    base = tiny_model("deepseek_v4", **SIZES)
    folder = change(base, tmp_path / "model", lambda name, tensor: {rename(name): tensor})
    names = set(load_file(folder / "model.safetensors"))
    written = {"layers.1.attn.kv_norm.weight", "embed.weight", "hc_head_fn", "norm.weight"}
    if rename is internal_name:
        written = {"model.layers.1.self_attn.kv_norm.weight", "lm_head.weight", "model.layers.2.attn_hc.fn"}
        assert "model.layers.1.self_attn.compressor.indexer.position_bias" in names
    assert written <= names
    outputs = tokens(folder)
    assert outputs == reference_choices(base, PROMPT, outputs)


def test_experts_in_mxfp4(tiny_model: MakeModel, tmp_path: Path) -> None:
    base = tiny_model("deepseek_v4", **SIZES)
    published = {**PUBLISHED, "compress_rates": {"heavily_compressed_attention": 16}, "quantization_config": FP8}
    experts = change(base, tmp_path / "experts", lambda *each: code(*each) if is_expert(each[0]) else plain(*each))
    folder = change(experts, tmp_path / "coded", lambda *each: dict([each]), **published)
    outputs = tokens(folder)
    same = change(base, tmp_path / "numbers", lambda *each: numbers(*each) if is_expert(each[0]) else dict([each]))
    assert outputs == tokens(same)
    assert outputs != tokens(base)


def test_fp8_beside_experts_in_mxfp4(tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_model("deepseek_v4", **SIZES)
    folder = change(base, tmp_path / "coded", code, quantization_config=FP8)
    outputs = tokens(folder)
    # The inputs of products with codes in FP8 are rounded, too, so that other tokens follow at some time.
    assert outputs[:3] == tokens(change(base, tmp_path / "numbers", numbers))[:3]
    pretend(monkeypatch)
    assert tokens(folder, enforce_eager=True) == outputs


@pytest.mark.parametrize("wrong", [8, -1])
def test_a_table_that_names_no_expert_is_refused(tiny_model: MakeModel, tmp_path: Path, wrong: int) -> None:
    def spoil(name: str, tensor: torch.Tensor) -> Tensors:
        if name.endswith("tid2eid"):
            tensor[7, 1] = wrong
        return {name: tensor}

    folder = change(tiny_model("deepseek_v4", **SIZES), tmp_path / "model", spoil)
    with pytest.raises(ConfigError, match=rf"mlp\.gate\.tid2eid names the expert {wrong}; the experts .* are 0 to 7"):
        tokens(folder)


def test_tables_of_32_bits(tiny_model: MakeModel, tmp_path: Path) -> None:
    base = tiny_model("deepseek_v4", **SIZES)
    folder = change(base, tmp_path / "model", lambda name, x: {name: x.int() if name.endswith("tid2eid") else x})
    assert tokens(folder) == tokens(base)
