"""Weights in each format: their numbers to the bit, and products with them, against float64 and as a GPU computes
them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.config import ConfigError
from baton_engine.layers.linear import Linear
from baton_engine.loading import Weights
from baton_engine.ops import TORCH
from baton_engine.quantization.dense import DENSE
from baton_engine.quantization.quantized_experts import join
from baton_engine.quantization.registry import parse_quantization
from baton_engine.shard import Heads, RankNumber
from baton_engine.source import Source
from baton_engine.triton_ops import TRITON
from baton_kernels.reference.grouped_linear import (
    GroupedWeight,
    dequantize_grouped_reference,
    held_exponents,
    pack_four_bits,
)
from tests.packing import Tensors, awq, fp8, gptq, mxfp4, nvfp4, packed_int4

CPU = torch.device("cpu")
INPUTS, OUTPUTS = 128, (40, 24)
SHUFFLED = torch.arange(INPUTS).roll(37) // 64
BITSANDBYTES = Path(__file__).parent / "data" / "bitsandbytes.safetensors"  # written by bitsandbytes 0.50.2

Pack = Callable[[torch.Tensor], Tensors]
# quantization_config, and how a weight is packed.
WEIGHTS_ONLY: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 64}, lambda w: gptq(w, 4, 64, 1)),
    "gptq, 8 bits, all inputs": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq"},
        lambda w: gptq(w, 8, INPUTS, 1),
    ),
    "gptq, version 2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, 4, 32, 2),
    ),
    "gptq, by activation": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True},
        lambda w: gptq(w, 4, 64, 1, SHUFFLED),
    ),
    "gptq, overridden": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {r"+:.*\.a$|.*\.b$": {"bits": 8}}},
        lambda w: gptq(w, 8, 64, 1),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, lambda w: awq(w, 32)),
    "auto-round": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 64, "packing_format": "auto_round:auto_gptq"},
        lambda w: without_order(gptq(w, 4, 64, 1)),
    ),
    "auto-round, zeros as they are": (
        {"quant_method": "intel/auto-round", "bits": 8, "group_size": 32, "backend": "auto_round:exllamav2"},
        lambda w: without_order(gptq(w, 8, 32, 2)),
    ),
    "auto-round, awq": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_awq"},
        lambda w: awq(w, 32),
    ),
    "auto-round, overridden": (
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 64,
            "extra_config": {
                "t.a": {"bits": 8, "data_type": None},
                r"t\.[b-d]$": {"bits": 8},
                "t.c": {"bits": 16},
                "t": {"bits": 4},
            },
        },
        lambda w: without_order(gptq(w, 8, 64, 1)),
    ),
    "compressed-tensors, by activation": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "strategy": "group", "group_size": 64, "actorder": "group"},
                }
            },
        },
        lambda w: packed_int4(w, 64, SHUFFLED),
    ),
    "modelopt, nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, nvfp4),
    "modelopt, large numbers": (
        {"quant_method": "modelopt_fp4", "quant_algo": "W4A16_NVFP4"},
        lambda w: nvfp4(w, 0.5),
    ),
    "modelopt, mixed": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {f"t.{name}": {"quant_algo": "NVFP4"} for name in "ab"},
        },
        nvfp4,
    ),
    "mxfp4": (
        {"quant_method": "mxfp4"},
        lambda w: {name if name == "numbers" else f"_{name}": tensor for name, tensor in mxfp4(w).items()},
    ),
}
FP8: dict[str, tuple[dict[str, Any], Pack]] = {
    "tiles": ({"quant_method": "fp8", "weight_block_size": [16, 32]}, lambda w: fp8(w, (16, 32), "weight_scale_inv")),
    "tiles, powers of two": (
        {"quant_method": "fp8", "weight_block_size": [8, 64], "scale_fmt": "ue8m0"},
        lambda w: fp8(w, (8, 64), "weight_scale_inv", exponents=True),
    ),
    "tiles of auto-round": (
        {"quant_method": "auto-round", "packing_format": "auto_round:fp8", "bits": 8, "weight_block_size": [16, 32]},
        lambda w: fp8(w, (16, 32), "weight_scale_inv"),
    ),
    "one scale": ({"quant_method": "fp8"}, lambda w: fp8(w, None, "weight_scale")),
    "one scale, static activations": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda w: {**fp8(w, None, "weight_scale"), "input_scale": torch.tensor(0.02)},
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        lambda w: {**fp8(w, None, "weight_scale"), "input_scale": torch.tensor(0.02)},
    ),
    "modelopt, per channel": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        lambda w: {
            name: tensor.flatten() if name == "weight_scale" else tensor
            for name, tensor in fp8(w, (1, INPUTS), "weight_scale").items()
        },
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 2.0},
        lambda w: fp8(w, (1, INPUTS), "weight_scale"),
    ),
}


def without_order(packed: Tensors) -> Tensors:
    del packed["g_idx"]
    return packed


def write(folder: Path, pack: Pack, seed: int = 0) -> torch.Tensor:
    """Write the projections t.a and t.b with biases, and return the numbers of both, [outputs, inputs]."""
    torch.manual_seed(seed)
    tensors, numbers = {}, []
    for name, outputs in zip("ab", OUTPUTS, strict=True):
        packed = pack(torch.randn(outputs, INPUTS))
        numbers.append(packed.pop("numbers"))
        joined = {
            f"t.{name}{field}" if field.startswith("_") else f"t.{name}.{field}": packed[field] for field in packed
        }
        tensors |= {field: tensor.contiguous() for field, tensor in joined.items()}
        tensors[f"t.{name}.bias"] = torch.randn(outputs)
    save_file(tensors, folder / "model.safetensors")
    return torch.cat(numbers)


def open_source(weights: Weights, config: dict[str, Any], ops: Any = TORCH) -> Source:
    return Source(weights, ops, parse_quantization({"quantization_config": config}).policy).at("t")


def products(folder: Path, config: dict[str, Any], x: torch.Tensor, ops: Any) -> torch.Tensor:
    with Weights(folder, torch.float32, CPU) as weights:
        return Linear(open_source(weights, config, ops), ["a", "b"], list(OUTPUTS), INPUTS, bias=True)(x)


@pytest.mark.parametrize("name", WEIGHTS_ONLY)
def test_weights_in_groups(name: str, tmp_path: Path) -> None:
    config, pack = WEIGHTS_ONLY[name]
    numbers = write(tmp_path, pack)
    with Weights(tmp_path, torch.float32, CPU) as weights:
        source = open_source(weights, config)
        read = [source.weight(each, outputs, INPUTS) for each, outputs in zip("ab", OUTPUTS, strict=True)]
    assert torch.equal(torch.cat(read), numbers)
    x = torch.randn(3, INPUTS)
    tensors = load_file(tmp_path / "model.safetensors")
    bias = torch.cat([tensors["t.a.bias"], tensors["t.b.bias"]])
    exact = x.double() @ numbers.double().T + bias.double()
    # Each of INPUTS products and sums is rounded to 24 bits.
    bound = 2**-24 * INPUTS * (x.double().abs() @ numbers.double().abs().T + bias.double().abs())
    for ops in (TORCH, TRITON):
        assert ((products(tmp_path, config, x, ops) - exact).abs() <= bound).all()


@pytest.mark.parametrize("name", FP8)
def test_fp8(name: str, tmp_path: Path) -> None:
    config, pack = FP8[name]
    numbers = write(tmp_path, pack)
    x = torch.randn(3, INPUTS)
    with Weights(tmp_path, torch.float32, CPU) as weights:
        source = open_source(weights, config)
        method = source.method(["a", "b"])
        read = [source.weight(each, outputs, INPUTS) for each, outputs in zip("ab", OUTPUTS, strict=True)]
    assert torch.equal(torch.cat(read), numbers)
    # What the activations become, by the definition of the format.
    groups = x.double().unflatten(1, (-1, method.rows.group or INPUTS))
    scales = groups.abs().amax(dim=2, keepdim=True) / 448
    if "activation_scale_ub" in config:
        scales = groups.abs().amax(dim=2, keepdim=True).clamp(max=2.0) / 448
    if "scale_fmt" in config:
        scales = 2 ** scales.log2().ceil()
    if "activation_scheme" in config or config.get("quant_algo") == "FP8":
        scales = torch.full_like(scales, 0.02)
    rounded = ((groups / scales).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scales).flatten(1)
    tensors = load_file(tmp_path / "model.safetensors")
    bias = torch.cat([tensors["t.a.bias"], tensors["t.b.bias"]])
    exact = rounded @ numbers.double().T + bias.double()
    bound = 2**-23 * INPUTS * (rounded.abs() @ numbers.double().abs().T + bias.double().abs())
    for ops in (TORCH, TRITON):
        assert ((products(tmp_path, config, x, ops) - exact).abs() <= bound).all()


@pytest.mark.parametrize("tile", [(16, 32), (20, 32), (8, 64)])
def test_ranks_have_parts_of_tiles(tile: tuple[int, int], tmp_path: Path) -> None:
    """Heads of 4 outputs are divided within tiles of all projections, or of one of them."""
    config = {"quant_method": "fp8", "weight_block_size": list(tile)}
    write(tmp_path, lambda w: fp8(w, tile, "weight_scale_inv"))
    x = torch.randn(3, INPUTS)
    for ops in (TORCH, TRITON):
        with Weights(tmp_path, torch.float32, CPU) as weights:
            source = open_source(weights, config, ops)
            parts = [
                Linear(source, ["a", "b"], list(OUTPUTS), INPUTS, bias=True, shard=Heads(RankNumber(rank, 2), 4))(x)
                for rank in range(2)
            ]
        [first, second] = products(tmp_path, config, x, ops).split(OUTPUTS, dim=1)
        expected = zip(first.chunk(2, dim=1), second.chunk(2, dim=1), strict=True)
        for part, pair in zip(parts, expected, strict=True):
            torch.testing.assert_close(part, torch.cat(pair, dim=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "with zeros"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_int8(static: bool, symmetric: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(weight: torch.Tensor) -> Tensors:
        codes = torch.randint(-128, 128, weight.shape, dtype=torch.int8)
        scales = torch.rand(len(weight), 1) / 100
        packed = {"weight": codes, "weight_scale": scales, "numbers": codes * scales}
        if static:
            packed |= {"input_scale": torch.tensor([0.03]), "input_zero_point": torch.tensor([-11], dtype=torch.int8)}
        return packed

    inputs = {"num_bits": 8, "type": "int", "symmetric": symmetric}
    inputs |= {"strategy": "tensor", "dynamic": False} if static else {"strategy": "token", "dynamic": True}
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}
    numbers = write(tmp_path, pack).double()
    x = torch.randn(3, INPUTS) + 0.2
    wide = x.double()
    if static:
        scales, zeros = torch.full((3, 1), 0.03, dtype=torch.float32).double(), 0.0 if symmetric else -11.0
    elif symmetric:
        scales, zeros = wide.abs().amax(dim=1, keepdim=True) / 127.5, 0.0
    else:
        low, high = wide.amin(dim=1, keepdim=True), wide.amax(dim=1, keepdim=True)
        scales = (high - low) / 255
        zeros = torch.round(-128 - low / scales)
    codes = torch.round((wide / scales + zeros).clamp(-128, 127))
    tensors = load_file(tmp_path / "model.safetensors")
    bias = torch.cat([tensors["t.a.bias"], tensors["t.b.bias"]]).double()
    exact = ((codes - zeros) * scales) @ numbers.T + bias
    bound = 2**-22 * INPUTS * ((codes.abs() + 128) * scales @ numbers.abs().T + bias.abs())
    for ops in (TORCH, TRITON):
        assert ((products(tmp_path, config, x, ops) - exact).abs() <= bound).all()
    monkeypatch.setattr("baton_engine.quantization.scaled.has_int8_products", lambda: False)
    assert ((products(tmp_path, config, x, TORCH) - exact).abs() <= bound).all()


@pytest.mark.parametrize(("kind", "inputs"), [("nf4", 128), ("fp4", 128), ("int8", 64)])
def test_bitsandbytes(kind: str, inputs: int, tmp_path: Path) -> None:
    tensors = load_file(BITSANDBYTES)
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quant_method": "bitsandbytes", "load_in_8bit": kind == "int8", "bnb_4bit_quant_type": kind}
    config = {name: value for name, value in config.items() if value != "int8"}
    policy = parse_quantization({"quantization_config": config}).policy
    if kind == "int8":
        numbers = tensors["int8.weight"] * (tensors["int8.SCB"] / 127)[:, None]
    else:
        numbers = tensors[f"{kind}.numbers"]
    x = torch.randn(3, inputs)
    for ops in (TORCH, TRITON):
        with Weights(tmp_path, torch.float32, CPU) as weights:
            source = Source(weights, ops, policy)
            assert torch.equal(source.weight(kind, 32, inputs), numbers)
            torch.testing.assert_close(Linear(source, [kind], [32], inputs)(x), x @ numbers.T)


def test_packed_numbers_are_those_of_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed = fp8(torch.randn(40, 96), (16, 32), "scales")
    numbers = _dequantize_fp8_weight(packed["weight"], packed["scales"], [16, 32], torch.float32)
    assert torch.equal(numbers, packed["numbers"])
    packed = mxfp4(torch.randn(2, 24, 64))
    numbers = convert_moe_packed_tensors(packed["blocks"], packed["scales"], dtype=torch.float32)
    assert torch.equal(numbers.transpose(1, 2), packed["numbers"])


def test_inputs_in_different_orders_are_multiplied_apart(tmp_path: Path) -> None:
    orders = iter((SHUFFLED, SHUFFLED.flip(0)))
    numbers = write(tmp_path, lambda w: gptq(w, 4, 64, 1, next(orders)))
    config, x = WEIGHTS_ONLY["gptq, by activation"][0], torch.randn(3, INPUTS)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = x @ numbers.T + torch.cat([tensors["t.a.bias"], tensors["t.b.bias"]])
    for ops in (TORCH, TRITON):
        torch.testing.assert_close(products(tmp_path, config, x, ops), expected)
        with Weights(tmp_path, torch.float32, CPU) as weights:
            both = Linear(open_source(weights, config, ops), ["b", "b"], [24, 24], INPUTS)
            gate = x @ numbers[40:].T
        torch.testing.assert_close(both.gated(x, "silu"), torch.nn.functional.silu(gate) * gate)
        with Weights(tmp_path, torch.float32, CPU) as weights:
            order = torch.randperm(sum(OUTPUTS)).tolist()
            shuffled = Linear(
                open_source(weights, config, ops), ["a", "b"], list(OUTPUTS), INPUTS, bias=True, order=order
            )
        torch.testing.assert_close(shuffled(x), expected[:, order])


@pytest.mark.parametrize("name", ["gptq", "awq", "mxfp4", "modelopt, nvfp4"])
def test_a_part_of_outputs_and_inputs(name: str, tmp_path: Path) -> None:
    config, pack = WEIGHTS_ONLY[name]
    numbers = write(tmp_path, pack)[:40]
    with Weights(tmp_path, torch.float32, CPU) as weights:
        source = open_source(weights, config)
        part = source.method(["a"]).read(source, "a", 40, INPUTS, slice(8, 32), slice(64, 128), False)
    assert torch.equal(part.dense(torch.float32), numbers[8:32, 64:128])


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("lm_head", True),
        ("model.layers.0.mlp.gate", True),
        ("model.layers.0.mlp.gate_proj", False),
        ("model.layers.10.mlp.gate", False),
        ("model.layers.3.self_attn.q_proj", True),
        ("model.layers.3.mlp.experts.7.up_proj", False),
    ],
)
def test_names_of_modules_that_are_left_out(name: str, left_out: bool) -> None:
    entries = ["lm_head", "model.layers.0.mlp.gate", r"model\.layers\.\d+\.self_attn"]
    policy = parse_quantization(
        {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": entries}}
    ).policy
    assert (policy(name, False, lambda _: True) == DENSE) == left_out
    # What has no scale is not quantized, whatever the config says.
    assert policy(name, False, lambda tensor: tensor.endswith(".weight")) == DENSE


@pytest.mark.parametrize("other", ["8 bits", "not quantized"])
@pytest.mark.parametrize("ordered", [True, False], ids=["in an order", "as stored"])
def test_projections_that_are_stored_differently_are_multiplied_apart(
    other: str, ordered: bool, tmp_path: Path
) -> None:
    packs = iter([
        lambda w: gptq(w, 4, 64, 1),
        (lambda w: gptq(w, 8, 64, 1)) if other == "8 bits" else lambda w: {"weight": w, "numbers": w},
    ])  # fmt: skip
    numbers, x = write(tmp_path, lambda w: next(packs)(w)), torch.randn(3, INPUTS)
    tensors = load_file(tmp_path / "model.safetensors")
    order = torch.randperm(sum(OUTPUTS)).tolist() if ordered else list(range(sum(OUTPUTS)))
    expected = (x @ numbers.T + torch.cat([tensors["t.a.bias"], tensors["t.b.bias"]]))[:, order]
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {r".*\.b": {"bits": 8}}}
    for ops in (TORCH, TRITON):
        with Weights(tmp_path, torch.float32, CPU) as weights:
            source = open_source(weights, config, ops)
            both = Linear(source, ["a", "b"], list(OUTPUTS), INPUTS, bias=True, order=order if ordered else None)
        torch.testing.assert_close(both(x), expected, rtol=1e-4, atol=1e-4)
        gate, up = expected.chunk(2, dim=1)
        gated = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(both.gated(x, "silu"), gated, rtol=1e-4, atol=1e-4)


def test_experts_that_are_stored_differently_are_named(tmp_path: Path) -> None:
    write(tmp_path, lambda w: gptq(w, 4, 64, 1))
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {r".*\.b": {"bits": 8}}}
    with Weights(tmp_path, torch.float32, CPU) as weights, pytest.raises(ConfigError) as error:
        open_source(weights, config).method(["a", "b"])
    assert "t.a and t.b are multiplied together, but are not stored alike: Gptq(bits=4" in str(error.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "quip"}, ["'quip'", "compressed-tensors", "gptq", "bitsandbytes"]),
        ({}, ["None", "gptq"]),
        ({"quant_method": ["gptq"]}, ["['gptq']", "gptq"]),
        ([4], ["not a JSON object"]),
        ({"quant_method": "gptq", "bits": 3}, ["3 bits", "4 and 8"]),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ["'marlin'", "gptq_v2"]),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, ["'('", "not a regular expression"]),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a" * 2000: {}}}, ["2000 characters"]),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a": 4}}, ["dynamic", "object"]),
        ({"quant_method": "awq", "version": "gemv"}, ["'gemv'", "gemm"]),
        ({"quant_method": "auto-round", "bits": 2}, ["2 bits", "4 and 8"]),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, ["'mx_fp'", "integers of 4 and 8 bits"]),
        ({"quant_method": "auto-round", "bits": 8, "packing_format": "auto_round:fake"}, ["'auto_round:fake'"]),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"a": 4}}, ["extra_config", "'a'", "object"]),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"a(": {}}}, ["'a('", "not a regular expression"]),
        ({"quant_method": "awq", "bits": 8}, ["8 bits"]),
        ({"quant_method": "awq", "modules_to_not_convert": "head"}, ["modules_to_not_convert", "list"]),
        ({"quant_method": "fp8", "weight_block_size": [128, 100]}, ["[128, 100]", "128"]),
        ({"quant_method": "fp8", "weight_block_size": "all"}, ["'all'"]),
        ({"quant_method": "fp8", "weight_block_size": "128x100"}, ["[128, 100]"]),
        ({"quant_method": "fp8", "activation_scheme": "none"}, ["activation_scheme", "dynamic"]),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}},
            },
            ["num_bits 4", "nvfp4-pack-quantized", "Baton serves FP8", "MXFP4"],
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": ["Linear"]}},
            ["config_groups", "'g'", "object"],
        ),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "int3"}, ["bnb_4bit_quant_type", "nf4"]),
        ({"quant_method": "bitnet", "use_rms_norm": True}, ["bitnet and use_rms_norm"]),
        ({"quant_method": "bitnet", "linear_class": "linear"}, ["linear_class", "autobitlinear"]),
    ],
)
def test_what_is_not_served_is_named(config: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_quantization({"quantization_config": config} if config != {} else {"quantization_config": {"x": 1}})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("field", "tensor", "words"),
    [
        ("qweight", torch.zeros(16, 40), ["t.a.qweight", "float32, not int32"]),
        ("qweight", torch.zeros(16, 8, dtype=torch.int32), ["[16, 8]", "[16, 40]"]),
        ("scales", None, ["no tensor 't.a.scales'"]),
        ("g_idx", torch.zeros(INPUTS, dtype=torch.int32), ["t.a has not 64 inputs in each group"]),
    ],
)
def test_damaged_tensors_are_named(field: str, tensor: torch.Tensor | None, words: list[str], tmp_path: Path) -> None:
    config, pack = WEIGHTS_ONLY["gptq"]
    write(tmp_path, pack)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {} if tensor is None else {f"t.a.{field}": tensor}
    save_file({name: t for name, t in tensors.items() if tensor is not None or name != f"t.a.{field}"},
              tmp_path / "model.safetensors")  # fmt: skip
    with Weights(tmp_path, torch.float32, CPU) as weights, pytest.raises(ConfigError) as error:
        Linear(open_source(weights, config), ["a"], [40], INPUTS)
    for word in words:
        assert word in str(error.value)


def test_codes_are_never_taken_for_numbers(tmp_path: Path) -> None:
    write(tmp_path, lambda w: fp8(w, None, "weight_scale"))
    config = {"quant_method": "fp8", "modules_to_not_convert": ["t.a"]}
    with Weights(tmp_path, torch.float32, CPU) as weights, pytest.raises(ConfigError) as error:
        Linear(open_source(weights, config), ["a"], [40], INPUTS)
    assert "t.a.weight in model.safetensors is float8_e4m3fn, not float32" in str(error.value)


def test_groups_that_no_kernel_has_are_named(tmp_path: Path) -> None:
    write(tmp_path, lambda w: gptq(w, 4, 16, 1))
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    with Weights(tmp_path, torch.float32, CPU) as weights, pytest.raises(ConfigError) as error:
        Linear(open_source(weights, config), ["a"], [40], INPUTS)
    assert "t.a has 128 inputs in groups of 16" in str(error.value)


@pytest.mark.parametrize("byte", [127, 128, 255])
def test_scales_that_are_no_numbers_above_0_are_refused(byte: int, tmp_path: Path) -> None:
    write(tmp_path, nvfp4)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["t.a.weight_scale"].view(torch.uint8)[3, 2] = byte
    save_file(tensors, tmp_path / "model.safetensors")
    with Weights(tmp_path, torch.float32, CPU) as weights, pytest.raises(ConfigError) as error:
        Linear(open_source(weights, WEIGHTS_ONLY["modelopt, nvfp4"][0], TRITON), ["a"], [40], INPUTS)
    assert "t.a has scales that are negative or not finite" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_algo": "NVFP4_AWQ"}, "'NVFP4_AWQ', which is not served; Baton serves FP8, "),
        ({}, "Model Optimizer's None"),
        ({"quant_algo": ["FP8"]}, "which is not served"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": 3}}, "quantized_layers has 3 for 'a'"),
        ({"quant_algo": "FP8", "ignore": "lm_head"}, "ignore in the quantization config is not a list"),
    ],
)
def test_what_of_model_optimizer_is_not_served(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_quantization({"quantization_config": {"quant_method": "modelopt", **fields}})
    assert message in str(error.value)


def test_experts_whose_exponents_differ_in_size_are_joined() -> None:
    """A weight with a scale above 2 is held in another way than its neighbours."""
    weights = []
    for most in (120, 140):
        exponents = torch.randint(110, most, (8, 2), dtype=torch.uint8)
        exponents[0, 0] = most
        codes = pack_four_bits(torch.randint(0, 16, (8, 64), dtype=torch.uint8))
        weights.append(GroupedWeight("e2m1", codes, held_exponents(exponents)))
    assert [weight.scales.dtype for weight in weights] == [torch.uint8, torch.float32]
    joined = join(weights, len(weights))
    assert isinstance(joined, GroupedWeight)
    for number, weight in enumerate(weights):
        one = joined._replace(codes=joined.codes[number], scales=joined.scales[number])
        numbers = dequantize_grouped_reference(weight, torch.float32)
        assert torch.equal(dequantize_grouped_reference(one, torch.float32), numbers)
