"""The hand-overs of KV from prefill pods, from an engine's reservation to the acknowledgement."""

import asyncio
import logging
from collections import Counter

from baton_common.peer_refusals import MessageRefused
from baton_engine.delta import Reservation
from baton_kv.link import PrefillLink
from baton_kv.pieces import Piece, PieceBounds, PieceRefused
from baton_kv.tickets import OpenTicket, TicketBook
from baton_proto import handover_pb2 as kv
from baton_worker.engine_client import EngineClient
from baton_worker.messages import Abort, CancelImport, Imported, ImportPiece, ImportTokens, Output, RestartImport
from baton_worker.request_metrics import RequestMetrics
from baton_worker.wire_checks import check_first_tokens

from .gpu_pairs import GpuPairs
from .handover import Handover
from .links import PrefillLinks
from .live_requests import LiveRequest, LiveRequests
from .settings import DecodeSettings

log = logging.getLogger(__name__)

_MOST_REASON = 300  # the most characters that are kept of a peer's reason for a failure


class Handovers:
    """Owns tickets and links: orders the KV that requests lack, and receives it from prefill pods (as a link.Receiver).

    events: as Service.events. tokens: the number of tokens whose KV was handed over since the start. exposed_s: the
    seconds from these prompts' first tokens until all KV had arrived.
    """

    def __init__(
        self,
        settings: DecodeSettings,
        engine: EngineClient,
        epoch: int,
        metrics: RequestMetrics,
        requests: LiveRequests,
    ) -> None:
        self.events: Counter[str] = Counter()
        self.tokens, self.exposed_s = 0, 0.0
        self._engine = engine
        self._metrics = metrics
        self._requests = requests
        self._refusals = settings.peer_refusals
        self._lease_s = settings.lease_seconds
        ready = engine.ready
        self._bounds = PieceBounds(ready.layout, ready.slot_bytes, ready.gpu_slot_bytes)
        self._tickets = TicketBook(epoch)
        self._links = PrefillLinks(settings, ready, epoch, self)
        self._pairs = GpuPairs(engine, self._links, self.events, settings.kv_gpu_checksum)
        self._renewing = asyncio.create_task(self._renew())

    @property
    def num_tickets(self) -> int:
        return len(self._tickets)

    def may_link(self, address: str) -> bool:
        """Whether this pod may link to an address, which is host:port."""
        return self._links.may_link(address)

    def link_to(self, address: str) -> None:
        """Open a link before the first request needs it."""
        self._links.to(address)

    async def stop(self) -> None:
        self._renewing.cancel()
        await self._links.close()

    # Engine

    def take(self, output: Output) -> None:
        for slot in output.freed_slots:
            self.free(slot)
        for reservation in output.reservations:
            self._order(reservation)
        for imported in output.imported:
            request = self._requests.get(imported.id)
            handover = _reserved_as(imported, request)
            if request is not None and handover is not None:
                handover.kv_complete = True
                self._acknowledge(request)
        if output.stale:
            self.events["refused_stale"] += len(output.stale)
        for damaged in output.damaged:
            self.events["refused_checksum"] += 1
            handover = _reserved_as(damaged, self._requests.get(damaged.id))
            if handover is not None:
                self._give_up(handover.ticket, "KV piece refused: checksum")
        for number in output.pairs_up:
            self._pairs.up(number)
        self._pairs.landed(output.landed)
        for lost in output.pairs_lost:
            link = self._pairs.link(lost.pair)
            if link is not None:
                link.send(kv.DecodeToPrefill(gpu_pair=kv.GpuPair(lost=lost.reason)))
                self._pair_lost(link, lost.reason)

    def _order(self, reservation: Reservation) -> None:
        """Send a ticket for the KV that a request lacks."""
        request = self._requests.get(reservation.id)
        if request is None:
            return
        while request.prefills and not self.may_link(request.prefills[0]):
            request.prefills.pop(0)
        if not request.prefills:
            self._engine.send(CancelImport(request.id))
            return
        link = self._links.to(request.prefills.pop(0))
        request.handover = Handover(self._tickets, link, reservation, self._bounds.layout)
        if request.span is not None:
            request.span.part("reserve")
        submit = request.submit
        link.send(
            kv.DecodeToPrefill(
                ticket=kv.Ticket(
                    ticket_id=request.handover.ticket.id,
                    request_id=submit.request_id,
                    prompt_token_ids=submit.prompt_token_ids,
                    sampling=submit.sampling,
                    priority=submit.priority,
                    first_token=reservation.first_token,
                    generation=reservation.generation,
                    lease_ms=self._lease_ms,
                    continuation=submit.continuation if submit.HasField("continuation") else None,
                    traceparent=request.span.traceparent if request.span is not None else "",
                    cache_scope=submit.cache_scope if submit.HasField("cache_scope") else None,
                )
            )
        )

    def _acknowledge(self, request: LiveRequest) -> None:
        """End a hand-over when its KV and its first tokens have both arrived."""
        handover = request.handover
        if handover is not None and handover.kv_complete and request.first_tokens_at is not None:
            exposed_s = asyncio.get_running_loop().time() - request.first_tokens_at
            self.tokens += handover.num_tokens
            self.exposed_s += exposed_s
            self._metrics.exposed_handover.observe(exposed_s)
            if request.span is not None:
                request.span.part("handover", tokens=handover.num_tokens)
            request.close_handover("ack")
            request.prefills.clear()

    def _give_up(self, ticket: OpenTicket, why: str) -> None:
        """End a hand-over that failed. The next prefill pod gets the order. After the last one, this pod's engine
        computes the missing KV."""
        request = self._requests.get(ticket.request)
        if request is None or request.handover is None:
            return
        where = f"prefill pod {request.prefills[0]} is next" if request.prefills else "this pod computes the prompt"
        log.warning(
            "hand-over failed, so %s: %s", where, why,
            extra={"event": "handover_failed", "request_id": request.submit.request_id},
        )  # fmt: skip
        self.events["failed"] += 1
        if request.span is not None:
            request.span.part("failed handover", why=why)
        request.stream.put_failed_handover(request.submit.handle, request.handover.link.address)
        request.close_handover("cancel")
        self._engine.send(RestartImport(request.id) if request.prefills else CancelImport(request.id))

    # Prefill pods

    def first_tokens(self, link: PrefillLink, message: kv.FirstTokens) -> None:
        ticket = self._ordered(link, message.ticket_id)
        request = self._requests.get(ticket.request) if ticket is not None else None
        if ticket is None or request is None or request.first_tokens_at is not None:
            return
        try:
            check_first_tokens(message, request.submit, self._engine.ready)
        except MessageRefused as refusal:
            self._refusals.add_message(link.address, refusal)
            self._give_up(ticket, f"first tokens refused: {refusal}")
            return
        message.deltas.sort(key=lambda delta: delta.choice)
        request.first_tokens_at = asyncio.get_running_loop().time()
        if request.span is not None:
            request.span.part("prefill elsewhere")
        self._note_arrival(ticket)
        for delta in message.deltas:
            delta.handle = request.submit.handle
            request.measure(delta, "prefill")
        request.stream.put(list(message.deltas))
        running = [delta for delta in message.deltas if not delta.finish_reason]
        if running:
            self._engine.send(ImportTokens(request.id, [delta.token_ids[0] for delta in message.deltas]))
        else:
            self._engine.send(Abort(request.id))
        self._acknowledge(request)
        for delta in message.deltas:
            self._requests.note_finish(request, delta.choice, delta.finish_reason)

    def ticket_failed(self, link: PrefillLink, message: kv.TicketFailed) -> None:
        ticket = self._ordered(link, message.ticket_id)
        if ticket is not None:
            self._give_up(ticket, message.failure.message[:_MOST_REASON])

    def _ordered(self, link: PrefillLink, ticket_id: int) -> OpenTicket | None:
        """Return an open ticket if it was sent over this link, else None: a pod may answer only its own tickets."""
        ticket = self._tickets.get(ticket_id)
        request = self._requests.get(ticket.request) if ticket is not None else None
        handover = request.handover if request is not None else None
        return ticket if handover is not None and handover.link is link else None

    async def slot(self) -> tuple[int, memoryview]:
        slot = await self._engine.import_slots.get()
        return slot, self._engine.imports.slot(slot)

    def free(self, slot: int) -> None:
        self._engine.import_slots.put_nowait(slot)

    def receive(self, link: PrefillLink, piece: Piece, slot: int) -> None:
        ticket = self._claim(link, piece)
        if ticket is None:
            self.free(slot)
            return
        self._note_arrival(ticket)
        self._metrics.piece("host", self._bounds.layout.size(piece.extent))
        self._engine.send(ImportPiece(ticket.request, ticket.generation, piece.extent, slot))

    def _claim(self, link: PrefillLink, piece: Piece) -> OpenTicket | None:
        """Return the ticket that ordered a piece over this link, None if the piece is refused."""
        try:
            self._bounds.check(piece)
            if self._tickets.get(piece.header.ticket_id) and self._ordered(link, piece.header.ticket_id) is None:
                raise PieceRefused("ticket", piece.header)
            return self._tickets.claim(piece)
        except PieceRefused as refusal:
            self.refused(link, refusal)
            return None

    def refused(self, link: PrefillLink, refusal: PieceRefused) -> None:
        self.events[f"refused_{refusal.reason}"] += 1
        # An open hand-over cannot complete without the refused piece, so it is given up. If a damaged piece names the
        # wrong ticket, a hand-over is given up without need, which only costs time. Pieces without an open ticket are
        # usual after a request that has ended early, so they are not worth a warning.
        ticket = self._ordered(link, refusal.header.ticket_id) if refusal.header is not None else None
        level = logging.DEBUG if ticket is None else logging.WARNING
        log.log(level, "%s", refusal, extra={"event": "piece_refused", "reason": refusal.reason})
        if ticket is not None:
            self._give_up(ticket, str(refusal))

    def receive_on_gpu(self, link: PrefillLink, piece: Piece) -> None:
        ticket = self._claim(link, piece)
        if ticket is not None:
            self._note_arrival(ticket)
        if link.pair is not None:
            problem = self._pairs.announced(link, piece, ticket)
            if problem is None:
                self._metrics.piece("gpu", piece.header.gpu_bytes)
            else:
                self._pair_lost(link, problem)
                self._pairs.check(link)
        elif ticket is not None:
            self._give_up(ticket, "a piece was sent over a lost pair")

    def pair_changed(self, link: PrefillLink, pair: kv.GpuPair) -> None:
        match pair.WhichOneof("state"):
            case "id":
                problem = self._pairs.offered(link, pair)
            case "lost":
                problem = pair.lost
            case _:
                problem = self._pairs.refuse_unknown(link)
        if problem is not None:
            self._pair_lost(link, problem)
            self._pairs.check(link)

    def _pair_lost(self, link: PrefillLink, reason: str) -> None:
        """Go on without a pair of GPUs. Hand-overs whose KV is incomplete are given up, so that it is ordered again."""
        if link.pair is None:
            return
        self._pairs.fall_back(link, reason)
        for handover in self._open_with(link):
            if not handover.kv_complete:
                self._give_up(handover.ticket, "the connection between the GPUs is lost")

    def link_lost(self, link: PrefillLink) -> None:
        self._links.forget(link)
        self._pairs.forget(link)
        for handover in self._open_with(link):
            self._give_up(handover.ticket, "the link to the prefill pod is lost")

    def _open_with(self, link: PrefillLink) -> list[Handover]:
        handovers = (request.handover for request in self._requests)
        return [handover for handover in handovers if handover is not None and handover.link is link]

    def _note_arrival(self, ticket: OpenTicket) -> None:
        request = self._requests.get(ticket.request)
        if request is not None and request.handover is not None:
            request.handover.note_arrival()

    # Leases

    @property
    def _lease_ms(self) -> int:
        return int(self._lease_s * 1000)

    def _stalled(self, request: LiveRequest, handover: Handover) -> bool:
        """Whether the prefill pod has computed the prompt, but has sent nothing more for the time of a lease."""
        computed = request.first_tokens_at is not None or handover.kv_complete
        return computed and handover.silence_s > self._lease_s

    async def _renew(self) -> None:
        """Renew the leases of open tickets, so that KV is kept while this pod is busy. Give up stalled hand-overs."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            tickets: dict[PrefillLink, list[int]] = {}
            for request in list(self._requests):
                handover = request.handover
                if handover is None:
                    continue
                if self._stalled(request, handover):
                    self.events["timeout"] += 1
                    self._give_up(handover.ticket, "the rest of the KV does not arrive")
                else:
                    tickets.setdefault(handover.link, []).append(handover.ticket.id)
            for link, ids in tickets.items():
                link.send(kv.DecodeToPrefill(renew=kv.Renew(ticket_ids=ids, lease_ms=self._lease_ms)))


def _reserved_as(imported: Imported, request: LiveRequest | None) -> Handover | None:
    """Return a request's open hand-over if the engine's message is about it, and not about an earlier one."""
    handover = request.handover if request is not None else None
    return handover if handover is not None and handover.ticket.generation == imported.generation else None
