"""The hand-over between two processes of this machine, beside plain TCP and plain gRPC in the same run.

Usage: handover_bench.py [--gib N] [--repeats N] [--slot-kib N] [--out FILE]. Prints a table of medians and writes JSON.
Both pods' RPC processes are the real ones, with their checks and copies; the engines behind them compute nothing.
CPU seconds are those of both processes.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

import grpc
import trustme

from baton_common.peer_rpc import bind, make_server
from baton_decode.service import DecodeService
from baton_decode.settings import DecodeSettings
from baton_prefill.service import PrefillService
from baton_prefill.settings import PrefillSettings
from baton_proto import serving_pb2 as pb
from baton_worker.request_metrics import RequestMetrics
from baton_worker.server import channel_options
from loadtest.common.canned_engine import CannedEngine

# Llama-3.1-8B: 128 KiB of KV a token.
SHAPE = {"num_layers": 32, "num_heads": 8, "head_dim": 128}
TOKEN_BYTES = 128 << 10
NUM_SLOTS = 8
TCP_CHUNK = 1 << 20
LENGTHS = (1024, 4000)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measured(size: int, child: Connection, work: Callable[[], None]) -> dict[str, float]:
    """Time `work`, which moves `size` bytes; the child answers "cpu" with its CPU seconds."""
    child.send("cpu")
    before = child.recv() + cpu_seconds()
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    child.send("cpu")
    gib = size / 2**30
    return {"gib_per_s": gib / seconds, "cpu_s_per_gib": (child.recv() + cpu_seconds() - before) / gib}


def serve_tcp(parent: Connection) -> None:
    """Send as much as the parent asks for, until it is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        parent.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    chunk = bytes(TCP_CHUNK)
    with connection, contextlib.suppress(EOFError):
        while True:
            message = parent.recv()
            if message == "cpu":
                parent.send(cpu_seconds())
                continue
            for _ in range(message // TCP_CHUNK):
                connection.sendall(chunk)


class Tcp:
    """Plain TCP: one connection with large reads and writes and no checks."""

    def __init__(self) -> None:
        self._child, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=serve_tcp, args=(theirs,), daemon=True).start()
        self._socket = socket.create_connection(("127.0.0.1", self._child.recv()))
        self._buffer = memoryview(bytearray(TCP_CHUNK))

    def move(self, size: int) -> dict[str, float]:
        def work() -> None:
            self._child.send(size)
            left = size
            while left:
                left -= self._socket.recv_into(self._buffer, min(left, TCP_CHUNK))

        return measured(size, self._child, work)


def write_certificate(folder: Path) -> dict[str, Path]:
    """Return the pods' settings for TLS, without its name."""
    authority = trustme.CA()
    issued = authority.issue_cert("baton-peer")
    files = {name: folder / f"{name}.pem" for name in ("peer_tls_cert_file", "peer_tls_key_file", "peer_tls_ca_file")}
    contents = issued.cert_chain_pems[0], issued.private_key_pem, authority.cert_pem
    for path, content in zip(files.values(), contents, strict=True):
        content.write_to_path(path)
    return files


def serve_grpc(parent: Connection, make: Callable[..., object], slot_bytes: int, files: dict[str, Path]) -> None:
    """make: adds services to a server. files: as write_certificate returns them; none = no TLS."""

    async def main() -> None:
        tls = PrefillSettings(model=Path(), **files).peer_tls
        server = make_server(channel_options(slot_bytes), tls)
        kept = make(server, slot_bytes, files)
        parent.send(bind(server, "127.0.0.1:0", tls))
        await server.start()
        with contextlib.suppress(EOFError):
            while await asyncio.to_thread(parent.recv):
                parent.send(cpu_seconds())
        del kept

    asyncio.run(main())


def add_plain(server: grpc.aio.Server, slot_bytes: int, files: dict[str, Path]) -> None:
    payload = bytes(slot_bytes)

    async def pieces(request: bytes, context: Any) -> Any:
        for _ in range(int(request)):
            yield payload

    handlers = {"Pieces": grpc.unary_stream_rpc_method_handler(pieces)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("plain.Plain", handlers),))


def add_prefill(server: grpc.aio.Server, slot_bytes: int, files: dict[str, Path]) -> object:
    engine = CannedEngine(**SHAPE, slot_bytes=slot_bytes, num_slots=NUM_SLOTS)
    service = PrefillService(PrefillSettings(model=Path(), **files), engine, epoch=1, metrics=RequestMetrics())  # type: ignore[arg-type]
    engine.take = service.take
    service.add_to(server)
    return service


class Grpc:
    """A child process that serves, and an event loop in this process."""

    def __init__(self, make: Callable[..., object], slot_bytes: int, files: dict[str, Path] | None = None) -> None:
        self.child, theirs = multiprocessing.Pipe()
        self.files = files or {}
        multiprocessing.Process(target=serve_grpc, args=(theirs, make, slot_bytes, self.files), daemon=True).start()
        self.address = f"127.0.0.1:{self.child.recv()}"
        self.slot_bytes = slot_bytes
        self.runner = asyncio.Runner()


class Plain(Grpc):
    """gRPC with the pods' options; it moves bytes that the receiver does not read."""

    def __init__(self, slot_bytes: int) -> None:
        super().__init__(add_plain, slot_bytes)
        self._channel = self.runner.run(self._open())

    def move(self, size: int) -> dict[str, float]:
        return measured(size, self.child, lambda: self.runner.run(self._read(size)))

    async def _open(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address, options=channel_options(self.slot_bytes))

    async def _read(self, size: int) -> None:
        call = self._channel.unary_stream("/plain.Plain/Pieces")(str(size // self.slot_bytes).encode())
        async for _ in call:
            pass


class Handover(Grpc):
    """A decode pod's service in this process, a prefill pod's in the child."""

    def __init__(self, slot_bytes: int, transport: str, files: dict[str, Path] | None = None) -> None:
        super().__init__(add_prefill, slot_bytes, files)
        self._transport = transport
        self._handles = itertools.count(1)
        self._messages: asyncio.Queue[pb.GatewayMessage] = asyncio.Queue()
        self._engine, self._serving = self.runner.run(self._open())
        self.runner.run(self._order(1))

    def move(self, size: int) -> dict[str, float]:
        tokens = size // TOKEN_BYTES
        return measured(size, self.child, lambda: self.runner.run(self._order(tokens)))

    def milliseconds(self, tokens: int) -> float:
        started = time.perf_counter()
        self.runner.run(self._order(tokens))
        return 1e3 * (time.perf_counter() - started)

    async def _open(self) -> tuple[CannedEngine, asyncio.Task[None]]:
        engine = CannedEngine(**SHAPE, slot_bytes=self.slot_bytes, num_slots=NUM_SLOTS)
        settings = DecodeSettings(model=Path(), lease_seconds=600, kv_transport=self._transport, **self.files)
        service = DecodeService(settings, engine, epoch=2, metrics=RequestMetrics())  # type: ignore[arg-type]
        engine.take = service.take
        return engine, asyncio.create_task(self._serve(service))

    async def _serve(self, service: DecodeService) -> None:
        async def messages() -> AsyncIterator[pb.GatewayMessage]:
            while True:
                yield await self._messages.get()

        async for _ in service.Serve(messages(), None):
            pass

    async def _order(self, tokens: int) -> None:
        """Hand over the KV of a prompt with this many tokens, from the request to the last byte."""
        sampling = pb.SamplingParams(max_tokens=2, n=1, top_p=1, repetition_penalty=1)
        submit = pb.Submit(
            handle=next(self._handles),
            prompt_token_ids=[0] * tokens,
            sampling=sampling,
            prefill_addresses=[self.address],
        )
        self._engine.imported.clear()
        self._messages.put_nowait(pb.GatewayMessage(submit=submit))
        async with asyncio.timeout(300):
            await self._engine.imported.wait()


def median(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="GiB moved in each measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slot-kib", type=int, default=4096, help="size of a piece")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    size, slot_bytes = int(args.gib * 2**30), args.slot_kib << 10
    folder = tempfile.TemporaryDirectory()
    files = write_certificate(Path(folder.name))
    ways: dict[str, Any] = {
        "plain TCP": Tcp(),
        "plain gRPC": Plain(slot_bytes),
        "KV over TCP": Handover(slot_bytes, "tcp"),
        "KV over gRPC": Handover(slot_bytes, "grpc"),
        "KV over TCP, TLS": Handover(slot_bytes, "tcp", files),
        "KV over gRPC, TLS": Handover(slot_bytes, "grpc", files),
    }
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    # The transports take turns, so that other work on the machine affects them equally.
    for _ in range(args.repeats):
        for name, way in ways.items():
            rows[name].append(way.move(size))
    result: dict[str, Any] = {name: median(measurements) for name, measurements in rows.items()}
    for name, row in result.items():
        share = 100 * row["gib_per_s"] / result["plain TCP"]["gib_per_s"]
        print(f"{name:17} {row['gib_per_s']:6.2f} GiB/s {share:5.0f} % {row['cpu_s_per_gib']:6.2f} CPU s/GiB")
    for name in [name for name in ways if name.startswith("KV")]:
        for tokens in LENGTHS:
            times = [ways[name].milliseconds(tokens) for _ in range(args.repeats)]
            result[name][f"ms_{tokens}"] = statistics.median(times)
            print(f"{name:17} {tokens} tokens of {TOKEN_BYTES >> 10} KiB: {statistics.median(times):.1f} ms")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
