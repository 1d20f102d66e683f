"""KV pieces are written only when they are whole and what was ordered."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout, Plane
from baton_kv.pieces import PieceBounds, PieceRefused, decode, encode, make_header
from baton_proto.handover_pb2 import KvPiece, PieceHeader

LAYOUT = KvLayout(4, (Plane("key", 2, 1, "float32"), Plane("value", 2, 4, "bfloat16")))
BOUNDS = PieceBounds(LAYOUT, most_bytes=400)
FIELDS = ("first_token", "num_tokens", "first_layer", "num_layers", "first_head", "num_heads")


def make_extent(**fields: int) -> Extent:
    whole = {"first_token": 7, "num_tokens": 3, "first_layer": 0, "num_layers": 4, "first_head": 0, "num_heads": 2}
    return Extent(**{**whole, **fields})


def make_message(payload: bytes | None = None, **fields: int) -> bytes:
    extent = make_extent(**fields)
    size = LAYOUT.size(extent)
    if payload is None:
        payload = random.Random(1).randbytes(size)
    return encode(make_header(2**63 + 5, 300, 2, extent), payload)


def reason(message: bytes) -> str:
    with pytest.raises(PieceRefused) as refused:
        BOUNDS.check(decode(message))
    assert refused.value.reason in str(refused.value)
    return refused.value.reason


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_what_is_encoded_is_decoded(payload: bytes, epoch: int, first_token: int) -> None:
    extent = make_extent(first_token=first_token)
    piece = decode(encode(make_header(epoch, 1, 2, extent), payload))
    assert (piece.header.epoch, piece.extent, bytes(piece.payload)) == (epoch, extent, payload)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 3_000_000])
def test_a_message_is_what_protobuf_would_write(size: int) -> None:
    message = make_message(random.Random(2).randbytes(size))
    read = KvPiece.FromString(message)
    assert read.SerializeToString(deterministic=True) == message or not size
    assert len(read.payload) == size
    assert PieceHeader.FromString(read.header) == decode(message).header


def test_the_checksum_is_xxh3() -> None:
    # From the specification of XXH3: of no bytes with seed 0.
    message = encode(PieceHeader(), b"")
    assert KvPiece.FromString(message).checksum == 0x2D06800538D394C2


def test_a_whole_piece_passes() -> None:
    BOUNDS.check(decode(make_message()))
    BOUNDS.check(decode(make_message(first_layer=1, num_layers=2, first_head=1, num_heads=1)))


@given(data=st.data())
def test_a_flipped_bit_anywhere_is_found(data: st.DataObject) -> None:
    message = bytearray(make_message())
    message[data.draw(st.integers(0, len(message) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert reason(bytes(message)) == "checksum"


@given(data=st.data())
def test_a_cut_or_lengthened_message_is_found(data: st.DataObject) -> None:
    message = make_message()
    assert reason(message[: data.draw(st.integers(0, len(message) - 1))]) == "checksum"
    assert reason(message + data.draw(st.binary(min_size=1, max_size=9))) == "checksum"


@given(st.binary(max_size=100))
def test_whatever_comes_is_refused_and_nothing_worse(message: bytes) -> None:
    assert reason(message) == "checksum"


def test_parts_of_a_payload_in_another_order_are_found() -> None:
    payload = random.Random(1).randbytes(288)
    swapped = make_message(payload)[:-288] + payload[96:192] + payload[:96] + payload[192:]
    assert reason(swapped) == "checksum"


def test_a_damaged_piece_tells_which_it_may_be() -> None:
    message = make_message()
    with pytest.raises(PieceRefused) as refused:
        decode(message[:-1] + bytes([message[-1] ^ 1]))
    assert refused.value.header is not None
    assert refused.value.header.ticket_id == 300


@pytest.mark.parametrize(
    "fields",
    [
        {"payload": b""},
        {"payload": bytes(3 * 96 - 1)},
        {"payload": bytes(3 * 96 + 1)},
        {"first_layer": 1},
        {"num_layers": 5},
        {"first_head": 1},
        {"num_heads": 3},
        {"num_tokens": 5},
    ],
    ids=str,
)
def test_a_piece_of_another_shape_is_refused(fields: dict[str, int]) -> None:
    assert reason(make_message(**fields)) == "range"  # type: ignore[arg-type]
