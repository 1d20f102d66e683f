"""Who gets a bulk connection where pods use TLS, and what happens to open connections when files are replaced."""

import asyncio
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton_common.peer_tls import PeerTls
from baton_kv import bulk
from baton_kv.bulk import BulkListener
from baton_kv.pieces import make_header
from baton_proto.handover_pb2 import PieceHeader
from tests.peer_files import STRANGERS, PeerFiles, of_other_authority

from .test_transports import extent

TOKEN = b"t" * bulk.TOKEN_BYTES
# More than sockets buffer, in records of all sizes.
PAYLOAD = bytes(range(256)) * (3 << 12) + b"end"

pytestmark = pytest.mark.processes


def header() -> PieceHeader:
    return make_header(1, 2, 3, extent(0, 1))


class Sender:
    """Sends a piece on the connection of that number whenever it is told to."""

    def __init__(self) -> None:
        self.admitted = 0
        self.go: dict[int, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(0))

    async def admit(self, token: bytes, connection: socket.socket) -> None:
        if token != TOKEN:
            return
        number = self.admitted
        self.admitted += 1
        while True:
            await self.go[number].acquire()
            await bulk.send(connection, header(), memoryview(PAYLOAD))

    async def works(self, connection: socket.socket, number: int = 0) -> bool:
        """Whether a piece comes as it was sent."""
        self.go[number].release()
        async with asyncio.timeout(10):
            frame = await bulk.receive_frame(connection)
            payload = bytearray(frame.size)
            await frame.receive(connection, memoryview(payload))
        return payload == PAYLOAD


@asynccontextmanager
async def listening(tls: PeerTls | None) -> AsyncIterator[tuple[Sender, int]]:
    sender = Sender()
    listener = BulkListener("127.0.0.1", 0, sender.admit, tls)
    try:
        yield sender, listener.port
    finally:
        await listener.close()


async def refused(sender: Sender, port: int, tls: PeerTls | None) -> str:
    """Return why nothing comes over a new connection."""
    before = sender.admitted
    try:
        with await bulk.connect("127.0.0.1", port, TOKEN, tls) as connection:
            async with asyncio.timeout(10):
                await bulk.receive_frame(connection)
    except OSError as error:
        assert sender.admitted == before
        return str(error)
    raise AssertionError("a stranger was let in")


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_strangers_are_refused_and_peers_go_on(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    stranger: Callable[[Path, PeerFiles], PeerTls | None],
) -> None:
    files = PeerFiles(tmp_path / "peers")
    tls = files.load()
    async with listening(tls) as (sender, port):
        with await bulk.connect("127.0.0.1", port, TOKEN, tls) as connection:
            assert await sender.works(connection)
            await refused(sender, port, stranger(tmp_path / "stranger", files))
            assert "bulk_refused" in [getattr(record, "event", "") for record in caplog.records]
            assert await sender.works(connection)


async def test_servers_that_are_no_peers_are_refused(tmp_path: Path) -> None:
    files = PeerFiles(tmp_path / "peers")
    ours = files.load()
    for theirs in (
        of_other_authority(tmp_path / "a", files),
        PeerFiles(tmp_path / "b", "x", files.authority).load(),
    ):
        async with listening(theirs) as (sender, port):
            assert "certificate verify failed" in await refused(sender, port, ours)
    async with listening(None) as (sender, port):
        with pytest.raises(OSError), await bulk.connect("127.0.0.1", port, TOKEN, ours):
            pass
        assert sender.admitted == 0


async def test_a_handshake_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "_TOKEN_TIMEOUT_S", 0.1)
    async with listening(PeerFiles(tmp_path).load()) as (sender, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        assert sender.admitted == 0


async def test_new_files_are_for_new_connections(tmp_path: Path) -> None:
    files = PeerFiles(tmp_path)
    tls = files.load()
    async with listening(tls) as (sender, port):
        with await bulk.connect("127.0.0.1", port, TOKEN, tls) as before:
            old = before.getpeercert(binary_form=True)  # type: ignore[attr-defined]
            files.renew()
            with await bulk.connect("127.0.0.1", port, TOKEN, tls) as after:
                assert after.getpeercert(binary_form=True) != old  # type: ignore[attr-defined]
                assert await sender.works(after, 1)
            assert await sender.works(before)
