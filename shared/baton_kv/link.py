"""A decode pod's connection to one prefill pod: a control stream, and a stream of KV pieces on a connection apart."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from baton_common.peer_rpc import open_channel, why_failed
from baton_common.peer_tls import PeerTls
from baton_common.peer_token import PeerToken
from baton_proto.handover_pb2 import (
    DecodeToPrefill,
    FirstTokens,
    GpuPair,
    Hello,
    PiecesRequest,
    PrefillToDecode,
    TicketFailed,
    Welcome,
)
from baton_proto.handover_pb2_grpc import PrefillServicer, PrefillStub

from . import bulk
from .pieces import Piece, PieceRefused, decode

log = logging.getLogger(__name__)

# How often a prefill pod that has nothing to say says so, and how long it may say nothing.
ALIVE_S = 1.0
_SILENCE_S = 5.0
_CONNECT_TIMEOUT_S = 5.0


class Receiver(Protocol):
    """Who gets what the prefill pod sends."""

    def first_tokens(self, link: "PrefillLink", message: FirstTokens) -> None: ...

    def ticket_failed(self, link: "PrefillLink", message: TicketFailed) -> None: ...

    async def slot(self) -> tuple[int, memoryview]:
        """Wait for a staging slot; return its number and its memory."""

    def free(self, slot: int) -> None:
        """Take a slot back that holds nothing of use."""

    def refused(self, link: "PrefillLink", refusal: PieceRefused) -> None:
        """Hear of a piece that was damaged on its way over this link."""

    def receive(self, link: "PrefillLink", piece: Piece, slot: int) -> None:
        """Take a piece that came over this link, or refuse it. Its payload is at the beginning of a slot, which is the
        receiver's again."""

    def receive_on_gpu(self, link: "PrefillLink", piece: Piece) -> None:
        """Take a piece whose payload comes over the link's pair of GPUs, or refuse it."""

    def pair_changed(self, link: "PrefillLink", pair: GpuPair) -> None:
        """Hear of the connection between the two GPUs."""

    def link_lost(self, link: "PrefillLink") -> None:
        """Nothing more will come; every ticket of this link has failed."""


class PrefillLink:
    """Opens itself when created and ends once, with `link_lost`; a new pair needs a new link."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        receiver: Receiver,
        options: list[tuple[str, int]],
        transport: str,
        tls: PeerTls | None,
        token: PeerToken | None = None,
    ) -> None:
        """options: of the gRPC channels. transport: of KV pieces; tcp, grpc, or else the first of these that works."""
        self.address = address
        self.pair: int | None = None  # of the GPUs; the receiver's number of it, while there is one
        self.pairs_offered = self.refusals = 0  # of pairs, and of what was said of them
        self.gpu_credit = False  # whether the prefill pod announces no more for it than it was allowed
        self._transport = transport
        self._hello = hello
        self._receiver = receiver
        self._options = options
        self._tls = tls
        self._token = token
        self._outbox: asyncio.Queue[DecodeToPrefill | None] = asyncio.Queue()  # None: nothing follows
        self._task = asyncio.create_task(self._run())

    def send(self, message: DecodeToPrefill) -> None:
        self._outbox.put_nowait(message)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            # Channels with equal options to one address share a connection unless each keeps a pool of its own.
            options = [*self._options, ("grpc.use_local_subchannel_pool", 1)]
            async with (
                open_channel(self.address, options, self._tls, self._token) as control,
                open_channel(self.address, options, self._tls, self._token) as bulk,
            ):
                await self._converse(PrefillStub(control), pieces_of(bulk))  # type: ignore[no-untyped-call]
        except* (grpc.aio.AioRpcError, OSError, DecodeError) as group:
            error = group.exceptions[0]
            reason = why_failed(error) if isinstance(error, grpc.aio.AioRpcError) else str(error) or "timed out"
            log.warning("link to prefill pod %s lost: %s", self.address, reason, extra={"event": "link_lost"})
        except* Exception as group:
            # What one pod sent must cost its own link alone. The text of such an error may quote what was sent.
            name = type(group.exceptions[0]).__name__
            log.error("link to prefill pod %s failed: %s", self.address, name, extra={"event": "link_failed"})
        finally:
            # gRPC goes on waiting for the next message of a call that has ended, unless told that there is none.
            self._outbox.put_nowait(None)
            self._receiver.link_lost(self)

    async def _converse(
        self, control: PrefillStub, pieces: "grpc.aio.UnaryStreamMultiCallable[PiecesRequest, bytes]"
    ) -> None:
        call = control.Handover(self._messages())
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            first = await _next(call)
        self.gpu_credit = first.welcome.gpu_credit
        connection = await self._connect_bulk(first.welcome)
        transport = "grpc" if connection is None else "tcp"
        extra = {"event": "linked", "transport": transport}
        log.info("linked to prefill pod %s, KV over %s", self.address, transport, extra=extra)
        async with asyncio.TaskGroup() as group:
            # Whichever stream ends takes the other with it: half a link is none.
            group.create_task(self._read_control(call))
            if connection is None:
                group.create_task(self._read_pieces(pieces(PiecesRequest(session=first.welcome.session))))
            else:
                group.create_task(self._read_bulk(connection))

    async def _connect_bulk(self, welcome: Welcome) -> socket.socket | None:
        """Return a connection for pieces, None when they are to come over gRPC."""
        if self._transport == "grpc" or (self._transport != "tcp" and not welcome.bulk_port):
            return None
        if welcome.bulk_port > 65_535 or len(welcome.bulk_token) != bulk.TOKEN_BYTES:
            raise ConnectionError("the prefill pod's welcome names no bulk connection")
        host = self.address.rpartition(":")[0].strip("[]")
        try:
            return await bulk.connect(host, welcome.bulk_port, welcome.bulk_token, self._tls)
        except (OSError, TimeoutError) as error:
            if self._transport == "tcp":
                raise ConnectionError(f"no TCP connection for KV: {error or 'timed out'}") from None
            log.warning(
                "no TCP connection to prefill pod %s for KV: %s", self.address, error or "timed out",
                extra={"event": "transport_fallback"},
            )  # fmt: skip
            return None

    async def _messages(self) -> AsyncIterator[DecodeToPrefill]:
        yield DecodeToPrefill(hello=self._hello)
        while (message := await self._outbox.get()) is not None:
            yield message

    async def _read_control(self, call: "grpc.aio.StreamStreamCall[DecodeToPrefill, PrefillToDecode]") -> None:
        while True:
            message = await self._next_or_silence(call)
            match message.WhichOneof("kind"):
                case "first_tokens":
                    self._receiver.first_tokens(self, message.first_tokens)
                case "failed":
                    self._receiver.ticket_failed(self, message.failed)
                case "gpu_pair":
                    self._receiver.pair_changed(self, message.gpu_pair)

    async def _next_or_silence(
        self, call: "grpc.aio.StreamStreamCall[DecodeToPrefill, PrefillToDecode]"
    ) -> PrefillToDecode:
        """Read one message. Raises ConnectionError when none comes.

        The wait has two halves: after a time in which this process itself stood still the first is over at once, and
        what has come meanwhile is read in the second.
        """
        reading = asyncio.ensure_future(_next(call))
        try:
            for _ in range(2):
                done, _ = await asyncio.wait({reading}, timeout=_SILENCE_S / 2)
                if done:
                    return reading.result()
            raise ConnectionError("the prefill pod is silent")
        finally:
            reading.cancel()

    async def _read_pieces(self, call: "grpc.aio.UnaryStreamCall[PiecesRequest, bytes]") -> None:
        receiver = self._receiver
        async for message in call:
            try:
                piece = decode(message)
            except PieceRefused as refusal:
                self._refuse(refusal)
                continue
            if not piece.payload:
                receiver.receive_on_gpu(self, piece)
                continue
            slot, memory = await receiver.slot()
            if len(piece.payload) > len(memory):
                receiver.free(slot)
                receiver.refused(self, PieceRefused("range", piece.header))
                continue
            memory[: len(piece.payload)] = piece.payload
            receiver.receive(self, piece, slot)
        raise ConnectionError("the prefill pod ended the pieces")

    async def _read_bulk(self, connection: socket.socket) -> None:
        receiver = self._receiver
        with connection:
            while True:
                try:
                    frame = await bulk.receive_frame(connection)
                except PieceRefused as refusal:
                    receiver.refused(self, refusal)
                    raise ConnectionError("what comes over the bulk connection is no KV piece") from None
                if not frame.size:
                    await self._read_gpu_header(connection, frame)
                    continue
                slot, memory = await receiver.slot()
                piece = None
                try:
                    if frame.size > len(memory):
                        receiver.refused(self, PieceRefused("range"))
                        raise ConnectionError(f"a KV piece of {frame.size} bytes is too large")
                    piece = await frame.receive(connection, memory[: frame.size])
                except PieceRefused as refusal:
                    receiver.refused(self, refusal)
                finally:
                    if piece is None:
                        receiver.free(slot)
                if piece is not None:
                    receiver.receive(self, piece, slot)

    async def _read_gpu_header(self, connection: socket.socket, frame: bulk.Frame) -> None:
        """Read what is left of a piece without payload."""
        try:
            piece = await frame.receive(connection, memoryview(b""))
        except PieceRefused as refusal:
            self._refuse(refusal)
        else:
            self._receiver.receive_on_gpu(self, piece)

    def _refuse(self, refusal: PieceRefused) -> None:
        """Raises ConnectionError when it may be a piece that the other GPU sends: of which size is not known then."""
        self._receiver.refused(self, refusal)
        if self.pair is not None:
            raise ConnectionError("the announcement of a piece from GPU to GPU was damaged")


def pieces_of(channel: grpc.aio.Channel) -> "grpc.aio.UnaryStreamMultiCallable[PiecesRequest, bytes]":
    """Return Prefill.Pieces with messages as bytes."""
    return channel.unary_stream("/baton.v1.Prefill/Pieces", PiecesRequest.SerializeToString)


def prefill_handler(servicer: PrefillServicer) -> grpc.GenericRpcHandler:
    """Return what serves Prefill for a servicer whose Pieces yields messages as bytes."""
    handlers = {
        "Handover": grpc.stream_stream_rpc_method_handler(
            servicer.Handover, DecodeToPrefill.FromString, PrefillToDecode.SerializeToString
        ),
        "Pieces": grpc.unary_stream_rpc_method_handler(servicer.Pieces, PiecesRequest.FromString),
    }
    return grpc.method_handlers_generic_handler("baton.v1.Prefill", handlers)


async def _next(call: "grpc.aio.StreamStreamCall[DecodeToPrefill, PrefillToDecode]") -> PrefillToDecode:
    message = await call.read()
    if not isinstance(message, PrefillToDecode):
        raise ConnectionError("the prefill pod ended the stream")
    return message
