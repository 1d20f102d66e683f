"""TLS handshakes of new connections, which count as connections from the beginning."""

import asyncio
import ssl
from collections.abc import Callable

from .connections import Connections


class Handshake(asyncio.Protocol):
    """Begins TLS on a new connection and then gives it to the protocol of requests.

    uvicorn would begin TLS itself, but then a connection would count only after its handshake, for which the event loop
    allows a minute. Clients that never finish it could take all file descriptors of the process.
    """

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        connections: Connections,
        timeout_s: float,
    ) -> None:
        self._make_protocol = make_protocol
        self._context = context
        self._connections = connections
        self._timeout_s = timeout_s
        self._early = bytearray()  # arrives with the end of the handshake

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        if self._connections.add(self):
            transport.pause_reading()  # the first bytes are for TLS
            self._running = asyncio.get_running_loop().create_task(self._run())
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)

    def drop(self) -> None:
        self._transport.abort()

    async def _run(self) -> None:
        try:
            transport = await asyncio.get_running_loop().start_tls(
                self._transport, self, self._context, server_side=True, ssl_handshake_timeout=self._timeout_s
            )
        except (OSError, RuntimeError):  # a RuntimeError when the connection is closed already
            self._transport.abort()
            return
        finally:
            self._connections.remove(self)
        if transport is None or transport.is_closing():
            return
        protocol = self._make_protocol()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._early:
            protocol.data_received(bytes(self._early))
