"""The time of decode steps of given shapes, beside the time that reading their weights and KV takes.

    python loadtest/engine/decode_bench.py --bandwidth 4.27 SHAPE_DIR [SHAPE_DIR ...]

A SHAPE_DIR needs its config.json alone: random weights are made on the device. Steps are those of an engine with CUDA
graphs. A cell shows the median of windows of steps that follow each other, and in parentheses the least and the
largest. To judge a change, run this file with the sources before the change, too, on the same machine.
"""

import argparse
import statistics
import sys
import time
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from loadtest.common.bench_table import aligned, figure, spread
from loadtest.common.job import Job
from loadtest.engine import device
from loadtest.engine.device import Card, measure_card
from loadtest.engine.engines import Ours
from loadtest.engine.limits import Limits

_STEPS = 16  # of a window
# Steps until the device does nothing but decode, and the engine is as far ahead of it as it goes.
_FIRST = 8


def windows(ours: Ours, count: int, context: int, repeats: int) -> tuple[list[float], list[int]]:
    """Return the milliseconds of a decode step of so many sequences, in each of several windows, and the sequences'
    tokens in the middle of them."""
    engine = ours.engine
    # Some sequences decode while others are still in prefill, for fewer steps than a prompt has tokens.
    ours.add(ours.random_prompts([context] * count), [2 * _FIRST + _STEPS * repeats + context] * count)
    running = engine.scheduler.running
    while engine.scheduler.waiting or any(sequence.output_len < _FIRST for sequence in running):
        engine.step()
    contexts = [sequence.num_tokens + _STEPS * repeats // 2 for sequence in running]
    times = [time.perf_counter()]
    for _ in range(repeats):
        for _ in range(_STEPS):
            engine.step()
        times.append(time.perf_counter())
    for sequence in list(running):
        engine.abort(sequence.request.id)
    while engine.has_work:
        engine.step()
    return [(end - start) / _STEPS * 1e3 for start, end in pairwise(times)], contexts


def measure(shape: Path, arguments: argparse.Namespace) -> None:
    began = time.monotonic()
    # Short steps and contexts need few graphs and kernels, so that the engine starts soon.
    most = max(arguments.batches)
    longest = 2 * arguments.context + 2 * _FIRST + _STEPS * arguments.repeats + 1
    job = Job(
        task="rows", model=str(shape), shape=shape.name, seed=0, scale=1.0, quick=True, rows="decode-1",
        max_num_seqs=most, max_num_batched_tokens=8 * most, ours={"max_model_len": longest}, vllm={},
        weights_in_memory=True,
    )  # fmt: skip
    ours = Ours(job)
    bandwidth = arguments.bandwidth * 1e12 or measure_card().bandwidth
    limits = Limits.of(job, device.itemsize(), Card(bandwidth, float("inf")))
    lines = [[shape.name, "ms", "bound ms", "% of bound"]]
    for batch in arguments.batches:
        samples, contexts = windows(ours, batch, arguments.context, arguments.repeats)
        bound, median = limits.decode(contexts) * 1e3, statistics.median(samples)
        lines.append([f"batch {batch}", spread(samples), figure(bound), f"{bound / median:.0%}"])
    print(f"{aligned(lines, 1)}\n{time.monotonic() - began:.0f} s\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", type=Path, metavar="SHAPE_DIR")
    parser.add_argument("--batches", default="1,8,32", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--repeats", type=int, default=11, help=f"windows of {_STEPS} steps")
    parser.add_argument("--bandwidth", type=float, default=0.0, help="TB/s for the bound; without this flag, measured")
    arguments = parser.parse_args()
    for shape in arguments.shapes:
        # Each shape has a process of its own, since an engine's graphs and memory last as long as its process.
        process = get_context("spawn").Process(target=measure, args=(shape.resolve(), arguments))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{shape.name} failed")


if __name__ == "__main__":
    main()
