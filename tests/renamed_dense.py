"""Folders of dense families that transformers does not have, written from models of its families that compute the same.

Each family has other names of config fields and of tensors than the reference, the model that transformers computes.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .models import NORMED_LAYERS

Fields = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def _nothing(fields: Fields) -> Fields:
    return {}


@dataclass(frozen=True)
class Renamed:
    """A family and its reference.

    architecture: the family's. reference: the family of transformers. overrides: fields that the reference needs, to
    compute the same. fields: gives the family's own fields of config.json, None for one that it does not have, from the
    reference's. names: parts of the reference's tensor names with the family's in their place. finish: changes the
    renamed tensors.
    """

    architecture: str
    reference: str
    overrides: Fields
    fields: Callable[[Fields], Fields] = _nothing
    names: tuple[tuple[str, str], ...] = ()
    finish: Callable[[Fields, Tensors], Tensors] = lambda fields, tensors: tensors

    def __call__(self, folder: Path, make_reference: Callable[..., Path], overrides: Fields) -> None:
        self.write(folder, make_reference(self.reference, **{**self.overrides, **overrides}))

    def write(self, folder: Path, reference: Path) -> None:
        """Write config.json and the weights of the reference, a folder of transformers, as the family has them."""
        given = json.loads((reference / "config.json").read_text())
        theirs = {"model_type", "architectures", "rope_parameters", "head_dim", "transformers_version"}
        kept = {name: value for name, value in given.items() if name not in theirs}
        fields = {**kept, **_rope(given), "architectures": [self.architecture], **self.fields(given)}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({k: each for k, each in fields.items() if each is not None}))
        tensors = load_file(reference / "model.safetensors")
        renamed = {self._renamed(name): tensor for name, tensor in tensors.items()}
        save_file(self.finish(given, renamed), folder / "model.safetensors")

    def _renamed(self, name: str) -> str:
        for old, new in self.names:
            name = name.replace(old, new)
        return name


def _rope(given: Fields) -> Fields:
    """Return the fields of the rotation in their older form."""
    rope = dict(given["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope["rope_type"]
    rope.pop("partial_rotary_factor", None)
    return {"rope_theta": theta, "rope_scaling": None if kind == "default" else rope}


def _biases(given: Fields) -> Fields:
    return {"bias": given["attention_bias"], "attention_bias": None, "mlp_bias": None}


def _internlm2(given: Fields) -> Fields:
    rope = given["rope_parameters"]
    scaling = {"type": "dynamic", "factor": 2.0}
    if rope["rope_type"] == "linear":
        scaling = {"type": "linear", "factor": rope["factor"]}
    return {**_biases(given), "model_type": "internlm2", "rope_scaling": scaling}


def _by_key_value_head(given: Fields, tensors: Tensors) -> Tensors:
    """Join queries, keys and values: for each key-value head its queries, its key and its value."""
    joined = dict(tensors)
    kv_heads, dim = given["num_key_value_heads"], given["hidden_size"] // given["num_attention_heads"]
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [joined.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        heads = [part.view(kv_heads, -1, dim, *part.shape[1:]) for part in parts]
        joined[name.replace(".q_proj.", ".wqkv.")] = torch.cat(heads, dim=1).flatten(0, 2).contiguous()
    return joined


def _internlm3(given: Fields) -> Fields:
    bias = given.get("attention_bias", False)
    scaling = {"rope_type": "dynamic", "factor": 6.0}
    if given["rope_parameters"]["rope_type"] != "default":
        scaling = _rope(given)["rope_scaling"]
    return {
        **dict.fromkeys(("attention_bias", "mlp_bias")),
        "model_type": "internlm3",
        "bias": bias,
        "qkv_bias": bias or given["model_type"] == "qwen2",
        "head_dim": given.get("head_dim"),
        "rope_scaling": scaling,
    }


def _internlm(given: Fields) -> Fields:
    rotary = {"base": given["rope_parameters"]["rope_theta"], "type": "dynamic"}
    absent = dict.fromkeys(("rope_theta", "rope_scaling", "num_key_value_heads"))
    return {**_biases(given), **absent, "model_type": "internlm", "rotary": rotary}


def _exaone(given: Fields) -> Fields:
    absent = ("num_hidden_layers", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias")
    return {
        **dict.fromkeys(absent),
        "model_type": "exaone",
        "num_layers": given["num_hidden_layers"],
        "activation_function": given["hidden_act"],
        "layer_norm_epsilon": given["rms_norm_eps"],
    }


def _orion(given: Fields) -> Fields:
    absent = ("layer_norm_eps", "partial_rotary_factor", "qk_layernorm", "use_parallel_residual", "use_qkv_bias")
    return {**dict.fromkeys(absent), "model_type": "orion", "rms_norm_eps": given["layer_norm_eps"]}


def _telechat3(given: Fields) -> Fields:
    rope = _rope(given)["rope_scaling"]
    if rope is not None:
        rope = {**rope, "rope_type": "telechat3-yarn", "type": "telechat3-yarn", "attention_factor": None}
    return {"model_type": "telechat3", "head_dim": given["head_dim"], "rope_scaling": rope}


def _iquest_coder(given: Fields) -> Fields:
    own = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 0, "clip_qkv": None}
    return {"model_type": "iquestcoder", "head_dim": given["head_dim"], **own}


def _teleflm(given: Fields) -> Fields:
    absent = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    factors = {"use_mup": True, "input_mult": given["embedding_multiplier"], "output_mult": 2.0}
    return {**dict.fromkeys(absent), **factors, "mup_scale_factor": 2.0 * given["logits_scaling"]}


def _stablelm_epoch(given: Fields) -> Fields:
    absent = ("layer_norm_eps", "partial_rotary_factor", "qk_layernorm", "use_parallel_residual")
    return {**dict.fromkeys(absent), "norm_eps": given["layer_norm_eps"], "rope_pct": 0.25}


def _with_mtp_layers(given: Fields, tensors: Tensors) -> Tensors:
    """Add some of the tensors of MiMo's layer for multi-token prediction."""
    inside, hidden = "model.mtp_layers.0", given["hidden_size"]
    first = {name.replace("model.layers.0", inside): 2 * t for name, t in tensors.items() if "layers.0." in name}
    return {**tensors, **first, f"{inside}.input_proj.weight": torch.zeros(hidden, 2 * hidden)}


def _write_ouro(folder: Path, make_reference: Callable[..., Path], overrides: Fields) -> None:
    """The layers of the reference have the same weights again and again."""
    layers = overrides.get("num_hidden_layers", 2)
    own = {name: value for name, value in overrides.items() if name != "total_ut_steps"}
    passes = overrides.get("total_ut_steps", 3)
    reference = make_reference("hyperclovax", **{**own, "num_hidden_layers": layers * passes, "use_post_norm": True})
    tensors = load_file(reference / "model.safetensors")
    for number in range(layers, layers * passes):
        again, first = f"model.layers.{number}.", f"model.layers.{number % layers}."
        tensors |= {again + name.removeprefix(first): t.clone() for name, t in tensors.items() if first in name}
    save_file(tensors, reference / "model.safetensors", {"format": "pt"})
    (reference / NORMED_LAYERS).write_text(str(layers))
    _OURO(folder, lambda *_, **__: reference, {})
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"num_hidden_layers": layers, "total_ut_steps": passes, "early_exit_threshold": 1.0}
    (folder / "config.json").write_text(json.dumps(fields))
    kept = {name: t for name, t in load_file(folder / "model.safetensors").items() if _within(name, layers)}
    gate = {
        "model.early_exit_gate.weight": torch.ones(1, fields["hidden_size"]),
        "model.early_exit_gate.bias": torch.ones(1),
    }
    save_file({**kept, **gate}, folder / "model.safetensors")


def _within(name: str, layers: int) -> bool:
    return not name.startswith("model.layers.") or int(name.split(".")[2]) < layers


_OURO = Renamed(
    "OuroForCausalLM", "hyperclovax", {}, lambda given: {"model_type": "ouro", "head_dim": given["head_dim"]},
    (("post_norm1", "input_layernorm_2"), ("post_norm2", "post_attention_layernorm_2")),
)  # fmt: skip
_INTERNLM2 = (
    ("embed_tokens", "tok_embeddings"), ("lm_head", "output"), ("self_attn", "attention"), ("o_proj", "wo"),
    ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"), ("mlp", "feed_forward"),
    ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"),
)  # fmt: skip
_EXAONE = (
    ("model.", "transformer."), ("embed_tokens", "wte"), ("layers", "h"), ("transformer.norm", "transformer.ln_f"),
    ("self_attn", "attn.attention"), ("o_proj", "out_proj"), ("input_layernorm", "ln_1"),
    ("post_attention_layernorm", "ln_2"), ("gate_proj", "c_fc_0"), ("up_proj", "c_fc_1"), ("down_proj", "c_proj"),
)  # fmt: skip
_ONE_KEY_PER_HEAD = {"num_key_value_heads": 4}
RENAMED: dict[str, Callable[[Path, Callable[..., Path], Fields], None]] = {
    "ouro": _write_ouro,
    "internlm": Renamed("InternLMForCausalLM", "llama", _ONE_KEY_PER_HEAD, _internlm),
    "internlm2": Renamed("InternLM2ForCausalLM", "llama", {}, _internlm2, _INTERNLM2, _by_key_value_head),
    "internlm3": Renamed("InternLM3ForCausalLM", "llama", {"head_dim": 32}, _internlm3),
    "internlm3_qkv_bias": Renamed("InternLM3ForCausalLM", "qwen2", {}, _internlm3),
    "exaone": Renamed("ExaoneForCausalLM", "llama", {}, _exaone, _EXAONE),
    "orion": Renamed("OrionForCausalLM", "stablelm", {"partial_rotary_factor": 1.0}, _orion),
    "mimo": Renamed("MiMoForCausalLM", "qwen2", {}, finish=_with_mtp_layers),
    "xverse": Renamed("XverseForCausalLM", "llama", _ONE_KEY_PER_HEAD),
    "llama_first": Renamed("LLaMAForCausalLM", "llama", _ONE_KEY_PER_HEAD),
    "telechat3": Renamed("Telechat3ForCausalLM", "llama", {}, _telechat3),
    "iquest_coder": Renamed("IQuestCoderForCausalLM", "llama", {}, _iquest_coder),
    "teleflm": Renamed("TeleFLMForCausalLM", "granite", {"attention_multiplier": 0.25}, _teleflm),
    "stablelm_epoch": Renamed("StableLMEpochForCausalLM", "stablelm", {"partial_rotary_factor": 0.25}, _stablelm_epoch),
    "aquila": Renamed("AquilaForCausalLM", "llama", _ONE_KEY_PER_HEAD),
    "pangu_embedded": Renamed("PanguEmbeddedForCausalLM", "llama", {}, _biases),
}
