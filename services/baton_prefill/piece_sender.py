"""Sends the KV pieces of sessions to decode pods, in gRPC messages or over TCP connections."""

import asyncio
import socket
from collections.abc import AsyncGenerator

from baton_kv import bulk
from baton_kv.pieces import encode, make_header
from baton_proto import handover_pb2 as kv
from baton_worker.engine_client import EngineClient
from baton_worker.messages import FreeSlot, SendPiece

from .session import PackedPiece, Session


class PieceSender:
    """Owns the staging slots of queued pieces: each slot is freed, or handed to the GPU's pair, exactly once."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def messages(self, session: Session) -> AsyncGenerator[bytes, None]:
        """Yield a session's pieces as gRPC messages until the session ends."""
        lost = asyncio.create_task(session.lost.wait())
        try:
            while True:
                packed = await self._next(session, lost)
                if packed is None:
                    return
                message = encode(*self._to_wire(session, packed))
                # Pieces of an export that has ended in the meantime are not sent, because nobody waits for them.
                wanted = packed.export.ticket.ticket_id in session.exports
                self._pass_on(session, packed, announced=wanted)
                if wanted:
                    yield message
        finally:
            lost.cancel()
            self.close(session)

    async def send(self, session: Session, connection: socket.socket) -> None:
        """Send a session's pieces over a connection until the session or the connection ends."""
        sending = asyncio.create_task(self._send_all(session, connection))
        lost = asyncio.create_task(session.lost.wait())
        try:
            await asyncio.wait([sending, lost], return_when=asyncio.FIRST_COMPLETED)
        finally:
            session.lost.set()
            self.close(session)
            for task in (sending, lost):
                task.cancel()
            await asyncio.gather(sending, lost, return_exceptions=True)

    def close(self, session: Session) -> None:
        """Free the slots of all queued pieces of a session. The session gets no more pieces."""
        session.closed = True
        self.free(session.take_pieces())

    def free(self, pieces: list[PackedPiece]) -> None:
        """Give back the slots of pieces that nobody will send."""
        for piece in pieces:
            self._engine.send(FreeSlot(piece.slot, piece.on_gpu))

    async def _next(self, session: Session, lost: "asyncio.Task[bool]") -> PackedPiece | None:
        """Return the next piece to send, or None when the session has ended."""
        taking = asyncio.create_task(session.pieces.get())
        try:
            await asyncio.wait((taking, lost), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # The piece is no longer in the queue, so nobody else would free its slot.
            if taking.done():
                self.free([taking.result()])
            raise
        finally:
            taking.cancel()
        return taking.result() if taking.done() else None

    async def _send_all(self, session: Session, connection: socket.socket) -> None:
        while True:
            packed = await session.pieces.get()
            sent = False
            try:
                if packed.export.ticket.ticket_id in session.exports:
                    await bulk.send(connection, *self._to_wire(session, packed))
                    sent = True
            finally:
                self._pass_on(session, packed, announced=sent)

    def _pass_on(self, session: Session, packed: PackedPiece, announced: bool) -> None:
        """Let the engine send a piece from its GPU slot once its header was sent. Free the slot of any other piece."""
        if packed.on_gpu and announced:
            self._engine.send(SendPiece(session.id, packed.slot))
        else:
            self.free([packed])

    def _to_wire(self, session: Session, packed: PackedPiece) -> tuple[kv.PieceHeader, memoryview]:
        ticket = packed.export.ticket
        header = make_header(session.epoch, ticket.ticket_id, ticket.generation, packed.extent)
        if not packed.on_gpu:
            return header, self._engine.exports.slot(packed.slot, self._size(packed))
        header.gpu_bytes = self._size(packed)
        if packed.checksum is not None:
            header.gpu_checksum = packed.checksum
        return header, memoryview(b"")

    def _size(self, packed: PackedPiece) -> int:
        return self._engine.ready.layout.size(packed.extent)
