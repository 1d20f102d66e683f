"""Messages between the RPC process and the engine arrive whole, however the bytes come."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout, Plane
from baton_engine.config import EngineConfig
from baton_engine.delta import Delta, Load, Reservation
from baton_engine.sampling import SamplingParams, TokenLogprobs
from baton_engine.sequence import FinishReason, Request
from baton_worker.channel import EngineEnd, RpcEnd, channel_pair, encode
from baton_worker.messages import (
    Abort,
    Add,
    CancelImport,
    Command,
    Event,
    FreeSlot,
    Imported,
    ImportPiece,
    ImportTokens,
    Output,
    Piece,
    Ping,
    Progress,
    Ready,
    Refused,
    Rejected,
    RestartImport,
    Start,
)

EXTENT = Extent(first_token=3, num_tokens=4, first_layer=0, num_layers=2, first_head=1, num_heads=2)
SAMPLING = SamplingParams(temperature=0.5, seed=2**64 - 1, logit_bias={3: -1.5}, bad_words=[[1, 2]], prompt_logprobs=0)
COMMANDS: list[Command] = [
    Start(EngineConfig(model="/folder", num_blocks=9), "decode", "info", 4, 5),
    Add(Request(id=1, prompt=[1, 2, 3], sampling=SAMPLING, priority=-2, exports_from=0)),
    Abort(7),
    ImportPiece(1, 2, EXTENT, 5),
    ImportTokens(1, [9, 8]),
    RestartImport(2),
    CancelImport(3),
    FreeSlot(0),
    Ping(),
]
EVENTS: list[Event] = [
    Progress("weights", 3, 20),
    Ready("fingerprint", 512, 1000, 16, 99, KvLayout(2, (Plane("key", 4, 1024, "float32"),)), 1 << 22, 8),
    Refused("there is no such model"),
    Output(),
    Output(
        deltas=[
            Delta(1, 0, 0, [5], [TokenLogprobs(5, -0.5, 1, [5, 6], [-0.5, -2.0])], FinishReason.STOP, 5, 16, []),
            Delta(2, 3, 9, [6], []),
        ],
        reservations=[Reservation(1, 2, 3, 4, 5)],
        rejections=[Rejected(1, "prompt", "is empty")],
        pieces=[Piece(1, EXTENT, 7)],
        freed_slots=[1],
        imported=[Imported(2, 7)],
        stale=[3],
        load=Load(1, 2, 3, 4, 5, 6, 7, 8),
    ),
]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, EngineEnd]]:
    ours, theirs = channel_pair()
    with ours, theirs:
        yield ours, EngineEnd(theirs)


def test_commands_cut_at_every_byte_arrive_whole(ends: tuple[socket.socket, EngineEnd]) -> None:
    ours, engine = ends
    stream = b"".join(map(encode, COMMANDS))
    for cut in range(1, len(stream)):
        ours.sendall(stream[:cut])
        got = engine.receive(timeout=0)
        ours.sendall(stream[cut:])
        while len(got) < len(COMMANDS):
            got += engine.receive(timeout=1)
        assert got == COMMANDS


def test_commands_that_come_byte_by_byte_arrive_whole(ends: tuple[socket.socket, EngineEnd]) -> None:
    ours, engine = ends
    got: list[Command] = []
    for byte in b"".join(map(encode, COMMANDS)):
        ours.sendall(bytes([byte]))
        got += engine.receive(timeout=0)
    assert got == COMMANDS


def test_nothing_to_receive_is_no_command(ends: tuple[socket.socket, EngineEnd]) -> None:
    assert ends[1].receive(timeout=0) == []
    assert ends[1].receive(timeout=0.01) == []


def test_what_was_sent_before_the_end_is_received_before_it(ends: tuple[socket.socket, EngineEnd]) -> None:
    ours, engine = ends
    ours.sendall(encode(Abort(1)) + encode(Abort(2))[:-1])
    ours.close()
    assert engine.receive(timeout=1) == [Abort(1)]
    with pytest.raises(EOFError):
        engine.receive(timeout=1)


async def open_rpc_end() -> tuple[RpcEnd, socket.socket]:
    ours, theirs = channel_pair()
    return await RpcEnd.open(ours), theirs


async def test_events_cut_at_every_byte_arrive_whole() -> None:
    rpc, engine = await open_rpc_end()
    stream = b"".join(map(encode, EVENTS))
    with engine:
        for cut in range(1, len(stream)):
            engine.sendall(stream[:cut])
            await asyncio.sleep(0)
            engine.sendall(stream[cut:])
            assert [await rpc.receive() for _ in EVENTS] == EVENTS
    rpc.close()


@pytest.mark.parametrize("left", [0, 3, 9])
async def test_the_end_of_the_engine_is_noticed(left: int) -> None:
    rpc, engine = await open_rpc_end()
    engine.sendall(encode(EVENTS[1]) + encode(EVENTS[2])[:left])
    engine.close()
    assert await rpc.receive() == EVENTS[1]
    with pytest.raises(asyncio.IncompleteReadError):
        await rpc.receive()
    rpc.close()


async def test_both_ways_at_once() -> None:
    rpc, sock = await open_rpc_end()
    engine = EngineEnd(sock)
    count = 300
    for index in range(count):
        rpc.send(Abort(index))
        engine.send(Output(stale=[index]))
    got: list[Command] = []
    while len(got) < count:
        await asyncio.sleep(0)
        got += engine.receive(timeout=0)
    assert got == [Abort(index) for index in range(count)]
    assert [await rpc.receive() for _ in range(count)] == [Output(stale=[index]) for index in range(count)]
    rpc.close()
    sock.close()
