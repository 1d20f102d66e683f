"""A prefill pod's part in a request's life: it takes tickets, computes prompts and sends KV while it computes."""

import asyncio
import itertools
import logging
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from baton_common.peer_refusals import MessageRefused
from baton_engine.config import ConfigError
from baton_engine.sequence import Request
from baton_kv import bulk
from baton_kv.bulk import BulkListener
from baton_kv.link import ALIVE_S, prefill_handler
from baton_proto import handover_pb2 as kv
from baton_proto import serving_pb2 as pb
from baton_proto.handover_pb2_grpc import PrefillServicer
from baton_worker.convert import NOT_FINITE_MESSAGE, delta_to_wire, request_from_wire
from baton_worker.engine_client import EngineClient
from baton_worker.intake import Intake, conclude
from baton_worker.messages import Abort, Add, FreeSlot, Output, Piece
from baton_worker.request_metrics import RequestMetrics
from baton_worker.request_span import begin_span
from baton_worker.wire_checks import (
    MOST_OPEN,
    MOST_OPEN_TOKENS,
    MOST_UNREAD,
    check_hello,
    check_renew,
    check_request,
    check_ticket,
)

from .gpu_pairs import GpuPairs
from .piece_sender import PieceSender
from .session import Export, PackedPiece, Session
from .settings import PrefillSettings

if TYPE_CHECKING:
    from baton_common.tracing import Tracing

log = logging.getLogger(__name__)

_SHUTTING_DOWN = "the prefill pod is shutting down"


class PrefillService(PrefillServicer):
    """Serves decode pods: owns their sessions, and sends them the first tokens and the KV of their tickets."""

    def __init__(
        self,
        settings: PrefillSettings,
        engine: EngineClient,
        epoch: int,
        metrics: RequestMetrics,
        tracing: "Tracing | None" = None,
    ) -> None:
        """Raises ConfigError when the port for KV is taken."""
        self.draining = False
        self.events: Counter[str] = Counter()
        self.handed_over_tokens, self.exposed_handover_s = 0, 0.0  # only decode pods count these
        self._engine = engine
        self._metrics = metrics
        self._tracing = tracing
        self._epoch = epoch
        self._refusals = settings.peer_refusals
        self._intake = Intake(engine, settings.peer_refusals)
        self._ids = itertools.count(1)
        self._sessions: dict[int, Session] = {}
        self._pairs = GpuPairs(engine, self._sessions, self.events)
        self._pieces = PieceSender(engine)
        self._owners: dict[int, tuple[Session, Export]] = {}  # by the engine's request id
        self._bulk: BulkListener | None = None
        if settings.kv_port is not None:
            try:
                self._bulk = BulkListener(
                    settings.host, settings.kv_port, self._send_bulk, settings.peer_tls, settings.peer_refusals
                )
            except OSError as error:
                raise ConfigError(f"--kv-port {settings.kv_port} on {settings.host}: {error.strerror}") from None

    def add_to(self, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((prefill_handler(self),))

    @property
    def num_active(self) -> int:
        return len(self._owners) + sum(session.control.qsize() for session in self._sessions.values())

    @property
    def num_tickets(self) -> int:
        return len(self._owners)

    def hand_back(self) -> None:
        for request, (session, export) in list(self._owners.items()):
            self._end(request)
            self._fail(session, export.ticket.ticket_id, pb.Failure.CODE_UNAVAILABLE, _SHUTTING_DOWN)

    async def stop(self) -> None:
        if self._bulk is not None:
            await self._bulk.close()

    # Decode pods

    async def Handover(self, request_iterator: AsyncIterator[kv.DecodeToPrefill], context: Any) -> AsyncIterator[Any]:
        first = await self._intake.first(request_iterator, context)
        if first is None or first.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello")
            return
        try:
            check_hello(first.hello)
        except MessageRefused as refusal:
            self._refusals.add_message(context.peer(), refusal)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refusal))
        ours, theirs = self._engine.ready, first.hello
        if theirs.fingerprint != ours.fingerprint:
            message = (
                f"KV layouts differ: this prefill pod's fingerprint is {ours.fingerprint}, the decode pod's "
                f"{theirs.fingerprint}. Both must serve the same weights with the same --dtype, --quantization and "
                f"--kv-cache-dtype. KV here is {ours.kv_format or 'unknown'}, there {theirs.kv_format or 'unknown'}"
            )
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
            return
        session = Session(secrets.randbits(63), first.hello.epoch)
        self._sessions[session.id] = session
        act = partial(self._act_on, session)
        reader = asyncio.create_task(self._intake.read(request_iterator, act, context.peer()))
        welcome = kv.Welcome(epoch=self._epoch, session=session.id, gpu_credit=True)
        if self._bulk is not None:
            welcome.bulk_port, welcome.bulk_token = self._bulk.port, session.token
        session.control.put_nowait(kv.PrefillToDecode(welcome=welcome))
        self._pairs.offer(session, first.hello)
        sending = asyncio.create_task(session.control.get())
        lost = asyncio.create_task(session.lost.wait())
        try:
            while True:
                tasks = (reader, sending, lost)
                done, _ = await asyncio.wait(tasks, timeout=ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if reader.done():
                    await conclude(reader, context)
                    return
                if lost.done():
                    return
                if not done:
                    yield kv.PrefillToDecode(alive=kv.Alive())
                    continue
                yield sending.result()
                sending = asyncio.create_task(session.control.get())
        finally:
            for task in (reader, sending, lost):
                task.cancel()
            session.lost.set()
            del self._sessions[session.id]
            self._pieces.close(session)
            for export in list(session.exports.values()):
                self._end(export.request)
            self._pairs.close(session)

    async def Pieces(self, request: kv.PiecesRequest, context: Any) -> AsyncIterator[bytes]:
        session = self._sessions.get(request.session)
        if session is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such session")
            return
        # This frees the slots when gRPC closes this stream, not when the inner generator is garbage-collected.
        async with aclosing(self._pieces.messages(session)) as messages:
            async for message in messages:
                yield message

    async def _send_bulk(self, token: bytes, connection: socket.socket) -> None:
        """Send the pieces of the session that the token belongs to. Raises bulk.UnknownSession."""
        session = next((s for s in self._sessions.values() if secrets.compare_digest(s.token, token)), None)
        if session is None:
            raise bulk.UnknownSession
        await self._pieces.send(session, connection)

    def _act_on(self, session: Session, message: kv.DecodeToPrefill) -> None:
        """Act on a message. Raises MessageRefused."""
        if session.control.qsize() > MOST_UNREAD:
            raise MessageRefused("unread", "control", "the peer does not read the answers")
        match message.WhichOneof("kind"):
            case "ticket":
                self._accept(message.ticket, session)
            case "ack":
                self._end_ticket(session, message.ack.ticket_id)
            case "cancel":
                self._end_ticket(session, message.cancel.ticket_id)
            case "renew":
                check_renew(message.renew)
                for ticket_id in set(message.renew.ticket_ids):
                    self._renew(session, ticket_id, message.renew.lease_ms)
            case "gpu_pair":
                self._pairs.changed(session, message.gpu_pair)
            case "gpu_credit":
                self._pairs.credit(session, message.gpu_credit.pieces)
            case _:
                raise MessageRefused("kind", "kind", "this version does not act on such a message")

    def _accept(self, ticket: kv.Ticket, session: Session) -> None:
        """Start to work on a ticket, or tell the decode pod that it has failed. Raises MessageRefused."""
        if ticket.ticket_id in session.exports:
            # There is no answer, because an answer would end the open ticket with this id.
            raise MessageRefused("repeated", "ticket_id", "a ticket with this id is open")
        if self.draining:
            self._fail(session, ticket.ticket_id, pb.Failure.CODE_UNAVAILABLE, _SHUTTING_DOWN)
            return
        try:
            check_ticket(ticket, self._engine.ready)
            request = self._request(ticket, session)
        except MessageRefused as refusal:
            code = pb.Failure.CODE_UNAVAILABLE if refusal.reason == "capacity" else pb.Failure.CODE_INVALID
            self._fail(session, ticket.ticket_id, code, refusal.problem, refusal.field)
            raise
        known = len(request.prompt) + len(request.output)
        session.open_tokens += known
        span = begin_span(self._tracing, "prefill", ticket.request_id, ticket.traceparent)
        times = self._metrics.begin(known, span.trace_id if span is not None else None)
        export = Export(ticket, request.id, self._lease(request.id, ticket.lease_ms), times, span)
        session.exports[ticket.ticket_id] = export
        self._owners[request.id] = session, export
        self._engine.send(Add(request, session.id))

    def _request(self, ticket: kv.Ticket, session: Session) -> Request:
        """Return the engine's request for a ticket. Raises MessageRefused."""
        known = len(ticket.prompt_token_ids) + len(ticket.continuation.token_ids)
        if len(session.exports) >= MOST_OPEN or session.open_tokens + known > MOST_OPEN_TOKENS:
            raise MessageRefused("capacity", "ticket", "too many tickets are open on this connection")
        request = request_from_wire(next(self._ids), ticket, ticket.first_token)
        check_request(request, self._engine.ready)
        return request

    def _lease(self, request: int, lease_ms: int) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(lease_ms / 1000, self._expire, request)

    def _renew(self, session: Session, ticket_id: int, lease_ms: int) -> None:
        export = session.exports.get(ticket_id)
        if export is not None:
            export.lease.cancel()
            export.lease = self._lease(export.request, lease_ms)

    def _expire(self, request: int) -> None:
        session, export = self._owners[request]
        self.events["lease_expired"] += 1
        log.warning(
            "the lease of a hand-over expired", extra={"event": "lease_expired", "request_id": export.ticket.request_id}
        )
        self._end(request)
        self._fail(session, export.ticket.ticket_id, pb.Failure.CODE_UNAVAILABLE, "the lease expired")

    def _end_ticket(self, session: Session, ticket_id: int) -> None:
        export = session.exports.get(ticket_id)
        if export is not None:
            self._end(export.request)

    def _end(self, request: int) -> None:
        """Free everything a ticket holds."""
        session, export = self._owners.pop(request)
        session.open_tokens -= len(export.ticket.prompt_token_ids) + len(export.ticket.continuation.token_ids)
        export.lease.cancel()
        # A prefill pod generates only the first tokens, so the reason is never stop, whatever these tokens were.
        reason = "length" if export.computed else "abort"
        export.times.end(reason)
        if export.span is not None:
            export.span.part("export")
            export.span.end(reason)
        del session.exports[export.ticket.ticket_id]
        # A decode pod that reads nothing must not keep slots that other decode pods wait for.
        self._pieces.free(session.take_pieces(export))
        self._engine.send(Abort(request))

    def _fail(self, session: Session, ticket_id: int, code: pb.Failure.Code, message: str, param: str = "") -> None:
        failure = pb.Failure(code=code, message=message, param=param)
        failed = kv.TicketFailed(ticket_id=ticket_id, failure=failure)
        session.control.put_nowait(kv.PrefillToDecode(failed=failed))

    # Engine

    def take(self, output: Output) -> None:
        for rejected in output.rejections:
            owner = self._owners.get(rejected.id)
            if owner is not None:
                session, export = owner
                self._end(rejected.id)
                code, param = pb.Failure.CODE_INVALID, rejected.param
                self._fail(session, export.ticket.ticket_id, code, rejected.message, param)
        for id in output.broken:
            owner = self._owners.get(id)
            if owner is not None:
                session, export = owner
                extra = {"event": "not_finite", "request_id": export.ticket.request_id}
                log.error(NOT_FINITE_MESSAGE, extra=extra)
                self._end(id)
                self._fail(session, export.ticket.ticket_id, pb.Failure.CODE_NOT_FINITE, NOT_FINITE_MESSAGE)
        firsts: dict[int, list[pb.Delta]] = {}
        for delta in output.deltas:
            firsts.setdefault(delta.id, []).append(delta_to_wire(delta, 0, disaggregated=True))
        for id, deltas in firsts.items():
            owner = self._owners.get(id)
            if owner is not None:
                session, export = owner
                self._measure(export, deltas)
                first = kv.FirstTokens(ticket_id=export.ticket.ticket_id, deltas=deltas)
                session.control.put_nowait(kv.PrefillToDecode(first_tokens=first))
        for piece in output.pieces:
            self._send_piece(piece)
        self._pairs.take(output)

    @staticmethod
    def _measure(export: Export, deltas: list[pb.Delta]) -> None:
        export.computed = True
        for delta in deltas:
            if delta.HasField("prompt"):
                prompt = delta.prompt
                export.times.prompt(prompt.cached_tokens, prompt.queued_seconds, prompt.prefill_seconds, "prefill")
                if export.span is not None:
                    export.span.prefilled(prompt.queued_seconds, prompt.prefill_seconds)
            export.times.tokens(delta.choice, len(delta.token_ids))

    def _send_piece(self, piece: Piece) -> None:
        owner = self._owners.get(piece.id)
        if owner is None or owner[0].closed:
            self._engine.send(FreeSlot(piece.slot, piece.on_gpu))
            return
        session, export = owner
        session.pieces.put_nowait(PackedPiece(export, piece.extent, piece.slot, piece.on_gpu, piece.checksum))
