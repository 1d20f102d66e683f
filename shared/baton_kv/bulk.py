"""KV pieces over a TCP connection of their own. Only the kernel copies them, from one staging arena to the other.

gRPC in Python copies every byte of a message several times; loadtest/handover/handover_bench.py shows what that costs.

A connection begins with the token of a session. Only the peer that opened the session over gRPC knows the token, so a
bulk connection is admitted by the same rules as a gRPC call. Frames follow. A frame is a checksum, the sizes of header
and payload, the header, and the payload. Header and checksum are those of handover.proto. Where pods use TLS with each
other, this connection uses TLS too.
"""

import asyncio
import logging
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable

from baton_common.peer_refusals import PeerRefusals
from baton_common.peer_tls import PeerTls
from baton_proto.handover_pb2 import PieceHeader

from . import tls_socket
from .pieces import Piece, PieceRefused, checksum, read_piece

log = logging.getLogger(__name__)

TOKEN_BYTES = 16

_FRAME = struct.Struct("<QII")
_MOST_HEADER_BYTES = 1 << 10
_TOKEN_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 2.0
# A piece has a few MiB. A peer that sends or reads only a part of one must not keep a staging slot.
_PIECE_TIMEOUT_S = 30.0
# At most this many connections may be open without having shown a token. Beyond it the oldest of them is closed. A peer
# shows its token at once; a stranger that only holds connections open does not.
_MOST_UNADMITTED = 64
_ACCEPT_RETRY_S = 0.1
# A peer that disappears without closing the connection is noticed after this time, as on the control connection.
_SILENCE_MS = 10_000


class UnknownSession(Exception):
    """A connection showed a token that no session has."""


class BulkListener:
    """The prefill pod's end. It accepts connections and passes each to the session whose token the connection shows."""

    def __init__(
        self,
        host: str,
        port: int,
        admit: Callable[[bytes, socket.socket], Awaitable[None]],
        tls: PeerTls | None,
        refusals: PeerRefusals | None = None,
    ) -> None:
        """port: 0 = any free port. admit: is called with the token and the connection, and returns when the session or
        the connection has ended. The connection is then closed. It raises UnknownSession when no session has the token.

        Raises OSError when the port is taken.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._admit = admit
        self._tls = tls
        self._refusals = refusals or PeerRefusals()
        self._unadmitted: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._serving: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        tasks = [self._accepting, *self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    async def _accept(self) -> None:
        while True:
            try:
                connection, address = await asyncio.get_running_loop().sock_accept(self._socket)
            except OSError as error:  # for example too many open files, which passes
                log.error("cannot accept a bulk connection: %s", error, extra={"event": "bulk_accept_failed"})
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            task = asyncio.create_task(self._serve(connection, f"{address[0]}:{address[1]}"))
            self._serving.add(task)
            self._unadmitted[task] = None
            task.add_done_callback(self._ended)
            if len(self._unadmitted) > _MOST_UNADMITTED:
                oldest = next(iter(self._unadmitted))
                del self._unadmitted[oldest]
                oldest.cancel()
            # A flood of new connections must not keep the event loop from serving the connections that are open.
            await asyncio.sleep(0)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._unadmitted.pop(task, None)

    async def _serve(self, connection: socket.socket, peer: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            _prepare(connection)
            async with asyncio.timeout(_TOKEN_TIMEOUT_S):
                if self._tls is not None:
                    connection = await tls_socket.secure(connection, self._tls, server_side=True)
                token = await _read(connection, TOKEN_BYTES)
            self._unadmitted.pop(task, None)
            await self._admit(token, connection)
        except UnknownSession:
            self._refusals.add("bulk", peer, "no session has the token that was shown")
        except ssl.SSLError as error:
            self._refusals.add("bulk", peer, str(error))
        except (OSError, TimeoutError) as error:
            log.info("bulk connection ended: %s", error, extra={"event": "bulk_ended"})
        finally:
            connection.close()


async def connect(host: str, port: int, token: bytes, tls: PeerTls | None) -> socket.socket:
    """Return the decode pod's end of a session's connection. Raises OSError or TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
        [(family, kind, protocol, _, address), *_] = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        connection = socket.socket(family, kind, protocol)
        try:
            _prepare(connection)
            await loop.sock_connect(connection, address)
            if tls is not None:
                connection = await tls_socket.secure(connection, tls, server_side=False)
            await _send_all(connection, token)
        except BaseException:
            connection.close()
            raise
    return connection


async def send(connection: socket.socket, header: PieceHeader, payload: memoryview) -> None:
    """Send a piece. The payload must not change until this returns. Raises OSError, also when it takes too long."""
    serialized = header.SerializeToString()
    frame = _FRAME.pack(checksum(serialized, payload), len(serialized), len(payload))
    async with asyncio.timeout(_PIECE_TIMEOUT_S):
        await _send_all(connection, frame + serialized)
        await _send_all(connection, payload)


class Frame:
    """The beginning of a piece that is being received."""

    def __init__(self, checksum: int, serialized: bytes, size: int) -> None:
        self._checksum = checksum
        self._serialized = serialized
        self.size = size  # of the payload, in bytes

    async def receive(self, connection: socket.socket, payload: memoryview) -> Piece:
        """Read `size` bytes into `payload`, and return the piece.

        Raises PieceRefused when the piece was damaged, TimeoutError when the rest of it does not come in time.
        """
        async with asyncio.timeout(_PIECE_TIMEOUT_S):
            await _fill(connection, payload)
        return read_piece(self._checksum, self._serialized, payload)


async def receive_frame(connection: socket.socket) -> Frame:
    """Wait for a piece. Raises ConnectionError when the connection ends, PieceRefused when the data is no piece."""
    checksum, header_size, size = _FRAME.unpack(await _read(connection, _FRAME.size))
    if header_size > _MOST_HEADER_BYTES:
        raise PieceRefused("checksum")
    return Frame(checksum, await _read(connection, header_size), size)


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


async def _send_all(connection: socket.socket, data: bytes | memoryview) -> None:
    if isinstance(connection, ssl.SSLSocket):
        await tls_socket.send_all(connection, data)
    else:
        await asyncio.get_running_loop().sock_sendall(connection, data)


async def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    await _fill(connection, memoryview(data))
    return bytes(data)


async def _fill(connection: socket.socket, view: memoryview) -> None:
    if isinstance(connection, ssl.SSLSocket):
        await tls_socket.fill(connection, view)
        return
    loop = asyncio.get_running_loop()
    while view:
        count = await loop.sock_recv_into(connection, view)
        if not count:
            raise ConnectionError("the bulk connection was closed")
        view = view[count:]
