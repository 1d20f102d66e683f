"""KV pieces are written only when they are whole and what was ordered."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_kv.pieces import Layout, PieceRefused, checksum
from baton_proto.handover_pb2 import KvPiece

LAYOUT = Layout(num_layers=4, num_heads=2, block_bytes=96)


def make_piece(num_blocks: int = 3, **fields: object) -> KvPiece:
    payload = random.Random(1).randbytes(num_blocks * LAYOUT.block_bytes)
    defaults = {"num_blocks": num_blocks, "num_layers": 4, "num_heads": 2, "payload": payload}
    piece = {**defaults, "checksum": checksum(payload), **fields}
    return KvPiece(**piece)  # type: ignore[arg-type]


def reason(piece: KvPiece) -> str:
    with pytest.raises(PieceRefused) as refused:
        LAYOUT.check(piece)
    assert refused.value.reason in str(refused.value)
    return refused.value.reason


def test_the_checksum_is_xxh3() -> None:
    # From the specification of XXH3: of no bytes with seed 0.
    assert checksum(b"") == 0x2D06800538D394C2


def test_a_whole_piece_passes_the_wire_unharmed() -> None:
    LAYOUT.check(make_piece())
    LAYOUT.check(KvPiece.FromString(make_piece().SerializeToString()))


@given(byte=st.integers(0, 3 * 96 - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found(byte: int, bit: int) -> None:
    piece = make_piece()
    payload = bytearray(piece.payload)
    payload[byte] ^= 1 << bit
    piece.payload = bytes(payload)
    assert reason(piece) == "checksum"


def test_blocks_in_another_order_are_found() -> None:
    piece = make_piece()
    blocks = [piece.payload[at : at + 96] for at in (96, 0, 192)]
    piece.payload = b"".join(blocks)
    assert reason(piece) == "checksum"


@pytest.mark.parametrize(
    "fields",
    [
        {"payload": b""},
        {"payload": bytes(3 * 96 - 1)},
        {"payload": bytes(3 * 96 + 1)},
        {"num_blocks": 2},
        {"num_blocks": 4},
        {"first_layer": 1},
        {"num_layers": 3},
        {"num_layers": 5},
        {"first_head": 1},
        {"num_heads": 1},
    ],
    ids=str,
)
def test_a_piece_of_another_shape_is_refused(fields: dict[str, object]) -> None:
    piece = make_piece()
    for name, value in fields.items():
        setattr(piece, name, value)
    piece.checksum = checksum(piece.payload)
    assert reason(piece) == "range"
