"""Requests straight into the application: no client would send some of these, and no socket costs time."""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message

ERROR_KEYS = {"message", "type", "param", "code"}
DONE = "data: [DONE]\n\n"
LAST_RESPONSE_EVENT = re.compile(r"event: response\.(completed|incomplete)\ndata: .*\n\n\Z")


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes

    def error(self) -> dict[str, Any]:
        """Return the error, which must have the one form there is."""
        assert self.headers[b"content-type"] == b"application/json"
        document = json.loads(self.body)
        assert set(document) == {"error"}
        error: dict[str, Any] = document["error"]
        assert set(error) == ERROR_KEYS
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error["type"], str)
        assert all(error[name] is None or isinstance(error[name], str) for name in ("param", "code"))
        return error

    def check(self) -> None:
        """Hold it to what is true of every answer."""
        assert self.status < 500, self.body
        if self.status >= 400:
            self.error()
        elif self.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            text = self.body.decode()
            assert text.endswith(DONE) or LAST_RESPONSE_EVENT.search(text)
            assert 'data: {"error"' not in text


async def ask(
    app: ASGIApp, method: str, target: str, body: bytes = b"", headers: Sequence[tuple[bytes, bytes]] = ()
) -> Answer:
    """Send a request as the server would hand it on. target: path and query, percent-encoded."""
    path, _, query = target.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode("ascii"),
        "query_string": query.encode("ascii"),
        "root_path": "",
        "headers": list(headers),
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not incoming:
            await asyncio.Event().wait()  # the client stays
        return incoming.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    async with asyncio.timeout(60):
        await app(scope, receive, send)
    assert sent[0]["type"] == "http.response.start"
    assert not sent[-1].get("more_body", False)
    return Answer(
        sent[0]["status"], dict(sent[0]["headers"]), b"".join(message.get("body", b"") for message in sent[1:])
    )
