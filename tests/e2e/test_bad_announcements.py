"""A prefill pod that sends random announcements loses only its own link, over either transport. The decode pod's engine
goes on, the pod reports what it refused, and it answers as before."""

import asyncio
import os
import random
import secrets
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton_kv.bulk import BulkListener
from baton_kv.link import prefill_handler
from baton_kv.pieces import checksum, encode
from baton_proto import handover_pb2 as kv
from baton_proto.handover_pb2_grpc import PrefillServicer
from baton_worker.server import channel_options

from .conftest import StartWorker
from .decode_client import DecodeClient
from .prompts import make_prompt
from .test_pairs import assert_right, paired, start_pair

NUMBERS = [0, 1, 2, 16, 64, 150, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
SIZES = [0, 1, 4_096, 150 * 4_096, 256 << 20, (256 << 20) + 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
TOKEN = b"t" * 16
_FRAME = struct.Struct("<QII")
ROUNDS = int(os.environ.get("FUZZ_ANNOUNCEMENT_PODS", "12"))


class Hostile(PrefillServicer):
    """Welcomes a decode pod, pairs up with it and sends announcements.

    up: whether it waits until the pair is there. transport: of the announcements.
    """

    def __init__(self, seed: int, transport: str, up: bool, fingerprint: str, count: int) -> None:
        self.address = ""
        self.dice = random.Random(seed)
        self.transport = transport
        self.sent = 0
        self.bulk: BulkListener | None = None
        self._up, self._fingerprint, self._count = up, fingerprint, count
        self._epoch = 0
        self._tickets: list[kv.Ticket] = []
        self._ready = asyncio.Event()
        self._gpu: list[socket.socket] = []
        self._past: list[kv.PieceHeader] = []

    async def Handover(self, request_iterator: AsyncIterator[kv.DecodeToPrefill], context: Any) -> AsyncIterator[Any]:
        self._epoch = (await anext(request_iterator)).hello.epoch
        welcome = kv.Welcome(epoch=1, session=1, gpu_credit=self.dice.random() < 0.7)
        if self.bulk is not None:
            welcome.bulk_port, welcome.bulk_token = self.bulk.port, TOKEN
        yield kv.PrefillToDecode(welcome=welcome)
        gpu = socket.socket(socket.AF_UNIX)
        self._gpu.append(gpu)
        name = secrets.token_hex(32).encode()
        gpu.bind(b"\0" + name)
        gpu.listen()
        name = name.ljust(128, b"\0")
        if not self._up:
            # Before a pair is there, and with an id that is none.
            self._ready.set()
            name = self.dice.choice([b"", b"short", bytes(4096), b"nobody".ljust(128, b"\0"), name])
        ranks = self.dice.choice([0, 0, 0, 1, 2, 3, 64, (1 << 32) - 1])
        yield kv.PrefillToDecode(gpu_pair=kv.GpuPair(id=name, ranks=ranks if not self._up else 1))
        async for message in request_iterator:
            match message.WhichOneof("kind"):
                case "ticket":
                    self._tickets.append(message.ticket)
                case "gpu_pair" if message.gpu_pair.WhichOneof("state") == "up":
                    self._ready.set()
            if self.dice.random() < 0.1:
                yield kv.PrefillToDecode(gpu_pair=self.dice.choice([kv.GpuPair(), kv.GpuPair(id=name)]))

    async def Pieces(self, request: kv.PiecesRequest, context: Any) -> AsyncIterator[bytes]:
        async for header, payload in self._announcements():
            message = encode(header, payload)
            yield message[: self.dice.randrange(len(message))] if self.dice.random() < 0.05 else message

    async def send_bulk(self, token: bytes, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        async for header, payload in self._announcements():
            words = header.SerializeToString()
            total = checksum(words, payload) ^ (self.dice.random() < 0.02)
            data = _FRAME.pack(total, len(words), len(payload)) + words + payload
            if self.dice.random() < 0.02:
                data = self.dice.randbytes(40)
            await loop.sock_sendall(connection, data)

    async def _announcements(self) -> AsyncIterator[tuple[kv.PieceHeader, bytes]]:
        await self._ready.wait()
        for _ in range(self._count):
            if self._past and self.dice.random() < 0.3:
                header = self.dice.choice(self._past)
            else:
                header = self._header()
            self._past.append(header)
            self.sent += 1
            yield header, self.dice.choice([b"", b"", b"", bytes(4_096)])
            await asyncio.sleep(0.001)

    def _header(self) -> kv.PieceHeader:
        dice = self.dice
        header = kv.PieceHeader(epoch=self._epoch, gpu_bytes=dice.choice(SIZES), num_tokens=dice.choice(NUMBERS))
        if self._tickets:
            ticket = dice.choice(self._tickets)
            header.ticket_id, header.generation, header.first_token = ticket.ticket_id, ticket.generation, 0
            header.num_layers, header.num_heads, header.num_tokens = 2, 2, dice.choice([1, 16, 64, 150])
        for field in dice.sample([f.name for f in header.DESCRIPTOR.fields], dice.randrange(4)):
            setattr(header, field, dice.choice(NUMBERS))
        return header

    def close(self) -> None:
        for gpu in self._gpu:
            gpu.close()


@asynccontextmanager
async def hostile(*arguments: Any) -> AsyncIterator[Hostile]:
    pod = Hostile(*arguments)
    if pod.transport == "tcp":
        pod.bulk = BulkListener("127.0.0.1", 0, pod.send_bulk, None)
    server = grpc.aio.server(options=channel_options(0))
    server.add_generic_rpc_handlers((prefill_handler(pod),))
    pod.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield pod
    finally:
        await server.stop(0)
        if pod.bulk is not None:
            await pod.bulk.close()
        pod.close()


@pytest.mark.soak
@pytest.mark.timeout(60 + 2 * ROUNDS)
@pytest.mark.parametrize("transport", ["tcp", "grpc"])
async def test_the_decode_pod_lives(llama: Path, start_worker: StartWorker, transport: str) -> None:
    prefill, decode = await start_pair(start_worker)
    fingerprint = (await decode.info()).fingerprint
    sent = 0
    async with DecodeClient(decode) as client:
        await paired(client, prefill, decode)
        for seed in range(ROUNDS):
            async with hostile(seed, transport, seed % 3 > 0, fingerprint, 60) as pod:
                prompt, good = make_prompt(150, seed=1_000 + seed), make_prompt(90, seed=2_000 + seed)
                answer = await client.submit(prompt, pod.address, prefill)
                # Beside it, one that has nothing to do with the hostile pod.
                assert_right(llama, good, await client.ask(good, prefill))
                async with asyncio.timeout(5):
                    while pod.sent < 40 and not answer.done:
                        await asyncio.sleep(0.02)
                sent += pod.sent
            await answer.finished(timeout_s=30)
            assert_right(llama, prompt, answer, other_pod=None)
        events = (await decode.load()).handover_events
        assert sent > 20 * ROUNDS
        assert events["refused_announcement"] > 0
        after = make_prompt(200, seed=9)
        assert_right(llama, after, await client.ask(after, prefill))
    await asyncio.gather(prefill.idle(), decode.idle())
    # Never lost: the good pod's pair was the same all the time.
    assert len([line for line in prefill.process.lines if line.get("event") == "paired"]) == 1
    assert not [line for line in decode.process.lines if "Traceback" in str(line)]


async def test_a_further_prefill_pod_than_there_is_room_for(
    llama: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAIR_MOST", "1")
    (prefill, decode), (second, _) = await asyncio.gather(start_pair(start_worker), start_pair(start_worker))
    async with DecodeClient(decode) as client:
        await paired(client, prefill, decode)
        await client.introduce(prefill, second)
        await decode.process.logged("pair_refused")
        for pod in (prefill, second):
            prompt = make_prompt(150, seed=1)
            assert_right(llama, prompt, await client.ask(prompt, pod), other_pod=None)
        assert (await decode.load()).handover_events["pair_refused"] == 1
        await prefill.kill()
        await second.process.logged("paired")
