"""KV from one GPU's cache into another's, beside plain NCCL send and receive of as many bytes in the same run.

Usage: pair_bench.py [--ranks SENDING RECEIVING] [--kv-cache-dtype auto|fp8] [--repeats N] [--out FILE], on a machine
with at least two GPUs. Each pod is a process with a KV cache of the Llama-3.1-8B shape, in bfloat16 or in FP8. With
--ranks the cache is divided among so many ranks, as the caches of pods with several GPUs are. Each rank has a GPU if
there are enough; else all ranks of a pod share one, so there are as many NCCL connections as between such pods, over
one cable. KV moves with the code of an engine process: gather, checksum, announcement, NCCL, checksum, scatter. The
same is measured without checksums. Plain NCCL is torch.distributed's, one message of this size at a time. The script
prints a table of medians and writes JSON.
"""

import argparse
import json
import math
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

import torch

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout, Plane
from baton_common.rank_parts import rank_heads
from baton_engine.executor import Fence
from baton_engine.exports import Export
from baton_engine.kv_cache import KvCache
from baton_engine.pairs.ends import PairEnds
from baton_engine.pairs.messages import PairCommand, Report
from baton_engine.pairs.nccl import warm_up
from baton_engine.pairs.rank_end import RankEnd
from baton_engine.triton_ops import TRITON
from baton_kv.staging import StagingArena
from baton_worker.kv_mover import KvMover
from baton_worker.messages import JoinPair, OpenPair, Output, ReceivePiece, SendPiece
from baton_worker.pair_memory import PairMemory
from loadtest.common.bench_table import aligned, figure

LAYERS, HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 64
DTYPES = {"auto": "bfloat16", "fp8": "float8_e4m3fn"}
LENGTHS = (128, 512, 1024, 4000, 8192, 16384)
PAIR = 1
MEMORY = {"slots, once": "slot_bytes", "the pair": "pair_bytes"}


class CachesOnly:
    """The parts of an engine that the transfer of KV needs: a cache for each rank."""

    def __init__(self, devices: list[torch.device], dtype: str) -> None:
        """devices: of each rank."""
        ranks = len(devices)
        layouts = [
            KvLayout(LAYERS, tuple(Plane(name, heads, HEAD_DIM, dtype) for name in ("key", "value")))
            for heads in (HEADS, len(rank_heads(HEADS, 0, ranks)))
        ]
        self.caches = [KvCache(layouts[1], BLOCK_SIZE, device, TRITON) for device in devices]
        for cache in self.caches:
            cache.allocate(2 * max(LENGTHS) // BLOCK_SIZE)
            for plane in cache.planes:
                plane.view(torch.uint8).random_(0, 120)  # the bytes of positive numbers of either dtype
        # What goes through the host is not measured here.
        self.runner = SimpleNamespace(cache=SimpleNamespace(layout=layouts[0], device=torch.device("cpu")))
        self.config = SimpleNamespace(block_size=BLOCK_SIZE)
        # The blocks are shuffled, so that their order differs from that in memory.
        count = self.caches[0].num_blocks
        self.blocks: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
        self.missing = 0

    def import_by(
        self, id: int, generation: int, extent: Extent, write: Callable[[list[list[int]], Fence | None], None]
    ) -> bool:
        write([self.blocks], None)
        self.missing -= extent.num_tokens
        return not self.missing

    def ends(self) -> PairEnds:
        layout, ranks = self.runner.cache.layout, len(self.caches)
        ends = []
        for rank, cache in enumerate(self.caches):
            with torch.cuda.device(cache.device):
                ends.append(RankEnd(cache, layout, rank, ranks))
        return PairEnds(ends[0], layout, OthersHere(ends[1:], [cache.device for cache in self.caches[1:]]))

    def sums(self) -> list[float]:
        """Return a sum over the KV of all ranks for each plane."""
        blocks = self.blocks[: 4000 // BLOCK_SIZE]
        sums = [[float(plane[:, blocks].double().sum()) for plane in cache.planes] for cache in self.caches]
        return [round(math.fsum(planes), 3) for planes in zip(*sums, strict=True)]


class OthersHere:
    """Implements OtherRanks with ranks of this process."""

    def __init__(self, ends: list[RankEnd], devices: list[torch.device]) -> None:
        self.count = 1 + len(ends)
        self._ends = list(zip(ends, devices, strict=True))

    def send(self, command: PairCommand) -> None:
        for end, device in self._ends:
            with torch.cuda.device(device):
                end.execute(command)

    def take_reports(self) -> list[tuple[int, Report]]:
        reports = []
        for rank, (end, device) in enumerate(self._ends, start=1):
            with torch.cuda.device(device):
                reports += [(rank, report) for report in end.settle()]
        return reports


def run_end(rank: int, ranks: list[int], dtype: str, peer: Connection, orders: Connection, port: int) -> None:
    """Run one end; rank 0 sends. ranks: of the cache of each end. dtype: of the KV.

    Orders are ("plain", bytes, repeats), ("pair", tokens, repeats) and ("unchecked", tokens, repeats), and answers
    are seconds."""
    apart = sum(ranks) <= torch.cuda.device_count()
    first = rank * ranks[0] if apart else rank
    devices = [torch.device("cuda", first + (own if apart else 0)) for own in range(ranks[rank])]
    device = devices[0]
    torch.cuda.set_device(device)
    engine = CachesOnly(devices, dtype)
    fds = [StagingArena.create_file("bench") for _ in range(2)]
    mover = KvMover(engine, engine.ends(), *fds, PairMemory(most=max(ranks)))  # type: ignore[arg-type]
    warm_up(device)
    meet(peer)
    used = memory(device)
    began = time.perf_counter()
    connect(rank, ranks[1 - rank], mover, peer)
    seconds = time.perf_counter() - began
    slots, pair = (after - before for before, after in zip(used, memory(device), strict=True))
    orders.send({"setup_s": seconds, "slot_bytes": slots, "pair_bytes": pair})
    torch.distributed.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    while (order := orders.recv()) is not None:
        kind, size, repeats = order
        if kind != "plain":
            mover.use_pair(PAIR, check=kind == "pair", credit=None)
        move = plain if kind == "plain" else through_pair
        orders.send([move(rank, size, engine, mover, peer) for _ in range(repeats)])
    torch.distributed.destroy_process_group()
    if rank == 0:
        peer.send(engine.sums())
    else:
        orders.send(engine.sums() == peer.recv())


def memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes of device memory that torch holds, and the bytes that all other users hold."""
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    return held, total - free - held


def connect(rank: int, peer_ranks: int, mover: KvMover, peer: Connection) -> None:
    if rank == 0:
        mover.begin_pair(OpenPair(PAIR, peer_ranks))
        peer.send(mover.output.pair_ids[0].unique_ids)
    else:
        mover.begin_pair(JoinPair(PAIR, peer_ranks, peer.recv()))
    while not mover.output.pairs_up:
        mover.settle()
        if mover.output.pairs_lost:
            raise RuntimeError(mover.output.pairs_lost[0].reason)
    mover.output = Output()


def plain(rank: int, size: int, engine: CachesOnly, mover: KvMover, peer: Connection) -> float:
    values = torch.empty(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    meet(peer)
    began = time.perf_counter()
    if rank == 0:
        torch.distributed.send(values, 1)
    else:
        torch.distributed.recv(values, 0)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def through_pair(rank: int, tokens: int, engine: CachesOnly, mover: KvMover, peer: Connection) -> float:
    engine.missing = tokens
    torch.cuda.synchronize()
    meet(peer)
    began = time.perf_counter()
    if rank == 0:
        mover.expect(1, PAIR)
        mover.put(Export(1, engine.runner.cache.layout.extent(0, tokens), [engine.blocks]))
        while not peer.poll():
            mover.pack()
            mover.settle()
            pieces, mover.output = mover.output.pieces, Output()
            for piece in pieces:
                peer.send((piece.checksum, piece.extent))
                mover.send(SendPiece(PAIR, piece.slot))
        peer.recv()
    else:
        while not mover.output.imported:
            while peer.poll():
                checksum, extent = peer.recv()
                mover.receive(ReceivePiece(PAIR, extent, checksum, 1, 1))
            mover.settle()
            if mover.output.damaged:
                raise RuntimeError("a piece was damaged")
        torch.cuda.synchronize()
        mover.output = Output()
        peer.send("done")
    return time.perf_counter() - began


def meet(peer: Connection) -> None:
    peer.send("here")
    peer.recv()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs=2, default=[1, 1], metavar=("SENDING", "RECEIVING"))
    parser.add_argument("--kv-cache-dtype", choices=DTYPES, default="auto", help="auto: bfloat16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("loadtest/out/pair_bench.json"))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    peers = context.Pipe()
    orders = [context.Pipe() for _ in range(2)]
    dtype = DTYPES[arguments.kv_cache_dtype]
    token_bytes = LAYERS * 2 * HEADS * HEAD_DIM * getattr(torch, dtype).itemsize
    ends = [
        context.Process(target=run_end, args=(rank, arguments.ranks, dtype, peers[rank], orders[rank][1], port))
        for rank in range(2)
    ]
    for end in ends:
        end.start()
    ours = [pipe[0] for pipe in orders]
    setup = [pipe.recv() for pipe in ours]
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "ranks": arguments.ranks,
        "dtype": dtype,
        "setup": setup,
        "rows": [],
    }
    slowest = max(end["setup_s"] for end in setup)
    print(f"pair set up in {slowest:.2f} s, NCCL's first message included; MiB of memory at sender and receiver:")
    print(", ".join(f"{what} {[end[key] >> 20 for end in setup]}" for what, key in MEMORY.items()))
    lines = [["", "plain NCCL", "", "hand-over", "", "of plain", "unchecked", "", "of plain"]]
    for tokens in LENGTHS:
        size = tokens * token_bytes
        seconds = {}
        for kind, amount in (("plain", size), ("pair", tokens), ("unchecked", tokens)):
            for pipe in ours:
                pipe.send((kind, amount, arguments.repeats))
            # The first transfers warm up. The receiver has all bytes when the sender gets the confirmation.
            seconds[kind] = statistics.median(max(pair) for pair in zip(*(p.recv() for p in ours), strict=True))
        report["rows"].append({"tokens": tokens, "bytes": size, **seconds})
        rates = {kind: size / value / 1e9 for kind, value in seconds.items()}
        line = [f"{tokens} tokens, {size >> 20} MiB"]
        for kind, rate in rates.items():
            line += [f"{figure(seconds[kind] * 1e3)} ms", f"{rate:.0f} GB/s"]
            line += [f"{rate / rates['plain']:.0%}"] if kind != "plain" else []
        lines.append(line)
    for pipe in ours:
        pipe.send(None)
    report["equal"] = ours[1].recv()
    for end in ends:
        end.join()
    print(aligned(lines, 1), f"\nwhat arrived is what was sent: {report['equal']}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1))
    os._exit(0 if report["equal"] else 1)


if __name__ == "__main__":
    main()
