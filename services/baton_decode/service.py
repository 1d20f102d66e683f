"""A decode pod's part in a request's life: it takes requests from gateways, orders their KV and decodes them."""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import msgspec

from baton_common.extent import Extent
from baton_engine.delta import Reservation
from baton_engine.sequence import FinishReason, Request
from baton_kv.link import PrefillLink
from baton_kv.pieces import Layout, Piece, PieceRefused
from baton_kv.tickets import OpenTicket, TicketBook
from baton_proto import handover_pb2 as kv
from baton_proto import serving_pb2 as pb
from baton_proto.serving_pb2_grpc import DecodeServicer, add_DecodeServicer_to_server
from baton_worker.convert import delta_to_wire, failure_delta, sampling_from_wire
from baton_worker.engine_client import EngineClient
from baton_worker.messages import (
    Abort,
    Add,
    CancelImport,
    ClosePair,
    Imported,
    ImportPiece,
    ImportTokens,
    JoinPair,
    Output,
    ReceivePiece,
    RestartImport,
)
from baton_worker.request_metrics import RequestMetrics, RequestTimes
from baton_worker.request_span import RequestSpan, begin_span
from baton_worker.server import channel_options

from .settings import DecodeSettings
from .stream import GatewayStream

if TYPE_CHECKING:
    from baton_common.tracing import Tracing

log = logging.getLogger(__name__)

_RELINK_S = 1.0
_SHUTTING_DOWN = "the decode pod is shutting down"


class _Live(msgspec.Struct):
    """A request that this pod answers for."""

    submit: pb.Submit
    stream: GatewayStream
    times: RequestTimes
    span: "RequestSpan | None"
    choices: set[int]  # still running
    prefills: list[str]  # addresses of prefill pods that have not been tried
    ticket: int | None = None
    link: PrefillLink | None = None
    handed_tokens: int = 0  # of this ticket
    started_at: float | None = None  # when the first tokens were known; in the event loop's seconds
    kv_complete: bool = False
    heard_at: float = 0.0  # when something of the hand-over last came; in the event loop's seconds


class DecodeService(DecodeServicer):
    """Serves gateways, and prefill pods' pieces through its links."""

    def __init__(
        self,
        settings: DecodeSettings,
        engine: EngineClient,
        epoch: int,
        metrics: RequestMetrics,
        tracing: "Tracing | None" = None,
    ) -> None:
        self.draining = False
        self.events: Counter[str] = Counter()
        self.handed_over_tokens, self.exposed_handover_s = 0, 0.0
        self._settings = settings
        self._engine = engine
        self._metrics = metrics
        self._tracing = tracing
        ready = engine.ready
        self._tickets = TicketBook(epoch)
        self._layout = Layout(
            ready.num_layers, ready.num_kv_heads, ready.head_bytes, ready.slot_bytes, ready.gpu_slot_bytes
        )
        self._hello = kv.Hello(
            epoch=epoch,
            fingerprint=ready.fingerprint,
            gpu_piece_bytes=ready.gpu_slot_bytes,
            gpu_unchecked=not settings.kv_gpu_checksum,
        )
        self._ids = itertools.count(1)
        self._pair_numbers = itertools.count(1)
        self._live: dict[int, _Live] = {}
        self._streams: set[GatewayStream] = set()
        self._links: dict[str, PrefillLink] = {}
        self._tasks = [asyncio.create_task(self._renew()), asyncio.create_task(self._keep_links())]

    def add_to(self, server: grpc.aio.Server) -> None:
        add_DecodeServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    @property
    def num_active(self) -> int:
        return len(self._live) + sum(stream.unsent for stream in self._streams)

    @property
    def num_tickets(self) -> int:
        return len(self._tickets)

    def hand_back(self) -> None:
        for id, live in list(self._live.items()):
            self._cancel(id)
            live.stream.put([failure_delta(live.submit.handle, pb.Failure.CODE_UNAVAILABLE, _SHUTTING_DOWN)])

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(link.close() for link in list(self._links.values())))

    # Gateways

    async def Serve(self, request_iterator: AsyncIterator[pb.GatewayMessage], context: Any) -> AsyncIterator[Any]:
        stream = GatewayStream()
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        sending = asyncio.create_task(stream.next())
        try:
            while True:
                await asyncio.wait([reader, sending], return_when=asyncio.FIRST_COMPLETED)
                if reader.done():
                    return
                yield sending.result()
                sending = asyncio.create_task(stream.next())
        finally:
            reader.cancel()
            sending.cancel()
            self._streams.remove(stream)
            for id in list(stream.requests.values()):
                self._cancel(id)

    async def _read(self, messages: AsyncIterator[pb.GatewayMessage], stream: GatewayStream) -> None:
        async for message in messages:
            kind = message.WhichOneof("kind")
            if kind == "submit":
                self._submit(message.submit, stream)
            elif kind == "peers":
                stream.peers = list(message.peers.prefill_addresses)
                self._link_to_peers()
            else:
                id = stream.requests.get(message.cancel.handle)
                if id is not None and message.cancel.HasField("choice"):
                    self._cancel_choice(id, message.cancel.choice)
                elif id is not None:
                    self._cancel(id)

    def _submit(self, submit: pb.Submit, stream: GatewayStream) -> None:
        if self.draining:
            stream.put([failure_delta(submit.handle, pb.Failure.CODE_UNAVAILABLE, _SHUTTING_DOWN)])
            return
        id = next(self._ids)
        sampling = sampling_from_wire(submit.sampling)
        output, choice = list(submit.continuation.token_ids), submit.continuation.choice
        known = len(submit.prompt_token_ids) + len(output)
        prefills = list(submit.prefill_addresses) if known > self._settings.local_prefill_tokens else []
        span = begin_span(self._tracing, "decode", submit.request_id, submit.traceparent)
        times = self._metrics.begin(known, span.trace_id if span is not None else None)
        self._live[id] = _Live(submit, stream, times, span, set(range(choice, choice + sampling.n)), prefills)
        stream.requests[submit.handle] = id
        request = Request(
            id=id,
            prompt=list(submit.prompt_token_ids),
            sampling=sampling,
            priority=submit.priority,
            imports_kv=bool(prefills),
            output=output,
            choice=choice,
        )
        self._engine.send(Add(request))

    def _cancel_choice(self, id: int, choice: int) -> None:
        live = self._live[id]
        # Until the KV is there the choices are one sequence in the engine; the rest of this one is then generated and
        # ignored, which costs little and changes nothing.
        if live.ticket is None and choice in live.choices:
            self._engine.send(Abort(id, choice))
            self._note_finish(id, live, choice, FinishReason.STOP)

    def _cancel(self, id: int) -> None:
        """Free what a request holds here and on its prefill pod."""
        live = self._live.get(id)
        if live is not None:
            self._engine.send(Abort(id))
            self._close_ticket(live, "cancel")
            self._forget(id, live, "abort")

    def _forget(self, id: int, live: _Live, reason: str) -> None:
        live.times.end(reason)
        if live.span is not None:
            live.span.end(reason)
        del self._live[id]
        live.stream.requests.pop(live.submit.handle, None)

    # Engine

    def take(self, output: Output) -> None:
        for slot in output.freed_slots:
            self._engine.import_slots.put_nowait(slot)
        for rejected in output.rejections:
            live = self._live.get(rejected.id)
            if live is not None:
                code = pb.Failure.CODE_INVALID
                live.stream.put([failure_delta(live.submit.handle, code, rejected.message, rejected.param)])
                self._forget(rejected.id, live, "error")
        for reservation in output.reservations:
            self._order(reservation)
        for imported in output.imported:
            live = self._live.get(imported.id)
            ticket = self._ticket(live) if live is not None else None
            if live is not None and ticket is not None and ticket.generation == imported.generation:
                live.kv_complete = True
                self._end_handover(live)
        if output.stale:
            self.events["refused_stale"] += len(output.stale)
        for damaged in output.damaged:
            self._refuse_damaged(damaged)
        for number in output.pairs_up:
            self._pair_up(number)
        for lost in output.pairs_lost:
            link = self._paired(lost.pair)
            if link is not None:
                link.send(kv.DecodeToPrefill(gpu_pair=kv.GpuPair(lost=lost.reason)))
                self._pair_lost(link, lost.reason)
        batches: dict[GatewayStream, list[pb.Delta]] = {}
        for delta in output.deltas:
            live = self._live.get(delta.id)
            if live is not None:
                wire = delta_to_wire(delta, live.submit.handle, disaggregated=False)
                self._measure(live, wire, "decode")
                batches.setdefault(live.stream, []).append(wire)
                self._note_finish(delta.id, live, delta.choice, delta.finish_reason)
        for stream, batch in batches.items():
            stream.put(batch)

    def _note_finish(self, id: int, live: _Live, choice: int, reason: int) -> None:
        if reason != FinishReason.NONE:
            live.choices.discard(choice)
            if not live.choices:
                self._close_ticket(live, "cancel")
                self._forget(id, live, FinishReason(reason).name.lower())

    @staticmethod
    def _measure(live: _Live, delta: pb.Delta, by: str) -> None:
        """by: the kind of pod that computed the prompt."""
        if delta.HasField("prompt"):
            prompt = delta.prompt
            live.times.prompt(prompt.cached_tokens, prompt.queued_seconds, prompt.prefill_seconds, by)
            if by == "decode" and live.span is not None:
                live.span.prefilled(prompt.queued_seconds, prompt.prefill_seconds)
        if delta.token_ids:
            live.times.tokens(delta.choice, len(delta.token_ids))

    # Prefill pods

    def _order(self, reservation: Reservation) -> None:
        """Send a ticket for the KV that a request lacks."""
        live = self._live.get(reservation.id)
        if live is None:
            return
        submit = live.submit
        extent = Extent(
            first_token=reservation.first_token,
            num_tokens=reservation.num_tokens,
            first_layer=0,
            num_layers=self._layout.num_layers,
            first_head=0,
            num_heads=self._layout.num_heads,
        )
        ticket = self._tickets.open(reservation.id, reservation.generation, extent)
        live.ticket = ticket.id
        live.link = self._link(live.prefills.pop(0))
        live.handed_tokens = reservation.num_tokens
        live.heard_at = asyncio.get_running_loop().time()
        if live.span is not None:
            live.span.part("reserve")
        live.link.send(
            kv.DecodeToPrefill(
                ticket=kv.Ticket(
                    ticket_id=ticket.id,
                    request_id=submit.request_id,
                    prompt_token_ids=submit.prompt_token_ids,
                    sampling=submit.sampling,
                    priority=submit.priority,
                    first_token=reservation.first_token,
                    generation=reservation.generation,
                    lease_ms=self._lease_ms,
                    continuation=submit.continuation if submit.HasField("continuation") else None,
                    traceparent=live.span.traceparent if live.span is not None else "",
                )
            )
        )

    @property
    def _lease_ms(self) -> int:
        return int(self._settings.lease_seconds * 1000)

    def _link_to_peers(self) -> None:
        """Have the links before the first request needs them."""
        for stream in self._streams:
            for address in stream.peers:
                self._link(address)

    async def _keep_links(self) -> None:
        while True:
            await asyncio.sleep(_RELINK_S)
            self._link_to_peers()

    def _link(self, address: str) -> PrefillLink:
        if address not in self._links:
            options = channel_options(self._engine.ready.slot_bytes)
            transport, tls = self._settings.kv_transport, self._settings.peer_tls
            self._links[address] = PrefillLink(address, self._hello, self, options, transport, tls)
        return self._links[address]

    def _end_handover(self, live: _Live) -> None:
        """Acknowledge a hand-over when KV and first tokens are both there."""
        if live.kv_complete and live.started_at is not None:
            exposed_s = asyncio.get_running_loop().time() - live.started_at
            self.handed_over_tokens += live.handed_tokens
            self.exposed_handover_s += exposed_s
            self._metrics.exposed_handover.observe(exposed_s)
            if live.span is not None:
                live.span.part("handover", tokens=live.handed_tokens)
            self._close_ticket(live, "ack")

    def _close_ticket(self, live: _Live, verdict: str) -> None:
        """End a hand-over, if one is open, with an "ack" or a "cancel" to the prefill pod."""
        if live.ticket is not None and live.link is not None:
            reference = kv.TicketRef(ticket_id=live.ticket)
            acked = verdict == "ack"
            live.link.send(kv.DecodeToPrefill(ack=reference) if acked else kv.DecodeToPrefill(cancel=reference))
            self._tickets.close(live.ticket)
            live.ticket = live.link = None

    def _give_up(self, ticket: OpenTicket, why: str) -> None:
        """End a hand-over that failed: the next prefill pod gets the order, after the last the engine computes here."""
        live = self._live.get(ticket.request)
        if live is None:
            return
        where = f"asking {live.prefills[0]}" if live.prefills else "prefilling here"
        log.warning(
            "hand-over failed, %s: %s", where, why,
            extra={"event": "handover_failed", "request_id": live.submit.request_id},
        )  # fmt: skip
        self.events["failed"] += 1
        if live.span is not None:
            live.span.part("failed handover", why=why)
        if live.link is not None:
            live.stream.put_failed_handover(live.submit.handle, live.link.address)
        self._close_ticket(live, "cancel")
        live.kv_complete = False
        self._engine.send(RestartImport(ticket.request) if live.prefills else CancelImport(ticket.request))

    def first_tokens(self, message: kv.FirstTokens) -> None:
        ticket = self._tickets.get(message.ticket_id)
        live = self._live.get(ticket.request) if ticket is not None else None
        if ticket is None or live is None or live.started_at is not None:
            return
        if [len(delta.token_ids) for delta in message.deltas] != [1] * live.submit.sampling.n:
            self._give_up(ticket, "the first tokens are not one per choice")
            return
        live.started_at = asyncio.get_running_loop().time()
        if live.span is not None:
            live.span.part("prefill elsewhere")
        self._note_arrival(ticket)
        for delta in message.deltas:
            delta.handle = live.submit.handle
            self._measure(live, delta, "prefill")
        live.stream.put(list(message.deltas))
        running = [delta for delta in message.deltas if not delta.finish_reason]
        if running:
            self._engine.send(ImportTokens(ticket.request, [delta.token_ids[0] for delta in message.deltas]))
        else:
            self._engine.send(Abort(ticket.request))
        for delta in message.deltas:
            self._note_finish(ticket.request, live, delta.choice, delta.finish_reason)
        self._end_handover(live)

    def ticket_failed(self, message: kv.TicketFailed) -> None:
        ticket = self._tickets.get(message.ticket_id)
        if ticket is not None:
            self._give_up(ticket, message.failure.message)

    async def slot(self) -> tuple[int, memoryview]:
        slot = await self._engine.import_slots.get()
        return slot, self._engine.imports.slot(slot)

    def free(self, slot: int) -> None:
        self._engine.import_slots.put_nowait(slot)

    def claim(self, piece: Piece) -> OpenTicket | None:
        try:
            self._layout.check(piece)
            return self._tickets.claim(piece)
        except PieceRefused as refusal:
            self.refused(refusal)
            return None

    def stage(self, ticket: OpenTicket, extent: Extent, slot: int) -> None:
        self._note_arrival(ticket)
        ready = self._engine.ready
        size = extent.num_layers * extent.num_tokens * extent.num_heads * ready.head_bytes
        self._metrics.piece("host", size)
        self._engine.send(ImportPiece(ticket.request, ticket.generation, extent, slot))

    def receive_on_gpu(self, link: PrefillLink, piece: Piece, ticket: OpenTicket | None) -> None:
        if ticket is not None:
            self._note_arrival(ticket)
        if link.pair is None:
            if ticket is not None:
                self._give_up(ticket, "a piece was sent over a lost pair")
            return
        header = piece.header
        self._metrics.piece("gpu", header.gpu_bytes)
        checksum = header.gpu_checksum if self._settings.kv_gpu_checksum else None
        target = (ticket.request, ticket.generation, piece.extent) if ticket is not None else (0, 0, None)
        self._engine.send(ReceivePiece(link.pair, header.gpu_bytes, checksum, *target))

    def pair_changed(self, link: PrefillLink, pair: kv.GpuPair) -> None:
        if pair.WhichOneof("state") == "id":
            link.pair = next(self._pair_numbers)
            self._engine.send(JoinPair(link.pair, pair.id))
        else:
            self._pair_lost(link, pair.lost)

    def _paired(self, number: int) -> PrefillLink | None:
        return next((link for link in self._links.values() if link.pair == number), None)

    def _pair_up(self, number: int) -> None:
        link = self._paired(number)
        if link is not None:
            link.send(kv.DecodeToPrefill(gpu_pair=kv.GpuPair(up=True)))
            extra = {"event": "paired", "transport": "nccl"}
            log.info("KV from prefill pod %s comes from GPU to GPU from now on", link.address, extra=extra)

    def _pair_lost(self, link: PrefillLink, reason: str) -> None:
        """Go on without the connection between the GPUs; what was ordered over it is ordered anew."""
        if link.pair is None:
            return
        self._engine.send(ClosePair(link.pair))
        link.pair = None
        log.warning(
            "no KV from GPU to GPU from prefill pod %s: %s", link.address, reason, extra={"event": "transport_fallback"}
        )
        for live in self._handed_over_by(link):
            ticket = self._ticket(live)
            if ticket is not None and not live.kv_complete:
                self._give_up(ticket, "the connection between the GPUs is lost")

    def _refuse_damaged(self, damaged: Imported) -> None:
        self.events["refused_checksum"] += 1
        live = self._live.get(damaged.id)
        ticket = self._ticket(live) if live is not None else None
        if ticket is not None and ticket.generation == damaged.generation:
            self._give_up(ticket, "KV piece refused: checksum")

    def refused(self, refusal: PieceRefused) -> None:
        self.events[f"refused_{refusal.reason}"] += 1
        # A refused piece of an open hand-over leaves a hole in it. If a damaged one names the wrong ticket, that one is
        # given up for nothing, which only costs time. Stray ones follow every request that has ended early and concern
        # nobody.
        ticket = self._tickets.get(refusal.header.ticket_id) if refusal.header is not None else None
        level = logging.DEBUG if ticket is None else logging.WARNING
        log.log(level, "%s", refusal, extra={"event": "piece_refused", "reason": refusal.reason})
        if ticket is not None:
            self._give_up(ticket, str(refusal))

    def link_lost(self, link: PrefillLink) -> None:
        if self._links.get(link.address) is link:
            del self._links[link.address]
        if link.pair is not None:
            self._engine.send(ClosePair(link.pair))
            link.pair = None
        for live in self._handed_over_by(link):
            ticket = self._ticket(live)
            if ticket is not None:
                self._give_up(ticket, "the prefill pod is lost")

    def _handed_over_by(self, link: PrefillLink) -> list[_Live]:
        return [live for live in self._live.values() if live.link is link]

    def _ticket(self, live: _Live) -> OpenTicket | None:
        return self._tickets.get(live.ticket) if live.ticket is not None else None

    def _note_arrival(self, ticket: OpenTicket) -> None:
        live = self._live.get(ticket.request)
        if live is not None:
            live.heard_at = asyncio.get_running_loop().time()

    def _stalled(self, live: _Live) -> bool:
        """Whether the prefill pod has computed all and yet, for the time of a lease, sent nothing of the rest."""
        silence_s = asyncio.get_running_loop().time() - live.heard_at
        return (live.started_at is not None or live.kv_complete) and silence_s > self._settings.lease_seconds

    async def _renew(self) -> None:
        """Keep the leases of open tickets, so that KV waits while this pod is busy; give up the stalled ones."""
        while True:
            await asyncio.sleep(self._settings.lease_seconds / 3)
            tickets: dict[str, list[int]] = {}
            for live in list(self._live.values()):
                ticket = self._ticket(live)
                if ticket is None or live.link is None:
                    continue
                if self._stalled(live):
                    self.events["timeout"] += 1
                    self._give_up(ticket, "the rest does not come")
                else:
                    tickets.setdefault(live.link.address, []).append(ticket.id)
            for address, ids in tickets.items():
                renew = kv.Renew(ticket_ids=ids, lease_ms=self._lease_ms)
                self._links[address].send(kv.DecodeToPrefill(renew=renew))
