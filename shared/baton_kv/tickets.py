"""The tickets of a decode pod: KV that it has ordered from prefill pods and that may still be written."""

import itertools
from collections.abc import Iterable

import msgspec

from baton_common.extent import Extent, Missing

from .pieces import Piece, PieceRefused

# The most parts of a ticket's missing KV. Pieces that come out of order cut it into parts, and each further piece is
# compared with all of them. Correct pods send tokens in order, one group of layers after the other, which makes a few
# parts per group and rank.
_MOST_PARTS = 1_024


class OpenTicket(msgspec.Struct):
    """An order for the KV of one request. request: the engine's id of it."""

    id: int
    request: int
    generation: int
    missing: Missing


class TicketBook:
    """The open tickets. No id is used twice within an epoch, so a late piece never finds another request's ticket."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._open: dict[int, OpenTicket] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: int, generation: int, extents: Iterable[Extent]) -> OpenTicket:
        """Open a ticket for extents of KV, which must not overlap."""
        ticket = OpenTicket(next(self._ids), request, generation, Missing(extents))
        self._open[ticket.id] = ticket
        return ticket

    def get(self, ticket_id: int) -> OpenTicket | None:
        return self._open.get(ticket_id)

    def close(self, ticket_id: int) -> OpenTicket | None:
        return self._open.pop(ticket_id, None)

    def claim(self, piece: Piece) -> OpenTicket:
        """Mark a piece as arrived and return its ticket. Raises PieceRefused unless an open ticket lacks the piece."""
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
