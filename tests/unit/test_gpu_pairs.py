"""Which messages about a pair of GPUs a prefill pod and a decode pod pass on to their engines."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout, Plane
from baton_common.rank_parts import UNIQUE_ID_BYTES
from baton_decode.handovers import Handovers
from baton_decode.live_requests import LiveRequests
from baton_decode.settings import DecodeSettings
from baton_kv.pieces import Piece, make_header
from baton_prefill.gpu_pairs import GpuPairs
from baton_prefill.session import Session
from baton_proto import handover_pb2 as kv
from baton_worker.messages import (
    ClosePair,
    GrantPair,
    JoinPair,
    OpenPair,
    Output,
    PairId,
    PairLost,
    Ready,
    ReceivePiece,
    UsePair,
)
from baton_worker.request_metrics import RequestMetrics

ID = bytes(UNIQUE_ID_BYTES)
SLOT_BYTES, CREDIT, MOST = 1 << 16, 2, 2
LAYOUT = KvLayout(1, (Plane("key", 1, 16, "float32"),))
READY = Ready("f", 1024, 512, 16, 64, LAYOUT, 1 << 16, 4, SLOT_BYTES, MOST, CREDIT, ["gpu 0"])


# Of pods with two ranks, which have two heads each of this layout.
HEADS = KvLayout(1, (Plane("key", 4, 4, "float32"),))
WIDE = msgspec.structs.replace(READY, layout=HEADS, gpus=["gpu 1", "gpu 2"])


class Engine:
    def __init__(self, ready: Ready = READY) -> None:
        self.ready = ready
        self.heard: list[Any] = []
        self.send = self.heard.append
        self.import_slots: asyncio.Queue[int] = asyncio.Queue()

    def of(self, kind: type) -> list[Any]:
        return [command for command in self.heard if isinstance(command, kind)]


class Link:
    """In place of the link to a prefill pod."""

    def __init__(self, address: str, credit: bool = True) -> None:
        self.address = address
        self.pair: int | None = None
        self.gpu_credit = credit
        self.pairs_offered = self.refusals = 0
        self.sent: list[kv.DecodeToPrefill] = []
        self.send = self.sent.append

    async def close(self) -> None: ...

    def said(self) -> list[str]:
        return [str(message.gpu_pair.WhichOneof("state")) for message in self.sent if message.HasField("gpu_pair")]


class Decode:
    def __init__(self, ready: Ready = READY) -> None:
        self.engine: Any = Engine(ready)
        settings = DecodeSettings(model=Path())
        self.handovers = Handovers(settings, self.engine, 1, RequestMetrics(), LiveRequests())

    def link(self, address: str, credit: bool = True) -> Any:
        link = Link(address, credit)
        self.handovers._links._links[address] = link  # type: ignore[assignment]
        return link

    def up(self, link: Any) -> None:
        self.handovers.pair_changed(link, kv.GpuPair(id=ID))
        self.handovers.take(Output(pairs_up=[link.pair]))

    def announce(self, link: Any, size: int, **header: int) -> None:
        extent = Extent(first_token=0, num_tokens=1, first_layer=0, num_layers=1, first_head=0, num_heads=1)
        words = make_header(1, 5, 1, extent)
        words.gpu_bytes = size
        for name, value in header.items():
            setattr(words, name, value)
        piece = Piece(words, memoryview(b""))
        self.handovers.receive_on_gpu(link, piece)

    @property
    def events(self) -> Counter[str]:
        return self.handovers.events


@pytest.mark.parametrize("size", [0, SLOT_BYTES + 1, 1 << 40, (1 << 64) - 1])
async def test_a_size_that_no_piece_has_does_not_reach_the_engine(size: int) -> None:
    decode = Decode()
    link, other = decode.link("a"), decode.link("b")
    for each in (link, other):
        decode.up(each)
    decode.announce(link, size)
    assert not decode.engine.of(ReceivePiece)
    assert (link.pair, decode.events["refused_announcement"]) == (None, 1)
    assert link.said() == ["up", "lost"]
    decode.announce(other, 64)
    assert [LAYOUT.size(command.extent) for command in decode.engine.of(ReceivePiece)] == [64]
    await decode.handovers.stop()


async def test_no_more_is_announced_than_was_allowed() -> None:
    decode = Decode()
    link = decode.link("a")
    decode.up(link)
    for _ in range(3):
        for _ in range(CREDIT):
            decode.announce(link, 64)
        decode.handovers.take(Output(landed=[link.pair] * CREDIT))
    assert [m.gpu_credit.pieces for m in link.sent if m.HasField("gpu_credit")] == [CREDIT] * 3
    for _ in range(CREDIT + 1):
        decode.announce(link, 64)
    assert len(decode.engine.of(ReceivePiece)) == 4 * CREDIT
    assert (link.pair, decode.events["refused_announcement"]) == (None, 1)
    # What comes after that is nobody's, and so is what the engine says of the pair that was.
    decode.announce(link, 64)
    decode.handovers.take(Output(landed=[1], pairs_up=[1], pairs_lost=[PairLost(1, "late")]))
    assert len(decode.engine.of(ReceivePiece)) == 4 * CREDIT
    await decode.handovers.stop()


async def test_a_prefill_pod_of_a_version_without_credit() -> None:
    decode = Decode()
    link = decode.link("a", credit=False)
    decode.up(link)
    for _ in range(20):
        decode.announce(link, 64)
    decode.handovers.take(Output(landed=[link.pair]))
    assert len(decode.engine.of(ReceivePiece)) == 20
    assert link.said() == ["up"]
    for _ in range(1_024):
        decode.announce(link, 64)
    assert decode.events["refused_announcement"] == 1
    await decode.handovers.stop()


async def test_too_many_prefill_pods() -> None:
    """Who finds no room goes on without a pair, until there is some."""
    decode = Decode()
    links = [decode.link(name) for name in "abc"]
    for link in links[:MOST]:
        decode.up(link)
    decode.handovers.pair_changed(links[2], kv.GpuPair(id=ID))
    assert len(decode.engine.of(JoinPair)) == MOST
    assert (links[2].said(), decode.events["pair_refused"]) == (["lost"], 1)
    decode.handovers.link_lost(links[0])
    assert links[2].said() == ["lost", "room"]
    decode.up(links[2])
    assert len(decode.engine.of(JoinPair)) == MOST + 1
    assert links[2].said()[-1] == "up"
    await decode.handovers.stop()


async def test_anything_that_a_prefill_pod_may_say() -> None:
    """Whatever comes, the engine is asked for nothing that it cannot do."""
    dice, decode = random.Random(1), Decode()
    links = [decode.link(name, credit) for name, credit in (("a", True), ("b", True), ("c", False))]
    numbers = [0, 1, 2, 64, 65, SLOT_BYTES, SLOT_BYTES + 1, 1 << 31, (1 << 32) - 1]
    names = "ticket_id", "epoch", "generation", "first_token", "num_tokens", "first_layer", "num_heads"

    def say(link: Any) -> None:
        match dice.randrange(8):
            case 0:
                states = {"id": [ID, b"", b"short", bytes(999)], "up": [True], "lost": ["", "x" * 99], "room": [True]}
                state = dice.choice(list(states))
                decode.handovers.pair_changed(link, kv.GpuPair(**{state: dice.choice(states[state])}))
            case 1:
                decode.handovers.pair_changed(link, kv.GpuPair())
            case 2 if link.pair is not None:
                decode.handovers.take(Output(pairs_up=[link.pair], landed=[link.pair]))
            case _:
                words = {name: dice.choice(numbers) for name in dice.sample(names, dice.randrange(4))}
                decode.announce(link, dice.choice([*numbers, 1 << 50, (1 << 64) - 1]), **words)

    for _ in range(1_500):
        link = dice.choice(links)
        try:
            say(link)
        except ConnectionError:
            # Its link ends, and is made anew.
            assert link.refusals == 4
            decode.handovers.link_lost(link)
            links.remove(link)
            links.append(decode.link(link.address, link.gpu_credit))
    assert decode.events["refused_announcement"] > 100
    opened: set[int] = set()
    for command in decode.engine.heard:
        match command:
            case JoinPair(pair, _, unique_ids):
                assert len(unique_ids) == UNIQUE_ID_BYTES
                opened.add(pair)
            case ClosePair(pair):
                opened.remove(pair)
            case ReceivePiece(pair, extent):
                assert pair in opened
                assert LAYOUT.holds(extent)
                assert 0 < LAYOUT.size(extent) <= SLOT_BYTES
        assert len(opened) <= MOST
    await decode.handovers.stop()


@pytest.mark.parametrize(
    ("ready", "ranks", "ids", "joined"),
    [
        (WIDE, 1, 2, True), (WIDE, 2, 2, True), (WIDE, 4, 4, True), (WIDE, 0, 2, True),
        (WIDE, 0, 1, False),  # of a version that knows only pods of one rank
        (WIDE, 1, 1, False), (WIDE, 2, 3, False), (WIDE, 3, 4, False), (WIDE, 1 << 31, 2, False), (READY, 2, 2, False),
        (READY, 2, 1, True),
    ],
)  # fmt: skip
async def test_an_offer_has_an_id_for_each_part(ready: Ready, ranks: int, ids: int, joined: bool) -> None:
    decode = Decode(ready)
    link = decode.link("a")
    offer = kv.GpuPair(id=bytes(ids * UNIQUE_ID_BYTES), ranks=ranks)
    decode.handovers.pair_changed(link, offer)
    assert decode.engine.of(JoinPair) == ([JoinPair(1, ranks or 1, offer.id)] if joined else [])
    assert (link.said(), decode.events["refused_announcement"]) == (([], 0) if joined else (["lost"], 1))
    await decode.handovers.stop()


async def test_a_pair_counts_by_its_connections() -> None:
    """This pod has room for two connections for each rank, which are all those of a prefill pod with four ranks."""
    decode = Decode(WIDE)
    links = [decode.link(name) for name in "ab"]
    for link in links:
        decode.handovers.pair_changed(link, kv.GpuPair(id=bytes(4 * UNIQUE_ID_BYTES), ranks=4))
    assert len(decode.engine.of(JoinPair)) == 1
    assert (links[1].said(), decode.events["pair_refused"]) == (["lost"], 1)
    decode.handovers.link_lost(links[0])
    assert links[1].said() == ["lost", "room"]
    await decode.handovers.stop()


class Prefill:
    def __init__(self, ready: Ready = READY) -> None:
        self.engine: Any = Engine(ready)
        self.sessions: dict[int, Session] = {}
        self.events: Counter[str] = Counter()
        self.pairs = GpuPairs(self.engine, self.sessions, self.events)

    def session(self, id: int, credit: int = CREDIT, gpus: Iterable[str] = ()) -> Session:
        session = self.sessions[id] = Session(id, epoch=id)
        self.pairs.offer(session, kv.Hello(gpu_piece_bytes=SLOT_BYTES, gpu_credit=credit, gpus=gpus))
        return session

    def up(self, session: Session) -> None:
        self.pairs.take(Output(pair_ids=[PairId(session.id, ID)], pairs_up=[session.id]))
        self.pairs.changed(session, kv.GpuPair(up=True))


async def test_a_prefill_pod_sends_as_much_as_it_is_allowed() -> None:
    prefill = Prefill()
    new, old = prefill.session(1), prefill.session(2, credit=0)
    for session in (new, old):
        prefill.up(session)
    assert prefill.engine.of(UsePair) == [UsePair(1, True, CREDIT), UsePair(2, True, None)]
    prefill.pairs.credit(new, 1)
    assert prefill.engine.of(GrantPair) == [GrantPair(1, 1)]
    prefill.pairs.credit(old, 1)
    assert prefill.engine.of(ClosePair) == [ClosePair(2)]


async def test_a_decode_pod_that_says_twice_that_its_end_is_up() -> None:
    """The other end is not: to send then would wait for it, and so would the engine."""
    prefill = Prefill()
    session = prefill.session(1)
    for _ in range(2):
        prefill.pairs.changed(session, kv.GpuPair(up=True))
    assert not prefill.engine.of(UsePair)
    assert prefill.events["refused_announcement"] == 1
    assert prefill.engine.of(ClosePair) == [ClosePair(1)]


async def test_too_many_decode_pods() -> None:
    prefill = Prefill()
    sessions = [prefill.session(number) for number in (1, 2, 3)]
    assert prefill.engine.of(OpenPair) == [OpenPair(1, 1), OpenPair(2, 1)]
    assert prefill.events["pair_refused"] == 1
    del prefill.sessions[1]
    prefill.pairs.close(sessions[0])
    assert prefill.engine.of(OpenPair)[2:] == [OpenPair(3, 1)]


@pytest.mark.parametrize(
    ("ready", "gpus", "reason"),
    [
        (WIDE, [], "its version pairs only with pods of one rank"),
        (WIDE, ["gpu 3", "gpu 4", "gpu 5"], "it has 3 ranks, among which 4 KV heads cannot be divided"),
        (WIDE, ["gpu 2"], "a rank of each pod is on the same GPU"),
        (WIDE, ["gpu 0", "gpu 2"], "a rank of each pod is on the same GPU"),
        (READY, ["gpu 0"], "a rank of each pod is on the same GPU"),
    ],
)
async def test_a_decode_pod_with_which_no_pair_is_possible(
    ready: Ready, gpus: list[str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = Prefill(ready)
    session = prefill.session(1, gpus=gpus)
    assert reason in caplog.text
    assert not prefill.engine.heard
    # Nor later, whatever it says.
    prefill.pairs.changed(session, kv.GpuPair(room=True))
    prefill.pairs.changed(session, kv.GpuPair(up=True))
    assert not prefill.engine.heard


async def test_pods_with_several_ranks() -> None:
    prefill = Prefill(WIDE)
    # The ranks of both pods are on the same two GPUs, but none sends to itself.
    swapped, four = prefill.session(1, gpus=["gpu 2", "gpu 1"]), prefill.session(2, gpus=["a", "b", "c", "d"])
    assert prefill.engine.of(OpenPair) == [OpenPair(1, 2)]
    assert prefill.events["pair_refused"] == 1  # one of its ranks would have two connections more
    del prefill.sessions[1]
    prefill.pairs.close(swapped)
    assert prefill.engine.of(OpenPair)[1:] == [OpenPair(2, 4)]
    ids = bytes(4 * UNIQUE_ID_BYTES)
    prefill.pairs.take(Output(pair_ids=[PairId(2, ids)]))
    assert four.control.get_nowait().gpu_pair == kv.GpuPair(id=ids, ranks=2)


async def test_a_decode_pod_without_room_has_some_later() -> None:
    prefill = Prefill()
    session = prefill.session(1)
    for _ in range(20):
        prefill.pairs.changed(session, kv.GpuPair(lost="no room"))
        prefill.pairs.changed(session, kv.GpuPair(room=True))
    # Not for ever.
    assert 2 <= len(prefill.engine.of(OpenPair)) <= 8


async def test_anything_that_a_decode_pod_may_say() -> None:
    dice, prefill = random.Random(2), Prefill()
    sessions = [prefill.session(number, credit) for number, credit in ((1, 1), (2, 0), (3, (1 << 32) - 1))]
    up: set[int] = set()
    for _ in range(1_000):
        session = dice.choice(sessions)
        states: list[dict[str, Any]] = [
            {"id": b"x"},
            {"up": True},
            {"up": False},
            {"lost": "x" * 999},
            {"room": True},
            {},
        ]
        if dice.random() < 0.5:
            prefill.pairs.changed(session, kv.GpuPair(**dice.choice(states)))
        elif dice.random() < 0.5:
            prefill.pairs.credit(session, dice.choice([0, 1, 1_024, 1_025, (1 << 32) - 1]))
        elif session.pair_opened and not session.pair_up_here:
            prefill.pairs.take(Output(pairs_up=[session.id]))
    opened: set[int] = set()
    for command in prefill.engine.heard:
        match command:
            case OpenPair(pair):
                assert pair not in opened
                opened.add(pair)
            case ClosePair(pair):
                opened.remove(pair)
                up.discard(pair)
            case UsePair(pair, _, credit):
                assert pair in opened - up
                assert credit is None or 0 < credit <= 1_024
                up.add(pair)
            case GrantPair(pair, pieces):
                assert pair in opened
                assert 0 < pieces <= 1_024
        assert len(opened) <= MOST
    assert all(session.control.qsize() < 1_000 for session in sessions)
