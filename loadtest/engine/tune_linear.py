"""Finds the fastest small-batch matrix product for each weight of the given models on the GPU at hand.

    python loadtest/engine/tune_linear.py --out kernels/baton_kernels/tuned/NAME.json MODEL_DIR [MODEL_DIR ...]

A MODEL_DIR needs its config.json alone. Each candidate runs in a CUDA graph over weights that exceed the L2 cache
together. A product is left to cuBLAS where no candidate is faster.
"""

import argparse
import functools
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from baton_engine.model_config import ModelConfig
from baton_engine.models.registry import load_model_config
from baton_engine.models.sparse_config import SparseConfig
from baton_kernels.activation import gate_mul
from baton_kernels.linear import linear
from baton_kernels.reference.linear import linear_reference
from baton_kernels.tuning import LinearConfig, product_name

ROWS = (1, 8, 16, 32, 64, 128)
SHARED_MEMORY = 220 << 10
WEIGHT_BYTES = 512 << 20  # several times the L2 cache of any current GPU


class Product(NamedTuple):
    """x [rows, inner] times a weight [outputs, inner]; gated: half of the outputs are gates."""

    outputs: int
    inner: int
    gated: bool


def products(config: ModelConfig) -> set[Product]:
    heads = config.num_heads + 2 * config.num_kv_heads
    size = config.hidden_size
    inner = {config.intermediate_size}
    if isinstance(config, SparseConfig):
        dense = {config.intermediate_size} if config.dense_layers else set()
        inner = dense | ({config.shared_size} if config.shared_size else set())
    return {
        Product(heads * config.head_dim, size, False),
        Product(size, config.num_heads * config.head_dim, False),
        *(Product(2 * units, size, True) for units in inner),
        *(Product(size, units, False) for units in inner),
        Product(config.vocab_size, size, False),
    }


def candidates(product: Product, rows: int) -> list[LinearConfig]:
    weights = 2 if product.gated else 1
    outputs = product.outputs // weights
    if rows == 1:
        return [
            LinearConfig(1, block, inner, 1, warps, 1)
            for block, inner, warps in itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096), (1, 2, 4, 8))
            if 16 <= block * inner * weights // (32 * warps) <= 64 and inner <= product.inner
        ]
    found = []
    block_rows = max(rows, 16)
    for block, inner, splits in itertools.product((16, 32, 64, 128), (64, 128, 256), (1, 2, 3, 4, 6, 8)):
        programs = triton.cdiv(outputs, block) * splits
        steps = triton.cdiv(product.inner, inner * splits)
        large = splits == 1 and block >= 64
        if block * block_rows * weights > 128 * 128 or steps < 2 or programs < 96 or (programs > 800 and not large):
            continue
        stage = (block * weights + block_rows) * inner * 2
        # Less than the whole shared memory lets several programs share a multiprocessor, or the next kernel start.
        depths = {min(SHARED_MEMORY // (stage * share), steps, 8) for share in (1, 2, 4)}
        warps = 8 if block * block_rows * weights > 8192 else 4
        found += [LinearConfig(block_rows, block, inner, splits, warps, depth) for depth in depths if depth > 1]
    return found


def compile_all(entries: list[tuple[Product, int, LinearConfig]]) -> None:
    """Run each once, so that the compiled kernel is in Triton's cache on disk."""
    for product, rows, config in entries:
        x = torch.zeros(rows, product.inner, dtype=torch.bfloat16, device="cuda")
        weight = torch.zeros(product.outputs, product.inner, dtype=torch.bfloat16, device="cuda")
        try:
            linear(x, weight, None, product.gated, config=config)
        except Exception:
            continue


@functools.cache
def capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def seconds(run: Callable[[int], object], count: int) -> float:
    """Return the time of one call of run(i), i < count, as part of a graph of them all."""
    run(0)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    # torch.cuda.graph does this too, but empties the allocator's cache each time, which takes longer than the replays.
    with torch.cuda.stream(stream):
        graph.capture_begin()
        for index in range(count):
            run(index)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    times: list[float] = []
    while len(times) < 3 or (len(times) < 8 and sum(times) * count < 0.05):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / count)
    return statistics.median(times[len(times) // 4 :])


def tune(product: Product, rows: int, weights: torch.Tensor) -> dict:
    size = product.outputs * product.inner
    count = max(1, weights.numel() // size)
    parts = [weights[index * size : (index + 1) * size].view(product.outputs, product.inner) for index in range(count)]
    x = torch.randn(rows, product.inner, dtype=torch.bfloat16, device="cuda")
    if product.gated:
        baseline = seconds(lambda i: gate_mul(torch.nn.functional.linear(x, parts[i]), "silu"), count)
    else:
        baseline = seconds(lambda i: torch.nn.functional.linear(x, parts[i]), count)
    expected = linear_reference(x.float(), parts[0].float(), None, product.gated)
    results = []
    for config in candidates(product, rows):
        try:
            got = linear(x, parts[0], None, product.gated, config=config).float()
            error = ((got - expected).norm() / expected.norm()).item()
            if not error < 0.02:
                print(f"  wrong: {product} {rows} {config} error {error}", flush=True)
                continue
            run = functools.partial(linear, x, bias=None, gated=product.gated, config=config)
            results.append((seconds(lambda i, run=run: run(weight=parts[i]), count), config))
        except Exception as error:
            if "out of resource" not in str(error):
                print(f"  failed: {product} {rows} {config}: {error}"[:300], flush=True)
    results.sort()
    return {"cublas": baseline, "best": results[:4], "bytes": size * 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=12)
    arguments = parser.parse_args()
    wanted = sorted(set().union(*(products(load_model_config(model)) for model in arguments.models)))
    began = time.monotonic()
    entries = {}
    for product, rows in itertools.product(wanted, ROWS):
        for config in candidates(product, rows):
            even = product.inner % (config.block_inner * config.splits) == 0
            inner = product.inner if config.block_rows == 1 else 0
            entries[product.gated, config, even, inner] = (product, rows, config)
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.processes) as pool:
        work = list(entries.values())
        pool.map(compile_all, [work[index :: arguments.processes * 4] for index in range(arguments.processes * 4)], 1)
    print(f"compiled {len(entries)} kernels in {time.monotonic() - began:.0f} s", flush=True)
    table = {}
    weights = torch.randn(WEIGHT_BYTES // 2, device="cuda", dtype=torch.bfloat16) * 0.02
    large = torch.randn(max(p.outputs * p.inner for p in wanted), device="cuda", dtype=torch.bfloat16) * 0.02
    for product in wanted:
        size = product.outputs * product.inner
        choices = {}
        for rows in ROWS:
            result = tune(product, rows, large if size > weights.numel() else weights)
            line = f"{product_name(*product)} rows {rows}: "
            line += f"limit {result['bytes'] / 4.3e12 * 1e6:.1f} cuBLAS {result['cublas'] * 1e6:.1f} us;"
            for took, config in result["best"]:
                line += f" {took * 1e6:.1f} {tuple(config)}"
            print(line, flush=True)
            better = result["best"] and result["best"][0][0] < result["cublas"]
            choices[str(rows)] = list(result["best"][0][1]) if better else None
        table[product_name(*product)] = choices
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        lines = (f"  {json.dumps(name)}: {json.dumps(choices)}" for name, choices in table.items())
        arguments.out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
