"""A load of streams that send one request after the other at a steady pace.

The pace does not depend on the engine's steps. If each stream sent its next request as soon as it ended, all requests
would arrive right after a step, when all processes are busy with the tokens of that step. Connections are kept for the
next request, as clients do. Requests that still run when the time is over are cut off. Run this in a process of its
own, beside the measured one.

The client of `baton bench` decodes every event and opens a connection for every request. This one counts events and
keeps connections, so that it costs a small part of what the gateway under test costs.
"""

import asyncio
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import uvloop

from baton_proto import serving_pb2 as pb
from baton_proto import serving_pb2_grpc as rpc

_QUESTION = "Which pods does a request go through, one after the other, and what does each of them do with it? " * 6
_PROMPT_TOKENS = 150  # about as many as the question has
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
_EVENT = b"data: {"


@dataclass(frozen=True)
class SteadyLoad:
    """`streams` of `tokens` each from `start` (of time.perf_counter, which processes share) to `end`.

    period_s: the time in which each stream sends one request, all of them evenly spread. A stream that takes longer
    sends its next request when it is over.
    """

    streams: int
    tokens: int
    start: float
    end: float
    period_s: float


@dataclass
class Answer:
    """Times in seconds on one clock. due: the scheduled send time. events: when events arrived."""

    due: float
    events: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""


def over_http(port: int, load: SteadyLoad, key: str) -> list[Answer]:
    """Send a load of chats to an OpenAI-compatible server on this machine."""
    unused: list[_Connection] = []

    async def ask(answer: Answer, number: int) -> None:
        body = {
            "model": "scripted",
            "messages": [{"role": "user", "content": f"{number}. {_QUESTION}"}],
            "max_tokens": load.tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = _post(f"127.0.0.1:{port}", "/v1/chat/completions", body, key)
        while unused and unused[-1].lost:
            unused.pop()
        if unused:
            connection = unused.pop()
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Connection, "127.0.0.1", port)
        stream = connection.ask(request)
        answer.events = stream.events
        await stream.over
        unused.append(connection)
        usage = _USAGE.findall(stream.tail)
        answer.tokens = int(usage[-1]) if usage else 0
        if answer.tokens != load.tokens:
            answer.error = f"{answer.tokens} of {load.tokens} tokens: {stream.tail[-300:]!r}"

    return uvloop.run(_drive(load, ask))


def _post(host: str, path: str, body: dict[str, Any], key: str) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class _Stream:
    """The arrival times of the events of one answer, and the end of its bytes."""

    def __init__(self) -> None:
        self._cut = b""  # an event may be split between two reads
        self.events: list[float] = []
        self.tail = b""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def receive(self, data: bytes) -> None:
        now = time.perf_counter()
        data = self._cut + data
        self.events += [now] * data.count(_EVENT)
        self.tail = (self.tail + data)[-2000:]
        self._cut = data[-len(_EVENT) + 1 :]

    def end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


class _Connection(asyncio.Protocol):
    """Carries one stream after the other."""

    def __init__(self) -> None:
        self.lost = False
        self._transport: asyncio.Transport
        self._stream: _Stream | None = None

    def ask(self, request: bytes) -> _Stream:
        self._stream = _Stream()
        self._transport.write(request)
        return self._stream

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert self._stream is not None
        self._stream.receive(data)
        # Each event ends with an empty line, so only the end of the answer matches this pattern.
        if data.endswith(b"0\r\n\r\n"):
            self._stream.end()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self._stream is not None:
            self._stream.end()


def over_grpc(decode: str, prefill: str, load: SteadyLoad) -> list[Answer]:
    """Send a load to a decode pod and its prefill pod, as a gateway would."""

    async def drive() -> list[Answer]:
        async with grpc.aio.insecure_channel(decode) as channel:
            pods = _Pods(channel, prefill, load.tokens)
            return await _drive(load, pods.ask)

    return asyncio.run(drive())


class _Pods:
    """The one stream to a decode pod, with all requests on it."""

    def __init__(self, channel: grpc.aio.Channel, prefill: str, tokens: int) -> None:
        self._prefill = prefill
        self._tokens = tokens
        self._outbox: asyncio.Queue[pb.GatewayMessage] = asyncio.Queue()
        self._call = rpc.DecodeStub(channel).Serve(self._requests())  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[Answer, asyncio.Event]] = {}
        self._reading = asyncio.create_task(self._read())

    async def ask(self, answer: Answer, number: int) -> None:
        over = asyncio.Event()
        self._live[number] = (answer, over)
        submit = pb.Submit(
            handle=number,
            prompt_token_ids=[number, *[7] * _PROMPT_TOKENS],
            sampling=pb.SamplingParams(max_tokens=self._tokens, n=1, top_p=1, repetition_penalty=1),
            prefill_addresses=[self._prefill],
        )
        self._outbox.put_nowait(pb.GatewayMessage(submit=submit))
        await over.wait()

    async def _requests(self) -> AsyncIterator[pb.GatewayMessage]:
        while True:
            yield await self._outbox.get()

    async def _read(self) -> None:
        async for message in self._call:
            now = time.perf_counter()
            for delta in message.step.deltas:
                answer, over = self._live[delta.handle]
                answer.events.append(now)
                answer.tokens += len(delta.token_ids)
                answer.error = delta.failure.message
                if delta.finish_reason:
                    over.set()


async def _drive(load: SteadyLoad, ask: Callable[[Answer, int], Awaitable[Any]]) -> list[Answer]:
    answers: list[Answer] = []
    numbers = itertools.count(1)

    async def ask_on(due: float) -> None:
        while True:
            await asyncio.sleep(due - time.perf_counter())
            due = max(due, time.perf_counter() - load.period_s) + load.period_s
            answers.append(Answer(time.perf_counter()))
            try:
                await ask(answers[-1], next(numbers))
            except OSError as error:
                answers[-1].error = repr(error)
                await asyncio.sleep(0.1)

    pace = load.period_s / load.streams
    tasks = [asyncio.create_task(ask_on(load.start + pace * index)) for index in range(load.streams)]
    await asyncio.wait(tasks, timeout=load.end - time.perf_counter(), return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    return answers
