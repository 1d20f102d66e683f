"""Folders of models that read images and that transformers does not have, written from the models of its families that
compute the same as their text parts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from . import renamed_fused
from .renamed_dense import Fields, Renamed, Tensors

_VISION = {"vision_config": {"hidden_size": 32}}


def _head_size(given: Fields) -> Fields:
    return {name: given[name] for name in ("head_dim",) if name in given}


def _version(version: float | str | None) -> Callable[[Fields], Fields]:
    return lambda given: {**_VISION, **_head_size(given), "model_type": "minicpmv", "version": version}


def _within_llm(given: Fields, tensors: Tensors) -> Tensors:
    return {"vpm.embeddings.weight": torch.zeros(4), **{f"llm.{name}": tensor for name, tensor in tensors.items()}}


def _keye(given: Fields) -> Fields:
    scaling = {"mrope_section": [4, 2, 2], "rope_type": "default", "type": "default"}
    return {**_VISION, **_head_size(given), "model_type": "Keye", "rope_scaling": scaling}


def _phi3_v(given: Fields) -> Fields:
    rope = given["rope_parameters"]
    scaling = {name: rope[name] for name in ("short_factor", "long_factor") if name in rope}
    return {"model_type": "phi3_v", "img_processor": {}, "rope_scaling": {**scaling, "type": "su"} if scaling else None}


def _phi4_mm(given: Fields) -> Fields:
    return {"model_type": "phi4mm", "embd_layer": {}, "vision_lora": {"r": 8}, "partial_rotary_factor": 0.75}


def _with_adapters(given: Fields, tensors: Tensors) -> Tensors:
    """Put the weights of projections beside those of adapters, which text alone does not use."""
    moved = {name.replace("_proj.weight", "_proj.base_layer.weight"): tensor for name, tensor in tensors.items()}
    adapter = "model.layers.0.self_attn.qkv_proj.lora_A.speech.weight"
    return {"model.embed_tokens_extend.audio_embed.encoder": torch.zeros(4), adapter: torch.ones(8, 64), **moved}


def _images_beside(given: Fields, tensors: Tensors) -> Tensors:
    return {"model.vision_embed_tokens.sub_GN": torch.zeros(4), "visual.weight": torch.zeros(4), **tensors}


def _molmo(given: Fields) -> Fields:
    olmo = given["model_type"] == "olmo2"
    absent = ("hidden_act", "rms_norm_eps", "attention_bias", "sliding_window", "layer_types", "rope_scaling")
    return {
        **dict.fromkeys(absent),
        "model_type": "molmo",
        "attention_layer_norm": olmo,
        "norm_after": olmo,
        "qkv_bias": not olmo,
        "embedding_size": given["vocab_size"],
        "vocab_size": given["vocab_size"] - 7,
        "intermediate_size": 2 * given["intermediate_size"],
        "layer_norm_eps": given["rms_norm_eps"],
        "layer_norm_type": "rms",
        "weight_tying": False,
    }


def _molmo_tensors(given: Fields, tensors: Tensors) -> Tensors:
    """Join the projections, ups before gates, and add the embeddings of tokens of images."""
    joined = {"model.vision_backbone.pad_embed": torch.zeros(4), **tensors}
    joined["model.transformer.wte.new_embedding"] = torch.ones(128, given["hidden_size"])
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [joined.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        joined[name.replace(".q_proj.", ".att_proj.")] = torch.cat(parts)
    for name in [name for name in tensors if ".up_proj." in name]:
        parts = [joined.pop(name), joined.pop(name.replace(".up_proj.", ".gate_proj."))]
        joined[name.replace(".up_proj.", ".ff_proj.")] = torch.cat(parts)
    return joined


_MOLMO = (
    ("model.embed_tokens.weight", "model.transformer.wte.embedding"), ("model.layers", "model.transformer.blocks"),
    ("model.norm", "model.transformer.ln_f"), ("lm_head", "model.transformer.ff_out"), ("self_attn.", ""),
    ("mlp.", ""), ("o_proj", "attn_out"), ("down_proj", "ff_out"),
)  # fmt: skip
_BEFORE = (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ff_norm"))
_AFTER = (("post_attention_layernorm", "attn_norm"), ("post_feedforward_layernorm", "ff_norm"))


def _minicpm_v(folder: Path, make_reference: Callable[..., Path], overrides: dict[str, Any]) -> None:
    """Write MiniCPM-V 2.0, which has MiniCPM as its text part."""
    renamed_fused.RENAMED["minicpm"](folder, make_reference, overrides)
    fields = json.loads((folder / "config.json").read_text())
    own = {"architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": "2.0"}
    (folder / "config.json").write_text(json.dumps({**fields, **own}))
    tensors = load_file(folder / "model.safetensors")
    save_file(_within_llm(fields, tensors), folder / "model.safetensors")


RENAMED: dict[str, Callable[[Path, Callable[..., Path], dict[str, Any]], None]] = {
    "minicpm_v_2": _minicpm_v,
    "minicpm_v_2_5": Renamed("MiniCPMV", "llama", {}, _version(None), finish=_within_llm),
    "minicpm_v_2_6": Renamed("MiniCPMV", "qwen2", {}, _version(2.6), finish=_within_llm),
    "minicpm_v_4": Renamed("MiniCPMV", "llama", {}, _version("4.0"), finish=_within_llm),
    "minicpm_v_4_5": Renamed("MiniCPMV", "qwen3", {}, _version(4.5), finish=_within_llm),
    "minicpm_o_2_6": Renamed("MiniCPMO", "qwen2", {}, _version("2.6"), finish=_within_llm),
    "minicpm_o_4_5": Renamed("MiniCPMO", "qwen3", {}, _version("4.5"), finish=_within_llm),
    "keye": Renamed("KeyeForConditionalGeneration", "qwen3", {}, _keye, finish=_images_beside),
    "keye_1_5": Renamed("KeyeVL1_5ForConditionalGeneration", "qwen3", {}, _keye, finish=_images_beside),
    "phi3_v": Renamed("Phi3VForCausalLM", "phi3", {"pad_token_id": None}, _phi3_v, finish=_images_beside),
    "phi4_mm": Renamed("Phi4MMForCausalLM", "phi3", {"pad_token_id": None}, _phi4_mm, finish=_with_adapters),
    "molmo": Renamed("MolmoForCausalLM", "qwen2", {}, _molmo, (*_MOLMO, *_BEFORE), _molmo_tensors),
    "molmo_olmo": Renamed("MolmoForCausalLM", "olmo2", {}, _molmo, (*_AFTER, *_MOLMO), _molmo_tensors),
}
