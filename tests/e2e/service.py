"""What a Kubernetes Service does for a set of gateways, in one process of the tests."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

POLL_S = 0.1


class Service:
    """Gives each new connection to the next endpoint, and leaves it there, as balancing on layer 4 does.

    An endpoint gets connections once its `/ready` says so, and for `lag_s` seconds after it has ceased to.
    """

    def __init__(self, lag_s: float) -> None:
        self.port = 0
        self.connections = 0
        self._lag_s = lag_s
        self._endpoints: list[int] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Service"]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def follow(self, port: int, admin_port: int) -> None:
        """Watch one gateway from its start to its end."""
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}", timeout=5) as http:
            while not await _ready(http):
                await asyncio.sleep(POLL_S)
            self._endpoints.append(port)
            try:
                while await _ready(http):
                    await asyncio.sleep(POLL_S)
                await asyncio.sleep(self._lag_s)
            finally:
                self._endpoints.remove(port)

    def serves(self, port: int) -> bool:
        return port in self._endpoints

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        port = self._endpoints[next(self._numbers) % len(self._endpoints)]
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))


async def _ready(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/ready")).status_code == 200
    except httpx.HTTPError:
        return False


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
