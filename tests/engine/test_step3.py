"""Step 3: transformers has no model that computes the same, so a plain reference in float32 takes its place."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, rms_norm, silu

from .plain_reference import compare, compare_ranks
from .pools import MakeEngine

_FIELDS: dict[str, Any] = {
    "architectures": ["Step3TextForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_attention_groups": 1, "head_dim": 32, "share_q_dim": 24,
    "share_expert_dim": 56, "moe_intermediate_size": 40, "moe_num_experts": 6, "moe_top_k": 2,
    "max_position_embedding": 512, "rms_norm_eps": 1e-5, "norm_expert_weight": False, "moe_layers_enum": "1,2",
    "rope_theta": 10000.0,
}  # fmt: skip


def write(folder: Path, *, within: bool = False, **changed: Any) -> Path:
    """Write a model with random weights. within: as the text part of one that reads images."""
    torch.manual_seed(0)
    fields = {**_FIELDS, **changed}
    hidden, size, rank, experts = 64, 4 * fields["head_dim"], fields["share_q_dim"], fields["moe_num_experts"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (512, hidden), "lm_head": (512, hidden)}
    sparse = {int(layer) for layer in fields["moe_layers_enum"].split(",")}
    for layer in range(fields["num_hidden_layers"]):
        at, inner = f"model.layers.{layer}", 56 if layer in sparse else 96
        mlp = f"{at}.share_expert" if layer in sparse else f"{at}.mlp"
        shapes |= {f"{mlp}.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{mlp}.down_proj": (hidden, inner), f"{at}.self_attn.q_proj": (rank, hidden)}
        shapes |= {f"{at}.self_attn.{name}_proj": (fields["head_dim"], hidden) for name in "kv"}
        shapes |= {f"{at}.self_attn.wq": (size, rank), f"{at}.self_attn.o_proj": (hidden, size)}
        if layer in sparse:
            shapes |= {f"{at}.moe.gate": (experts, hidden), f"{at}.moe.down_proj": (experts, hidden, 40)}
            shapes |= {f"{at}.moe.{name}_proj": (experts, 40, hidden) for name in ("gate", "up")}
    tensors = {f"{name}.weight": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    norms = {"model.norm": hidden}
    for layer in range(fields["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        norms |= {f"{at}.input_layernorm": hidden, f"{at}.post_attention_layernorm": hidden}
        norms[f"{at}.self_attn.inter_norm"] = rank
    tensors |= {f"{name}.weight": torch.rand(count) + 0.5 for name, count in norms.items()}
    whole = {"architectures": ["Step3VLForConditionalGeneration"], "text_config": fields, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(whole if within else fields))
    save_file({**tensors, "vision_model.conv1.weight": torch.zeros(4)} if within else tensors,
              folder / "model.safetensors")  # fmt: skip
    return folder


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return the logits [len(ids), vocab] after each of the tokens."""
    written = json.loads((folder / "config.json").read_text())
    fields = written.get("text_config", written)
    tensors, heads, dim = load_file(folder / "model.safetensors"), 4, fields["head_dim"]
    x = tensors["model.embed_tokens.weight"][ids]
    places = torch.arange(len(ids))
    angles = places[:, None] / fields["rope_theta"] ** (torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    for layer in range(fields["num_hidden_layers"]):
        of = {name.removeprefix(f"model.layers.{layer}."): tensor for name, tensor in tensors.items()}

        def normed(x: torch.Tensor, name: str, of: dict[str, torch.Tensor] = of) -> torch.Tensor:
            return rms_norm(x, x.shape[-1:], of[f"{name}.weight"], 1e-5)

        def mlp(x: torch.Tensor, name: str, of: dict[str, torch.Tensor] = of) -> torch.Tensor:
            gates, ups, down = (of[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            return linear(silu(linear(x, gates)) * linear(x, ups), down)

        h = normed(x, "input_layernorm")
        low = normed(linear(h, of["self_attn.q_proj.weight"]), "self_attn.inter_norm")
        q = rotate(linear(low, of["self_attn.wq.weight"]).view(len(ids), heads, dim).transpose(0, 1))
        k, v = rotate(linear(h, of["self_attn.k_proj.weight"])), linear(h, of["self_attn.v_proj.weight"])
        mixed = (q @ k.T / math.sqrt(dim) + mask).softmax(-1) @ v
        x = x + linear(mixed.transpose(0, 1).flatten(1), of["self_attn.o_proj.weight"])
        h = normed(x, "post_attention_layernorm")
        if "mlp.down_proj.weight" in of:
            x = x + mlp(h, "mlp")
            continue
        weights, chosen = linear(h, of["moe.gate.weight"]).softmax(-1).topk(fields["moe_top_k"])
        routed = torch.zeros_like(x)
        for token, (each, numbers) in enumerate(zip(weights, chosen, strict=True)):
            for weight, number in zip(each, numbers, strict=True):
                gates, ups, down = (of[f"moe.{part}_proj.weight"][number] for part in ("gate", "up", "down"))
                routed[token] += weight * linear(silu(linear(h[token], gates)) * linear(h[token], ups), down)
        x = x + routed + mlp(h, "share_expert")
    return linear(rms_norm(x, (64,), tensors["model.norm.weight"], 1e-5), tensors["lm_head.weight"])


@pytest.mark.parametrize("shape", [{}, {"head_dim": 16, "moe_top_k": 1, "moe_layers_enum": "0,2"}, {"within": True}])
def test_tokens(tmp_path: Path, shape: dict[str, Any]) -> None:
    transcript = compare(logits, write(tmp_path, **shape))
    assert all(len(set(tokens)) > 3 for tokens in transcript.tokens.values())


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_of_ranks(divided: MakeEngine, tmp_path: Path, ranks: int) -> None:
    folder = write(tmp_path)
    compare_ranks(logits, folder, divided(folder, ranks))
