"""A ticket admits each piece that it ordered once, and no other piece."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_common.extent import Extent
from baton_kv.pieces import Piece, PieceRefused, make_header
from baton_kv.tickets import OpenTicket, TicketBook

EPOCH, GENERATION = 0xABCDEF, 7


Range = tuple[int, int]


def extent(first_token: int, num_tokens: int, layers: Range = (0, 3), heads: Range = (0, 4)) -> Extent:
    return Extent(
        first_token=first_token,
        num_tokens=num_tokens,
        first_layer=layers[0],
        num_layers=layers[1] - layers[0],
        first_head=heads[0],
        num_heads=heads[1] - heads[0],
    )


@pytest.fixture
def book() -> TicketBook:
    return TicketBook(EPOCH)


def make_piece(ticket: OpenTicket, part: Extent, **fields: int) -> Piece:
    words = {"epoch": EPOCH, "ticket_id": ticket.id, "generation": ticket.generation, **fields}
    return Piece(make_header(**words, extent=part), memoryview(b""))


def reason(book: TicketBook, piece: Piece) -> str:
    with pytest.raises(PieceRefused) as refused:
        book.claim(piece)
    assert refused.value.header is piece.header
    return refused.value.reason


def test_each_token_is_taken_once(book: TicketBook) -> None:
    ticket = book.open(request=5, generation=GENERATION, extents=[extent(3, 4)])
    assert book.claim(make_piece(ticket, extent(5, 2))) is ticket
    assert reason(book, make_piece(ticket, extent(5, 1))) == "range"
    assert reason(book, make_piece(ticket, extent(4, 2))) == "range"
    assert ticket.missing
    book.claim(make_piece(ticket, extent(3, 2)))
    assert not ticket.missing


@pytest.mark.parametrize(
    "part",
    [
        *(extent(first, count) for first, count in [(2, 1), (2, 2), (6, 2), (7, 1), (3, 5), (3, 0), (0, 2**32 - 1)]),
        extent(3, 1, layers=(0, 4)),
        extent(3, 1, layers=(1, 1)),
        extent(3, 1, heads=(3, 5)),
    ],
    ids=str,
)
def test_what_was_not_ordered_is_refused(book: TicketBook, part: Extent) -> None:
    ticket = book.open(5, GENERATION, [extent(3, 4)])
    assert reason(book, make_piece(ticket, part)) == "range"
    assert ticket.missing.lacks(extent(3, 4))


def test_writers_from_another_time_are_refused(book: TicketBook) -> None:
    ticket, part = book.open(5, GENERATION, [extent(0, 2)]), extent(0, 1)
    assert reason(book, make_piece(ticket, part, epoch=EPOCH + 1)) == "epoch"
    assert reason(book, make_piece(ticket, part, ticket_id=ticket.id + 1)) == "ticket"
    assert reason(book, make_piece(ticket, part, generation=GENERATION - 1)) == "generation"
    assert ticket.missing.lacks(extent(0, 2))
    book.close(ticket.id)
    assert reason(book, make_piece(ticket, part)) == "ticket"


def test_the_ticket_of_a_request_opened_again_is_another(book: TicketBook) -> None:
    first = book.open(5, GENERATION, [extent(0, 2)])
    book.close(first.id)
    second = book.open(5, GENERATION + 1, [extent(0, 2)])
    assert second.id != first.id
    assert reason(book, make_piece(first, extent(0, 1))) == "ticket"
    assert second.missing.lacks(extent(0, 2))


def test_the_book_knows_what_is_open(book: TicketBook) -> None:
    tickets = [book.open(request, GENERATION, [extent(0, 1)]) for request in range(3)]
    assert len(book) == 3
    assert book.get(tickets[1].id) is tickets[1]
    assert book.close(tickets[1].id) is tickets[1]
    assert book.close(tickets[1].id) is None
    assert book.get(tickets[1].id) is None
    assert len(book) == 2


def ranges(most: int) -> st.SearchStrategy[Range]:
    return st.tuples(st.integers(0, most), st.integers(0, most)).map(lambda ends: (min(ends), max(ends)))


@given(st.lists(st.tuples(ranges(9), ranges(4), ranges(5)), max_size=40))
def test_whatever_comes_each_cell_is_written_at_most_once(pieces: list[tuple[Range, Range, Range]]) -> None:
    book = TicketBook(EPOCH)
    ticket = book.open(5, GENERATION, [extent(2, 6)])
    ordered = {(t, layer, head) for t in range(2, 8) for layer in range(3) for head in range(4)}
    written: set[tuple[int, int, int]] = set()
    for tokens, layers, heads in pieces:
        cells = {(t, layer, head) for t in range(*tokens) for layer in range(*layers) for head in range(*heads)}
        with contextlib.suppress(PieceRefused):
            book.claim(make_piece(ticket, extent(tokens[0], tokens[1] - tokens[0], layers, heads)))
            assert cells
            assert cells <= ordered - written
            written |= cells
            continue
        assert not cells or not cells <= ordered - written
    assert bool(ticket.missing) == (written != ordered)
