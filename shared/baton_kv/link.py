"""A decode pod's link to one prefill pod: a control stream, and a stream of KV pieces on a separate connection."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from baton_common.peer_rpc import open_channel, read_message, why_failed
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

# A prefill pod that has sent nothing else for ALIVE_S sends a keepalive. After _SILENCE_S of silence it counts as lost.
ALIVE_S = 1.0
_SILENCE_S = 5.0
_CONNECT_TIMEOUT_S = 5.0


class Receiver(Protocol):
    """Handles the messages and the KV pieces that arrive over a link."""

    def first_tokens(self, link: "PrefillLink", message: FirstTokens) -> None: ...

    def ticket_failed(self, link: "PrefillLink", message: TicketFailed) -> None: ...

    async def slot(self) -> tuple[int, memoryview]:
        """Wait for a staging slot; return its number and its memory."""

    def free(self, slot: int) -> None:
        """Take back a slot that holds no piece."""

    def refused(self, link: "PrefillLink", refusal: PieceRefused) -> None:
        """Handle a piece of this link that was damaged on its way, or is too large for a slot."""

    def receive(self, link: "PrefillLink", piece: Piece, slot: int) -> None:
        """Accept or refuse a piece that came over this link. Its payload is at the beginning of the slot, and the slot
        belongs to the receiver again."""

    def receive_on_gpu(self, link: "PrefillLink", piece: Piece) -> None:
        """Accept or refuse a piece whose payload comes over the link's pair of GPUs."""

    def pair_changed(self, link: "PrefillLink", pair: GpuPair) -> None:
        """Handle a message about the NCCL connection between the two GPUs."""

    def link_lost(self, link: "PrefillLink") -> None:
        """Handle the end of the link. Nothing more will arrive over it, and all of its open tickets have failed."""


class PrefillLink:
    """A link opens itself when it is created, and ends once, with `link_lost`. To connect again, make a new link."""

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
        """options: of the gRPC channels. transport: of KV pieces: tcp, grpc, or any other value for TCP if it works and
        gRPC if it does not."""
        self.address = address
        self.pair: int | None = None  # the receiver's number for the pair of GPUs; None while there is no pair
        # How many pairs the prefill pod has offered, and how many of its messages about pairs were refused.
        self.pairs_offered = self.refusals = 0
        self.gpu_credit = False  # whether the prefill pod announces only as many GPU pieces as it was allowed
        self._transport = transport
        self._hello = hello
        self._receiver = receiver
        self._options = options
        self._tls = tls
        self._token = token
        self._outbox: asyncio.Queue[DecodeToPrefill | None] = asyncio.Queue()  # None ends the stream
        self._answered = asyncio.Event()  # the prefill pod has welcomed this pod, or the link has ended
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
            # A pod's message may end only that pod's link. Only the type is logged, as the text may quote the message.
            name = type(group.exceptions[0]).__name__
            log.error("link to prefill pod %s failed: %s", self.address, name, extra={"event": "link_failed"})
        finally:
            # gRPC waits for the next message to send even when the call has ended. None tells it that there is none.
            self._outbox.put_nowait(None)
            self._answered.set()
            self._receiver.link_lost(self)

    async def _converse(
        self, control: PrefillStub, pieces: "grpc.aio.UnaryStreamMultiCallable[PiecesRequest, bytes]"
    ) -> None:
        call = control.Handover(self._messages())
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            first = await _next(call)
        self._answered.set()
        self.gpu_credit = first.welcome.gpu_credit
        connection = await self._connect_bulk(first.welcome)
        transport = "grpc" if connection is None else "tcp"
        extra = {"event": "linked", "transport": transport}
        log.info("linked to prefill pod %s, KV over %s", self.address, transport, extra=extra)
        async with asyncio.TaskGroup() as group:
            # When one stream ends, the task group ends the other one: a link needs both.
            group.create_task(self._read_control(call))
            if connection is None:
                group.create_task(self._read_pieces(pieces(PiecesRequest(session=first.welcome.session))))
            else:
                group.create_task(self._read_bulk(connection))

    async def _connect_bulk(self, welcome: Welcome) -> socket.socket | None:
        """Return a connection for pieces; None when the pieces are to come over gRPC."""
        if self._transport == "grpc" or (self._transport != "tcp" and not welcome.bulk_port):
            return None
        if welcome.bulk_port > 65_535 or len(welcome.bulk_token) != bulk.TOKEN_BYTES:
            raise ConnectionError("the prefill pod's welcome message names no valid bulk connection")
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
        # A pod that refuses the link says why. gRPC would report an internal error in place of the reason if this pod
        # were sending a ticket at that moment, so tickets wait for the answer to the hello.
        await self._answered.wait()
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
        """Read one message. Raises ConnectionError when none comes in time.

        The wait has two halves. If this process itself was stopped for a while, the first half is over as soon as it
        goes on, and the second half reads the messages that have arrived in the meantime.
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
        raise ConnectionError("the prefill pod ended the stream of pieces")

    async def _read_bulk(self, connection: socket.socket) -> None:
        receiver = self._receiver
        with connection:
            while True:
                # Data that has arrived is read without a wait. A pod that sends faster than it is read must not keep
                # the event loop from everything else.
                await asyncio.sleep(0)
                try:
                    frame = await bulk.receive_frame(connection)
                except PieceRefused as refusal:
                    receiver.refused(self, refusal)
                    raise ConnectionError("the data on the bulk connection is not a KV piece") from None
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
        """Read the rest of a piece whose payload comes from GPU to GPU."""
        try:
            piece = await frame.receive(connection, memoryview(b""))
        except PieceRefused as refusal:
            self._refuse(refusal)
        else:
            self._receiver.receive_on_gpu(self, piece)

    def _refuse(self, refusal: PieceRefused) -> None:
        """Refuse a damaged piece. Raises ConnectionError when the link has a pair of GPUs: the other GPU may send the
        payload of this piece, and its size is unknown."""
        self._receiver.refused(self, refusal)
        if self.pair is not None:
            raise ConnectionError("the announcement of a piece from GPU to GPU was damaged")


def pieces_of(channel: grpc.aio.Channel) -> "grpc.aio.UnaryStreamMultiCallable[PiecesRequest, bytes]":
    """Return the client's Prefill.Pieces, whose messages are bytes."""
    return channel.unary_stream("/baton.v1.Prefill/Pieces", PiecesRequest.SerializeToString)


def prefill_handler(servicer: PrefillServicer) -> grpc.GenericRpcHandler:
    """Return the gRPC handler of Prefill for a servicer whose Pieces yields its messages as bytes."""
    handlers = {
        "Handover": grpc.stream_stream_rpc_method_handler(
            servicer.Handover, DecodeToPrefill.FromString, PrefillToDecode.SerializeToString
        ),
        "Pieces": grpc.unary_stream_rpc_method_handler(servicer.Pieces, PiecesRequest.FromString),
    }
    return grpc.method_handlers_generic_handler("baton.v1.Prefill", handlers)


async def _next(call: "grpc.aio.StreamStreamCall[DecodeToPrefill, PrefillToDecode]") -> PrefillToDecode:
    message = await read_message(call)
    if not isinstance(message, PrefillToDecode):
        raise ConnectionError("the prefill pod ended the stream")
    return message
