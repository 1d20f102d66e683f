"""An OpenAI-compatible server that follows a script, with as little work per token as Python allows.

Usage: scripted_upstream.py --model DIR --port N --first-s S --step-s S. Answers every POST by a stream of chat chunks,
with the usage at the end, and every GET by an empty page.
"""

import asyncio
import json
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

import uvloop

from loadtest.gateway.script import Script, keep_stepping, script_arguments

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
_FIELDS = {"id": "chatcmpl-scripted", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "scripted"}


def _event(delta: dict[str, str], finish_reason: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return _chunk(json.dumps({**_FIELDS, "choices": [choice], "usage": None}).encode())


def _chunk(data: bytes) -> bytes:
    return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)


def _end(tokens: int) -> bytes:
    usage = {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 100 + tokens}
    told = _chunk(json.dumps({**_FIELDS, "choices": [], "usage": usage}).encode())
    return _event({}, "length") + told + _chunk(b"[DONE]") + b"0\r\n\r\n"


class Upstream:
    """The running streams, and the chunks that every stream is made of."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.running: dict[_Connection, int] = {}  # tokens sent so far
        self._chunks = [_event({"content": text}, None) for text in script.texts]
        self._first = _HEAD + _event({"role": "assistant", "content": script.texts[0]}, None)

    def begin(self, connection: "_Connection") -> None:
        connection.transport.write(self._first)
        self.running[connection] = 1

    def step(self) -> None:
        for connection, position in list(self.running.items()):
            data = self._chunks[position % len(self._chunks)]
            self.running[connection] = position + 1
            if position + 1 >= connection.max_tokens:
                del self.running[connection]
                data += _end(connection.max_tokens)
            connection.transport.write(data)
            if position + 1 >= connection.max_tokens and connection.closes:
                connection.transport.close()


class _Connection(asyncio.Protocol):
    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._received = b""
        self._timer: asyncio.TimerHandle | None = None
        self.max_tokens = 0
        self.closes = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not found or len(body) < (int(length[1]) if length else 0):
            return
        self._received = b""
        if head.startswith(b"GET"):
            self.transport.write(_EMPTY)
            return
        self.closes = b"connection: close" in head.lower()
        request = json.loads(body)
        self.max_tokens = request.get("max_tokens") or request["max_completion_tokens"]
        first_s = self._upstream.script.first_s
        self._timer = asyncio.get_running_loop().call_later(first_s, self._upstream.begin, self)

    def connection_lost(self, error: Exception | None) -> None:
        self._upstream.running.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()


async def serve(script: Script, port: int) -> None:
    upstream = Upstream(script)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(upstream), "127.0.0.1", port)
    async with server:
        await keep_stepping(script.step_s, upstream.step)


def main() -> None:
    arguments = script_arguments(__doc__).parse_args()
    uvloop.run(serve(Script.of(arguments.model, arguments.first_s, arguments.step_s), arguments.port))


if __name__ == "__main__":
    main()
