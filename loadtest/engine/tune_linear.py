"""Finds the fastest matrix product for each weight of the given models, in each format, on the GPU at hand.

    python loadtest/engine/tune_linear.py --formats bf16,fp8,int8,int4 MODEL_DIR [MODEL_DIR ...]

A MODEL_DIR needs its config.json alone. Each candidate runs in a CUDA graph over weights that exceed the L2 cache
together. A product is left to a library (cuBLAS, CUTLASS) where no candidate is faster. Tables keep the entries of
other shapes.
"""

import argparse
import functools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).parents[2]))

from baton_engine.model_config import ModelConfig
from baton_engine.models.registry import load_model_config
from baton_engine.models.sparse_config import SparseConfig
from baton_kernels.kernel_configs import LinearConfig
from baton_kernels.tuning import product_name, table_name
from loadtest.engine.tuned_formats import FORMATS, Format, Product

TABLES = Path(__file__).parents[2] / "kernels/baton_kernels/tuned"


def products(config: ModelConfig, format: Format) -> set[Product]:
    size = config.hidden_size
    inner = {config.intermediate_size}
    if isinstance(config, SparseConfig):
        dense = {config.intermediate_size} if config.dense_layers else set()
        inner = dense | ({config.shared_size} if config.shared_size else set())
    # Heads are not quantized.
    heads = {Product(config.vocab_size, size, False)} if format is FORMATS["bf16"] else set()
    return heads | {
        *(Product(outputs, inputs, False) for outputs, inputs in config.projections),
        *(Product(2 * units, size, gated) for units in inner for gated in {True, format.gates}),
        *(Product(size, units, False) for units in inner),
    }


class Entry(NamedTuple):
    """A candidate to compile, with the name of its format."""

    format: str
    product: Product
    rows: int
    config: LinearConfig


def compile_all(entries: list[Entry]) -> None:
    """Run each once, so that the compiled kernel is in Triton's cache on disk."""
    weights: dict[tuple[str, Product], Any] = {}
    for name, product, rows, config in entries:
        format = FORMATS[name]
        if (name, product) not in weights:
            weights = {(name, product): format.split(format.stack(1, product))[0]}
        try:
            x = format.inputs(min(rows, 128), product.inner)
            format.run(x, weights[name, product], product.gated, config)
        except Exception:
            continue


@functools.cache
def capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def seconds(run: Callable[[int], object], count: int) -> float:
    """Return the time of one call of run(i), i < count, as part of a graph of them all."""
    run(0)
    torch.cuda.synchronize()
    # Each graph allocates memory of its own, which the allocator keeps afterwards.
    if torch.cuda.memory_reserved() > torch.cuda.mem_get_info()[1] // 2:
        torch.cuda.empty_cache()
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


class Tuned(NamedTuple):
    """library: seconds of the library's product; None = it has none. best: the fastest candidates."""

    library: float | None
    best: list[tuple[float, LinearConfig]]

    @property
    def choice(self) -> list[int] | None:
        better = self.best and (self.library is None or self.best[0][0] < self.library)
        return list(self.best[0][1]) if better else None


def tune(format: Format, product: Product, rows: int, weights: list[Any]) -> Tuned:
    # Rows that an earlier product has read may still be in the L1 caches, which those of a model never are.
    own = [format.inputs(rows, product.inner) for _ in weights]
    x = own[0]
    try:
        library = seconds(lambda i: format.run(own[i], weights[i], product.gated, None), len(weights))
    except RuntimeError:
        library = None
    expected = format.expected(x, weights[0], product.gated).float()
    results = []
    for config in format.candidates(product, rows):
        run = functools.partial(format.run, gated=product.gated, config=config)
        try:
            error = ((run(x, weights[0]).float() - expected).norm() / expected.norm()).item()
            if not error < 0.02:
                print(f"  wrong: {product} {rows} {config} error {error}", flush=True)
                continue
            results.append((seconds(lambda i, run=run: run(own[i], weights[i]), len(weights)), config))
        except Exception as error:
            if "out of resource" not in str(error):
                print(f"  failed: {product} {rows} {config}: {error}"[:300], flush=True)
    return Tuned(library, sorted(results)[:4])


def report(format: Format, product: Product, rows: int, tuned: Tuned) -> str:
    read = product.outputs * product.inner * format.bytes / 4.3e12
    library = "no library" if tuned.library is None else f"library {tuned.library * 1e6:.1f} us"
    best = "".join(f" {took * 1e6:.1f} {tuple(config)}" for took, config in tuned.best)
    name = f"{format.table or 'bf16'} {product_name(*product)} rows {rows}"
    return f"{name}: reads in {read * 1e6:.1f}, {library};{best}"


def write_table(path: Path, new: dict[str, Any]) -> None:
    """Write entries into a table of products or experts, one line each, beside those that it has of other shapes."""
    table = {**(json.loads(path.read_text()) if path.exists() else {}), **new}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"  {json.dumps(name)}: {json.dumps(choices)}" for name, choices in table.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def to_compile(wanted: dict[str, list[Product]]) -> list[Entry]:
    """Return entries that together have each kernel of all candidates."""
    entries: dict[object, Entry] = {}
    for name, products_of in wanted.items():
        for product, rows in ((each, rows) for each in products_of for rows in FORMATS[name].rows_of(each)):
            for config in FORMATS[name].candidates(product, rows):
                even = product.inner % (config.block_inner * config.splits) == 0
                inner = product.inner if config.block_rows == 1 else 0
                entries[name, product.gated, config, even, inner] = Entry(name, product, rows, config)
    return list(entries.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--formats", default="bf16", help="some of " + ", ".join(FORMATS))
    parser.add_argument("--out", type=Path, default=TABLES, help="the folder of the tables")
    parser.add_argument("--processes", type=int, default=16)
    arguments = parser.parse_args()
    configs = [load_model_config(model) for model in arguments.models]
    names = arguments.formats.split(",")
    wanted = {name: sorted(set().union(*(products(each, FORMATS[name]) for each in configs))) for name in names}
    began = time.monotonic()
    work = to_compile(wanted)
    parts = arguments.processes * 4
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        pool.map(compile_all, [work[index::parts] for index in range(parts)], 1)
    print(f"compiled {len(work)} kernels in {time.monotonic() - began:.0f} s", flush=True)
    for name, products_of in wanted.items():
        format = FORMATS[name]
        path = arguments.out / table_name(format.table, torch.cuda.get_device_name())
        for product in products_of:
            weights, choices = format.make(product), {}
            for rows in format.rows_of(product):
                tuned = tune(format, product, rows, weights)
                print(report(format, product, rows, tuned), flush=True)
                choices[str(rows)] = tuned.choice
            write_table(path, {product_name(*product): choices})
            del weights
    print(f"took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
