"""Hy4 as its authors publish it: by other names than transformers writes, with rotated pairs side by side, in MXFP8."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import MakeModel
from tests.models import reference_choices
from tests.packing import Tensors, fp8

from .fake_cuda import pretend
from .harness import generate, make_engine, make_prompt, make_request

HEADS, KEY, ROPE, RANK, INDEX = 4, 16, 8, 32, 16
# Widths that are whole groups of MXFP8.
SIZES = {
    "q_lora_rank": 64, "kv_lora_rank": RANK, "v_head_dim": 16, "index_head_dim": INDEX, "moe_intermediate_size": 64,
    "intermediate_size": 96,
}  # fmt: skip
# Fields that transformers does not write.
PUBLISHED: dict[str, Any] = {
    "enable_ihc": True, "enable_lm_head_fp32": True, "gated_mla": True, "gating_type": "elementwise",
    "layer_types": ["deepseek_sparse_attention"] * 3, "learnable_sink": True,
}  # fmt: skip
NAMES = (
    (r"\.hc_pre\.(hc_\w+_layer)\.", r".\1.hc_pre."), (r"\.hc_pre\.hc_head\.", ".hc_head."),
    (r"(mlp\.(shared_experts\.)?)linear_gate", r"\1gate_proj"),
)  # fmt: skip
PROMPT = make_prompt(60, seed=3)


def side_by_side(tensor: torch.Tensor, each: int) -> torch.Tensor:
    """Reorder the last ROPE rows of each `each` ones: those that are half as many apart become neighbours."""
    parts = tensor.unflatten(0, (-1, each))
    ends = parts[:, -ROPE:].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([parts[:, :-ROPE], ends], dim=1).flatten(0, 1)


def as_published(name: str, tensor: torch.Tensor) -> Tensors:
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    rows = {"q_b_proj.weight": KEY + ROPE, "kv_a_proj_with_mqa.weight": RANK + ROPE, "wq_b.weight": INDEX,
            "wk.weight": INDEX, "k_norm.weight": INDEX, "k_norm.bias": INDEX}  # fmt: skip
    each = next((each for end, each in rows.items() if name.endswith(end)), None)
    return {name: tensor if each is None else side_by_side(tensor, each)}


def change(base: Path, folder: Path, new: Callable[[str, torch.Tensor], Tensors], **fields: Any) -> Path:
    """Copy a model with the tensors that `new` returns in place of each."""
    shutil.copytree(base, folder)
    tensors = [new(*each) for each in load_file(base / "model.safetensors").items()]
    stored = {name: tensor.contiguous() for each in tensors for name, tensor in each.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


def tokens(folder: Path, **settings: Any) -> list[int]:
    engine = make_engine(folder, max_num_batched_tokens=40, **settings)
    return generate(engine, [make_request(0, PROMPT, 24)]).tokens[0, 0]


def test_published_names_and_pairs(tiny_model: MakeModel, tmp_path: Path) -> None:
    base = tiny_model("hy_v4", **SIZES)
    folder = change(base, tmp_path / "model", as_published, **PUBLISHED)
    names = set(load_file(folder / "model.safetensors"))
    assert {"hc_attn_layer.hc_pre.hc_fn", "mlp.gate_proj.weight", "self_attn.linear_gate.weight"} <= {
        name.removeprefix("model.layers.0.") for name in names
    }
    outputs = tokens(folder)
    assert outputs == reference_choices(base, PROMPT, outputs)
    # With pairs as transformers has them, the model is another one.
    assert tokens(change(folder, tmp_path / "apart", lambda *each: dict([each]), rope_interleave=False)) != outputs


def test_mxfp8_as_published(tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the experts, of which one tensor has the codes and another one the exponents."""

    def is_coded(name: str) -> bool:
        return bool(re.search(r"(?<!weights)(_proj|_mqa|wq_b|wk)\.weight$|experts\.\w+_proj$", name))

    def code(name: str, tensor: torch.Tensor) -> Tensors:
        if not is_coded(name):
            return {name: tensor}
        coded = fp8(tensor.flatten(0, -2), (1, 32), "scale", exponents=True)
        exponents = coded["scale"].view(torch.uint8).unflatten(0, tensor.shape[:-1])
        return {name: coded["weight"].view(tensor.shape), f"{name}_scale": exponents}

    def numbers(name: str, tensor: torch.Tensor) -> Tensors:
        if not is_coded(name):
            return {name: tensor}
        return {name: fp8(tensor.flatten(0, -2), (1, 32), "scale", exponents=True)["numbers"].view(tensor.shape)}

    published = change(tiny_model("hy_v4", **SIZES), tmp_path / "published", as_published, **PUBLISHED)
    config = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head", "*linear_gate", "*mlp.gate"]}
    folder = change(published, tmp_path / "coded", code, quantization_config=config)
    outputs = tokens(folder)
    assert outputs == tokens(change(published, tmp_path / "numbers", numbers))
    pretend(monkeypatch)
    assert tokens(folder) == outputs


def test_what_is_computed_in_float32(tiny_model: MakeModel) -> None:
    """transformers keeps these tensors in float32 in a model of 16 bits."""
    engine = make_engine(tiny_model("hy_v4"), dtype="bfloat16")
    model: Any = engine.runner._model  # type: ignore[attr-defined]
    hidden = torch.randn(3, 64, dtype=torch.bfloat16)
    expected = hidden.float() @ load_file(tiny_model("hy_v4") / "model.safetensors")["lm_head.weight"].T
    torch.testing.assert_close(model.logits(hidden), expected)
    layer = model.layers[0]
    kept = layer.attention._sinks, layer.around_mlp._gates._weight, model.stream_head._gates._base
    assert {tensor.dtype for tensor in kept} == {torch.float32}
