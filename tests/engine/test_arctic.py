"""Arctic: transformers has no model that computes the same, so a plain reference in float32 takes its place."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, rms_norm, silu

from .plain_reference import compare, compare_ranks
from .pools import MakeEngine

_HIDDEN, _INNER, _EXPERTS, _DIM = 64, 40, 6, 16


def write(folder: Path, *, every: int = 1) -> Path:
    """Write a model of three layers with random weights. every: moe_layer_frequency."""
    torch.manual_seed(0)
    fields = {
        "architectures": ["ArcticForCausalLM"], "vocab_size": 512, "hidden_size": _HIDDEN, "intermediate_size": _INNER,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": _EXPERTS,
        "num_experts_per_tok": 2, "moe_layer_frequency": every, "parallel_attn_mlp_res": True, "use_residual": True,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (512, _HIDDEN), "lm_head": (512, _HIDDEN)}
    norms = ["model.norm"]
    for layer in range(3):
        at = f"model.layers.{layer}"
        norms += [f"{at}.input_layernorm", f"{at}.post_attention_layernorm"]
        for name, size in (("q", _HIDDEN), ("k", 2 * _DIM), ("v", 2 * _DIM), ("o", _HIDDEN)):
            shapes[f"{at}.self_attn.{name}_proj"] = (size, _HIDDEN)
        mlps = {f"{at}.block_sparse_moe.mlp": _INNER}
        if not (layer + 1) % every:
            norms.append(f"{at}.residual_layernorm")
            shapes[f"{at}.block_sparse_moe.gate"] = (_EXPERTS, _HIDDEN)
            mlps = {f"{at}.block_sparse_moe.experts.{number}": _INNER for number in range(_EXPERTS)}
            mlps[f"{at}.residual_mlp"] = _HIDDEN
        for name, size in mlps.items():
            shapes |= {f"{name}.w1": (size, _HIDDEN), f"{name}.w3": (size, _HIDDEN), f"{name}.w2": (_HIDDEN, size)}
    tensors = {f"{name}.weight": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    save_file({**tensors, **{f"{name}.weight": torch.rand(_HIDDEN) + 0.5 for name in norms}},
              folder / "model.safetensors")  # fmt: skip
    return folder


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return the logits [len(ids), vocab] after each of the tokens."""
    tensors = load_file(folder / "model.safetensors")
    x = tensors["model.embed_tokens.weight"][ids]
    angles = torch.arange(len(ids))[:, None] / 10000.0 ** (torch.arange(0, _DIM, 2) / _DIM)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, (_HIDDEN,), tensors[f"{name}.weight"], 1e-5)

    def mlp(x: torch.Tensor, name: str) -> torch.Tensor:
        gates, ups, down = (tensors[f"{name}.{part}.weight"] for part in ("w1", "w3", "w2"))
        return linear(silu(linear(x, gates)) * linear(x, ups), down)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    for layer in range(3):
        at = f"model.layers.{layer}"
        h = normed(x, f"{at}.input_layernorm")
        q, k, v = (linear(h, tensors[f"{at}.self_attn.{name}_proj.weight"]).view(len(ids), -1, _DIM).transpose(0, 1)
                   for name in "qkv")  # fmt: skip
        k, v = (each.repeat_interleave(2, dim=0) for each in (rotate(k), v))
        mixed = (rotate(q) @ k.transpose(1, 2) / math.sqrt(_DIM) + mask).softmax(-1) @ v
        after = x + linear(mixed.transpose(0, 1).flatten(1), tensors[f"{at}.self_attn.o_proj.weight"])
        if f"{at}.residual_layernorm.weight" not in tensors:
            x = after + mlp(normed(after, f"{at}.post_attention_layernorm"), f"{at}.block_sparse_moe.mlp")
            continue
        dense = mlp(normed(after, f"{at}.residual_layernorm"), f"{at}.residual_mlp")
        h = normed(x, f"{at}.post_attention_layernorm")
        weights, chosen = linear(h, tensors[f"{at}.block_sparse_moe.gate.weight"]).softmax(-1).topk(2)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        shares = torch.zeros(len(ids), _EXPERTS).scatter(1, chosen, weights)
        each = [mlp(h, f"{at}.block_sparse_moe.experts.{number}") for number in range(_EXPERTS)]
        x = after + dense + sum(share[:, None] * part for share, part in zip(shares.T, each, strict=True))
    return linear(normed(x, "model.norm"), tensors["lm_head.weight"])


@pytest.mark.parametrize("every", [1, 2])
def test_tokens(tmp_path: Path, every: int) -> None:
    transcript = compare(logits, write(tmp_path, every=every))
    assert all(len(set(tokens)) > 3 for tokens in transcript.tokens.values())


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_of_ranks(divided: MakeEngine, tmp_path: Path, ranks: int) -> None:
    folder = write(tmp_path)
    compare_ranks(logits, folder, divided(folder, ranks))
