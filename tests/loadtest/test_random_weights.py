"""Random weights of each quantized format are what the engine loads, and give numbers that are finite."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from baton_engine.engine import Engine
from loadtest.common.random_model import write_random_model
from loadtest.common.random_weights import random_weights_in_memory
from tests.conftest import MakeModel
from tests.engine.harness import generate, make_engine, make_prompt, make_request

EIGHT = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "compressed-tensors": (
        "llama",
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": EIGHT, "input_activations": TOKEN}},
            "ignore": ["lm_head"],
        },
    ),
    "gptq": ("llama", {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "fp8": ("qwen3_moe", {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "nvfp4": ("llama", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4 of experts": ("qwen3_moe", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "mxfp8": ("llama", {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
    "mxfp4": ("gpt_oss", {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}),
}


def config_of(name: str, tiny_model: MakeModel) -> str:
    family, config = FORMATS[name]
    sizes = {"intermediate_size": 96} if family == "gpt_oss" else {}
    sizes |= {"moe_intermediate_size": 96} if family == "qwen3_moe" else {}
    fields = json.loads((tiny_model(family, **sizes) / "config.json").read_text())
    return json.dumps({**fields, "quantization_config": config})


@pytest.mark.parametrize("name", FORMATS)
def test_random_weights_in_a_format(name: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    write_random_model(tmp_path, config_of(name, tiny_model), seed=1)
    check(make_engine(tmp_path))


@pytest.mark.parametrize("name", FORMATS)
def test_random_weights_that_no_file_holds(name: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config_of(name, tiny_model))
    with random_weights_in_memory(seed=1):
        engine = make_engine(tmp_path)
    check(engine)


@pytest.mark.processes
def test_ranks_have_random_weights_too(tiny_model: MakeModel, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_model("llama") / "config.json").read_text())
    with random_weights_in_memory(seed=1):
        engine = make_engine(tmp_path, tensor_parallel=2)
    with contextlib.closing(engine.runner):
        check(engine)


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_random_weights_that_are_quantized_on_load(quantization: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_model("llama") / "config.json").read_text())
    with random_weights_in_memory(seed=1):
        engine = make_engine(tmp_path, quantization=quantization)
    check(engine)


def check(engine: Engine) -> None:
    """Check that an engine with random weights generates."""
    result = generate(engine, [make_request(1, make_prompt(20), 8, logprobs=1)])
    assert len(result.tokens[1, 0]) == 8
    # Weights of another size than intended would make logits huge or equal.
    first = result.first(1).logprobs
    assert first is not None
    assert -7.5 < first[0].logprob < -1
