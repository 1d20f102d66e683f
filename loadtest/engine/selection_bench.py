"""Latent attention over selected tokens on a GPU, beside attention over all of them.

Times of one layer in microseconds, in CUDA graphs as decode steps have them (attention_bench.py). The defaults are the
sizes of DeepSeek-V3.2 on one of 8 ranks: all heads of the indexer, and an eighth of those of attention.

    python loadtest/engine/selection_bench.py
    python loadtest/engine/selection_bench.py --heads 64 --index-heads 32
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

import torch

from baton_common.kv_layout import KvLayout, Plane
from baton_engine.attention.backend import StepLimits
from baton_engine.attention.triton_indexed import TritonIndexed
from baton_engine.attention.triton_latent import TritonLatent
from baton_engine.kv_cache import KvCache
from baton_engine.latent_spec import IndexedLatentSpec
from baton_engine.triton_ops import TRITON
from loadtest.engine import attention_bench
from loadtest.engine.attention_bench import BLOCK, LAYERS

BATCHES = {
    "1 x 1k": [1024],
    "1 x 4k": [4096],
    "1 x 32k": [32_768],
    "1 x 128k": [131_072],
    "8 x 32k": [32_768] * 8,
    "64 x 8k": [8192] * 64,
    "63 x 1k + 1 x 128k": [1024] * 63 + [131_072],
}


def measure(heads: int, spec: IndexedLatentSpec, lengths: list[int], device: torch.device) -> tuple[float, ...]:
    """Return the seconds of a decode over all tokens, of a selection, and of a decode over the selected tokens."""
    planes = Plane("latent", 1, spec.latent_dim, "bfloat16"), Plane("index", 1, spec.index_dim, "bfloat16")
    cache, count = KvCache(KvLayout(LAYERS, planes), BLOCK, device, TRITON), len(lengths)
    cache.allocate(sum(-(-length // BLOCK) for length in lengths))
    for plane in cache.planes:
        plane.normal_()
    random = attention_bench.random
    queries = random(count, heads, spec.query_dim, device=device)
    up = random(heads, spec.key_dim + spec.value_dim, spec.rank, device=device)
    index_queries = random(count, spec.index_heads, spec.index_dim, device=device)
    weights = torch.randn(count, spec.index_heads, device=device)
    tables, rows = attention_bench.make_tables(lengths, device)[:, None], torch.arange(count, device=device)
    on_device, limits = torch.tensor(lengths, dtype=torch.int32, device=device), StepLimits(count, max(lengths))
    every = TritonLatent(cache, heads, (spec,) * LAYERS, limits)
    some = TritonIndexed(cache, heads, (spec,) * LAYERS, limits)
    out = every.outputs(queries)

    def step(backend: TritonLatent, selects: bool, attends: bool = True) -> None:
        backend.use_rows(tables, rows, on_device)
        for layer in range(LAYERS):
            if selects and isinstance(backend, TritonIndexed):
                backend.select(layer, index_queries, weights)
            if attends:
                backend.attend(layer, queries, out, None, up)

    whole = attention_bench.replayed(lambda: step(every, selects=False))
    selection = attention_bench.replayed(lambda: step(some, selects=True, attends=False))
    return whole, selection, attention_bench.replayed(lambda: step(some, selects=True)) - selection


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16, help="query heads of attention")
    parser.add_argument("--index-heads", type=int, default=64, help="query heads of the indexer")
    parser.add_argument("--selected", type=int, default=2048, help="tokens that a query attends to")
    given = parser.parse_args()
    spec = IndexedLatentSpec(
        scale=192**-0.5, rank=512, rope_dim=64, key_dim=128, value_dim=128, selected=given.selected,
        index_heads=given.index_heads, index_dim=128,
    )  # fmt: skip
    print("| lengths | all tokens | selection | selected tokens |")
    print("|---|---|---|---|")
    for name, lengths in BATCHES.items():
        times = (f"{seconds * 1e6:.1f}" for seconds in measure(given.heads, spec, lengths, torch.device("cuda")))
        print(f"| {name} | {' | '.join(times)} |", flush=True)


if __name__ == "__main__":
    main()
