"""The decode side's open hand-overs: what was ordered from a prefill pod and may still be written."""

import itertools

import msgspec

from baton_proto.handover_pb2 import KvPiece

from .pieces import PieceRefused


class OpenTicket(msgspec.Struct):
    """Blocks [first_block, first_block + num_blocks) of a prompt, ordered for the engine's request `request`."""

    id: int
    request: int
    generation: int
    missing: set[int]

    def receive(self, piece: KvPiece) -> None:
        """Count a piece's blocks as received."""
        self.missing.difference_update(range(piece.first_block, piece.first_block + piece.num_blocks))


class TicketBook:
    """Ticket ids are never used twice within an epoch, so that a late piece finds no ticket instead of another's."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._open: dict[int, OpenTicket] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: int, generation: int, first_block: int, num_blocks: int) -> OpenTicket:
        ticket = OpenTicket(next(self._ids), request, generation, set(range(first_block, first_block + num_blocks)))
        self._open[ticket.id] = ticket
        return ticket

    def get(self, ticket_id: int) -> OpenTicket | None:
        return self._open.get(ticket_id)

    def close(self, ticket_id: int) -> OpenTicket | None:
        return self._open.pop(ticket_id, None)

    def find(self, piece: KvPiece) -> OpenTicket:
        """Return the open ticket that ordered a piece and still lacks it. Raises PieceRefused."""
        if piece.epoch != self.epoch:
            raise PieceRefused("epoch")
        ticket = self._open.get(piece.ticket_id)
        if ticket is None:
            raise PieceRefused("ticket")
        if piece.generation != ticket.generation:
            raise PieceRefused("generation")
        blocks = range(piece.first_block, piece.first_block + piece.num_blocks)
        if not blocks or not ticket.missing.issuperset(blocks):
            raise PieceRefused("range")
        return ticket
