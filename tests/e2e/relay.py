"""A relay in front of a prefill pod, which can hold back, change or cut the messages that pass through it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from baton_kv.link import pieces_of, prefill_handler
from baton_proto import handover_pb2 as kv
from baton_proto.handover_pb2_grpc import PrefillServicer, PrefillStub
from baton_worker.server import channel_options

from .pod import Pod

Change = Callable[[bytes], Iterable[bytes]]


def unchanged(message: bytes) -> list[bytes]:
    return [message]


class Relay(PrefillServicer):
    """change: what a piece's message becomes. gate: closed, it holds them back. cut: once set, both streams break.

    voice: silenced, what the prefill pod says on the control stream is held back. firsts: changes first tokens.
    """

    def __init__(self, target: Pod, change: Change) -> None:
        self.address = ""
        self.change = change
        self.gate = asyncio.Event()
        self.gate.set()
        self.cut = asyncio.Event()
        self.voice = asyncio.Event()
        self.voice.set()
        self.firsts: Callable[[kv.FirstTokens], None] = lambda first: None
        self.num_pieces = 0
        self.held = asyncio.Event()
        self._target = target

    async def Handover(self, request_iterator: AsyncIterator[kv.DecodeToPrefill], context: Any) -> AsyncIterator[Any]:
        async with self._prefill() as channel:
            call = PrefillStub(channel).Handover(request_iterator)
            async for message in self._until_cut(call, context):
                if message.HasField("welcome"):
                    # Pieces are to come this way.
                    message.welcome.ClearField("bulk_port")
                elif message.HasField("first_tokens"):
                    self.firsts(message.first_tokens)
                await self.voice.wait()
                yield message

    async def Pieces(self, request: kv.PiecesRequest, context: Any) -> AsyncIterator[bytes]:
        async with self._prefill() as channel:
            async for message in self._until_cut(pieces_of(channel)(request), context):
                self.num_pieces += 1
                if not self.gate.is_set():
                    self.held.set()
                    await self.gate.wait()
                for sent in self.change(message):
                    yield sent

    def _prefill(self) -> grpc.aio.Channel:
        return self._target.open_channel()

    async def _until_cut(self, call: Any, context: Any) -> AsyncIterator[Any]:
        cut = asyncio.create_task(self.cut.wait())
        try:
            while True:
                reading = asyncio.ensure_future(call.read())
                await asyncio.wait([reading, cut], return_when=asyncio.FIRST_COMPLETED)
                if cut.done():
                    reading.cancel()
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")
                if reading.result() is grpc.aio.EOF:
                    return
                yield reading.result()
        finally:
            cut.cancel()
            call.cancel()


@asynccontextmanager
async def relay_to(target: Pod, change: Change = unchanged) -> AsyncIterator[Relay]:
    """Run a relay in front of a prefill pod."""
    relay = Relay(target, change)
    server = grpc.aio.server(options=channel_options(0))
    server.add_generic_rpc_handlers((prefill_handler(relay),))
    relay.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield relay
    finally:
        await server.stop(grace=0)
