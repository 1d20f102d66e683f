"""One hand-over: the KV of one request, ordered from one prefill pod."""

import asyncio

from baton_common.kv_layout import KvLayout
from baton_engine.delta import Reservation
from baton_kv.link import PrefillLink
from baton_kv.tickets import TicketBook
from baton_proto import handover_pb2 as kv


class Handover:
    """Owns a ticket, which is open until `close`."""

    def __init__(self, tickets: TicketBook, link: PrefillLink, reservation: Reservation, layout: KvLayout) -> None:
        """Open a ticket for the KV that a reservation lacks. layout: of the engine that made the reservation."""
        extents = layout.seen(reservation.first_token, reservation.num_tokens)
        self.ticket = tickets.open(reservation.id, reservation.generation, extents)
        self.link = link
        self.num_tokens = reservation.num_tokens
        self.kv_complete = False
        self._tickets = tickets
        self.note_arrival()

    def note_arrival(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()

    @property
    def silence_s(self) -> float:
        """Seconds since KV or first tokens of this hand-over last arrived."""
        return asyncio.get_running_loop().time() - self._heard_at

    def close(self, verdict: str) -> None:
        """Close the ticket and let the prefill pod free the KV. Later pieces are refused. verdict: ack or cancel."""
        reference = kv.TicketRef(ticket_id=self.ticket.id)
        acked = verdict == "ack"
        self.link.send(kv.DecodeToPrefill(ack=reference) if acked else kv.DecodeToPrefill(cancel=reference))
        self._tickets.close(self.ticket.id)
