"""TLS on non-blocking sockets in an event loop, like asyncio's sock_sendall and sock_recv_into on plain sockets.

asyncio's own TLS copies all data several times. Here OpenSSL works directly on the memory that is sent or filled.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable

from baton_common.peer_tls import PeerTls

# TLS records, of at most 16 KiB each, after which other tasks of the event loop get a turn. While both ends keep up, a
# transfer never waits, so other tasks would get none. OpenSSL takes a fraction of a millisecond for this many.
_RECORDS_PER_TURN = 32


async def secure(connection: socket.socket, tls: PeerTls, server_side: bool) -> ssl.SSLSocket:
    """Take over a connected non-blocking socket for TLS. Raises OSError when the other end is not a peer.

    The other end may check this end's certificate only after this returns. If it refuses the certificate, the first
    read raises the error.
    """
    if server_side:
        secured = tls.server_context().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
    else:
        context = tls.client_context()
        secured = context.wrap_socket(connection, server_hostname=tls.name, do_handshake_on_connect=False)
    try:
        await _shake_hands(secured)
        if server_side:
            tls.check_client(secured.getpeercert())
    except BaseException:
        secured.close()
        raise
    return secured


async def send_all(connection: ssl.SSLSocket, data: bytes | memoryview) -> None:
    """Send all of the data. Raises OSError."""
    await _move(connection, connection.send, memoryview(data))


async def fill(connection: ssl.SSLSocket, view: memoryview) -> None:
    """Receive until the memory is full. Raises OSError, also when the connection ends before that."""
    await _move(connection, connection.recv_into, view)


async def _shake_hands(connection: ssl.SSLSocket) -> None:
    while True:
        try:
            connection.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as want:
            await _ready(connection, want)
        else:
            return


async def _move(connection: ssl.SSLSocket, some: Callable[[memoryview], int], view: memoryview) -> None:
    """Call `some`, which returns how many bytes it has moved, until all of `view` has been moved."""
    records = 0
    while view:
        try:
            count = some(view)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as want:
            await _ready(connection, want)
            continue
        if not count:
            raise ConnectionError("the connection was closed")
        view = view[count:]
        records += 1
        if records % _RECORDS_PER_TURN == 0:
            await asyncio.sleep(0)


async def _ready(connection: ssl.SSLSocket, want: ssl.SSLError) -> None:
    """Wait until OpenSSL can go on. It may have to read in order to send, and to send in order to read."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def note() -> None:
        if not ready.done():
            ready.set_result(None)

    reads = isinstance(want, ssl.SSLWantReadError)
    add, remove = (loop.add_reader, loop.remove_reader) if reads else (loop.add_writer, loop.remove_writer)
    add(connection, note)
    try:
        await ready
    finally:
        remove(connection)
