"""Experts of which a checkpoint has all weights of a layer in one tensor, in formats that know single experts."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.config import ConfigError
from baton_engine.loading import weights_bytes
from baton_engine.quantization.registry import read_quantization
from tests.conftest import MakeModel
from tests.packing import Tensors, fp8
from tests.quantized import rewrite

from .fake_cuda import pretend
from .harness import make_engine
from .pools import MakeEngine
from .test_expert_parallel import packed, takes
from .test_expert_parallel import tokens as tokens_of
from .test_quantized_models import assert_tokens_of, behind, scheme, tokens

EXPERTS, HIDDEN, SIZE = 6, 64, 128
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"intermediate_size": SIZE},
    "dbrx": {"ffn_config": {"ffn_hidden_size": SIZE, "moe_num_experts": EXPERTS, "moe_top_k": 2}},
    "llama4": {"intermediate_size": SIZE, "intermediate_size_mlp": SIZE, "interleave_moe_layer_step": 2},
    "granitemoe": {"intermediate_size": SIZE},
}
# The whole model also has projections for images, which the models that are rewritten below should not have.
STEP = {"moe_intermediate_size": SIZE}
JOINED = re.compile(
    r".*(experts\.(gate_up_proj|down_proj|mlp\.(w1|v1|w2))|(in|out)put_linear\.weight|moe\.\w+_proj\.weight)(_bias)?$"
)
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"group_0": scheme("fp8")}}
# The family, quantization_config, the name of an expert's scales, the outputs and inputs that share one, and whether
# weights are [inputs, outputs]: FBGEMM's and tiles as transformers stores them, and Granite as llm-compressor does.
FP8: dict[str, tuple[str, dict[str, Any], str, tuple[int, int], bool]] = {
    "fbgemm": ("llama4", {"quant_method": "fbgemm_fp8"}, "weight_scale", (1, SIZE), True),
    "compressed-tensors": ("granitemoe", COMPRESSED, "weight_scale", (1, SIZE), False),
    "tiles": ("llama4", {"quant_method": "fp8", "weight_block_size": [32, 32]}, "weight_scale_inv", (32, 32), False),
    "tiles of separate ups": (
        "step3p7",
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        "weight_scale_inv",
        (32, 32),
        False,
    ),
}


@pytest.fixture(params=FAMILIES)
def base(request: pytest.FixtureRequest, tiny_model: MakeModel) -> Path:
    return tiny_model(request.param, **FAMILIES[request.param])


def change(base: Path, folder: Path, new: Callable[[str, torch.Tensor], Tensors], config: Any = None) -> Path:
    """Copy a model of one file, with the tensors that `new` returns in place of each."""
    shutil.copytree(base, folder)
    tensors = [new(*each) for each in load_file(base / "model.safetensors").items()]
    stored = {name: tensor.contiguous() for each in tensors for name, tensor in each.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **({"quantization_config": config} if config else {})}))
    return folder


def parts_of(name: str, tensor: torch.Tensor) -> Tensors:
    """Return the weights [experts, outputs, inputs] or biases [experts, outputs] in a joined tensor, by part."""
    kind = name.removesuffix(".weight").rpartition(".")[2]
    if kind in ("w1", "v1", "w2"):
        tensor = tensor.view(EXPERTS, SIZE, HIDDEN)
    if kind == "w2" or (".experts." in name and kind in ("gate_up_proj", "down_proj")):
        tensor = tensor.transpose(1, 2)
    if kind in ("gate_proj", "up_proj"):
        return {kind: tensor}
    if kind in ("w1", "v1"):
        return {"gate_proj" if kind == "w1" else "up_proj": tensor}
    if kind.startswith(("down", "output", "w2")):
        return {"down_proj": tensor}
    # gpt-oss has them in turn.
    gates, ups = (tensor[:, ::2], tensor[:, 1::2]) if ".mlp." in name else tensor.chunk(2, dim=1)
    return {"gate_proj": gates, "up_proj": ups}


def one_by_one(
    base: Path, folder: Path, config: Any = None, code: Callable[[torch.Tensor], Tensors] | None = None
) -> Path:
    """Copy a model with the names that llm-compressor gives to the tensors of single experts. code: returns what is
    stored of a weight [outputs, inputs]; None = its numbers."""

    def new(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if not JOINED.match(name):
            yield name, tensor
            return
        at = name.rpartition(".")[0] if ".experts." in name else f"{name.rsplit('.', 2)[0]}.experts"
        for part, of_all in parts_of(name, tensor).items():
            for number, each in enumerate(of_all):
                fields = {"bias": each} if each.ndim == 1 else code(each) if code else {"weight": each}
                for field, stored in fields.items():
                    yield f"{at}.{number}.{part}.{field}", stored

    return change(base, folder, lambda *each: dict(new(*each)), config)


def int4(name: str, weight: torch.Tensor) -> Tensors:
    """Return the numbers of the nearest codes of a weight: in each group of 64 inputs, 15 steps from the least to the
    largest number or 0."""
    if not re.search(r"(_proj|Wqkv)\.weight$", name):
        return {name: weight}
    groups = weight.unflatten(1, (-1, 64))
    low, high = groups.amin(dim=-1, keepdim=True).clamp(max=0), groups.amax(dim=-1, keepdim=True).clamp(min=0)
    step = (high - low) / 15
    zero = (-low / step).round()
    return {name: (((groups / step + zero).round().clamp(0, 15) - zero) * step).flatten(1)}


def test_int4_on_load(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = change(one_by_one(base, tmp_path / "model"), tmp_path / "plain", int4)
    outputs = tokens(base, quantization="int4")
    assert outputs == tokens(plain)
    pretend(monkeypatch)
    assert tokens(base, quantization="int4") == outputs


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_eight_bits_on_load(kind: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    separate = one_by_one(base, tmp_path / "model")
    outputs = tokens(base, quantization=kind)
    assert behind(base, outputs).mean() < 1
    assert outputs == tokens(separate, quantization=kind)
    pretend(monkeypatch)
    assert tokens(base, quantization=kind) == tokens(separate, quantization=kind)


def test_experts_one_by_one(base: Path, tmp_path: Path) -> None:
    separate = one_by_one(base, tmp_path / "model")
    assert_tokens_of(base, tokens(separate))
    groups = {"group_0": {**scheme("int4 weights"), "format": "pack-quantized"}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    folder, plain = rewrite(separate, tmp_path / "packed", config, packed)
    assert tokens(folder) == tokens(plain)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
def test_ranks(family: str, expert_parallel: bool, tiny_model: MakeModel, divided: MakeEngine, tmp_path: Path) -> None:
    """Ranks round parts of a row, so that their tokens may not be those of one rank."""
    base, settings = (
        tiny_model(family, **FAMILIES[family]),
        {"expert_parallel": expert_parallel, "quantization": "int8"},
    )
    separate = one_by_one(base, tmp_path / "model")
    assert tokens_of(divided(base, 2, **settings)) == tokens_of(divided(separate, 2, **settings))


@pytest.mark.parametrize("name", FP8)
def test_joined_codes(
    name: str, tiny_model: MakeModel, divided: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, config, scale, tile, turned = FP8[name]
    base = tiny_model(family, **FAMILIES.get(family, STEP))

    def code(weight: torch.Tensor) -> Tensors:
        coded = fp8(weight, (tile[0], min(tile[1], weight.shape[1])), scale)
        return {"weight": coded["weight"], scale: coded[scale]}

    def join(name: str, tensor: torch.Tensor) -> Tensors:
        if not JOINED.match(name):
            return {name: tensor}
        coded = [[code(weight) for weight in of_all] for of_all in parts_of(name, tensor).values()]
        weight, scales = (
            torch.cat([torch.stack([each[field] for each in part]) for part in coded], dim=1)
            for field in ("weight", scale)
        )
        if turned:
            # Scales of outputs are beside the gates and ups, and below each other for the last product.
            weight, scales = weight.transpose(1, 2), scales if "down" in name else scales.transpose(1, 2)
        return {name: weight, f"{name}{scale.removeprefix('weight')}": scales}

    folder = change(base, tmp_path / "joined", join, config)
    outputs = tokens(folder)
    assert behind(base, outputs).mean() < 0.5
    separate = one_by_one(base, tmp_path / "model", config, code)
    assert outputs == tokens(separate)
    assert tokens_of(divided(folder, 2)) == tokens_of(divided(separate, 2))
    pretend(monkeypatch)
    assert tokens(folder) == outputs


def test_experts_are_read_one_at_a_time(tiny_model: MakeModel) -> None:
    folder = tiny_model("gpt_oss", **FAMILIES["gpt_oss"])
    for rank, own in enumerate([range(3), range(3, 6)]):
        for name in ("gate_up_proj", "down_proj"):
            parts = [take.part for take in takes(folder, rank) if take.name.endswith(name)]
            assert parts == [(slice(number, number + 1),) for _ in range(3) for number in own]
    on_gpu = torch.bfloat16, torch.device("cuda")
    dense, codes = (weights_bytes(folder, read_quantization(folder, kind).sizes(*on_gpu)) for kind in ("auto", "int8"))
    assert codes == pytest.approx(dense / 2, rel=0.05)


def test_other_codes_are_refused(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Static activations, as Mistral Small 4 has them."""

    def new(name: str, tensor: torch.Tensor) -> Tensors:
        coded = {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1)}
        return coded if JOINED.match(name) else {name: tensor}

    base, config = tiny_model("llama4", **FAMILIES["llama4"]), {"quant_method": "fp8", "activation_scheme": "static"}
    with pytest.raises(ConfigError, match=r"experts.gate_up_proj has the weights of all experts together, which is se"):
        make_engine(change(base, tmp_path / "model", new, config))
