"""A load on one OpenAI completions server: requests of exact lengths, each timed by the events of its stream.

The client is an asyncio protocol and not an HTTP library, so that a chunk costs it only microseconds. It runs on the
same machine as the servers that it measures.
"""

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from loadtest.common.job import Json

USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
_EVENT = b"data: {"
_PATIENCE_S = 120.0
LOWEST_TOKEN, HIGHEST_TOKEN = 10, 30_000


@dataclass(frozen=True)
class Load:
    """`count` requests with fixed numbers of tokens in and out, `concurrency` of them at a time. With a `rate`,
    requests arrive at random (Poisson) at that many a second instead, independent of the server."""

    key: str
    name: str
    inputs: int
    outputs: int
    count: int
    rate: float = 0.0
    concurrency: int = 1


@dataclass
class Answer:
    """Times in seconds on one clock. due: the scheduled send time. events: when the events with tokens arrived."""

    due: float
    events: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""


class Stream(asyncio.Protocol):
    """Sends a request, records the arrival times of events, and keeps the end of the received bytes."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._cut = b""  # an event may be split between two reads
        self.events: list[float] = []
        self.tail = b""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        data = self._cut + data
        self.events += [now] * data.count(_EVENT)
        self.tail = (self.tail + data)[-2000:]
        self._cut = data[-len(_EVENT) + 1 :]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def drive(host: str, port: int, load: Load, seed: int, vocab: int, key: str = "none") -> list[Answer]:
    """Put a load on the server and return its answers. Prompts are random token ids below `vocab`."""
    rng = random.Random(seed)
    highest = min(HIGHEST_TOKEN, vocab - 1)
    requests = [_request(host, port, load, rng, highest, key) for _ in range(load.count)]
    if load.rate:
        return await _open_loop(host, port, load, rng, requests)
    left = iter(requests)
    answers: list[Answer] = []

    async def ask_on() -> None:
        for request in left:
            answers.append(Answer(time.perf_counter()))
            await _ask(host, port, request, load, answers[-1])

    await asyncio.gather(*(ask_on() for _ in range(load.concurrency)))
    return answers


async def _open_loop(host: str, port: int, load: Load, rng: random.Random, requests: list[bytes]) -> list[Answer]:
    answers: list[Answer] = []
    tasks: list[asyncio.Task[None]] = []
    start = time.perf_counter()
    for due, request in zip(_arrivals(load.rate, rng), requests, strict=False):
        await asyncio.sleep(max(start + due - time.perf_counter(), 0))
        answers.append(Answer(start + due))
        tasks.append(asyncio.create_task(_ask(host, port, request, load, answers[-1])))
    await asyncio.gather(*tasks)
    return answers


def _arrivals(rate: float, rng: random.Random) -> Iterator[float]:
    """Yield the arrival times of requests in seconds, without end."""
    due = 0.0
    while True:
        due += rng.expovariate(rate)
        yield due


async def _ask(host: str, port: int, request: bytes, load: Load, answer: Answer) -> None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            transport, stream = await asyncio.get_running_loop().create_connection(lambda: Stream(request), host, port)
            try:
                await stream.over
            finally:
                transport.close()
    except (OSError, TimeoutError) as error:
        answer.error = repr(error)
        return
    usage = USAGE.findall(stream.tail)
    # The last event contains the usage and no token.
    answer.events = stream.events[:-1]
    answer.tokens = int(usage[-1]) if usage else 0
    if answer.tokens != load.outputs or not answer.events:
        answer.error = f"{answer.tokens} of {load.outputs} tokens: {stream.tail[-300:]!r}"


def _request(host: str, port: int, load: Load, rng: random.Random, highest: int, key: str) -> bytes:
    lowest = min(LOWEST_TOKEN, highest)
    body = {
        "model": "m",
        "prompt": [rng.randint(lowest, highest) for _ in range(load.inputs)],
        "max_tokens": load.outputs,
        "temperature": 0.6,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return post(f"{host}:{port}", "/v1/completions", body, key)


def post(host: str, path: str, body: Json, key: str = "none", after: str = "close") -> bytes:
    """Return the bytes of a request. after: the value of the Connection header, close or keep-alive."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nAuthorization: Bearer {key}\r\n"
        f"Connection: {after}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data
