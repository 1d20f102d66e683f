"""Finds the fastest tile sizes of the products of experts for each of the given models on the GPU at hand.

    python loadtest/engine/tune_experts.py --formats bf16,e2m1 MODEL_DIR [MODEL_DIR ...]

A MODEL_DIR needs its config.json alone; those of models without experts are passed over. Each candidate runs in a CUDA
graph of several calls that choose other experts, at random. For each number of rows of a block, the tiles of the first
product are chosen first and then those of the second; for weights of 16 bits the best ones are tried with the copy
engine, too. Tables keep the entries of other shapes.
"""

import argparse
import itertools
import multiprocessing
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

sys.path.append(str(Path(__file__).parents[2]))

from baton_engine.models.registry import load_model_config
from baton_engine.models.sparse_config import SparseConfig
from baton_kernels.experts import FIXED, run_experts
from baton_kernels.kernel_configs import ExpertsConfig, ProductConfig
from baton_kernels.quantized_experts import run_quantized_experts
from baton_kernels.reference.activation import ClampedGate
from baton_kernels.reference.experts import ExpertWeights
from baton_kernels.reference.quantized_experts import QuantizedExperts
from baton_kernels.tuning import experts_config, experts_name, table_name
from baton_kernels.unmeasured import MOST_PAIRS_BY_ROW, rows_of_blocks
from loadtest.engine.tune_linear import TABLES, seconds, write_table
from loadtest.engine.tuned_formats import FORMATS, SHARED_MEMORY, Product

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BLOCK_ROWS = (16, 32, 64, 128)
COPIED = 3  # so many of the fastest candidates are tried with the copy engine
DEVICE = "cuda"


Timed = tuple[float, ExpertsConfig]  # seconds of a call


class Layer(NamedTuple):
    """The shape of a layer of experts, and a key of FORMATS. clamp: None = its gate is silu."""

    count: int
    experts: int
    hidden: int
    size: int
    clamp: ClampedGate | None
    format: str = "bf16"

    @property
    def name(self) -> str:
        return experts_name(self.count, self.experts, self.hidden, self.size)

    def make(self, experts: int) -> Any:
        """Return random weights of so many experts, with biases where the gate is clamped."""
        shapes = (experts, 2 * self.size, self.hidden), (experts, self.hidden, self.size)
        biases = [torch.zeros(shape[:2], dtype=torch.bfloat16, device=DEVICE) for shape in shapes if self.clamp]
        if self.format == "bf16":
            weights = [torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(std=0.02) for shape in shapes]
            return ExpertWeights(*weights, *(biases or (None, None)), self.clamp)
        format = FORMATS[self.format]
        coded = [format.stack(experts, Product(outputs, inner, False)) for _, outputs, inner in shapes]
        return QuantizedExperts(*coded, *(biases or (None, None)), self.clamp, format.form)

    def run(self, x: torch.Tensor, held: Any, *choice: torch.Tensor, config: ExpertsConfig) -> torch.Tensor:
        run = run_experts if self.format == "bf16" else run_quantized_experts
        return run(x, held, *choice, config=config)

    def limit(self, tokens: int) -> float:
        """Return the least seconds of a call on an H200: it reads the weights, or it multiplies."""
        weights = 3 * self.hidden * self.size
        read = self.experts * (1 - (1 - self.count / self.experts) ** tokens)
        return max(read * weights * FORMATS[self.format].bytes / 4.3e12, 2 * tokens * self.count * weights / 800e12)


def layer_of(model: Path, format: str) -> Layer | None:
    config = load_model_config(model)
    if not isinstance(config, SparseConfig):
        return None
    clamp = getattr(config, "clamp", None)
    return Layer(config.routing.count, config.num_experts, config.hidden_size, config.expert_size, clamp, format)


def row_tiles(inner_size: int, at_once: int) -> list[ProductConfig]:
    """Return candidates for products of one row. at_once: rows of weights that a program reads for each output."""
    return [
        ProductConfig(outputs, inner, warps, 1)
        for outputs, inner, warps in itertools.product((1, 2, 4), (64, 128, 256, 512, 1024, 2048), (2, 4, 8))
        if outputs * inner * at_once // (32 * warps) in (16, 32) and inner <= triton.next_power_of_2(inner_size)
    ]


def block_tiles(rows: int, inner_size: int, halves: int) -> list[ProductConfig]:
    """Return candidates for products of blocks of rows. halves: 2 = gates and ups."""
    found = []
    for outputs, inner in itertools.product((32, 64, 128, 256), (64, 128)):
        cells = outputs * rows * halves
        if cells > 256 * 128 or (rows > 32 and outputs < 64) or (outputs == 256 and rows < 64):
            continue
        stage = (outputs * halves + rows) * inner * 2
        # Less than the whole shared memory lets several programs share a multiprocessor, or the next kernel start.
        depths = {min(SHARED_MEMORY // (stage * share), triton.cdiv(inner_size, inner), 6) for share in (1, 2, 4)}
        warps = 8 if cells > 8192 else 4
        found += [ProductConfig(outputs, inner, warps, depth) for depth in depths if depth > 1]
    return found


def coded_tiles(layer: Layer, rows: int, inner_size: int, halves: int) -> list[ProductConfig]:
    """Return candidates for quantized weights. halves: 2 = gates and ups."""
    format = FORMATS[layer.format]
    inners = (format.tile[1],) if format.tile else (128, 256)
    found = []
    for outputs, inner in itertools.product((64, 128), inners):
        cells = outputs * rows * halves
        if cells > 256 * 128:
            continue
        stage = int((outputs * halves * format.bytes + rows * (1 if format.form else 2)) * inner)
        depths = {min(SHARED_MEMORY // (stage * share), triton.cdiv(inner_size, inner), 6) for share in (2, 4)}
        # Warps beyond four would decode the same weights, unless there are outputs for them.
        warps = 8 if cells > 8192 and outputs == 128 else 4
        found += [ProductConfig(outputs, inner, warps, depth) for depth in depths if depth > 1]
    return found


def tiles(layer: Layer, rows: int) -> tuple[list[ProductConfig], list[ProductConfig]]:
    """Return candidates for both products with so many rows of a block."""
    if layer.format != "bf16":
        return coded_tiles(layer, rows, layer.hidden, 2), coded_tiles(layer, rows, layer.size, 1)
    if rows == 1:
        return row_tiles(layer.hidden, 1), row_tiles(layer.size, triton.next_power_of_2(layer.count))
    return block_tiles(rows, layer.hidden, 2), block_tiles(rows, layer.size, 1)


def rows_to_try(layer: Layer, tokens: int) -> list[int]:
    """Return the rows of a block that can be fastest: about as many as an expert has on average."""
    pairs = tokens * layer.count
    found = rows_of_blocks(pairs / layer.experts)
    return [1, *found] if pairs <= MOST_PAIRS_BY_ROW and layer.format == "bf16" else found


class Call:
    """Calls of a layer with so many tokens, whose experts are chosen at random."""

    def __init__(self, layer: Layer, held: Any, tokens: int) -> None:
        self._layer, self._held = layer, held
        self._x = torch.randn(tokens, layer.hidden, dtype=torch.bfloat16, device=DEVICE)
        self._choices = []
        for _ in range(8 if tokens <= 256 else 2 if tokens <= 2048 else 1):
            merit = torch.rand(tokens, layer.experts, device=DEVICE).topk(layer.count)
            self._choices.append((merit.values / merit.values.sum(-1, keepdim=True), merit.indices.int()))
        self._expected = self.run(0, FIXED).float()

    def run(self, index: int, config: ExpertsConfig) -> torch.Tensor:
        return self._layer.run(self._x, self._held, *self._choices[index], config=config)

    def seconds(self, config: ExpertsConfig) -> float | None:
        """Return the time of a call; None = the GPU cannot run it, or its result is wrong."""
        try:
            got = self.run(0, config).float()
        except Exception as error:
            if "out of resource" not in str(error):
                print(f"  failed: {config}: {error}"[:300], flush=True)
            return None
        error = ((got - self._expected).norm() / self._expected.norm()).item()
        if not error < 0.02:
            print(f"  wrong: {config} error {error}", flush=True)
            return None
        return seconds(partial(self.run, config=config), len(self._choices))

    def ranked(self, configs: list[ExpertsConfig]) -> list[Timed]:
        """Return the configurations that run, the fastest one first."""
        return sorted((took, config) for config in configs if (took := self.seconds(config)) is not None)

    def fastest(self, rows: int, gate_up: list[ProductConfig], down: list[ProductConfig]) -> list[Timed]:
        """Return the fastest one of these candidates, if any runs."""
        found = self.ranked([ExpertsConfig(rows, each, down[0]) for each in gate_up])
        if self._copies(rows):
            best = [config.gate_up._replace(whole=True) for _, config in found[:COPIED]]
            found = sorted(found + self.ranked([ExpertsConfig(rows, each, down[0]) for each in best]))
        if not found:
            return []
        first = found[0][1].gate_up
        found = self.ranked([ExpertsConfig(rows, first, each) for each in down])
        if self._copies(rows):
            best = [config.down._replace(whole=True) for _, config in found[:COPIED]]
            found = sorted(found + self.ranked([ExpertsConfig(rows, first, each) for each in best]))
        return found[:1]

    def _copies(self, rows: int) -> bool:
        """Whether the copy engine can fetch the tiles of weights."""
        return rows > 1 and self._layer.format == "bf16"


def tune(layer: Layer, held: Any, tokens: int) -> Timed:
    """Return the best time of a call and its configuration."""
    call = Call(layer, held, tokens)
    best: list[Timed] = []
    if layer.format == "bf16":
        shape = tokens, layer.count, layer.experts, layer.hidden, layer.size
        plain = experts_config(*shape, 2, torch.device(DEVICE))
        best = [(call.seconds(plain) or float("inf"), plain)]
    for rows in rows_to_try(layer, tokens):
        best += call.fastest(rows, *tiles(layer, rows))
    return min(best)


def compile_all(entries: list[tuple[Layer, ExpertsConfig]]) -> None:
    """Run each once, so that the compiled kernels are in Triton's cache on disk."""
    for layer, config in entries:
        held = layer.make(layer.count)
        x = torch.zeros(1, layer.hidden, dtype=torch.bfloat16, device=DEVICE)
        experts = torch.arange(layer.count, dtype=torch.int32, device=DEVICE)[None]
        try:
            layer.run(x, held, torch.ones_like(experts, dtype=torch.float32), experts, config=config)
        except Exception:
            continue


def to_compile(layers: list[Layer]) -> list[tuple[Layer, ExpertsConfig]]:
    """Return configurations that together have each kernel of all candidates. Kernels for blocks of rows depend on the
    gate, and on whether tiles divide the inner dimension."""
    work: list[tuple[Layer, ExpertsConfig]] = []
    seen: set[object] = set()
    for layer, rows in itertools.product(layers, (1, *BLOCK_ROWS)):
        if rows == 1 and layer.format != "bf16":
            continue
        for first, second in itertools.zip_longest(*tiles(layer, rows)):
            first, second = first or tiles(layer, rows)[0][0], second or tiles(layer, rows)[1][0]
            shape = (layer,) if rows == 1 else (layer.hidden % first.block_inner, layer.size % second.block_inner)
            key = (layer.format, rows, first, second, layer.clamp, shape)
            if key not in seen:
                seen.add(key)
                work.append((layer, ExpertsConfig(rows, first, second)))
                if rows > 1 and layer.format == "bf16":
                    copied = first._replace(whole=True), second._replace(whole=True)
                    work.append((layer, ExpertsConfig(rows, *copied)))
    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--formats", default="bf16", help="some of " + ", ".join(FORMATS))
    parser.add_argument("--out", type=Path, default=TABLES, help="the folder of the tables")
    parser.add_argument("--processes", type=int, default=16)
    arguments = parser.parse_args()
    pairs = itertools.product(arguments.models, arguments.formats.split(","))
    found = {layer for model, format in pairs if (layer := layer_of(model, format))}
    layers = sorted(found, key=lambda layer: (layer.format, layer.name))
    began = time.monotonic()
    work = to_compile(layers)
    parts = arguments.processes * 4
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        pool.map(compile_all, [work[index::parts] for index in range(parts)], 1)
    print(f"compiled {len(work)} configurations in {time.monotonic() - began:.0f} s", flush=True)
    for layer in layers:
        held, choices = layer.make(layer.experts), {}
        for tokens in TOKENS:
            took, config = tune(layer, held, tokens)
            name, limit = f"{layer.format} {layer.name}", layer.limit(tokens) * 1e6
            print(f"{name}, {tokens} tokens: limit {limit:.1f}, {took * 1e6:.1f} us, {tuple(config)}", flush=True)
            choices[str(tokens)] = config
        del held
        path = table_name(FORMATS[layer.format].table, torch.cuda.get_device_name(), experts=True)
        write_table(arguments.out / path, {layer.name: choices})
    print(f"took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
