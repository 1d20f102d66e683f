"""A TCP proxy whose connections can be cut, or stay open and pass nothing."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

_READ_BYTES = 1 << 16


class Gate:
    """Open unless somebody holds it closed; several may."""

    def __init__(self) -> None:
        self._holders = 0
        self._open = asyncio.Event()
        self._open.set()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        self._holders += 1
        self._open.clear()
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._open.set()

    async def passed(self) -> None:
        """Return when the gate is open."""
        await self._open.wait()


class TcpProxy:
    """Stands in front of one peer, at an address of its own for each port of the peer.

    gate: closed, nothing passes on any connection; open again, everything does, as if nothing had been.
    """

    def __init__(self) -> None:
        self.gate = Gate()
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._servers: list[asyncio.Server] = []

    async def front(self, target: str) -> str:
        """Open an address that leads to `target`; both are host:port."""
        host, _, port = target.rpartition(":")

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._serve(host, int(port), reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self._servers.append(server)
        return "{}:{}".format(*server.sockets[0].getsockname())

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection; new ones are welcome."""
        for connection in list(self._connections):
            connection.reset()

    def abandon(self) -> None:
        """Let every connection there is pass nothing any more, and tell neither side; new ones do pass."""
        for connection in self._connections:
            connection.abandoned = True

    async def _serve(self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self.gate, writer)
        self._connections.add(connection)
        try:
            await self.gate.passed()
            target_reader, target_writer = await asyncio.open_connection(host, port)
            connection.writers.append(target_writer)
            await asyncio.gather(connection.pump(reader, target_writer), connection.pump(target_reader, writer))
        except OSError:
            pass
        finally:
            connection.reset()
            self._connections.discard(connection)


class _Connection:
    """Both halves of a connection through the proxy."""

    def __init__(self, gate: Gate, writer: asyncio.StreamWriter) -> None:
        self.abandoned = False
        self.writers = [writer]
        self._gate = gate
        self._over = asyncio.Event()

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what comes, and its end."""
        while not self._over.is_set():
            data = await reader.read(_READ_BYTES)
            await self._gate.passed()
            if self.abandoned:
                await self._over.wait()
            if not data:
                self.reset()
            elif not self._over.is_set():
                writer.write(data)
                await writer.drain()

    def reset(self) -> None:
        self._over.set()
        for writer in self.writers:
            writer.transport.abort()
