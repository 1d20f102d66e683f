"""Decode attention alone on a GPU: batches of even and uneven lengths, beside the time that their bytes take.

Each batch is computed over several caches in turn, as the layers of a model would, so that nothing is found in the L2
cache. Times are medians of replays of one CUDA graph, which hides the launches as decode steps do.

    python loadtest/engine/attention_bench.py --heads 32 --kv-heads 8 --head-dim 128 --programs 256,512,1024
    python loadtest/engine/attention_bench.py --heads 32 --kv-heads 8 --head-dim 128 --kv-cache-dtype fp8
    python loadtest/engine/attention_bench.py --heads 16 --latent 512,64 --programs 256,512 --tiles 32x4x3,64x4x2

    python loadtest/engine/attention_bench.py --heads 32 --kv-heads 8 --head-dim 128 --prefill ours,cudnn,fa3,fa4

With --kv-cache-dtype fp8, keys and values in FP8 are measured beside those in bf16, and the bytes bound is that of FP8.
A second table has chunks of prompts; with --latent: expanded, absorbed in groups, and what LatentSpec chooses.
With --prefill, chunks alone are measured in several ways (prefill_ways.py), each beside its error against float32.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

import numpy as np
import torch
from triton.runtime import driver

from baton_common.kv_layout import KvLayout, Plane
from baton_engine.attention.backend import AttentionBatch, StepLimits
from baton_engine.attention.triton_latent import TritonLatent
from baton_engine.kv_cache import KvCache
from baton_engine.latent_spec import LatentSpec
from baton_engine.triton_ops import TRITON
from baton_kernels.decode_attention import decode_attention
from baton_kernels.decode_parts import plan_parts
from baton_kernels.head_products import absorb_queries, values_of
from baton_kernels.latent_decode import latent_decode, programs_per_part
from baton_kernels.prefill_attention import prefill_attention, prefill_tiles, queries_per_tile
from baton_kernels.reference.kv_codes import KV_CODES
from baton_kernels.reference.paged_attention import AttentionVariant
from loadtest.engine.prefill_ways import WAYS, Chunks

BLOCK = 64
LAYERS = 8
BATCHES = {
    "1 x 512": [512],
    "8 x 512": [512] * 8,
    "32 x 512": [512] * 32,
    "64 x 640": [640] * 64,
    "128 x 640": [640] * 128,
    "256 x 640": [640] * 256,
    "1 x 32k": [32_768],
    "8 x 32k": [32_768] * 8,
    "128 x 4k": [4096] * 128,
    "64 x 3,056, equal bytes": [3056] * 64,
    "63 x 1k + 1 x 128k": [1024] * 63 + [131_072],
    "128 x 100 to 2,048": [100 + 1948 * index // 127 for index in range(128)],
}
# New tokens and all tokens of one sequence, as in prompts whole, in chunks, and behind a cached prefix.
CHUNKS = [(512, 512), (2048, 2048), (8192, 8192), (8192, 32_768), (16, 8192), (64, 8192), (160, 8192), (512, 8192)]
# Sequences, new tokens and all tokens of each, window, softcap, and whether there are sinks.
PREFILLS = [
    (1, 8192, 8192, 0, 0.0, False),
    (1, 8192, 16_384, 0, 0.0, False),
    (1, 8192, 32_768, 0, 0.0, False),
    (1, 8192, 131_072, 0, 0.0, False),
    (64, 2048, 2048, 0, 0.0, False),
    (1, 8192, 32_768, 128, 0.0, False),
    (1, 8192, 32_768, 4096, 0.0, False),
    (1, 8192, 8192, 0, 50.0, False),
    (1, 8192, 8192, 0, 0.0, True),
    (1, 16, 131_072, 0, 0.0, False),
    (1, 128, 131_072, 0, 0.0, False),
    (1, 500, 131_072, 0, 0.0, False),
    (1, 1000, 131_072, 0, 0.0, False),
]


def copy_rate(device: torch.device) -> float:
    """Return the bytes a second, read and written, of a large copy on the device."""
    source = torch.randn(1 << 30, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source))


def seconds_of(run: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time of a callable whose work is on the current device."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def make_tables(lengths: list[int], device: torch.device) -> torch.Tensor:
    """Return the block tables of sequences in shuffled blocks, [sequences, most blocks] int32."""
    widths = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(widths), dtype=torch.int32)
    tables = torch.zeros(len(lengths), max(widths), dtype=torch.int32)
    first = 0
    for row, width in zip(tables, widths, strict=True):
        row[:width] = order[first : first + width]
        first += width
    return tables.to(device)


def replayed(step: Callable[[], object]) -> float:
    """Return the seconds of a graph of some work over LAYERS layers, for each layer."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    return seconds_of(graph.replay) / LAYERS


def random(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(torch.bfloat16)


class Paged:
    """Attention with keys and values of some heads, as codes in FP8 or as numbers in bf16. tile: as in
    Latent, of decodes."""

    def __init__(
        self, heads: int, kv_heads: int, dim: int, codes: bool, tile: tuple[int, int, int], device: torch.device
    ) -> None:
        self._tile = dict(zip(("keys_at_once", "num_warps", "num_stages"), tile, strict=True))
        self._heads, self._kv_heads, self._dim, self._codes, self._device = heads, kv_heads, dim, codes, device
        self._scales = torch.ones(2, kv_heads, device=device) if codes else None

    def measure(self, lengths: list[int], programs: int) -> float:
        """Return the seconds that one layer's attention takes."""
        device, kv_heads, dim = self._device, self._kv_heads, self._dim
        blocks = sum(-(-length // BLOCK) for length in lengths)
        caches = self._caches(blocks)
        tables, rows = make_tables(lengths, device), torch.arange(len(lengths), device=device)
        on_device = torch.tensor(lengths, dtype=torch.int32, device=device)
        arrivals = torch.zeros(len(lengths) * kv_heads, dtype=torch.int32, device=device)
        queries = random(len(lengths), self._heads, dim, device=device)
        out = torch.empty_like(queries)
        how = AttentionVariant(dim**-0.5)

        def step() -> None:
            parts = plan_parts(on_device, rows, max(programs // kv_heads, 1), arrivals)
            # Decode attention reads the plan early, so a kernel of torch must separate them, as the embedding does.
            out.zero_()
            for keys, values in caches:
                decode_attention(queries, keys, values, tables, how, parts, out, scales=self._scales, **self._tile)

        return replayed(step)

    def chunk_seconds(self, tokens: int, length: int) -> float:
        """Return the seconds of one layer's attention for a chunk of one sequence."""
        device, heads, dim = self._device, self._heads, self._dim
        caches, tables = self._caches(-(-length // BLOCK)), make_tables([length], device)
        properties = driver.active.utils.get_device_properties(0)
        per_tile = queries_per_tile(dim, 2, properties["max_shared_mem"])
        facts = ([length], [0, tokens], *prefill_tiles([0, tokens], per_tile))
        lengths, starts, *tiles = (torch.tensor(each, dtype=torch.int32, device=device) for each in facts)
        queries = random(tokens, heads, dim, device=device)
        out, how = torch.empty_like(queries), AttentionVariant(dim**-0.5)

        def step() -> None:
            for keys, values in caches:
                prefill_attention(
                    queries, keys, values, tables, lengths, starts, (tiles[0], tiles[1]), how, out,
                    block_queries=per_tile, scales=self._scales,
                )  # fmt: skip

        step()
        return seconds_of(step) / LAYERS

    def _caches(self, blocks: int) -> list[torch.Tensor]:
        """Return keys and values of each layer."""
        shape = 2, blocks, BLOCK, self._kv_heads, self._dim
        caches = (random(*shape, device=self._device) for _ in range(LAYERS))
        return [cache.to(KV_CODES) if self._codes else cache for cache in caches]


class Latent:
    """Absorbed latent attention. tile: keys of a tile, warps and stages; zeros = the kernel's own choice."""

    def __init__(self, heads: int, spec: LatentSpec, tile: tuple[int, int, int], device: torch.device) -> None:
        self._heads, self._spec, self._tile, self._device = heads, spec, tile, device

    def measure(self, lengths: list[int], programs: int, products: bool = False) -> float:
        """Return the seconds that one layer's attention takes, with `products` from queries to values of heads."""
        spec, device, heads = self._spec, self._device, self._heads
        blocks = sum(-(-length // BLOCK) for length in lengths)
        caches = [random(blocks, BLOCK, 1, spec.latent_dim, device=device) for _ in range(LAYERS)]
        ups = [random(heads, spec.key_dim + spec.value_dim, spec.rank, device=device) for _ in caches]
        tables, rows = make_tables(lengths, device), torch.arange(len(lengths), device=device)
        on_device = torch.tensor(lengths, dtype=torch.int32, device=device)
        none = on_device[:0]
        queries = random(len(lengths), heads, spec.query_dim, device=device)
        out = queries.new_empty(len(lengths), heads, spec.value_dim)
        absorbed = absorb_queries(queries, ups[0], spec.rope_dim)
        keys, warps, stages = self._tile

        def step() -> None:
            parts = plan_parts(on_device, rows, max(programs // programs_per_part(heads, 2, spec.rank), 1), none)
            for latents, up in zip(caches, ups, strict=True):
                q = absorb_queries(queries, up, spec.rope_dim) if products else absorbed
                attended = latent_decode(
                    q, latents, tables, parts, spec.scale, spec.rank,
                    keys=keys, num_warps=warps, num_stages=stages,
                )  # fmt: skip
                if products:
                    values_of(attended, up, out)

        return replayed(step)


def chunk_seconds(tokens: int, length: int, heads: int, spec: LatentSpec, device: torch.device) -> float:
    """Return the seconds of one layer's attention for a chunk of one sequence, in the way that spec.expands says."""
    layout = KvLayout(LAYERS, (Plane("latent", 1, spec.latent_dim, "bfloat16"),))
    cache = KvCache(layout, BLOCK, device, TRITON)
    cache.allocate(-(-length // BLOCK))
    cache.planes[0].normal_()
    backend = TritonLatent(cache, heads, (spec,) * LAYERS, StepLimits(1, length))
    tables = np.random.default_rng(0).permutation(cache.num_blocks).astype(np.int32)[None, None]
    backend.prepare(AttentionBatch([0, tokens], [length], np.ascontiguousarray(tables)))
    queries = random(tokens, heads, spec.query_dim, device=device)
    up, out = random(heads, spec.key_dim + spec.value_dim, spec.rank, device=device), backend.outputs(queries)

    def step() -> None:
        for layer in range(LAYERS):
            backend.attend(layer, queries, out, up=up)

    step()
    return seconds_of(step) / LAYERS


class _Forced(LatentSpec, frozen=True, kw_only=True):
    """A spec that always expands or never does."""

    expand: bool

    def expands(self, tokens: int, length: int) -> bool:
        return self.expand


def print_decodes(kinds: Mapping[str, Callable[[list[int]], float]], token_bytes: int, rate: float) -> None:
    """Print a line for each batch with the time of each kind."""
    print(f"| lengths | bytes bound | {' | '.join(kinds)} |")
    print("|---|---|" + "---|" * len(kinds))
    for name, lengths in BATCHES.items():
        times = " | ".join(f"{measure(lengths) * 1e6:.1f}" for measure in kinds.values())
        print(f"| {name} | {sum(lengths) * token_bytes / rate * 1e6:.1f} | {times} |", flush=True)


def print_paged_chunks(kinds: Mapping[str, Paged]) -> None:
    print(f"| chunk | {' | '.join(kinds)} |")
    print("|---|" + "---|" * len(kinds))
    for tokens, length in CHUNKS:
        times = " | ".join(f"{kind.chunk_seconds(tokens, length) * 1e6:.1f}" for kind in kinds.values())
        print(f"| {tokens} of {length} | {times} |", flush=True)


def print_chunks(heads: int, spec: LatentSpec, device: torch.device) -> None:
    print("| chunk | expanded | absorbed | chosen |")
    print("|---|---|---|---|")
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    for tokens, length in CHUNKS:
        times = [
            chunk_seconds(tokens, length, heads, _Forced(**fields, expand=expand), device) for expand in (True, False)
        ]
        chosen = "expanded" if spec.expands(tokens, length) else "absorbed"
        print(f"| {tokens} of {length} | {times[0] * 1e6:.1f} | {times[1] * 1e6:.1f} | {chosen} |", flush=True)


def print_prefills(heads: int, kv_heads: int, dim: int, names: list[str], device: torch.device) -> None:
    """Print a line for each of PREFILLS and each way, with the reason where a way fails."""
    print("| sequences x new of all tokens | window | softcap | sinks | way | ms | TFLOP/s | error |")
    print("|---|---|---|---|---|---|---|---|")
    for sequences, tokens, length, window, softcap, sinks in PREFILLS:
        tables = make_tables([length] * sequences, device)
        keys, values = (random(tables.numel(), BLOCK, kv_heads, dim, device=device) for _ in range(2))
        sink = torch.randn(heads, device=device) if sinks else None
        how = AttentionVariant(dim**-0.5, window, softcap, sinks=sink)
        q = random(sequences * tokens, heads, dim, device=device)
        chunks = Chunks(q, keys, values, tables, tokens, length, how)
        row = f"| {sequences} x {tokens} of {length} | {window} | {softcap} | {sinks}"
        for name in names:
            try:
                run = WAYS[name](chunks)
                error = chunks.error(run())
                seconds = seconds_of(run, repeats=7)
            # Libraries raise exceptions of any kind, and the other ways are measured nevertheless.
            except Exception as failure:
                print(
                    f"{row} | {name} | - | - | {type(failure).__name__}: {str(failure).strip()[:160]!r} |", flush=True
                )
                continue
            rate = chunks.operations / seconds / 1e12
            print(f"{row} | {name} | {seconds * 1e3:.3f} | {rate:.0f} | {error:.1e} |", flush=True)


def parse_tile(text: str) -> tuple[int, int, int]:
    keys, warps, stages = map(int, text.split("x"))
    return keys, warps, stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="fp8 beside bf16, or bf16")
    parser.add_argument("--latent", default="", help="rank and rope_dim of latent attention, as 512,64")
    parser.add_argument("--tiles", default="0x0x0", help="keys x warps x stages, separated by commas")
    parser.add_argument(
        "--programs", default="512", help="numbers of programs that count as a full device, separated by commas"
    )
    parser.add_argument(
        "--prefill", default="", help=f"measure these ways instead, separated by commas: {', '.join(WAYS)}"
    )
    arguments = parser.parse_args()
    device, heads, dim = torch.device("cuda"), arguments.heads, arguments.head_dim
    if arguments.prefill:
        print(f"{torch.cuda.get_device_name()}, {heads} query heads, {arguments.kv_heads} KV heads of {dim}, bf16")
        print_prefills(heads, arguments.kv_heads, dim, arguments.prefill.split(","), device)
        return
    rate = copy_rate(device)
    programs = [int(part) for part in arguments.programs.split(",")]
    tiles = {text: parse_tile(text) for text in arguments.tiles.split(",")}
    print(f"{torch.cuda.get_device_name()}, a copy moves {rate / 1e12:.2f} TB/s; µs of one layer, by programs")
    if not arguments.latent:
        in_fp8 = arguments.kv_cache_dtype == "fp8"
        kinds_of_kv = {
            f"{'fp8' if codes else 'bf16'}, {text}": Paged(heads, arguments.kv_heads, dim, codes, tile, device)
            for codes in ((False, True) if in_fp8 else (False,))
            for text, tile in tiles.items()
        }
        by_count = {
            f"{count}, {name}": partial(paged.measure, programs=count)
            for name, paged in kinds_of_kv.items()
            for count in programs
        }
        print_decodes(by_count, (2 if in_fp8 else 4) * arguments.kv_heads * dim, rate)
        print_paged_chunks(kinds_of_kv)
        return
    rank, rope = map(int, arguments.latent.split(","))
    spec = LatentSpec(scale=(dim + rope) ** -0.5, rank=rank, rope_dim=rope, key_dim=dim, value_dim=dim)
    kinds: dict[str, Callable[[list[int]], float]] = {}
    for text, tile in tiles.items():
        latent = Latent(heads, spec, tile, device)
        kinds |= {f"{count}, {text}": partial(latent.measure, programs=count) for count in programs}
    kinds["with products"] = partial(
        Latent(heads, spec, (0, 0, 0), device).measure, programs=programs[0], products=True
    )
    print_decodes(kinds, 2 * spec.latent_dim, rate)
    print_chunks(heads, spec, device)


if __name__ == "__main__":
    main()
