"""A KV piece on the wire, as handover.proto describes it. The sender encodes it, and the receiver checks it.

Messages are framed by hand in protobuf's format, because protobuf's generated code copies a payload when it builds a
message and again when it reads one.
"""

import struct

import msgspec
import xxhash
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout
from baton_proto.handover_pb2 import PieceHeader

# The most bytes of a message beside its payload; a piece needs some dozens. gRPC's default limit of 4 MiB is made for
# smaller messages.
MESSAGE_OVERHEAD = 1 << 16

_CHECKSUM, _HEADER, _PAYLOAD = b"\x09", b"\x12", b"\x1a"  # tags: number and wire type of KvPiece's fields
_FIXED64 = struct.Struct("<Q")


class PieceRefused(Exception):
    """A piece must not be written. reason: epoch, ticket, generation, range or checksum.

    header: the header of the piece, if it could be read. After a wrong checksum the header itself may be damaged.
    """

    def __init__(self, reason: str, header: PieceHeader | None = None) -> None:
        super().__init__(f"KV piece refused: {reason}")
        self.reason = reason
        self.header = header


class Piece(msgspec.Struct):
    """payload: the bytes of the extent, in the order that KvLayout gives them."""

    header: PieceHeader
    payload: memoryview

    @property
    def extent(self) -> Extent:
        return extent_of(self.header)


def extent_of(header: PieceHeader) -> Extent:
    return Extent(
        first_token=header.first_token,
        num_tokens=header.num_tokens,
        first_layer=header.first_layer,
        num_layers=header.num_layers,
        first_head=header.first_head,
        num_heads=header.num_heads,
    )


def make_header(epoch: int, ticket_id: int, generation: int, extent: Extent) -> PieceHeader:
    return PieceHeader(
        epoch=epoch,
        ticket_id=ticket_id,
        generation=generation,
        first_token=extent.first_token,
        num_tokens=extent.num_tokens,
        first_layer=extent.first_layer,
        num_layers=extent.num_layers,
        first_head=extent.first_head,
        num_heads=extent.num_heads,
    )


def encode(header: PieceHeader, payload: bytes | memoryview) -> bytes:
    """Return the message of a piece; the payload is copied once."""
    serialized = header.SerializeToString()
    sizes = _HEADER, _varint(len(serialized)), serialized, _PAYLOAD, _varint(len(payload))
    return b"".join((_CHECKSUM, _FIXED64.pack(checksum(serialized, payload)), *sizes, payload))


def decode(message: bytes) -> Piece:
    """Return the piece in a message. Its payload is a view of the message. Raises PieceRefused when it was damaged."""
    try:
        if message[:1] != _CHECKSUM or message[9:10] != _HEADER:
            raise PieceRefused("checksum")
        [expected] = _FIXED64.unpack_from(message, 1)
        size, at = _read_varint(message, 10)
        serialized, at = message[at : at + size], at + size
        if message[at : at + 1] != _PAYLOAD:
            raise PieceRefused("checksum")
        size, at = _read_varint(message, at + 1)
    except (IndexError, struct.error):
        raise PieceRefused("checksum") from None
    payload = memoryview(message)[at:]
    return read_piece(expected if len(payload) == size else None, serialized, payload)


def read_piece(expected: int | None, serialized: bytes, payload: memoryview) -> Piece:
    """Return the piece. serialized: the serialized header. Raises PieceRefused when the checksum is not as expected."""
    try:
        header = PieceHeader.FromString(serialized)
    except DecodeError:
        raise PieceRefused("checksum") from None
    if checksum(serialized, payload) != expected:
        raise PieceRefused("checksum", header)
    return Piece(header, payload)


def checksum(serialized: bytes, payload: bytes | memoryview) -> int:
    """Return the xxh3-64 of a serialized header and a payload."""
    digest = xxhash.xxh3_64(serialized)
    digest.update(payload)
    return digest.intdigest()


def _varint(value: int) -> bytes:
    """Return protobuf's encoding of a length: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the length that is encoded at a position, and the position after it."""
    value = shift = 0
    while message[at] > 0x7F:
        value |= (message[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | message[at] << shift, at + 1


class PieceBounds:
    """The limits of the pieces that this pod's engine can take."""

    def __init__(self, layout: KvLayout, most_bytes: int, most_gpu_bytes: int = 0) -> None:
        """most_bytes: the largest payload. most_gpu_bytes: the largest payload that comes from GPU to GPU."""
        self.layout = layout
        self._most_bytes = most_bytes
        self._most_gpu_bytes = most_gpu_bytes

    def check(self, piece: Piece) -> None:
        """Raise PieceRefused when a piece's extent is outside of the layout, when its payload is too large or
        does not have the size of the extent, or when it has one payload in the message and another from GPU to GPU."""
        extent, size = piece.extent, piece.header.gpu_bytes or len(piece.payload)
        most = self._most_gpu_bytes if piece.header.gpu_bytes else self._most_bytes
        both = bool(piece.header.gpu_bytes) and bool(piece.payload)
        if both or not self.layout.holds(extent) or size != self.layout.size(extent) or size > most:
            raise PieceRefused("range", piece.header)
