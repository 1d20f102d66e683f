"""A prefill pod seen through a proxy that may lose, change or hold back what passes.

Messages are bytes here. The proxy reads only two facts in them: the port of the bulk connection, so that this one leads
through the proxy too, and the arrival of first tokens.
"""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import grpc
import grpc.aio

from baton_kv.bulk import TOKEN_BYTES
from baton_proto.handover_pb2 import PrefillToDecode
from baton_worker.server import channel_options
from tests.e2e.pod import CHANNEL_OPTIONS

from .tampering import Damage, Tampering
from .tcp import Gate

# A message to be swapped with the next one goes on alone when none comes.
_NEXT_S = 0.3
# Real pieces are larger than what HTTP/2 sends ahead of a slow reader, so these must be too.
_NARROW = [("grpc.http2.lookahead_bytes", 1 << 13), ("grpc.http2.bdp_probe", 0)]
_FRAME = struct.Struct("<QII")  # checksum, bytes of the header, bytes of the payload; both follow


class WireProxy:
    """Stands in front of the prefill pod at `target`, host:port.

    gate: closed, nothing passes in either direction, and every connection stays up. pieces_gate: the same for pieces.
    bulk_port: where decode pods are told to fetch pieces; it is to lead to `bulk_address`.
    """

    def __init__(self, target: str) -> None:
        self.address = ""
        self.bulk_address = ""
        self.bulk_port = 0
        self.gate = Gate()
        self.pieces_gate = Gate()
        self.num_pieces = 0
        self._target = target
        self._tamperings: list[Tampering] = []
        self._cut = asyncio.Event()
        self._first_tokens = asyncio.Event()
        self._bulk_ports: dict[bytes, int] = {}  # of the pod, by session's token
        self._bulk: asyncio.Server | None = None
        self._bulk_tasks: set[asyncio.Task[None]] = set()
        self._server = grpc.aio.server(options=channel_options(0))
        bidirectional, streaming = grpc.stream_stream_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers = {
            "baton.v1.Prefill": {"Handover": bidirectional(self._handover), "Pieces": streaming(self._pieces)},
            "baton.v1.Worker": {"Watch": streaming(self._watch)},
        }
        self._server.add_generic_rpc_handlers(
            tuple(grpc.method_handlers_generic_handler(service, methods) for service, methods in handlers.items())
        )

    async def start(self) -> None:
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self._bulk = await asyncio.start_server(self._accept_bulk, "127.0.0.1", 0)
        self.bulk_address = "{}:{}".format(*self._bulk.sockets[0].getsockname())

    async def stop(self) -> None:
        await self._server.stop(grace=0)
        if self._bulk is not None:
            self._bulk.close()
        for task in self._bulk_tasks:
            task.cancel()
        await asyncio.gather(*self._bulk_tasks, return_exceptions=True)

    @contextlib.contextmanager
    def tampering(self, tampering: Tampering) -> Iterator[None]:
        self._tamperings.append(tampering)
        try:
            yield
        finally:
            self._tamperings.remove(tampering)

    def cut(self) -> None:
        """Break the streams of every link; new ones are welcome, and the pod's reports go on."""
        self._cut.set()
        self._cut = asyncio.Event()

    async def first_tokens(self) -> None:
        """Return when the pod has next sent first tokens on."""
        self._first_tokens.clear()
        await self._first_tokens.wait()

    async def _handover(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        cut = self._cut
        async with self._call("stream_stream", "Prefill/Handover", self._passed(requests), context) as call:
            async for message in _messages(call.read, cut):
                said = PrefillToDecode.FromString(message)
                await self.gate.passed()
                yield self._welcomed(said) if said.HasField("welcome") else message
                if said.HasField("first_tokens"):
                    self._first_tokens.set()

    async def _pieces(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        cut = self._cut
        async with self._call("unary_stream", "Prefill/Pieces", request, context) as call:
            async for piece in self._tampered(call.read, cut):
                yield piece

    async def _watch(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        async with self._call("unary_stream", "Worker/Watch", request, context) as call:
            async for message in _messages(call.read, asyncio.Event()):
                await self.gate.passed()
                yield message

    @contextlib.asynccontextmanager
    async def _call(self, kind: str, method: str, request: Any, context: Any) -> AsyncIterator[Any]:
        """Make the pod the call that the proxy has got; it ends there as it ends here.

        It has a connection of its own, as the calls of pods have.
        """
        async with grpc.aio.insecure_channel(self._target, options=[*CHANNEL_OPTIONS, *_NARROW]) as channel:
            call = getattr(channel, kind)(f"/baton.v1.{method}")(request)
            try:
                yield call
            except _LinkCut:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the link was cut")
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
            finally:
                call.cancel()

    async def _passed(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for request in requests:
            await self.gate.passed()
            yield request

    def _welcomed(self, said: PrefillToDecode) -> bytes:
        """Return the welcome with the proxy's way to the pieces in place of the pod's."""
        welcome = said.welcome
        if welcome.bulk_port:
            self._bulk_ports[welcome.bulk_token] = welcome.bulk_port
            welcome.bulk_port = self.bulk_port
        return said.SerializeToString()

    def _accept_bulk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve_bulk(reader, writer))
        self._bulk_tasks.add(task)
        task.add_done_callback(self._bulk_tasks.discard)

    async def _serve_bulk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cut = self._cut
        writers = [writer]
        try:
            token = await reader.readexactly(TOKEN_BYTES)
            host = self._target.rpartition(":")[0]
            target_reader, target_writer = await asyncio.open_connection(host, self._bulk_ports[token])
            writers.append(target_writer)
            target_writer.write(token)
            async with asyncio.TaskGroup() as group:
                group.create_task(_until_end(reader))
                group.create_task(self._pass_frames(target_reader, writer, cut))
        except* (OSError, EOFError, _LinkCut):
            pass
        finally:
            for each in writers:
                each.transport.abort()

    async def _pass_frames(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut: asyncio.Event
    ) -> None:
        async def read() -> bytes:
            head = await reader.readexactly(_FRAME.size)
            _, header_bytes, payload_bytes = _FRAME.unpack(head)
            return head + await reader.readexactly(header_bytes + payload_bytes)

        async for piece in self._tampered(read, cut):
            writer.write(piece)
            await writer.drain()

    async def _tampered(self, read: Callable[[], Awaitable[bytes]], cut: asyncio.Event) -> AsyncIterator[bytes]:
        """Yield what becomes of the pieces that are read."""
        held: list[bytes] = []  # to be swapped with the next one
        async for message in _messages(read, cut, held):
            waiting = held.copy()
            held.clear()
            sent = [message] if message else []
            hit = next((each for each in self._tamperings if each.hits_next()), None) if sent else None
            if hit is not None and hit.damage is Damage.REORDERED and not waiting:
                held += sent
                continue
            if hit is not None:
                sent = await hit.apply(*sent)
            for piece in (*sent, *waiting):
                await self.gate.passed()
                await self.pieces_gate.passed()
                self.num_pieces += 1
                yield piece


class _LinkCut(Exception):
    """The proxy has cut what it was reading from."""


async def _messages(
    read: Callable[[], Awaitable[bytes]], cut: asyncio.Event, held: Sequence[bytes] = ()
) -> AsyncIterator[bytes]:
    """Yield what is read until its end, and b"" when nothing follows what is held. Raises _LinkCut."""
    ending = asyncio.create_task(cut.wait())
    reading = asyncio.ensure_future(read())
    try:
        while True:
            patience_s = _NEXT_S if held else None
            await asyncio.wait([reading, ending], return_when=asyncio.FIRST_COMPLETED, timeout=patience_s)
            if ending.done():
                raise _LinkCut
            if not reading.done():
                yield b""
            elif reading.result() is grpc.aio.EOF:
                return
            else:
                message, reading = reading.result(), asyncio.ensure_future(read())
                yield message
    finally:
        ending.cancel()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _until_end(reader: asyncio.StreamReader) -> None:
    """Raise EOFError when the other side, which has nothing to say, leaves."""
    await reader.read(1)
    raise EOFError
