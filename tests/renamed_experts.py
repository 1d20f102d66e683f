"""Folders of families that transformers does not have, with the weights of models that it has under other names.

The two give the same tokens: what one of them lacks is expressed by weights of the other. Qwen2-MoE multiplies the
results of its shared expert by a sigmoid, which is a half where its weights are zero. A bias of values, whose weights
add up to one in each head, is a bias of attention's output. Parts that a layer lacks are there with weights of zero,
and an MLP whose gates are constant is a matrix.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Renamed:
    """A family. reference: the one of transformers. write: writes the folder of a reference's folder. fields: the
    fields of the reference that differ from those that the tests have otherwise. own: fields of the family with their
    defaults in tests, which the reference does not have. biases: those of them that say which biases there are, and the
    reference's name for those of queries, keys and values."""

    reference: str
    write: Callable[..., None]
    fields: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    biases: tuple[tuple[str, ...], str] = ((), "")

    def __call__(self, folder: Path, make_reference: Callable[..., Path], overrides: Mapping[str, Any]) -> None:
        given, own = self.split(overrides)
        self.write(folder, make_reference(self.reference, **given), **own)

    def split(self, overrides: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fields of the reference and the family's own ones."""
        own = {name: overrides.get(name, default) for name, default in self.own.items()}
        fields = {**self.fields, **{name: each for name, each in overrides.items() if name not in own}}
        names, reference_name = self.biases
        return ({**fields, reference_name: any(own[name] for name in names)} if names else fields), own


def write_deepseek(folder: Path, reference: Path, *, n_shared_experts: int, attention_bias: bool, **own: Any) -> None:
    """Write DeepSeek-MoE 16B. reference: a Qwen2-MoE."""
    config, weights = _read(reference)
    _ungate(weights, n_shared_experts > 0)
    fields = {
        **_fields(config, "DeepseekForCausalLM", "deepseek"),
        "attention_bias": attention_bias,
        "first_k_dense_replace": own["first_k_dense_replace"],
        "moe_intermediate_size": config["moe_intermediate_size"],
        "moe_layer_freq": own["moe_layer_freq"],
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": n_shared_experts or None,
        "norm_topk_prob": config["norm_topk_prob"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "scoring_func": "softmax",
    }
    named: Weights = {}
    for name, tensor in weights.items():
        if "shared_expert_gate" not in name and ("shared_expert" not in name or n_shared_experts):
            named[name.replace(".shared_expert.", ".shared_experts.")] = tensor
    for layer in range(config["num_hidden_layers"]):
        attention = f"model.layers.{layer}.self_attn"
        named |= _attention(weights, config, attention, qkv_bias=attention_bias, output_bias=attention_bias)
    _save(reference, weights)
    _write(folder, fields, _halved(named))


def write_bailing(
    folder: Path, reference: Path, *, num_shared_experts: int, norm_head: bool, use_qkv_bias: bool, use_bias: bool,
    first_k_dense_replace: int,
) -> None:  # fmt: skip
    """Write a Ling of the first generation. reference: a Qwen2-MoE."""
    config, weights = _read(reference)
    _ungate(weights, num_shared_experts > 0)
    fields = {
        **_fields(config, "BailingMoeForCausalLM", "bailing_moe"),
        "first_k_dense_replace": first_k_dense_replace,
        "head_dim": config.get("head_dim"),
        "moe_intermediate_size": config["moe_intermediate_size"],
        "norm_head": norm_head,
        "norm_softmax": False,
        "norm_topk_prob": config["norm_topk_prob"],
        "num_experts": config["num_experts"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "num_shared_experts": num_shared_experts,
        "use_bias": use_bias,
        "use_qkv_bias": use_qkv_bias,
    }
    named = _bailing(config, weights, use_qkv_bias, use_bias)
    if norm_head:
        # The logits stay as large as they were.
        head = weights["lm_head.weight"] * 40
        named["lm_head.weight"] = head
        weights["lm_head.weight"] = head / (head.norm(dim=0, keepdim=True) + 1e-7)
    _save(reference, weights)
    for name, tensor in weights.items():
        if ".shared_expert." in name and num_shared_experts:
            named[name.replace(".shared_expert.", ".shared_experts.")] = tensor
    _write(folder, fields, _halved(named))


def write_bailing_v2(
    folder: Path, reference: Path, *, use_qkv_bias: bool, use_bias: bool, num_nextn_predict_layers: int
) -> None:
    """Write a Ling 2.0. reference: a GLM-4.5."""
    config, weights = _read(reference)
    rope = config["rope_parameters"]
    fields = {
        **_fields(config, "BailingMoeV2ForCausalLM", "bailing_moe"),
        "first_k_dense_replace": config["first_k_dense_replace"],
        "head_dim": config["head_dim"],
        "moe_intermediate_size": config["moe_intermediate_size"],
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"],
        "n_group": config["n_group"],
        "norm_topk_prob": True,
        "num_experts": config["n_routed_experts"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "num_nextn_predict_layers": num_nextn_predict_layers,
        "num_shared_experts": config["n_shared_experts"],
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "routed_scaling_factor": config["routed_scaling_factor"],
        "score_function": "sigmoid",
        "topk_group": config["topk_group"],
        "use_bias": use_bias,
        "use_qk_norm": config["use_qk_norm"],
        "use_qkv_bias": use_qkv_bias,
    }
    named = _bailing(config, weights, use_qkv_bias, use_bias)
    for name, tensor in weights.items():
        if ".shared_experts." in name or name.endswith("e_score_correction_bias"):
            named[name.replace("e_score_correction_bias", "expert_bias")] = tensor
    for layer in range(num_nextn_predict_layers):
        place = config["num_hidden_layers"] + layer
        named[f"model.layers.{place}.eh_proj.weight"] = torch.randn(config["hidden_size"], 2 * config["hidden_size"])
    _save(reference, weights)
    _write(folder, fields, named)


def write_decilm(folder: Path, reference: Path, *, blocks: list[tuple[Any, Any]], biased_mlp: bool, form: str) -> None:
    """Write a Llama-Nemotron. reference: a Llama, with an MLP bias, and with two layers in place of each one that has
    a matrix instead of attention.

    blocks: for each layer its key-value heads and its hidden units; None = it has no such part, "linear" = a matrix.
    biased_mlp: mlp_bias. form: the field of hidden units, or of key-value heads if only these differ.
    """
    config, weights = _read(reference)
    named = {name: weights[name] for name in ("model.embed_tokens.weight", "model.norm.weight")}
    if "lm_head.weight" in weights:
        named["lm_head.weight"] = weights["lm_head.weight"]
    if not biased_mlp:
        for name, tensor in weights.items():
            if ".mlp." in name and name.endswith(".bias"):
                tensor.zero_()
    at, configs = 0, []
    for layer, (attention, mlp) in enumerate(blocks):
        new = f"model.layers.{layer}"
        if attention == "linear":
            norm = weights[f"model.layers.{at}.post_attention_layernorm.weight"]
            matrix = _as_matrix(weights, f"model.layers.{at}")
            named |= {f"{new}.self_attn.linear_attn.weight": matrix, f"{new}.input_layernorm.weight": norm}
            _silence(weights, f"model.layers.{at}.self_attn.o_proj")
            at += 1
        old = f"model.layers.{at}"
        if isinstance(attention, int):
            named |= _with_kv_heads(weights, config, f"{old}.self_attn", f"{new}.self_attn", attention)
            named[f"{new}.input_layernorm.weight"] = weights[f"{old}.input_layernorm.weight"]
        else:
            _silence(weights, f"{old}.self_attn.o_proj")
        if mlp is not None:
            named[f"{new}.post_attention_layernorm.weight"] = weights[f"{old}.post_attention_layernorm.weight"]
        if isinstance(mlp, int):
            named |= _with_units(weights, f"{old}.mlp", f"{new}.mlp", mlp, biased_mlp)
        elif mlp == "linear":
            named[f"{new}.mlp.linear_mlp.weight"] = _as_matrix(weights, old)
        else:
            _silence(weights, f"{old}.mlp.down_proj")
        at += 1
        configs.append(_decilm_block(config, attention, mlp, form))
    assert at == config["num_hidden_layers"]
    _save(reference, weights)
    apart = {"block_configs": configs, "intermediate_size": None}
    if form == "num_key_value_heads_per_layer":
        apart = {form: [attention for attention, _ in blocks], "intermediate_size": blocks[0][1]}
    fields = {
        **_fields(config, "DeciLMForCausalLM", "nemotron-nas"),
        **apart,
        "attention_bias": config["attention_bias"],
        "head_dim": config["head_dim"],
        "mlp_bias": biased_mlp,
        "num_hidden_layers": len(blocks),
        "num_key_value_heads": None,
    }
    _write(folder, fields, named)


def _decilm_block(config: dict[str, Any], attention: Any, mlp: Any, form: str) -> dict[str, Any]:
    group = config["num_attention_heads"] // attention if isinstance(attention, int) else None
    units = mlp if isinstance(mlp, int) else None
    if form == "ffn_mult" and units is not None:
        units = 1.5 * units / config["hidden_size"]
    linear = {"no_op": False, "replace_with_linear": True}
    return {
        "attention": {
            "n_heads_in_group": group, "no_op": attention is None, "num_sink_tokens": None, "sparsify": None,
            "replace_with_linear": False, "unshifted_sink": False, "window_length": None,
            **(linear if attention == "linear" else {}),
        },
        "ffn": {
            form: units, "no_op": mlp is None, "replace_with_linear": False, "sparsify": None,
            **(linear if mlp == "linear" else {}),
        },
    }  # fmt: skip


def _silence(weights: Weights, name: str) -> None:
    """Let a projection of the reference return zeros."""
    for kind in ("weight", "bias"):
        if f"{name}.{kind}" in weights:
            weights[f"{name}.{kind}"].zero_()


def _with_kv_heads(weights: Weights, config: dict[str, Any], old: str, new: str, kv_heads: int) -> Weights:
    """Return attention with fewer key-value heads, and repeat these in the reference."""
    named: Weights = {}
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        for kind in ("weight", "bias"):
            tensor = weights.get(f"{old}.{part}.{kind}")
            if tensor is not None and part in ("k_proj", "v_proj"):
                heads = tensor.view(config["num_key_value_heads"], -1)
                fewer = heads[:kv_heads].clone()
                heads.copy_(fewer.repeat_interleave(len(heads) // kv_heads, dim=0))
                tensor = fewer.view(-1, *tensor.shape[1:])
            if tensor is not None:
                named[f"{new}.{part}.{kind}"] = tensor
    return named


def _with_units(weights: Weights, old: str, new: str, units: int, bias: bool) -> Weights:
    """Return an MLP with fewer hidden units, and silence the others in the reference."""
    named: Weights = {}
    for part in ("gate_proj", "up_proj"):
        for kind in ("weight", "bias") if bias else ("weight",):
            named[f"{new}.{part}.{kind}"] = weights[f"{old}.{part}.{kind}"][:units]
    weights[f"{old}.down_proj.weight"][:, units:] = 0
    named[f"{new}.down_proj.weight"] = weights[f"{old}.down_proj.weight"][:, :units]
    if bias:
        named[f"{new}.down_proj.bias"] = weights[f"{old}.down_proj.bias"]
    return named


def _as_matrix(weights: Weights, layer: str) -> torch.Tensor:
    """Make the MLP of a layer of the reference the product with a matrix, and return that matrix: its gates are always
    silu(1), and its ups its inputs."""
    down, up = weights[f"{layer}.mlp.down_proj.weight"], weights[f"{layer}.mlp.up_proj.weight"]
    hidden = len(down)
    matrix = down[:, :hidden].clone()
    for name in ("gate_proj.weight", "up_proj.weight", "up_proj.bias", "down_proj.bias"):
        weights[f"{layer}.mlp.{name}"].zero_()
    weights[f"{layer}.mlp.gate_proj.bias"].fill_(1)
    up[:hidden] = torch.eye(hidden)
    down.zero_()[:, :hidden] = matrix / torch.nn.functional.silu(torch.ones(()))
    return matrix


def _bailing(config: dict[str, Any], weights: Weights, use_qkv_bias: bool, use_bias: bool) -> Weights:
    """Return the tensors of both generations, without shared experts and the correction of the router's scores."""
    others = ("embed_tokens", "self_attn", "shared_expert", "correction_bias")
    named = {name: tensor for name, tensor in weights.items() if not any(part in name for part in others)}
    named["model.word_embeddings.weight"] = weights["model.embed_tokens.weight"]
    for layer in range(config["num_hidden_layers"]):
        old, new = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.attention"
        parts = _attention(weights, config, old, qkv_bias=use_qkv_bias, output_bias=use_bias)
        for kind in ("weight", "bias"):
            if f"{old}.q_proj.{kind}" in parts:
                fused = torch.cat([parts[f"{old}.{part}_proj.{kind}"] for part in "qkv"])
                named[f"{new}.query_key_value.{kind}"] = fused
            if f"{old}.o_proj.{kind}" in parts:
                named[f"{new}.dense.{kind}"] = parts[f"{old}.o_proj.{kind}"]
        for theirs, ours in (("q_norm", "query_layernorm"), ("k_norm", "key_layernorm")):
            if f"{old}.{theirs}.weight" in weights:
                named[f"{new}.{ours}.weight"] = weights[f"{old}.{theirs}.weight"]
    return named


def _attention(weights: Weights, config: dict[str, Any], name: str, *, qkv_bias: bool, output_bias: bool) -> Weights:
    """Return the projections of one attention with these biases. Changes the reference's weights where they have more
    than those."""
    kinds = [f"{name}.{part}_proj.weight" for part in "qkvo"]
    named = {kind: weights[kind] for kind in kinds}
    if not qkv_bias and output_bias:
        for part in "qk":
            weights[f"{name}.{part}_proj.bias"].zero_()
    if qkv_bias:
        named |= {f"{name}.{part}_proj.bias": weights[f"{name}.{part}_proj.bias"].clone() for part in "qkv"}
    if output_bias:
        values = weights[f"{name}.v_proj.bias"] / (2 if qkv_bias else 1)
        if qkv_bias:
            named[f"{name}.v_proj.bias"] -= values
        kv_heads = config["num_key_value_heads"]
        each = values.view(kv_heads, -1).repeat_interleave(config["num_attention_heads"] // kv_heads, dim=0)
        named[f"{name}.o_proj.bias"] = weights[f"{name}.o_proj.weight"] @ each.flatten()
    return named


def _ungate(weights: Weights, shared: bool) -> None:
    """Let the gate of the shared expert of a Qwen2-MoE always be a half. shared: it has an effect."""
    for name, tensor in weights.items():
        if "shared_expert_gate" in name or (not shared and ".shared_expert.down_proj." in name):
            tensor.zero_()


def _halved(named: Weights) -> Weights:
    """Return the weights with the half that is the gate of the reference's shared expert."""
    return {name: each / 2 if ".shared_experts.down_proj." in name else each for name, each in named.items()}


def _fields(config: dict[str, Any], architecture: str, model_type: str) -> dict[str, Any]:
    """Return the fields that all of these families have, in the form of their time."""
    rope = dict(config["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    rope.pop("partial_rotary_factor", None)
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "vocab_size", "eos_token_id", "hidden_act",
    )  # fmt: skip
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **{name: config[name] for name in names},
        "rope_scaling": None if kind == "default" else {"type": kind, **rope},
        "rope_theta": theta,
        "torch_dtype": "float32",
    }


def _read(reference: Path) -> tuple[dict[str, Any], Weights]:
    return json.loads((reference / "config.json").read_text()), load_file(reference / "model.safetensors")


def _save(folder: Path, weights: Weights) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _write(folder: Path, fields: dict[str, Any], weights: Weights) -> None:
    (folder / "config.json").write_text(json.dumps(fields))
    _save(folder, weights)


# Layers with few key-value heads, without attention, without an MLP, without both, and with matrices.
_BLOCKS = [(4, 96), (None, 48), (4, None), (None, None), ("linear", 96), (4, "linear"), (4, 32)]
_BIASES = ("use_qkv_bias", "use_bias")
RENAMED = {
    "deepseek": Renamed(
        "qwen2_moe",
        write_deepseek,
        {"shared_expert_intermediate_size": 80, "mlp_only_layers": [0], "num_key_value_heads": 4},
        {"n_shared_experts": 2, "attention_bias": False, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        (("attention_bias",), "qkv_bias"),
    ),
    "bailing_moe": Renamed(
        "qwen2_moe",
        write_bailing,
        {"shared_expert_intermediate_size": 80},
        {"num_shared_experts": 2, "norm_head": False, "first_k_dense_replace": 0, **dict.fromkeys(_BIASES, False)},
        (_BIASES, "qkv_bias"),
    ),
    "bailing_moe_v2": Renamed(
        "glm4_moe",
        write_bailing_v2,
        {"use_qk_norm": True, "n_routed_experts": 12, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        {"num_nextn_predict_layers": 1, **dict.fromkeys(_BIASES, False)},
        (_BIASES, "attention_bias"),
    ),
    "decilm": Renamed(
        "llama",
        write_decilm,
        {"num_hidden_layers": 8, "num_key_value_heads": 4, "mlp_bias": True},
        {"blocks": _BLOCKS, "biased_mlp": False, "form": "intermediate_size"},
    ),
}
