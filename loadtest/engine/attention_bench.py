"""Decode attention alone on a GPU: batches of even and uneven lengths, beside the time that their bytes take.

Each batch is computed over several caches in turn, as the layers of a model would, so that nothing is found in the L2
cache. Times are medians of replays of one CUDA graph, which hides the launches as decode steps do.

    python loadtest/engine/attention_bench.py --heads 32 --kv-heads 8 --head-dim 128 --programs 256,512,1024
"""

import argparse
import statistics

import torch

from baton_kernels.decode_attention import BLOCK_KEYS, decode_attention
from baton_kernels.decode_parts import plan_parts
from baton_kernels.reference.paged_attention import AttentionVariant

_BLOCK = 64
_LAYERS = 8
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


def copy_rate(device: torch.device) -> float:
    """Return the bytes a second, read and written, of a large copy on the device."""
    source = torch.randn(1 << 30, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source))


def seconds_of(run: object, repeats: int = 20) -> float:
    """Return the median time of a callable whose work is on the current device."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()  # type: ignore[operator]
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure(lengths: list[int], heads: int, kv_heads: int, dim: int, programs: int, device: torch.device) -> float:
    """Return the seconds that one layer's attention takes."""
    widths = [-(-length // _BLOCK) for length in lengths]
    shape = (sum(widths), _BLOCK, kv_heads, dim)
    caches = [torch.randn(2, *shape, device=device).to(torch.bfloat16) for _ in range(_LAYERS)]
    order = torch.randperm(sum(widths), dtype=torch.int32)
    tables = torch.zeros(len(lengths), max(widths), dtype=torch.int32)
    first = 0
    for row, width in zip(tables, widths, strict=True):
        row[:width] = order[first : first + width]
        first += width
    tables = tables.to(device)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=device)
    rows = torch.arange(len(lengths), device=device)
    arrivals = torch.zeros(len(lengths) * kv_heads, dtype=torch.int32, device=device)
    queries = torch.randn(len(lengths), heads, dim, device=device).to(torch.bfloat16)
    out = torch.empty_like(queries)
    how = AttentionVariant(dim**-0.5)

    def step() -> None:
        parts = plan_parts(on_device, rows, max(programs // kv_heads, 1), BLOCK_KEYS, arrivals)
        for keys, values in caches:
            decode_attention(queries, keys, values, tables, how, parts, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    return seconds_of(graph.replay) / _LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--programs", default="512", help="numbers of programs that count as a full device, separated by commas"
    )
    arguments = parser.parse_args()
    device = torch.device("cuda")
    rate = copy_rate(device)
    programs = [int(part) for part in arguments.programs.split(",")]
    print(f"{torch.cuda.get_device_name()}, a copy moves {rate / 1e12:.2f} TB/s; µs of one layer, by programs")
    print(f"| lengths | bytes bound | {' | '.join(map(str, programs))} |")
    print("|---|---|" + "---|" * len(programs))
    for name, lengths in BATCHES.items():
        bound = sum(lengths) * arguments.kv_heads * arguments.head_dim * 4 / rate
        times = [
            measure(lengths, arguments.heads, arguments.kv_heads, arguments.head_dim, count, device)
            for count in programs
        ]
        print(f"| {name} | {bound * 1e6:.1f} | {' | '.join(f'{seconds * 1e6:.1f}' for seconds in times)} |", flush=True)


if __name__ == "__main__":
    main()
