"""The benchmark's one command, on a tiny shape: every engine has its column, and one that fails spoils only its own."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton_engine.models.registry import parse_model_config

from .conftest import CONFIG

FOLDER = Path(__file__).parents[2] / "loadtest"
# Answers everything at once, but for many requests of one length, on which it breaks.
STAND_IN = """
from types import SimpleNamespace

import torch

SamplingParams = lambda **fields: SimpleNamespace(**fields)

class LLM:
    def __init__(self, model, **settings):
        assert settings["load_format"] == "dummy" and settings["enable_prefix_caching"] is False
        self.model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40), torch.nn.LayerNorm(4))
        for parameter in self.model.parameters():
            torch.nn.init.constant_(parameter, 0.001)

    def apply_model(self, function):
        function(self.model)
        first, second = (layer.weight for layer in self.model[:2])
        assert 0.018 < first.std() < 0.022 and not torch.equal(first, second), "as trained weights"

    def generate(self, prompts, params, use_tqdm):
        if len(prompts) > 8 and len({p.max_tokens for p in params}) == 1:
            raise MemoryError("too many")
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * p.max_tokens)]) for p in params]
"""


def run(folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Return exit code, what was printed, and the report."""
    out = folder.parent / "results.json"
    (folder.parent / "vllm.py").write_text(STAND_IN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder.parent)}
    command = [sys.executable, str(FOLDER / "engine" / "engine_bench.py"), str(folder), "--out", str(out)]
    command += ["--scale", "0.02", "--ours", "num_threads=1", "--max-num-seqs", "64", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert out.exists(), done.stdout + done.stderr
    return done.returncode, done.stdout, json.loads(out.read_text())


@pytest.mark.processes
def test_one_command_measures_all_engines(shape: Path) -> None:
    traces = shape.parent / "traces"
    rows_and_rates = ("--rows", "decode-1,prefill,first-16,requests", "--bandwidth", "2", "--arithmetic", "3")
    code, printed, report = run(shape, *rows_and_rates, "--seed", "7", "--profile", str(traces))
    assert code == 1, "a failed row must show in the exit code"
    assert report["seed"] == 7
    assert report["versions"]["torch"]
    assert report["card"]["measured"]["bandwidth"] > 0
    assert report["card"]["used_for_limits"] == {"bandwidth": 2e12, "arithmetic": 3e12}
    assert not any(shape.glob("*.safetensors")), "weights belong into a temporary folder"
    entry = report["shapes"]["tiny"]
    assert entry["errors"] == {"vllm": "requests: MemoryError: too many"}, printed
    check_rows(entry["rows"], printed)
    assert len(list(traces.glob("tiny-*.json"))) == 5
    assert entry["profile"][-1]["name"] == "prefill, 4 x 41"
    for step in entry["profile"]:
        assert step["groups"]["gemm"]["ms"] > 0
        assert step["groups"]["attention"]["limit_ms"] > 0


def check_rows(rows: dict[str, Any], printed: str) -> None:
    assert list(rows) == ["decode-1", "prefill", "first-16", "requests"]
    for row in rows.values():
        assert math.isfinite(row["ours"]["median"])
        assert row["limit"] > 0
    first, prefill = rows["first-16"], rows["prefill"]
    assert len(first["ours"]["samples"]) == 7
    for other in ("vllm", "transformers"):
        assert prefill["ratio"][other] == pytest.approx(prefill["ours"]["median"] / prefill[other]["median"])
        assert first["ratio"][other] == pytest.approx(first[other]["median"] / first["ours"]["median"])
    assert "transformers" not in rows["requests"]
    lines = {line.split("  ")[0]: line for line in printed.splitlines()}
    assert "failed" in lines[rows["requests"]["name"]]
    assert lines[prefill["name"]].rstrip().endswith("%")


@pytest.mark.processes
def test_long_and_uneven_rows_are_measured_as_far_as_they_fit(shape: Path) -> None:
    rows = ("--rows", "decode-8-4k,decode-128-16k,decode-uneven,first-16k,first-128k,prefill-uneven")
    limits = ("--bandwidth", "2", "--arithmetic", "3", "--ours", "num_blocks=40")
    code, printed, report = run(shape, "--long", "--repeats", "2", "--engines", "ours", *rows, *limits)
    assert code == 0, printed
    found = report["shapes"]["tiny"]["rows"]
    # 2,601 tokens are more than the model's positions, and three sequences of 339 tokens do not fit into 40 blocks.
    assert {key for key, row in found.items() if "ours" not in row} == {"decode-128-16k", "first-128k"}
    for key, samples in {"decode-8-4k": 2, "decode-uneven": 2, "first-16k": 7, "prefill-uneven": 2}.items():
        assert len(found[key]["ours"]["samples"]) == samples
    line = next(line for line in printed.splitlines() if line.startswith(found["first-16k"]["name"]))
    assert re.search(r"[\d.,]+ \([\d.,]+-[\d.,]+\)", line)


@pytest.mark.parametrize(
    ("config", "model"),
    [
        ("LlamaConfig", "LlamaForCausalLM"),
        ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
        ("GptOssConfig", "GptOssForCausalLM"),
        ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
        ("Gemma3TextConfig", "Gemma3ForCausalLM"),
        ("Phi3Config", "Phi3ForCausalLM"),
        ("GPT2Config", "GPT2LMHeadModel"),
    ],
)
def test_every_row_has_a_limit_for_configs_as_the_hub_has_them(config: str, model: str) -> None:
    import transformers

    from loadtest.engine.device import Card
    from loadtest.engine.limits import Limits
    from loadtest.engine.long_rows import make_long_rows
    from loadtest.engine.rows import make_rows

    raw = {**getattr(transformers, config)().to_dict(), "architectures": [model], "transformers_version": "5"}
    limits = Limits(parse_model_config(raw), 2, Card(4.3e12, 790e12))
    for row in (*make_rows(1.0, quick=False), *make_long_rows(1.0)):
        assert 0 < row.limit(limits) < math.inf


def test_the_limit_of_uneven_decodes_counts_each_context() -> None:
    from loadtest.engine.device import Card
    from loadtest.engine.limits import Limits
    from loadtest.engine.rows import Row

    limits = Limits(parse_model_config(CONFIG), 2, Card(4.3e12, 790e12))
    even, uneven = (Row("k", "k", "ms/token", inputs, [24] * 3, short=8) for inputs in ([500] * 3, [100, 500, 900]))
    assert (
        uneven.limit(limits)
        == pytest.approx(even.limit(limits))
        != Row("k", "k", "ms/token", [100, 100, 100], [24] * 3, short=8).limit(limits)
    )


def test_random_weights_are_what_the_model_takes() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from baton_engine.load_plan import tensor_shapes

    kinds: list[dict[str, Any]] = [
        {},
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False},
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    ]
    for kind in kinds:
        raw = {**CONFIG, **kind}
        config = AutoConfig.for_model(**{key: value for key, value in raw.items() if key != "torch_dtype"})
        model = AutoModelForCausalLM.from_config(config)
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        if raw["tie_word_embeddings"]:
            del expected["lm_head.weight"]
        shapes = tensor_shapes(parse_model_config(raw))
        assert shapes == expected


def test_weights_in_memory_are_random_and_complete(tmp_path: Path) -> None:
    import torch

    from baton_engine import runner
    from baton_engine.load_plan import tensor_shapes
    from loadtest.common.random_weights import random_weights_in_memory

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shapes = tensor_shapes(parse_model_config(CONFIG))
    with random_weights_in_memory(seed=1):
        assert runner.weights_bytes(tmp_path, lambda dtype, shape: 4 * math.prod(shape)) == 4 * sum(
            map(math.prod, shapes.values())
        )
        with runner.Weights(tmp_path, torch.float32, torch.device("cpu")) as weights:
            tensors = {name: weights.take(name, shape, None, torch.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        assert tensor.shape == shapes[name]
        assert tensor.std() == 0 if name.endswith("norm.weight") else 0.015 < tensor.std() < 0.025
    assert runner.Weights.__module__ == "baton_engine.loading"


def test_overlapping_kernels_count_once_as_busy() -> None:
    from loadtest.engine.step_profile import sum_trace

    names = {
        "nvjet_tst_128x8": (0, 10),
        "_decode_kernel": (8, 4),
        "Memcpy HtoD": (20, 5),
        "_add_rms_norm_kernel": (21, 1),
    }
    events = [
        {"cat": "gpu_memcpy" if "Memcpy" in name else "kernel", "name": name, "ts": ts, "dur": dur}
        for name, (ts, dur) in names.items()
    ]
    spent, counts, busy = sum_trace([*events, {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 99}])
    assert {group: us for group, us in spent.items() if us} == {"gemm": 10, "attention": 2, "copies": 5}
    assert sum(counts.values()) == 4
    assert busy == 17


def test_limits_of_an_8b_model_on_an_h200() -> None:
    from loadtest.engine.device import Card
    from loadtest.engine.limits import Limits
    from loadtest.engine.rows import make_rows

    raw = {**CONFIG, "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336}
    raw |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    raw |= {"vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 131072}
    limits = Limits(parse_model_config(raw), 2, Card(4.3e12, 790e12))
    got = {row.key: row.limit(limits) for row in make_rows(1.0, quick=False)}
    known = {"decode-1": 3.5, "decode-32": 4.1, "decode-256": 9.9, "prefill": 54_500, "first-2048": 37.6}
    assert {key: got[key] for key in known} == pytest.approx(known, rel=0.01)


def test_what_an_engine_compiles_neither_counts_nor_is_subtracted() -> None:
    from loadtest.engine.rows import Row

    asked: list[int] = []

    def measure(repeats: int, times: list[float]) -> list[float]:
        left = iter(times)

        def generate(inputs: list[int], outputs: list[int]) -> float:
            asked.append(outputs[0])
            return next(left)

        row = Row("k", "k", "ms/token", [512] * 2, [108] * 2, repeats=repeats, short=8)
        samples = row.measure(generate)
        assert next(left, None) is None
        return samples

    # The engine compiles in the first long run, and in the first two short ones.
    assert measure(1, [3.0, 1.5, 1.5, 0.9, 0.9, 0.5, 0.5]) == [10.0]
    assert asked == [108, 108, 108, 8, 8, 8, 8]
    assert measure(2, [1.5, 0.5, 0.5, 0.5, 2.0, 1.0, 1.0, 1.0]) == [10.0, 10.0]
    # A run of more than a minute is not repeated.
    assert measure(1, [101.0, 1.0, 1.0, 1.0]) == [1000.0]


def test_what_an_engine_warns_of_is_in_the_report(tmp_path: Path) -> None:
    import logging

    from loadtest.engine.bench_report import Report
    from loadtest.engine.tasks import Warnings

    report, events = Report(tmp_path / "report.json", {}), []
    entry = report.add_shape("m")
    handler = Warnings(lambda event, **facts: events.append({"event": event, **facts}))
    log = logging.getLogger("baton_engine")
    log.addHandler(handler)
    try:
        logging.getLogger("baton_engine.product_tuning").error("not used: %s", "a kernel")
        logging.getLogger("baton_engine.product_tuning").info("measured")
    finally:
        log.removeHandler(handler)
    assert [report.note(event, "ours", entry) for event in events] == ["warning: not used: a kernel"]
    assert report.json["shapes"]["m"]["warnings"] == ["not used: a kernel"]
