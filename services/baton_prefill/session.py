"""The prefill pod's end of one decode pod's link: its tickets, and the messages and pieces still to be sent."""

import asyncio
import secrets

import msgspec

from baton_common.extent import Extent
from baton_kv import bulk
from baton_proto import handover_pb2 as kv
from baton_worker.request_metrics import RequestTimes
from baton_worker.request_span import RequestSpan


class Export(msgspec.Struct):
    """A ticket that this pod works on. request: the engine's id of it. computed: whether its prompt was computed."""

    ticket: kv.Ticket
    request: int
    lease: asyncio.TimerHandle
    times: RequestTimes
    span: RequestSpan | None
    computed: bool = False


class Session:
    """The state of one link. Control messages and KV pieces wait in separate queues."""

    def __init__(self, id: int, epoch: int) -> None:
        self.id = id
        self.token = secrets.token_bytes(bulk.TOKEN_BYTES)
        self.lost = asyncio.Event()  # the connection for pieces has ended
        self.epoch = epoch  # of the decode process
        self.closed = False
        self.pair_wanted = False  # whether a pair of GPUs waits for room
        self.pair_opened = False
        self.pairs_opened = 0  # how many so far
        self.gpu_ranks = 1  # of the decode pod
        self.pair_links = 1  # the most connections that a rank of this pod has for the pair
        self.pair_up_here = self.pair_up_there = False  # whether this end is up, and the decode pod's
        self.gpu_checked = True  # whether pieces over the pair have a checksum
        self.gpu_credit: int | None = None  # pieces that may be announced before more are allowed; None = any number
        self.exports: dict[int, Export] = {}  # by ticket id
        self.open_tokens = 0  # of the prompts and continuations of the exports
        self.control: asyncio.Queue[kv.PrefillToDecode] = asyncio.Queue()
        self.pieces: asyncio.Queue[PackedPiece] = asyncio.Queue()

    def take_pieces(self, export: Export | None = None) -> "list[PackedPiece]":
        """Remove the pieces of an export, or all pieces, from the queue and return them."""
        queued = [self.pieces.get_nowait() for _ in range(self.pieces.qsize())]
        for piece in queued:
            if export is not None and piece.export is not export:
                self.pieces.put_nowait(piece)
        return [piece for piece in queued if export is None or piece.export is export]


class PackedPiece(msgspec.Struct):
    """Part of an export's KV in a staging slot, on the host or the GPU."""

    export: Export
    extent: Extent
    slot: int
    on_gpu: bool
    checksum: int | None
