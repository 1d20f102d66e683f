"""An OpenAI server without a model. It sends the requested number of tokens, one per interval, to all streams at once.

The client's own delay is measured with this server as a script: canned_server.py PORT INTERVAL_S.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any


class CannedServer:
    """plain: knows nothing that OpenAI's API does not, and takes text only. broken: ends streams in the middle."""

    def __init__(self, interval_s: float = 0.01, plain: bool = False) -> None:
        self.interval_s = interval_s
        self.plain = plain
        self.broken = False
        self.status = 200
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.port = 0

    @contextlib.asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator["CannedServer"]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=1024) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split("\r\n")[0].split()
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if method == "GET":
                self._answer(writer, 200, {"object": "list", "data": [{"id": "canned", "object": "model"}]})
            else:
                self.headers.append(headers)
                await self._complete(writer, path, json.loads(body))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _complete(self, writer: asyncio.StreamWriter, path: str, request: dict[str, Any]) -> None:
        self.bodies.append(request)
        prompt = request.get("prompt", "")
        refused = (
            not isinstance(prompt, str) or "ignore_eos" in request or "continuous_usage_stats" in json.dumps(request)
        )
        if self.plain and refused:
            self._answer(writer, 400, {"error": {"message": "no such thing"}})
            return
        if self.status != 200:
            self._answer(writer, self.status, {"error": {"message": "not now"}})
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        length, exact = len(prompt if isinstance(prompt, list) else prompt.split()), not self.plain
        tick = time.monotonic() // self.interval_s
        for count in range(1, request["max_tokens"] + 1):
            await asyncio.sleep((tick + count) * self.interval_s - time.monotonic())
            if self.broken and count > 1:
                return
            self._event(writer, [{"index": 0, "text": " a"}], _usage(length, count) if exact else None)
            await writer.drain()
        self._event(writer, [], _usage(length, request["max_tokens"]))
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    @staticmethod
    def _event(writer: asyncio.StreamWriter, choices: list[Any], usage: dict[str, int] | None) -> None:
        event = b"data: " + json.dumps({"choices": choices, **({"usage": usage} if usage else {})}).encode() + b"\n\n"
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))

    @staticmethod
    def _answer(writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion}


async def _main() -> None:
    async with CannedServer(float(sys.argv[2])).running(int(sys.argv[1])):
        await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_main())
