"""A ticket lets in each block it ordered, once, and nothing else."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_kv.pieces import PieceRefused
from baton_kv.tickets import OpenTicket, TicketBook
from baton_proto.handover_pb2 import KvPiece

EPOCH, GENERATION = 0xABCDEF, 7


@pytest.fixture
def book() -> TicketBook:
    return TicketBook(EPOCH)


def claim(book: TicketBook, piece: KvPiece) -> OpenTicket:
    ticket = book.find(piece)
    ticket.receive(piece)
    return ticket


def make_piece(ticket: OpenTicket, first_block: int, num_blocks: int = 1, **fields: int) -> KvPiece:
    defaults = {"epoch": EPOCH, "ticket_id": ticket.id, "generation": ticket.generation}
    return KvPiece(**{**defaults, "first_block": first_block, "num_blocks": num_blocks, **fields})


def reason(book: TicketBook, piece: KvPiece) -> str:
    with pytest.raises(PieceRefused) as refused:
        claim(book, piece)
    return refused.value.reason


def test_each_block_is_taken_once(book: TicketBook) -> None:
    ticket = book.open(request=5, generation=GENERATION, first_block=3, num_blocks=4)
    assert claim(book, make_piece(ticket, 5, 2)) is ticket
    assert ticket.missing == {3, 4}
    assert reason(book, make_piece(ticket, 5)) == "range"
    assert reason(book, make_piece(ticket, 4, 2)) == "range"
    assert ticket.missing == {3, 4}
    claim(book, make_piece(ticket, 3, 2))
    assert ticket.missing == set()


@pytest.mark.parametrize(
    ("first_block", "num_blocks"), [(2, 1), (2, 2), (6, 2), (7, 1), (3, 5), (3, 0), (0, 2**32 - 1)]
)
def test_blocks_that_were_not_ordered_are_refused(book: TicketBook, first_block: int, num_blocks: int) -> None:
    ticket = book.open(5, GENERATION, 3, 4)
    assert reason(book, make_piece(ticket, first_block, num_blocks)) == "range"
    assert ticket.missing == {3, 4, 5, 6}


def test_writers_from_another_time_are_refused(book: TicketBook) -> None:
    ticket = book.open(5, GENERATION, 0, 2)
    assert reason(book, make_piece(ticket, 0, epoch=EPOCH + 1)) == "epoch"
    assert reason(book, make_piece(ticket, 0, ticket_id=ticket.id + 1)) == "ticket"
    assert reason(book, make_piece(ticket, 0, generation=GENERATION - 1)) == "generation"
    assert ticket.missing == {0, 1}
    book.close(ticket.id)
    assert reason(book, make_piece(ticket, 0)) == "ticket"


def test_the_ticket_of_a_request_opened_again_is_another(book: TicketBook) -> None:
    first = book.open(5, GENERATION, 0, 2)
    book.close(first.id)
    second = book.open(5, GENERATION + 1, 0, 2)
    assert second.id != first.id
    assert reason(book, make_piece(first, 0)) == "ticket"
    assert second.missing == {0, 1}


def test_the_book_knows_what_is_open(book: TicketBook) -> None:
    tickets = [book.open(request, GENERATION, 0, 1) for request in range(3)]
    assert len(book) == 3
    assert book.get(tickets[1].id) is tickets[1]
    assert book.close(tickets[1].id) is tickets[1]
    assert book.close(tickets[1].id) is None
    assert book.get(tickets[1].id) is None
    assert len(book) == 2


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=30))
def test_whatever_comes_each_block_is_written_at_most_once(pieces: list[tuple[int, int]]) -> None:
    book = TicketBook(EPOCH)
    ticket = book.open(5, GENERATION, 2, 6)
    written: list[int] = []
    for first_block, num_blocks in pieces:
        with contextlib.suppress(PieceRefused):
            claim(book, make_piece(ticket, first_block, num_blocks))
            written += range(first_block, first_block + num_blocks)
    assert len(written) == len(set(written))
    assert set(written) <= set(range(2, 8))
    assert ticket.missing == set(range(2, 8)) - set(written)
