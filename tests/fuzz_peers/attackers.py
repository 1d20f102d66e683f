"""Broken peers of each kind. Each call is one connection, or one stream, and returns how many messages it has sent."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from baton_common.peer_rpc import bind, make_server
from baton_common.peer_token import PeerToken
from baton_kv import bulk
from baton_kv.pieces import encode
from baton_proto import handover_pb2 as kv
from baton_proto.handover_pb2_grpc import PrefillServicer
from tests.e2e.pod import Pod

from .messages import Odd

_ENDED = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, asyncio.CancelledError)


async def stream(call: Any, next_message: Callable[[], bytes], count: int, reads: bool) -> int:
    """Send messages until there are so many or the pod ends the stream."""

    async def read() -> None:
        with contextlib.suppress(*_ENDED):
            while await call.read() is not grpc.aio.EOF:
                pass

    reading = asyncio.create_task(read()) if reads else None
    sent = 0
    try:
        while sent < count:
            sent += 1
            await call.write(next_message())
    except _ENDED:
        pass
    finally:
        call.cancel()
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    return sent


async def broken_gateway(pod: Pod, odd: Odd, prefills: list[str]) -> int:
    async with pod.open_channel() as channel:
        call = channel.stream_stream("/baton.v1.Decode/Serve")()
        count, reads = odd.random.randrange(1, 120), odd.random.random() < 0.9
        return await stream(call, lambda: odd.data(odd.to_decode(prefills)), count, reads)


async def broken_decode_pod(pod: Pod, odd: Odd, fingerprint: str) -> int:
    """Opens a link, at times with its pieces over gRPC or the bulk port."""
    rng = odd.random
    async with pod.open_channel() as channel:
        call = channel.stream_stream("/baton.v1.Prefill/Handover", None, kv.PrefillToDecode.FromString)()
        hello = kv.Hello(
            epoch=rng.randrange(1 << 63), fingerprint=fingerprint, gpu_piece_bytes=rng.choice([0, 1 << 30])
        )
        message = kv.DecodeToPrefill(hello=odd.changed(hello) if rng.random() < 0.2 else hello)
        pieces: list[Any] = []
        try:
            await call.write(odd.data(message))
            async with asyncio.timeout(5):
                welcome = await call.read()
        except (*_ENDED, TimeoutError):
            call.cancel()
            return 1
        if welcome is grpc.aio.EOF:
            return 1
        if rng.random() < 0.3:
            request = kv.PiecesRequest(session=welcome.welcome.session)
            pieces.append(channel.unary_stream("/baton.v1.Prefill/Pieces")(request.SerializeToString()))
        connection = await _bulk(pod, odd, welcome.welcome) if rng.random() < 0.4 else None
        try:
            count, reads = rng.randrange(1, 120), rng.random() < 0.9
            return 1 + await stream(call, lambda: odd.data(odd.to_prefill()), count, reads)
        finally:
            for other in pieces:
                other.cancel()
            if connection is not None:
                connection.close()


async def _bulk(pod: Pod, odd: Odd, welcome: kv.Welcome) -> socket.socket | None:
    host = pod.address.rpartition(":")[0]
    with contextlib.suppress(OSError, TimeoutError):
        connection = await bulk.connect(host, welcome.bulk_port, welcome.bulk_token, None)
        with contextlib.suppress(OSError):
            connection.send(odd.random.randbytes(odd.random.randrange(2_000)))
        return connection
    return None


async def raw_bytes(host: str, port: int, odd: Odd) -> int:
    """No gRPC and no token: bytes to a port, which may end in the middle of anything."""
    rng = odd.random
    with contextlib.suppress(OSError, TimeoutError):
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 5)
        begin = rng.choice([b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"])
        writer.write(begin + rng.randbytes(rng.choice([0, 15, 16, 17, 3_000])))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(100), 0.05)
        writer.close()
    return 1


async def single_requests(pod: Pod, odd: Odd) -> int:
    """Requests that are one message each, on one connection."""
    rng = odd.random
    async with pod.open_channel() as channel:
        for _ in range(10):
            path = rng.choice(
                ["baton.v1.Worker/Watch", "baton.v1.Prefill/Pieces", "grpc.health.v1.Health/Check", "baton.v1.No/Such"]
            )
            data = rng.choice([b"", b"\x08\x01", rng.randbytes(8), rng.randbytes(2_000)])
            call = channel.unary_stream(f"/{path}")(data)
            with contextlib.suppress(*_ENDED, TimeoutError):
                async with asyncio.timeout(0.1):
                    await call.read()
            call.cancel()
    return 10


async def stranger(pod: Pod, odd: Odd, token: str | None) -> int:
    """A connection that shows no token or a wrong one. Every call of it must be refused."""
    async with grpc.aio.insecure_channel(pod.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        path = odd.random.choice(["Decode/Serve", "Prefill/Handover", "Worker/Watch", "Prefill/Pieces"])
        metadata = [("baton-peer-token", token)] if token is not None else None
        call = channel.stream_stream(f"/baton.v1.{path}")(metadata=metadata)
        async with asyncio.timeout(10):
            code = await call.code()
        assert code == grpc.StatusCode.UNAUTHENTICATED, (code, await call.details())
    return 1


class BrokenPrefill(PrefillServicer):
    """A prefill pod that says anything. It stops when it has sent `budget` messages."""

    def __init__(self, odd: Odd) -> None:
        self.address = ""
        self.sent = 0
        self._odd = odd
        self._tickets: dict[int, kv.Ticket] = {}
        self._epoch = 0
        self._bulk: asyncio.Server | None = None

    async def Handover(self, request_iterator: AsyncIterator[kv.DecodeToPrefill], context: Any) -> AsyncIterator[Any]:
        rng = self._odd.random
        self._epoch = (await anext(request_iterator)).hello.epoch
        welcome = kv.Welcome(epoch=1, session=1, bulk_token=bytes(16))
        if self._bulk is not None and rng.random() < 0.5:
            welcome.bulk_port = rng.choice([self._bulk.sockets[0].getsockname()[1], 1, (1 << 32) - 1])
        yield kv.PrefillToDecode(welcome=welcome).SerializeToString()
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            for _ in range(rng.randrange(1, 200)):
                await asyncio.sleep(rng.choice([0, 0, 0, 0.01]))
                self.sent += 1
                yield self._odd.data(self._odd.from_prefill(self._tickets))
        finally:
            reading.cancel()

    async def Pieces(self, request: kv.PiecesRequest, context: Any) -> AsyncIterator[bytes]:
        for _ in range(self._odd.random.randrange(200)):
            await asyncio.sleep(0.002)
            header = self._odd.announcement(self._epoch, self._tickets)
            piece = encode(header, self._odd.random.randbytes(0 if header.gpu_bytes else 4_096))
            self.sent += 1
            yield piece if self._odd.random.random() < 0.9 else piece[: self._odd.random.randrange(len(piece))]
        await asyncio.sleep(0.5)

    async def serve_bulk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rng = self._odd.random
        with contextlib.suppress(OSError):
            for _ in range(rng.randrange(200)):
                header = self._odd.announcement(self._epoch, self._tickets)
                words, payload = header.SerializeToString(), b"" if header.gpu_bytes else rng.randbytes(4_096)
                sum_ = bulk.checksum(words, payload) if rng.random() < 0.9 else 7
                writer.write(bulk._FRAME.pack(sum_, len(words), len(payload)) + words + payload)
                if rng.random() < 0.01:
                    writer.write(rng.randbytes(rng.randrange(100)))
                self.sent += 1
                await writer.drain()
                await asyncio.sleep(0.002)
        writer.close()

    async def _read(self, messages: AsyncIterator[kv.DecodeToPrefill]) -> None:
        async for message in messages:
            if message.HasField("ticket"):
                self._tickets[message.ticket.ticket_id] = message.ticket
                if len(self._tickets) > 50:
                    del self._tickets[next(iter(self._tickets))]


@asynccontextmanager
async def broken_prefill(odd: Odd, token: PeerToken) -> AsyncIterator[BrokenPrefill]:
    pod = BrokenPrefill(odd)
    pod._bulk = await asyncio.start_server(pod.serve_bulk, "127.0.0.1", 0)
    server = make_server([("grpc.so_reuseport", 0)], None, token)
    server.add_generic_rpc_handlers((_as_bytes(pod),))
    pod.address = f"127.0.0.1:{bind(server, '127.0.0.1:0', None)}"
    await server.start()
    try:
        yield pod
    finally:
        await server.stop(0)
        pod._bulk.close()


def _as_bytes(pod: BrokenPrefill) -> grpc.GenericRpcHandler:
    """Return what serves Prefill with responses as bytes."""
    handlers = {
        "Handover": grpc.stream_stream_rpc_method_handler(pod.Handover, kv.DecodeToPrefill.FromString),
        "Pieces": grpc.unary_stream_rpc_method_handler(pod.Pieces, kv.PiecesRequest.FromString),
    }
    return grpc.method_handlers_generic_handler("baton.v1.Prefill", handlers)
