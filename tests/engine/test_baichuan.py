"""Baichuan of 13B, which has ALiBi: transformers has no such model, so a plain reference in float32 takes its place."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, normalize, rms_norm, silu

from tests.conftest import MakeModel

from .plain_reference import compare, compare_ranks, slopes
from .pools import MakeEngine


def with_alibi(renamed: Path, folder: Path) -> Path:
    """Write a model of 7B as one of 13B, which differ in a field of config.json alone."""
    fields = json.loads((renamed / "config.json").read_text())
    fields["model_max_length"] = fields.pop("max_position_embeddings")
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "model.safetensors").symlink_to(renamed / "model.safetensors")
    return folder


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return the logits [len(ids), vocab] after each of the tokens."""
    fields = json.loads((folder / "config.json").read_text())
    tensors, heads = load_file(folder / "model.safetensors"), fields["num_attention_heads"]
    size, eps = fields["hidden_size"], fields["rms_norm_eps"]
    x = tensors["model.embed_tokens.weight"][ids]
    places = torch.arange(len(ids))
    distances = places[:, None] - places
    bias = (-slopes(heads)[:, None, None] * distances).masked_fill(distances < 0, -torch.inf)
    for layer in range(fields["num_hidden_layers"]):
        of = {name.removeprefix(f"model.layers.{layer}."): tensor for name, tensor in tensors.items()}
        normed = rms_norm(x, (size,), of["input_layernorm.weight"], eps)
        qkv = linear(normed, of["self_attn.W_pack.weight"]).view(len(ids), 3, heads, -1)
        q, k, v = qkv.permute(1, 2, 0, 3)
        scores = q @ k.transpose(1, 2) / math.sqrt(size // heads) + bias
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + linear(mixed, of["self_attn.o_proj.weight"])
        normed = rms_norm(x, (size,), of["post_attention_layernorm.weight"], eps)
        gated = silu(linear(normed, of["mlp.gate_proj.weight"])) * linear(normed, of["mlp.up_proj.weight"])
        x = x + linear(gated, of["mlp.down_proj.weight"])
    head = tensors["lm_head.weight"]
    head = normalize(head) if len(head) == 125696 else head
    return linear(rms_norm(x, (size,), tensors["model.norm.weight"], eps), head)


@pytest.mark.parametrize(("heads", "hidden", "tokens"), [(4, 64, 512), (12, 96, 512), (4, 64, 125696)])
def test_alibi(tiny_model: MakeModel, tmp_path: Path, heads: int, hidden: int, tokens: int) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": hidden, "vocab_size": tokens}
    compare(logits, with_alibi(tiny_model("baichuan", **sizes), tmp_path))


@pytest.mark.soak
def test_alibi_of_ranks(tiny_model: MakeModel, divided: MakeEngine, tmp_path: Path) -> None:
    folder = with_alibi(tiny_model("baichuan", num_key_value_heads=4), tmp_path)
    compare_ranks(logits, folder, divided(folder, 2))
