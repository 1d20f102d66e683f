"""The decode side's open hand-overs: what was ordered from a prefill pod and may still be written."""

import itertools
from collections.abc import Iterable

import msgspec

from baton_common.extent import Extent, Missing

from .pieces import Piece, PieceRefused

# Into which what is missing may be cut by pieces out of order, since each further piece is compared with all of them.
# Pods send tokens in order, a group of layers after the other: a few per group and rank.
_MOST_PARTS = 1_024


class OpenTicket(msgspec.Struct):
    """KV ordered for the engine's request `request`."""

    id: int
    request: int
    generation: int
    missing: Missing


class TicketBook:
    """Ticket ids are never used twice within an epoch, so that a late piece finds no ticket instead of another's."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._open: dict[int, OpenTicket] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: int, generation: int, extents: Iterable[Extent]) -> OpenTicket:
        """Order extents of KV, which do not overlap."""
        ticket = OpenTicket(next(self._ids), request, generation, Missing(extents))
        self._open[ticket.id] = ticket
        return ticket

    def get(self, ticket_id: int) -> OpenTicket | None:
        return self._open.get(ticket_id)

    def close(self, ticket_id: int) -> OpenTicket | None:
        return self._open.pop(ticket_id, None)

    def claim(self, piece: Piece) -> OpenTicket:
        """Return the open ticket that ordered a piece and lacked it until now. Raises PieceRefused."""
        header = piece.header
        if header.epoch != self.epoch:
            raise PieceRefused("epoch", header)
        ticket = self._open.get(header.ticket_id)
        if ticket is None:
            raise PieceRefused("ticket", header)
        if header.generation != ticket.generation:
            raise PieceRefused("generation", header)
        if ticket.missing.num_parts > _MOST_PARTS or not ticket.missing.lacks(piece.extent):
            raise PieceRefused("range", header)
        ticket.missing.remove(piece.extent)
        return ticket
