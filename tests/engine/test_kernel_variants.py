"""No kernel is compiled while an engine serves, whatever its model and settings are."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeModel

pytestmark = pytest.mark.timeout(900)  # The first test waits for the process that looks at all cases.

SETTINGS: dict[str, Any] = {"max_num_seqs": 20, "max_num_batched_tokens": 300, "max_model_len": 500, "block_size": 16}
# The model's family with fields of its config, and the engine's settings.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "graphs": ("qwen3", {}, {}),
    "eager": ("llama", {}, {"enforce_eager": True}),
    "deterministic": ("llama", {}, {"deterministic": True}),
    "few sequences, odd sizes": ("llama", {}, {"max_num_seqs": 3, "max_num_batched_tokens": 77, "block_size": 5}),
    "long sequences": ("gemma3", {"sliding_window": 700, "max_position_embeddings": 1500}, {"max_model_len": 1500}),
    "windows": ("gemma3", {}, {}),
    "softcap": ("gemma2", {}, {}),
    "two sizes of heads": ("gemma4", {}, {}),
    "shared keys and values": ("gemma4_small", {}, {}),
    "values of another size": ("mimo_v2_flash", {}, {}),
    "biases of keys": ("doge", {}, {}),
    "Hopper": ("gpt_oss", {"max_position_embeddings": 1500}, {"max_model_len": 1500, "block_size": 64}),
    "Hopper, KV in FP8": (
        "gpt_oss",
        {"max_position_embeddings": 1500, "sliding_window": 700},
        {"max_model_len": 1500, "max_num_batched_tokens": 1200, "block_size": 64, "kv_cache_dtype": "fp8"},
    ),
    "ALiBi": ("bloom", {}, {}),
    "sinks": ("gpt_oss", {}, {}),
    "experts": ("qwen3_moe", {"num_experts": 60, "num_experts_per_tok": 5}, {}),
    "a row for each expert of a token": ("muse_spark", {"num_local_experts": 20, "num_experts_per_tok": 3}, {}),
    "a row for each expert of a token, scaled": ("llama4", {"num_local_experts": 20, "num_experts_per_tok": 3}, {}),
    "a product with one output": ("qwen2_moe", {}, {}),
    "latents": ("deepseek_v3", {"kv_lora_rank": 512}, {"max_num_batched_tokens": 256}),
    "selected tokens": ("deepseek_v32", {"index_topk": 100, "index_n_heads": 4}, {"max_num_batched_tokens": 290}),
    "selected blocks of keys": ("minimax_m3", {"index_topk_blocks": 12}, {"max_num_batched_tokens": 290}),
    "selected blocks of keys, one key-value head": (
        "minimax_m3",
        {"num_key_value_heads": 1, "index_n_heads": 1, "index_topk_blocks": 12},
        {"max_num_batched_tokens": 290},
    ),
    "selected tokens without rotation": ("mistral_large4", {}, {"max_num_batched_tokens": 290}),
    "selected tokens with sinks": ("hy_v4", {"index_topk": 100}, {"max_num_batched_tokens": 290}),
    "selected groups of tokens": ("glm5_next", {"index_topk": 100}, {"max_num_batched_tokens": 290}),
    "latents by layer": ("dots3_note", {"index_topk": 100}, {"max_num_batched_tokens": 290}),
    "few latents": ("deepseek_v3", {}, {}),
    "entries of windows": ("deepseek_v4", {"index_topk": 30}, {"max_num_batched_tokens": 290}),
    "entries of windows, deterministic": ("deepseek_v4", {}, {"deterministic": True}),
    "recurrent states beside windows": ("recurrent_gemma", {}, {}),
    "KV in FP8": ("llama", {}, {"kv_cache_dtype": "fp8"}),
    "KV in FP8, shared": ("gemma3n", {}, {"kv_cache_dtype": "fp8"}),
    "KV in FP8, windows": ("gemma3", {}, {"kv_cache_dtype": "fp8"}),
    "KV in FP8, values of another size": (
        "mimo_v2_flash",
        {"layer_types": ["sliding_attention"] * 4},
        {"kv_cache_dtype": "fp8"},
    ),
    "int4": ("llama", {}, {"quantization": "int4"}),
    "fp8": ("llama", {}, {"quantization": "fp8"}),
    "int8": ("llama", {}, {"quantization": "int8"}),
    "experts in int4": ("qwen3_moe", {"moe_intermediate_size": 64}, {"quantization": "int4"}),
    "experts in fp8": ("qwen3_moe", {"moe_intermediate_size": 64}, {"quantization": "fp8"}),
    "without warm-up": ("qwen3_moe", {"num_experts": 60, "num_experts_per_tok": 5}, {"enforce_eager": True}),
}


@pytest.fixture(scope="module")
def found(tiny_model: MakeModel, processes: None) -> dict[str, Any]:
    """What kernel_variants.py finds. It is a process of its own, as kernels of this one run in the interpreter."""
    cases = [
        (name, str(tiny_model(family, **fields)), {**SETTINGS, **settings})
        for name, (family, fields, settings) in CASES.items()
    ]
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.engine.kernel_variants", json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("name", [name for name in CASES if name != "without warm-up"])
def test_serving_needs_no_variant_that_was_not_compiled_at_start(found: dict[str, Any], name: str) -> None:
    assert [f"{kernel} {key}" for kernel, key in found[name]["late"]] == []
    assert found[name]["ahead"] > 10


def test_these_requests_would_compile_kernels_without_warm_up(found: dict[str, Any]) -> None:
    assert len(found["without warm-up"]["late"]) > 5


def test_kernels_are_compiled_in_threads_and_counted(found: dict[str, Any]) -> None:
    assert all(size > 1000 for size in found["compile_ahead"]["binaries"])
    assert len(found["compile_ahead"]["binaries"]) == 2
    # Two variants are new, and the third launch has the second one's.
    assert found["compile_ahead"]["counted"] == [2, 2]
