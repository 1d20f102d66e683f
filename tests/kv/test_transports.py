"""What every transport of KV pieces must do, between a prefill pod's service and a decode pod's link."""

import asyncio
import os
import random
import socket
import tempfile
import zlib
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout, Plane
from baton_common.peer_rpc import bind, make_server
from baton_kv import bulk, pieces
from baton_kv.link import PrefillLink
from baton_kv.pieces import Piece, PieceBounds, PieceRefused
from baton_kv.staging import StagingArena
from baton_kv.tickets import OpenTicket, TicketBook
from baton_prefill.service import PrefillService
from baton_prefill.settings import PrefillSettings
from baton_proto import handover_pb2 as kv
from baton_proto import serving_pb2 as pb
from baton_worker.messages import (
    Abort,
    Add,
    ClosePair,
    Command,
    FreeSlot,
    OpenPair,
    Output,
    PairId,
    Ready,
    SendPiece,
    UsePair,
)
from baton_worker.messages import Piece as Packed
from baton_worker.request_metrics import RequestMetrics
from baton_worker.server import channel_options
from tests.peer_files import PeerFiles

EPOCH = 99
Wire = deque[bytes]
NUM_SLOTS, TOKEN_BYTES = 4, 2 * 3 * 8
SLOT_BYTES = 100 * TOKEN_BYTES
LAYOUT = KvLayout(2, (Plane("key", 3, 2, "float32"),))
READY = Ready("layout", 1 << 20, 1000, 16, 99, LAYOUT, SLOT_BYTES, NUM_SLOTS)

pytestmark = pytest.mark.processes


def extent(first_token: int, num_tokens: int) -> Extent:
    return Extent(
        first_token=first_token, num_tokens=num_tokens, first_layer=0, num_layers=2, first_head=0, num_heads=3
    )


def arena() -> StagingArena:
    fd = StagingArena.create_file("test")
    try:
        return StagingArena.sized(fd, SLOT_BYTES, NUM_SLOTS)
    finally:
        os.close(fd)


class PrefillEngine:
    """In place of the prefill pod's engine process: the test says what it exports.

    wire: to the decode pod's GPU, if there is one; slots are then numbered as those of the host, but others.
    """

    def __init__(self, wire: Wire | None) -> None:
        self.ready = msgspec.structs.replace(
            READY, gpu_slot_bytes=SLOT_BYTES if wire is not None else 0, gpu_pairs=2, gpus=["gpu 0"]
        )
        self.wire = wire
        self.opened: asyncio.Queue[int] = asyncio.Queue()
        self.paired = asyncio.Event()
        self.checks = True
        self.closed_pairs: list[int] = []
        self.gpu_slots: dict[int, bytes] = {}
        self.exports = arena()
        self.added: asyncio.Queue[Add] = asyncio.Queue()
        self.aborted: list[int] = []
        self.free_slots = list(range(NUM_SLOTS))

    async def drained(self) -> None:
        pass

    def send(self, command: Command) -> None:
        match command:
            case Add():
                self.added.put_nowait(command)
            case Abort(id):
                self.aborted.append(id)
            case FreeSlot(slot, on_gpu):
                assert slot not in self.free_slots
                assert on_gpu == (self.gpu_slots.pop(slot, None) is not None)
                self.free_slots.append(slot)
            case SendPiece(_, slot):
                assert self.wire is not None
                self.wire.append(self.gpu_slots.pop(slot))
                self.free_slots.append(slot)
            case OpenPair(pair):
                self.opened.put_nowait(pair)
            case UsePair(_, check):
                self.checks = check
                self.paired.set()
            case ClosePair(pair):
                self.closed_pairs.append(pair)


class DecodePod:
    """In place of a decode pod's service."""

    def __init__(self, wire: Wire | None, unchecked: bool) -> None:
        self.wire = wire
        self.unchecked = unchecked
        self.announced: deque[tuple[Piece, OpenTicket | None]] = deque()
        self.tickets = TicketBook(EPOCH)
        self.arrived: dict[tuple[int, int], bytes] = {}  # by ticket and first token
        self.refusals: list[str] = []
        self.lost = asyncio.Event()
        self.slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(NUM_SLOTS):
            self.slots.put_nowait(slot)
        self._imports = arena()
        self._bounds = PieceBounds(LAYOUT, SLOT_BYTES, SLOT_BYTES)

    async def slot(self) -> tuple[int, memoryview]:
        slot = await self.slots.get()
        return slot, self._imports.slot(slot)

    def free(self, slot: int) -> None:
        self.slots.put_nowait(slot)

    def _claim(self, link: PrefillLink, piece: Piece) -> OpenTicket | None:
        try:
            self._bounds.check(piece)
            return self.tickets.claim(piece)
        except PieceRefused as refusal:
            self.refused(link, refusal)
            return None

    def refused(self, link: PrefillLink, refusal: PieceRefused) -> None:
        self.refusals.append(refusal.reason)

    def receive(self, link: PrefillLink, piece: Piece, slot: int) -> None:
        ticket = self._claim(link, piece)
        if ticket is not None:
            data = bytes(self._imports.slot(slot, piece.extent.num_tokens * TOKEN_BYTES))
            self.arrived[ticket.id, piece.extent.first_token] = data
        self.free(slot)

    def pair_changed(self, link: PrefillLink, pair: kv.GpuPair) -> None:
        assert pair.id == b"the id"
        link.pair = 1
        link.send(kv.DecodeToPrefill(gpu_pair=kv.GpuPair(up=True)))

    def receive_on_gpu(self, link: PrefillLink, piece: Piece) -> None:
        assert not piece.payload
        self.announced.append((piece, self._claim(link, piece)))
        asyncio.get_running_loop().call_later(0.01, self._receive)

    def _receive(self) -> None:
        """Take in order what was sent, as NCCL does."""
        while self.wire and self.announced:
            (piece, ticket), data = self.announced.popleft(), self.wire.popleft()
            assert len(data) == piece.header.gpu_bytes
            if ticket is None:
                continue
            assert piece.header.HasField("gpu_checksum") != self.unchecked
            if self.unchecked or piece.header.gpu_checksum == zlib.crc32(data):
                self.arrived[ticket.id, piece.extent.first_token] = data

    def first_tokens(self, link: PrefillLink, message: kv.FirstTokens) -> None: ...

    def ticket_failed(self, link: PrefillLink, message: kv.TicketFailed) -> None: ...

    def link_lost(self, link: PrefillLink) -> None:
        self.lost.set()


class Pair:
    """A prefill pod's service, and a decode pod linked to it."""

    def __init__(self, engine: PrefillEngine, service: PrefillService, decode: DecodePod, link: PrefillLink) -> None:
        self.engine = engine
        self.service = service
        self.decode = decode
        self.link = link

    async def order(self, num_tokens: int) -> tuple[OpenTicket, int]:
        """Open a ticket and send it; return it and the number that the prefill engine has for it."""
        ticket = self.decode.tickets.open(1, 7, [extent(0, num_tokens)])
        sampling = pb.SamplingParams(max_tokens=2, n=1, top_p=1, repetition_penalty=1)
        order = kv.Ticket(
            ticket_id=ticket.id, prompt_token_ids=[1] * num_tokens, sampling=sampling, generation=7, lease_ms=60_000
        )
        self.link.send(kv.DecodeToPrefill(ticket=order))
        return ticket, (await asyncio.wait_for(self.engine.added.get(), 10)).request.id

    def export(self, id: int, first_token: int, num_tokens: int, seed: int = 0) -> bytes:
        """Let the prefill engine pack some tokens; return what it packed."""
        slot = self.engine.free_slots.pop()
        data = random.Random(seed * 1000 + first_token).randbytes(num_tokens * TOKEN_BYTES)
        packed = Packed(id, extent(first_token, num_tokens), slot)
        if self.engine.wire is None:
            self.engine.exports.slot(slot, len(data))[:] = data
        else:
            self.engine.gpu_slots[slot] = data
            packed.on_gpu = True
            packed.checksum = zlib.crc32(data) if self.engine.checks else None
        self.service.take(Output(pieces=[packed]))
        return data

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.002)


@asynccontextmanager
async def pair(transport: str, gpu_unchecked: bool = False, **settings: Any) -> AsyncIterator[Pair]:
    """transport: of KV; "… with TLS" on all connections."""
    transport, _, tls = transport.partition(" with ")
    with tempfile.TemporaryDirectory() as folder:
        if tls:
            settings |= PeerFiles(Path(folder)).settings
        async with _pair(transport, gpu_unchecked, PrefillSettings(model=Path(), **settings)) as both:
            yield both


@asynccontextmanager
async def _pair(transport: str, gpu_unchecked: bool, settings: PrefillSettings) -> AsyncIterator[Pair]:
    wire: Wire | None = deque() if transport == "nccl" else None
    engine, decode = PrefillEngine(wire), DecodePod(wire, gpu_unchecked)
    service = PrefillService(settings, engine, epoch=1, metrics=RequestMetrics())  # type: ignore[arg-type]
    server = make_server(channel_options(SLOT_BYTES), settings.peer_tls)
    service.add_to(server)
    port = bind(server, "127.0.0.1:0", settings.peer_tls)
    await server.start()
    hello = kv.Hello(
        epoch=EPOCH,
        fingerprint=READY.fingerprint,
        gpu_piece_bytes=engine.ready.gpu_slot_bytes,
        gpu_unchecked=gpu_unchecked,
    )
    options = channel_options(SLOT_BYTES)
    link = PrefillLink(f"127.0.0.1:{port}", hello, decode, options, transport, settings.peer_tls)
    try:
        if wire is not None:
            number = await asyncio.wait_for(engine.opened.get(), 10)
            service.take(Output(pair_ids=[PairId(number, b"the id")]))
            service.take(Output(pairs_up=[number]))
            await asyncio.wait_for(engine.paired.wait(), 10)
        yield Pair(engine, service, decode, link)
    finally:
        await link.close()
        await server.stop(grace=0)
        await service.stop()


HOST = ["tcp", "grpc", "tcp with TLS", "grpc with TLS"]
transports = pytest.mark.parametrize("transport", [*HOST, "nccl"])
by_host = pytest.mark.parametrize("transport", HOST)


@transports
async def test_every_byte_arrives(transport: str) -> None:
    async with pair(transport) as both:
        orders = [await both.order(300) for _ in range(3)]
        expected = {}
        for first in range(0, 300, 60):
            for seed, (ticket, id) in enumerate(orders):
                await both.until(lambda: both.engine.free_slots)
                expected[ticket.id, first] = both.export(id, first, 60, seed)
        await both.until(lambda: len(both.decode.arrived) == len(expected))
        assert both.decode.arrived == expected
        assert not any(ticket.missing for ticket, _ in orders)
        assert both.decode.refusals == []
        await both.until(lambda: len(both.engine.free_slots) == NUM_SLOTS)


@by_host
async def test_a_damaged_piece_is_refused_and_those_after_it_are_not(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = pieces.checksum
    async with pair(transport) as both:
        ticket, id = await both.order(90)
        both.export(id, 0, 30)
        await both.until(lambda: both.decode.arrived)
        wrong = iter([True, False])
        # The sender's sum; the receiver computes its own, which then is another.
        for module in (bulk, pieces):
            monkeypatch.setattr(module, "checksum", lambda *data: right(*data) ^ next(wrong, False))
        both.export(id, 30, 30)
        await both.until(lambda: both.decode.refusals)
        both.export(id, 60, 30)
        await both.until(lambda: len(both.decode.arrived) == 2)
        assert both.decode.refusals == ["checksum"]
        assert ticket.missing.lacks(extent(30, 30))
        await both.until(lambda: both.decode.slots.qsize() == NUM_SLOTS)


@transports
async def test_a_writer_from_before_is_refused(transport: str) -> None:
    """The ticket is closed, and its blocks may be another's, when the piece comes."""
    async with pair(transport) as both:
        late, id = await both.order(60)
        current, _ = await both.order(60)
        both.decode.tickets.close(late.id)
        both.export(id, 0, 60)
        await both.until(lambda: both.decode.refusals)
        assert both.decode.refusals == ["ticket"]
        assert both.decode.arrived == {}
        assert current.missing.lacks(extent(0, 60))
        await both.until(lambda: both.decode.slots.qsize() == NUM_SLOTS)


async def test_a_damaged_announcement_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what size the piece is that follows is not known, and all that come after it would be taken for others."""
    right = pieces.checksum
    async with pair("nccl") as both:
        _, id = await both.order(90)
        wrong = iter([True, False])
        for module in (bulk, pieces):
            monkeypatch.setattr(module, "checksum", lambda *data: right(*data) ^ next(wrong, False))
        both.export(id, 0, 30)
        await asyncio.wait_for(both.decode.lost.wait(), 10)
        await both.until(lambda: both.engine.closed_pairs)
        assert both.decode.arrived == {}


async def test_pieces_between_gpus_go_without_a_checksum_where_none_is_wanted() -> None:
    async with pair("nccl", gpu_unchecked=True) as both:
        ticket, id = await both.order(60)
        data = both.export(id, 0, 60)
        await both.until(lambda: both.decode.arrived)
        assert both.decode.arrived == {(ticket.id, 0): data}


async def test_a_piece_for_a_closed_ticket_is_received_and_thrown_away() -> None:
    async with pair("nccl") as both:
        late, late_id = await both.order(60)
        current, id = await both.order(60)
        both.decode.tickets.close(late.id)
        both.export(late_id, 0, 60)
        data = both.export(id, 0, 60, seed=1)
        await both.until(lambda: both.decode.arrived)
        assert both.decode.arrived == {(current.id, 0): data}
        assert both.decode.refusals == ["ticket"]


@by_host
async def test_without_slots_pieces_wait(transport: str) -> None:
    async with pair(transport) as both:
        _, id = await both.order(300)
        taken = [await both.decode.slot() for _ in range(NUM_SLOTS)]
        both.export(id, 0, 60)
        await asyncio.sleep(0.2)
        assert both.decode.arrived == {}
        both.decode.free(taken[0][0])
        await both.until(lambda: both.decode.arrived)


@by_host
async def test_a_lost_link_gives_everything_back(transport: str) -> None:
    async with pair(transport) as both:
        _, id = await both.order(300)
        taken = [await both.decode.slot() for _ in range(NUM_SLOTS)]
        for first in range(0, 180, 60):
            both.export(id, first, 60)
        await asyncio.sleep(0.1)
        await both.link.close()
        assert both.decode.lost.is_set()
        await both.until(lambda: both.engine.aborted == [id])
        await both.until(lambda: len(both.engine.free_slots) == NUM_SLOTS)
        for slot, _ in taken:
            both.decode.free(slot)
        assert both.decode.slots.qsize() == NUM_SLOTS


@by_host
async def test_the_end_of_a_ticket_is_the_end_of_its_pieces(transport: str) -> None:
    async with pair(transport) as both:
        ticket, id = await both.order(300)
        taken = [await both.decode.slot() for _ in range(NUM_SLOTS)]
        for first in range(0, 180, 60):
            both.export(id, first, 60)
        both.link.send(kv.DecodeToPrefill(cancel=kv.TicketRef(ticket_id=ticket.id)))
        both.decode.tickets.close(ticket.id)
        await both.until(lambda: both.engine.aborted == [id])
        for slot, _ in taken:
            both.decode.free(slot)
        await both.until(lambda: len(both.engine.free_slots) == NUM_SLOTS)
        other, other_id = await both.order(60)
        both.export(other_id, 0, 60)
        await both.until(lambda: not other.missing)


async def test_half_a_piece_keeps_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection stays open, but the rest of the piece does not come."""
    monkeypatch.setattr(bulk, "_PIECE_TIMEOUT_S", 0.2)
    async with pair("tcp") as both:

        async def admit(_: bytes, connection: socket.socket) -> None:
            await asyncio.get_running_loop().sock_sendall(connection, bulk._FRAME.pack(0, 0, 100) + b"half")
            await both.decode.lost.wait()

        assert both.service._bulk is not None
        both.service._bulk._admit = admit
        await asyncio.wait_for(both.decode.lost.wait(), 10)
        assert both.decode.slots.qsize() == NUM_SLOTS


async def test_a_peer_that_reads_slowly_keeps_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads often enough that the kernel never gives the connection up."""
    monkeypatch.setattr(bulk, "_PIECE_TIMEOUT_S", 0.5)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)

        async def read() -> None:
            while True:
                await asyncio.get_running_loop().sock_recv(theirs, 1_000)
                await asyncio.sleep(0.01)

        reading = asyncio.create_task(read())
        sending = asyncio.create_task(bulk.send(ours, kv.PieceHeader(), memoryview(bytes(4 << 20))))
        await asyncio.wait([sending], timeout=5)
        assert sending.done()
        assert isinstance(sending.exception(), TimeoutError)
        assert not reading.done()
        reading.cancel()


async def test_a_flood_of_pieces_leaves_the_event_loop_to_others() -> None:
    """They all are refused, and arrive faster than they are read."""
    async with pair("tcp") as both:
        header = pieces.make_header(EPOCH, 99, 1, extent(0, 1)).SerializeToString()
        flood = (bulk._FRAME.pack(pieces.checksum(header, b""), len(header), 0) + header) * 5_000

        async def admit(_: bytes, connection: socket.socket) -> None:
            connection.setblocking(True)
            with suppress(OSError):
                await asyncio.to_thread(connection.sendall, flood)

        assert both.service._bulk is not None
        both.service._bulk._admit = admit
        refusals, most = both.decode.refusals, 0
        while not both.decode.lost.is_set():
            before = len(refusals)
            await asyncio.sleep(0)
            most = max(most, len(refusals) - before)
        assert len(refusals) == 5_000
        assert most < 5


async def linked(caplog: pytest.LogCaptureFixture) -> str:
    """Return the transport that the log names."""
    async with asyncio.timeout(10):
        while not (records := [r for r in caplog.records if getattr(r, "event", "") == "linked"]):
            await asyncio.sleep(0.01)
    return str(records[-1].__dict__["transport"])


@pytest.mark.parametrize(("kv_port", "expected"), [(0, "tcp"), (None, "grpc")])
async def test_what_both_offer_is_taken(kv_port: int | None, expected: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with pair("auto", kv_port=kv_port) as both:
        assert await linked(caplog) == expected
        ticket, id = await both.order(30)
        both.export(id, 0, 30)
        await both.until(lambda: not ticket.missing)


@pytest.mark.parametrize("transport", ["auto", "auto with TLS"])
async def test_a_port_out_of_reach_leaves_grpc(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with pair(transport) as both:
        assert both.service._bulk is not None
        await both.service._bulk.close()
        assert await linked(caplog) == "grpc"
        assert "transport_fallback" in [getattr(record, "event", "") for record in caplog.records]
        ticket, id = await both.order(30)
        both.export(id, 0, 30)
        await both.until(lambda: not ticket.missing)


async def test_tcp_alone_is_no_link_without_its_port() -> None:
    async with pair("tcp", kv_port=None) as both:
        await asyncio.wait_for(both.decode.lost.wait(), 10)


@pytest.mark.parametrize("greeting", [b"", b"short", b"x" * bulk.TOKEN_BYTES], ids=["nothing", "too little", "wrong"])
async def test_strangers_get_nothing(greeting: bytes) -> None:
    async with pair("tcp") as both:
        _, id = await both.order(30)
        assert both.service._bulk is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", both.service._bulk.port)
        writer.write(greeting)
        writer.write_eof()
        both.export(id, 0, 30)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        await both.until(lambda: both.decode.arrived)


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff" * 64,
        bulk._FRAME.pack(0, 4, SLOT_BYTES + 1) + b"\x08\x01\x10\x01",
        bulk._FRAME.pack(0, 0, 100) + b"cut",
    ],
    ids=["noise", "too large a payload", "cut"],
)
async def test_what_is_no_piece_ends_the_link(sent: bytes) -> None:
    """The other end of the bulk connection is not what it should be."""
    async with pair("tcp") as both:
        assert both.service._bulk is not None

        async def admit(_: bytes, connection: socket.socket) -> None:
            await asyncio.get_running_loop().sock_sendall(connection, sent)

        both.service._bulk._admit = admit
        await asyncio.wait_for(both.decode.lost.wait(), 10)
        assert both.decode.slots.qsize() == NUM_SLOTS
        assert both.decode.arrived == {}
