"""Answers that the gateway keeps until their end, and unread streams: their memory is bounded."""

import asyncio
import gc
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from baton_gateway.answers.choice import Choice, Piece
from baton_gateway.answers.reply import WRITE_BYTES, _free, _grouped
from baton_gateway.answers.response_output import MessageOutput
from baton_gateway.answers.response_shape import ResponseShape
from baton_gateway.models.tokenizer import ModelTokenizer
from baton_gateway.requests.response_body import ResponseRequest
from baton_gateway.web.body import parse_body
from baton_proto import serving_pb2 as pb
from tests.tenant_keys import write_tenants

from .fake_worker import Job, hang
from .harness import Stack, error_of, events, pods, response_events, running

MAX_KEPT_BYTES = "baton_gateway.generation.answer_memory.MAX_KEPT_BYTES"
LOGPROBS = {"include": ["message.output_text.logprobs"]}


@pytest.mark.parametrize(("fields", "fits"), [({"n": 2}, 8), ({"n": 1, "logprobs": 0}, 2)])
async def test_an_answer_that_is_kept_until_its_end_is_bounded(stack: Stack, monkeypatch, fields, fits: int):
    monkeypatch.setattr(MAX_KEPT_BYTES, 1600)
    for tokens, status in ((fits, 200), (fits + 1, 400)):
        answer = await stack.complete([7] * 20, max_tokens=tokens, **fields)
        assert answer.status_code == status
    assert (error_of(answer)["param"], error_of(answer)["code"]) == ("stream", "answer_too_large")
    assert (await stack.complete([7] * 20, max_tokens=20, stream=True, **fields)).status_code == 200
    events = response_events(await stack.respond("a long text " * 9, stream=True, **LOGPROBS))
    assert "too long to be kept" in events[-1]["response"]["error"]["message"]


@asynccontextmanager
async def two_tenants(folder: Path, model: Path) -> AsyncIterator[tuple[Stack, Callable[..., Any]]]:
    """Run a gateway for the tenants greedy and calm. Yield it with a function that sends requests."""
    headers = write_tenants(folder / "tenants", {"greedy": {}, "calm": {}})
    async with pods() as decodes, running(model, decodes, tenants_file=folder / "tenants") as stack:

        async def send(tenant: str, unread: bool = False, **fields: Any) -> httpx.Response:
            body = {"model": "tiny", "prompt": [7] * 5, "max_tokens": 5, **fields}
            request = stack.http.build_request("POST", "/v1/completions", json=body, headers=headers[tenant])
            return await stack.http.send(request, stream=unread)

        yield stack, send


@pytest.mark.processes
async def test_answers_of_one_tenant_are_bounded_together(tmp_path: Path, model_folder: Path, monkeypatch):
    monkeypatch.setattr(MAX_KEPT_BYTES, 500)
    async with two_tenants(tmp_path, model_folder) as (stack, send):
        memory, echo = stack.gateway.services.replies._memory, stack.pod.script
        stack.pod.script = hang(*[7] * 5)
        held = [asyncio.create_task(send("greedy")) for _ in range(4)]
        await stack.until(lambda: "greedy" in memory and memory["greedy"].kept == 2000)
        stack.pod.script = echo
        refused = await send("greedy")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "server_is_overloaded")
        assert (await send("calm")).status_code == 200
        for task in held:
            task.cancel()
        await stack.until(lambda: "greedy" not in memory or not memory["greedy"].kept)
        assert (await send("greedy")).status_code == 200


def buffer_little(stack: Stack) -> None:
    """Let the system hold few unsent bytes of the gateway's new connections."""
    for server in stack.server.servers:
        for each in server.sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


@asynccontextmanager
async def unread_answer(stack: Stack, path: str, content: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request on a connection that takes little before its answer is read."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", stack.port))
    reader, writer = await asyncio.open_connection(sock=plain, limit=1024)
    writer.write(
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(content), content)
    )
    try:
        yield reader
    finally:
        writer.close()


@pytest.mark.processes
@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_unread_answers_with_tokens_are_bounded(model_folder: Path, monkeypatch, path: str):
    async with pods(max_model_len=2**20) as decodes, running(model_folder, decodes) as stack:
        buffer_little(stack)
        body: dict[str, Any] = {"tokens": [7] * 1_000_000}
        if path == "/tokenize":
            body = {"prompt": "hello world " * 50_000, "return_token_strs": True}
        size = len((await stack.http.post(path, json=body)).content)
        monkeypatch.setattr(MAX_KEPT_BYTES, (size + 1) // 2)
        connections, memory = stack.server.server_state.connections, stack.gateway.services.replies._memory
        content = json.dumps(body).encode()

        def kept() -> int:
            return sum(tenant.kept for tenant in memory.values())

        async with unread_answer(stack, path, content), unread_answer(stack, path, content) as second:
            await stack.until(lambda: kept() == 2 * size)
            assert all(each.transport.get_write_buffer_size() < 4 * WRITE_BYTES for each in connections)
            refused = await stack.http.post(path, json=body)
            assert (refused.status_code, error_of(refused)["code"]) == (503, "server_is_overloaded")
            head = await second.readuntil(b"\r\n\r\n")
            assert b"content-length: %d\r\n" % size in head
            assert len(await second.readexactly(size)) == size
        await stack.until(lambda: not kept())
        monkeypatch.setattr("baton_gateway.answers.whole_answer.SLOW_READER_TIMEOUT_S", 0.1)
        await stack.http.aclose()
        async with unread_answer(stack, path, content):
            await stack.until(lambda: kept() == size)
            await stack.until(lambda: not connections)


@pytest.mark.processes
async def test_the_end_of_an_answer_that_is_not_read_keeps_no_connection(model_folder: Path):
    async with pods(max_model_len=2**20) as decodes, running(model_folder, decodes) as stack:
        stack.server.config.timeout_keep_alive = 1
        connections = stack.server.server_state.connections
        await stack.http.aclose()
        buffer_little(stack)
        content = json.dumps({"tokens": [7] * 60_000}).encode()
        async with unread_answer(stack, "/detokenize", content):
            await stack.until(lambda: any(each.transport.get_write_buffer_size() for each in connections))
            await stack.until(lambda: not connections)


@pytest.mark.processes
async def test_unread_streams_of_one_tenant_are_bounded_together(tmp_path: Path, model_folder: Path, monkeypatch):
    monkeypatch.setattr(MAX_KEPT_BYTES, 500_000)
    monkeypatch.setattr("baton_gateway.generation.generation._SLOW_S", 0.1)
    async with two_tenants(tmp_path, model_folder) as (stack, send):
        memory, echo = stack.gateway.services.replies._memory, stack.pod.script

        async def fill(job: Job) -> None:
            while memory["greedy"].unread < 1_000_000 or len(stack.pod.jobs) == 2:
                await job.send(job.delta([7] * 20))
            await asyncio.Event().wait()

        stack.pod.script = fill
        unread = await send("greedy", unread=True, stream=True, logprobs=5, max_tokens=400)
        await stack.until(lambda: memory["greedy"].unread >= 1_000_000)
        slower = await send("greedy", unread=True, stream=True, logprobs=5, max_tokens=400)
        async with asyncio.timeout(20):
            await stack.pod.jobs[1].cancelled.wait()
        assert 1_000_000 <= memory["greedy"].unread < 2_000_000
        stack.pod.script = echo
        for tenant, fields in (("greedy", {"n": 128, "logprobs": 5}), ("greedy", {}), ("calm", {})):
            assert len(events(await send(tenant, stream=True, **fields))) >= 5
        assert not stack.pod.jobs[0].cancelled.is_set()
        assert '"code":"slow_reader"' in (await slower.aread()).decode()
        await unread.aclose()
        await stack.until(lambda: "greedy" not in memory or not memory["greedy"].unread)


async def test_a_whole_answer_is_never_read_too_slowly(stack: Stack, monkeypatch):
    monkeypatch.setattr(stack.gateway.settings, "max_unread_tokens", 10)
    feed = Choice.feed

    def slow(choice: Choice, delta: pb.Delta) -> Piece:
        time.sleep(0.003)  # more than a slice of time
        return feed(choice, delta)

    monkeypatch.setattr(Choice, "feed", slow)
    answer = await stack.complete([7] * 20, max_tokens=20, n=32, logprobs=2)
    assert [len(choice["logprobs"]["tokens"]) for choice in answer.json()["choices"]] == [20] * 32


def test_log_probabilities_that_events_repeat_are_never_copied_at_once(tokenizer: Tokenizer):
    shape = ResponseShape({}, MessageOutput("m", ModelTokenizer(tokenizer), True))
    for token in range(100, 300):
        shape.chunk(0, Piece("a", logprobs=[pb.TokenLogprobs(token_id=token, logprob=-1)]), None)
    parts = [*shape._write(shape._output.end("completed"))]
    assert max(map(len, parts)) < 1000
    done, *_ = (json.loads(line[6:]) for line in b"".join(parts).decode().split("\n") if line.startswith("data:"))
    assert len(done["logprobs"]) == 200


@pytest.mark.asyncio
async def test_others_run_while_a_large_answer_is_written_and_freed():
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(other())
    async for _ in _grouped([b"x" * (WRITE_BYTES + 1)] * 5):
        time.sleep(0.003)  # noqa: ASYNC251, more than a slice of time
    assert turns >= 3
    turns = 0
    await _free([Piece(logprobs=[pb.TokenLogprobs() for _ in range(100_000)])])
    task.cancel()
    assert turns >= 3


def test_reasoning_items_take_few_objects():
    item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]}
    body = json.dumps({"model": "tiny", "input": [item] * 1000}).encode()
    before = len(gc.get_objects())
    request = parse_body(body, ResponseRequest)
    assert len(request.input) == 1000
    assert len(gc.get_objects()) - before < 5000
