"""A KV piece on the wire: built where it leaves, checked where it arrives."""

import xxhash

from baton_proto.handover_pb2 import KvPiece

# Beside the payload a piece holds some dozens of bytes; gRPC's own limit of 4 MiB is made for smaller messages.
MESSAGE_OVERHEAD = 1 << 16


def checksum(payload: bytes | memoryview) -> int:
    """Return the xxh3-64 of a payload."""
    return int(xxhash.xxh3_64_intdigest(payload))


class PieceRefused(Exception):
    """A piece that must not be written; `reason` is epoch, ticket, generation, range or checksum."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"KV piece refused: {reason}")
        self.reason = reason


class Layout:
    """What a piece must look like, from the layout facts of the pod's engine."""

    def __init__(self, num_layers: int, num_heads: int, block_bytes: int) -> None:
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.block_bytes = block_bytes

    def check(self, piece: KvPiece) -> None:
        """Raise PieceRefused when the piece is not made of whole blocks of this layout or was damaged on its way."""
        whole = (
            piece.first_layer == 0
            and piece.num_layers == self.num_layers
            and piece.first_head == 0
            and piece.num_heads == self.num_heads
        )
        if not whole or len(piece.payload) != piece.num_blocks * self.block_bytes:
            raise PieceRefused("range")
        if checksum(piece.payload) != piece.checksum:
            raise PieceRefused("checksum")
