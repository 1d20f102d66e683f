"""What strangers can do at the bulk port: they are refused in bounded time and number, and peers are served."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from baton_common.peer_refusals import PeerRefusals
from baton_kv import bulk
from baton_kv.bulk import BulkListener, UnknownSession

from .test_bulk_tls import TOKEN, Sender

pytestmark = pytest.mark.processes


class Sessions(Sender):
    """Knows one session, as a prefill pod does."""

    async def admit(self, token: bytes, connection: socket.socket) -> None:
        if token != TOKEN:
            raise UnknownSession
        await super().admit(token, connection)


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Sessions, PeerRefusals, BulkListener]]:
    sessions, refusals = Sessions(), PeerRefusals()
    listener = BulkListener("127.0.0.1", 0, sessions.admit, None, refusals)
    try:
        yield sessions, refusals, listener
    finally:
        await listener.close()


async def closed(connection: socket.socket) -> None:
    """Wait until the other end has closed; it may reset what is still being sent."""
    try:
        async with asyncio.timeout(10):
            assert not await asyncio.get_running_loop().sock_recv(connection, 1)
    except ConnectionError:
        pass


async def hold(port: int) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return connection


async def test_a_token_of_no_session_is_refused_counted_and_logged(caplog: pytest.LogCaptureFixture):
    async with listening() as (sessions, refusals, listener):
        with await bulk.connect("127.0.0.1", listener.port, TOKEN, None) as peer:
            assert await sessions.works(peer)
            for noise in (random.Random(seed).randbytes(10_000) for seed in range(20)):
                with await hold(listener.port) as stranger:
                    await asyncio.get_running_loop().sock_sendall(stranger, noise)
                    await closed(stranger)
            assert await sessions.works(peer)
        assert sessions.admitted == 1
        assert refusals.counts["bulk"] == 20
        assert [getattr(record, "event", "") for record in caplog.records] == ["bulk_refused"] * 10


async def test_strangers_that_hold_connections_do_not_keep_peers_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bulk, "_TOKEN_TIMEOUT_S", 60)  # only their number ends them
    async with listening() as (sessions, _, listener), AsyncExitStack() as stack:
        strangers = [stack.enter_context(await hold(listener.port)) for _ in range(300)]
        with await bulk.connect("127.0.0.1", listener.port, TOKEN, None) as peer:
            assert await sessions.works(peer)
            await asyncio.gather(*(closed(stranger) for stranger in strangers[:200]))
            assert await sessions.works(peer)
        assert len(listener._unadmitted) <= bulk._MOST_UNADMITTED


async def test_a_stranger_that_says_nothing_is_closed_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bulk, "_TOKEN_TIMEOUT_S", 0.2)
    async with listening() as (_, _, listener):
        with await hold(listener.port) as stranger:
            await closed(stranger)


async def test_the_port_survives_an_error_of_accept(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Such as too many open files, for as long as somebody holds them."""
    loop, failures = asyncio.get_running_loop(), [OSError(24, "Too many open files")] * 2
    accept = loop.sock_accept

    async def failing(listening: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", failing)
    async with listening() as (sessions, _, listener):
        with await bulk.connect("127.0.0.1", listener.port, TOKEN, None) as peer:
            assert await sessions.works(peer)
    assert [getattr(record, "event", "") for record in caplog.records] == ["bulk_accept_failed"] * 2
