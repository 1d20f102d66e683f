"""JAIS of the first generation: transformers has no model that computes the same, so a plain reference in float32 takes
its place."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import layer_norm, silu

from .plain_reference import PROMPTS, compare, compare_ranks, slopes
from .pools import MakeEngine

_OLDER = {"embeddings_scale": 6.5, "width_scale": 0.3, "scale_qk_dot_by_d": True}
_NEWER = {"mup_embeddings_scale": 6.5, "mup_output_alpha": 2.0, "mup_width_scale": 0.15, "mup_scale_qk_dot_by_d": True}


def write(folder: Path, heads: int = 4, hidden: int = 64, inner: int = 100, **fields: Any) -> Path:
    """Write a model of two layers with random weights."""
    torch.manual_seed(0)
    names = {"n_embd": hidden, "n_head": heads, "n_inner": inner, "n_layer": 2, "n_positions": 512, "vocab_size": 512}
    kinds = {"activation_function": "swiglu", "position_embedding_type": "alibi", "layer_norm_epsilon": 1e-5}
    written = {"architectures": ["JAISLMHeadModel"], "model_type": "jais", **names, **kinds, **fields}
    (folder / "config.json").write_text(json.dumps(written))
    tensors = {"transformer.wte.weight": 0.3 * torch.randn(512, hidden), "lm_head.weight": torch.randn(512, hidden)}
    for name in ("h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"):
        tensors[f"transformer.{name}.weight"] = torch.rand(hidden) + 0.5
        tensors[f"transformer.{name}.bias"] = 0.3 * torch.randn(hidden)
    sizes = {"attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden), "mlp.c_fc": (hidden, inner),
             "mlp.c_fc2": (hidden, inner), "mlp.c_proj": (inner, hidden)}  # fmt: skip
    for layer in range(2):
        for name, size in sizes.items():
            tensors[f"transformer.h.{layer}.{name}.weight"] = 0.3 * torch.randn(size)
            tensors[f"transformer.h.{layer}.{name}.bias"] = 0.3 * torch.randn(size[1])
        tensors[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return the logits [len(ids), vocab] after each of the tokens."""
    fields = json.loads((folder / "config.json").read_text())
    tensors, heads, size = load_file(folder / "model.safetensors"), fields["n_head"], fields["n_embd"]
    by_size = fields.get("scale_qk_dot_by_d") or fields.get("mup_scale_qk_dot_by_d")
    embedding = tensors["transformer.wte.weight"]
    x = embedding[ids] * fields.get("embeddings_scale", fields.get("mup_embeddings_scale", 1.0))
    places = torch.arange(len(ids))
    distances = places[:, None] - places
    bias = (-slopes(heads)[:, None, None] * distances).masked_fill(distances < 0, -torch.inf)

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return layer_norm(x, (size,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-5)

    for layer in range(fields["n_layer"]):
        inside = f"transformer.h.{layer}"
        qkv = project(norm(x, f"{inside}.ln_1"), f"{inside}.attn.c_attn").view(len(ids), 3, heads, -1)
        q, k, v = qkv.permute(1, 2, 0, 3)
        dim = size // heads
        scores = q @ k.transpose(1, 2) / (dim if by_size else math.sqrt(dim)) + bias
        x = x + project((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{inside}.attn.c_proj")
        normed = norm(x, f"{inside}.ln_2")
        gated = project(normed, f"{inside}.mlp.c_fc") * silu(project(normed, f"{inside}.mlp.c_fc2"))
        x = x + project(gated, f"{inside}.mlp.c_proj")
    head = embedding if fields.get("tie_word_embeddings", True) else tensors["lm_head.weight"]
    factor = fields.get("width_scale", fields.get("mup_output_alpha", 1.0) * fields.get("mup_width_scale", 1.0))
    return norm(x, "transformer.ln_f") @ head.T * factor


@pytest.mark.parametrize(
    "shape",
    [
        {**_OLDER, "tie_word_embeddings": False},
        {**_NEWER, "heads": 12, "hidden": 96, "tie_word_embeddings": False},
        {"tie_word_embeddings": False},
        _OLDER,
    ],
)
def test_tokens(tmp_path: Path, shape: dict[str, Any]) -> None:
    folder = write(tmp_path, **shape)
    transcript = compare(logits, folder, prompt_logprobs=1)
    for id, prompt in enumerate(PROMPTS):
        # Greedy tokens do not depend on the factor of logits.
        expected = logits(folder, prompt)[:-1].log_softmax(dim=-1)[range(len(prompt) - 1), prompt[1:]].tolist()
        given = transcript.first(id).prompt_logprobs
        assert given is not None
        assert [each.logprob for each in given] == pytest.approx(expected, abs=1e-4)
    assert len({*transcript.tokens[1, 0], *transcript.tokens[2, 0]}) > 3


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_of_ranks(divided: MakeEngine, tmp_path: Path, ranks: int) -> None:
    folder = write(tmp_path, **_OLDER, tie_word_embeddings=False)
    compare_ranks(logits, folder, divided(folder, ranks))
