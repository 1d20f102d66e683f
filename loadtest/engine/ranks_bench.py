"""How long a plan takes from the engine process to the other ranks, and how long ranks take to add up their results.

A plan's time is measured from before it is encoded until this process learns that all ranks have decoded it, so it
includes the way back. Ranks all-reduce hidden states of decode steps as they do in service on GPUs, and over gloo on
CPUs. GPUs also all-reduce messages of each size within a CUDA graph: over NCCL, and over symmetric memory in each way
of rank_sums.py. Sums over symmetric memory must equal the float32 sums of all ranks' messages.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

import torch
from torch._C._distributed_c10d import FileStore

from baton_engine.cuda_graph import graph_seconds
from baton_engine.ranks.group import Group
from baton_engine.ranks.messages import Launch, decode, encode
from baton_engine.ranks.ring import RING_BYTES, RingReader, RingWriter, create_counter, create_memory, read_counter
from baton_engine.ranks.seat import Seat
from baton_engine.ranks.symmetric_memory import SymmetricMemory
from baton_engine.step_plan import StepPlan

_ROUNDS = 2_000
_MESSAGES = [1 << exponent for exponent in range(13, 23)]  # bytes


def microseconds(times: list[float]) -> str:
    ordered = sorted(times)
    return f"p50 {statistics.median(ordered) * 1e6:.0f}, p99 {ordered[len(ordered) * 99 // 100] * 1e6:.0f} us"


def read_plans(memory: int, counters: tuple[int, int, int], closed: int, spin_s: float) -> None:
    new, taken, confirmed = counters
    reader = RingReader(memory, new, taken, closed, spin_s)
    while decode(reader.receive()):
        os.eventfd_write(confirmed, 1)


def time_plans(ranks: int, spin_s: float) -> None:
    memory, (closed, _) = create_memory("plans", RING_BYTES), os.pipe()
    counters = [(create_counter(), create_counter(), create_counter()) for _ in range(ranks - 1)]
    readers = [
        get_context("fork").Process(target=read_plans, args=(memory, each, closed, spin_s), daemon=True)
        for each in counters
    ]
    for reader in readers:
        reader.start()
    writer = RingWriter(memory, [(new, taken) for new, taken, _ in counters], lambda: None)
    for decodes in (1, 32, 256):
        rows, ones = list(range(decodes)), [1] * decodes
        plan = StepPlan(rows, ones, [4_000 + row for row in rows], ones, decodes)
        times = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            writer.send(encode(Launch(plan)))
            for _, _, confirmed in counters:
                while not read_counter(confirmed):
                    if not spin_s:
                        os.sched_yield()
            times.append(time.perf_counter() - began)
            # Steps do not follow each other at once, so a reader that does not spin falls asleep.
            time.sleep(0.0005)
        print(f"plan of {decodes} decodes to {ranks - 1} ranks, spinning {spin_s * 1e3:g} ms: {microseconds(times)}")
    for reader in readers:
        reader.kill()


def time_sums(rank: int, ranks: int, folder: str, hidden: int) -> None:
    on_gpu = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    group = Group(Seat(rank, ranks, 1), Path(folder), device, lambda: None)
    for tokens in (1, 32, 256, 2048):
        x = torch.ones(tokens, hidden, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
        times = []
        for _ in range(200):
            began = time.perf_counter()
            group.sum(x)
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        if rank == 0:
            print(f"sum of {tokens} x {hidden} over {ranks} ranks on {device.type}: {microseconds(times[20:])}")
    if on_gpu:
        time_ways(rank, ranks, Path(folder), device, group)


def time_ways(rank: int, ranks: int, folder: Path, device: torch.device, group: Group) -> None:
    """Print how long GPUs take to add up a message in a CUDA graph over NCCL and over symmetric memory."""
    store = FileStore(str(folder / "ways"), ranks)
    memory = SymmetricMemory(rank, ranks, device, store, "ways")
    memory.allocate(_MESSAGES[-1])
    group.least(0)
    memory.connect()
    memory.check()
    for size in _MESSAGES:
        x = torch.randn(1, size // 2, device=device, generator=torch.Generator(device).manual_seed(rank)).bfloat16()
        expected = torch.zeros(size // 2, device=device)
        for part in group.join(x).view(ranks, -1):
            expected += part
        ways = {"at once": memory.add_up_at_once, "in two steps": memory.add_up_in_steps}
        if size <= memory.most_pushed:
            ways = {"pushed": memory.add_up_pushed, **ways}
        for way, add_up in ways.items():
            if not torch.equal(add_up(x)[0], expected.bfloat16()):
                raise SystemExit(f"rank {rank}: {way}, the sum of {size} bytes is not that of the ranks' parts")
        times = {way: graph_seconds(partial(run, x)) * 1e6 for way, run in {"NCCL": group.sum_large, **ways}.items()}
        if rank == 0:
            shown = ", ".join(f"{way} {time:.1f} us" for way, time in times.items())
            print(f"sum of {size >> 10} KiB over {ranks} ranks in a graph: {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    arguments = parser.parse_args()
    for spin_s in (0.0, 0.002):
        time_plans(arguments.ranks, spin_s)
    with tempfile.TemporaryDirectory() as folder:
        others = [
            get_context("spawn").Process(target=time_sums, args=(rank, arguments.ranks, folder, arguments.hidden))
            for rank in range(1, arguments.ranks)
        ]
        for other in others:
            other.start()
        time_sums(0, arguments.ranks, folder, arguments.hidden)
        for other in others:
            other.join()


if __name__ == "__main__":
    main()
