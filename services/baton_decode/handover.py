"""One hand-over: KV that one prefill pod was ordered to bring for one request."""

import asyncio

from baton_common.kv_layout import KvLayout
from baton_engine.delta import Reservation
from baton_kv.link import PrefillLink
from baton_kv.tickets import TicketBook
from baton_proto import handover_pb2 as kv


class Handover:
    """Owns a ticket: it is open from the beginning until `close`."""

    def __init__(self, tickets: TicketBook, link: PrefillLink, reservation: Reservation, layout: KvLayout) -> None:
        """Order what a reservation lacks. layout: of the engine that has reserved it."""
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
        """For how long nothing of it has come."""
        return asyncio.get_running_loop().time() - self._heard_at

    def close(self, verdict: str) -> None:
        """Tell the prefill pod with an "ack" or a "cancel" that it need keep nothing; what still comes is refused."""
        reference = kv.TicketRef(ticket_id=self.ticket.id)
        acked = verdict == "ack"
        self.link.send(kv.DecodeToPrefill(ack=reference) if acked else kv.DecodeToPrefill(cancel=reference))
        self._tickets.close(self.ticket.id)
