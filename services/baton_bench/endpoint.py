"""The address of a server, and one HTTP exchange with it."""

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

from baton_bench.errors import BenchError

_MOST_OF_AN_ERROR = 2000
_GET_S = 10.0


@dataclass(frozen=True)
class Endpoint:
    """The root of an API. path: what precedes /v1."""

    host: str
    port: int
    tls: bool
    path: str
    headers: Mapping[str, str]

    @classmethod
    def parse(cls, url: str, key: str = "") -> "Endpoint":
        """url: with or without /v1 at its end. Raises BenchError."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise BenchError(f"{url!r} is no URL of a server: http://host:port or https://host")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return cls(parts.hostname, port or (443 if tls else 80), tls, path, {"Host": parts.netloc, **headers})

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Return the bytes of a complete request."""
        return self._request("POST", path, {**headers, "Content-Type": "application/json"}, body)

    async def get(self, path: str) -> Any:
        """Return the JSON at a path. Raises OSError, also for another status than 200, and ValueError."""
        parts: list[bytes] = []
        async with asyncio.timeout(_GET_S):
            exchange = Exchange(self._request("GET", path, {}), lambda body, _now: parts.append(body))
            await exchange.run(self)
        if exchange.status != 200 or exchange.failure:
            raise OSError(exchange.failure or f"status {exchange.status}")
        return json.loads(b"".join(parts))

    def _request(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
        fields = {**self.headers, **headers, "Connection": "close", "Content-Length": str(len(body))}
        lines = [f"{method} {self.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return "\r\n".join([*lines, "", ""]).encode() + body


class Exchange(asyncio.Protocol):
    """A request on a connection of its own. `on_body` gets the pieces of the body and when they came.

    An asyncio protocol, so that a chunk costs microseconds: hundreds of streams must not distort each other's times.
    status: of the answer, 0 before it came. refusal: body of an answer other than 200. failure: why it was not whole.
    """

    def __init__(self, request: bytes, on_body: Callable[[bytes, float], None]) -> None:
        self._request = request
        self._on_body = on_body
        self._parser = HttpResponseParser(self)
        self._over = asyncio.Event()
        self._now = 0.0
        self.status = 0
        self.refusal = b""
        self.failure = "the connection ended before the answer did"

    async def run(self, endpoint: Endpoint) -> None:
        """Return when the answer is complete or the connection was lost. Raises OSError when none can be made."""
        context = ssl.create_default_context() if endpoint.tls else None
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: self, endpoint.host, endpoint.port, ssl=context)
        try:
            transport.write(self._request)
            await self._over.wait()
        finally:
            transport.abort()

    def leave(self) -> None:
        """Close the connection in the middle of the answer."""
        self._over.set()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self.failure = f"not HTTP: {error}"
            self._over.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._over.set()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.status == 200:
            self._on_body(body, self._now)
        else:
            self.refusal = (self.refusal + body)[:_MOST_OF_AN_ERROR]

    def on_message_complete(self) -> None:
        self.failure = ""
        self._over.set()
