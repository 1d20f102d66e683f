"""The prefill pod's end of one decode pod's link: its tickets, and what is still to be sent."""

import asyncio

import msgspec

from baton_proto import handover_pb2 as kv


class Export(msgspec.Struct):
    """A ticket that this pod works for; `request` is the engine's number of it."""

    ticket: kv.Ticket
    request: int
    lease: asyncio.TimerHandle


class Session:
    """Control messages and KV pieces wait in queues of their own."""

    def __init__(self, id: int, epoch: int) -> None:
        self.id = id
        self.epoch = epoch  # of the decode process
        self.closed = False
        self.exports: dict[int, Export] = {}  # by ticket id
        self.control: asyncio.Queue[kv.PrefillToDecode] = asyncio.Queue()
        self.pieces: asyncio.Queue[PackedPiece] = asyncio.Queue()


class PackedPiece(msgspec.Struct):
    """Blocks of an export in a staging slot."""

    export: Export
    first_block: int
    num_blocks: int
    slot: int
