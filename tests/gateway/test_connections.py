"""Clients that are slow, silent, greedy or gone."""

import asyncio
import json
import resource
import time

import pytest

from baton_gateway.web.connections import MOST_CONNECTIONS, Connections, most_connections
from baton_gateway.web.server import MAX_PIPELINED

from .fake_worker import hang, say
from .harness import Stack, error_of, events, pods, running

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def exchange(port: int, *parts: bytes) -> bytes:
    """Send bytes, and return everything up to the server's end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await reader.read()
    finally:
        writer.close()


@pytest.fixture(scope="module")
def impatient_settings():
    return {"head_timeout_s": 0.3, "body_timeout_s": 0.3, "max_body_bytes": 100_000}


async def test_a_large_body_is_refused_unread(stack: Stack):
    body = b'{"model": "tiny", "prompt": "' + b"x" * 10_000_000 + b'"}'
    response = await stack.http.post("/v1/completions", content=body)
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"
    assert (await stack.complete()).status_code == 200


async def test_a_large_body_of_unknown_length_is_refused_as_it_grows(stack: Stack):
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
    sent = 0
    while not answer.done() and sent < 64_000_000:
        writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0)
        sent += 65536
    assert (await answer).startswith(b"HTTP/1.1 413 ")
    assert stack.gateway.settings.max_body_bytes < sent < 64_000_000
    writer.close()


@pytest.mark.processes
async def test_half_open_connections_are_closed(model_folder, impatient_settings):
    body = b'{"model": "tiny", "prompt": "hello"}'
    async with pods() as decodes, running(model_folder, decodes, **impatient_settings) as stack:
        silent, half_a_head, half_a_body, second = await asyncio.gather(
            exchange(stack.port),
            exchange(stack.port, HEAD),
            exchange(stack.port, HEAD + b"content-length: 100\r\n\r\n{"),
            exchange(stack.port, HEAD + b"content-length: %d\r\n\r\n" % len(body) + body + b"POST /v1"),
        )
        assert silent == b""
        assert half_a_head.startswith(b"HTTP/1.1 408 ")
        assert json.loads(half_a_head.split(b"\r\n\r\n")[1])["error"]["code"] == "request_timeout"
        assert half_a_body.startswith(b"HTTP/1.1 408 ")
        assert second.startswith(b"HTTP/1.1 200 ")
        assert b"HTTP/1.1 408 " in second
        assert (await stack.complete()).status_code == 200


async def limited(stack: Stack, most: int) -> None:
    """Let a gateway have so many connections, and none so far."""
    await stack.http.aclose()
    await stack.until(lambda: not stack.server.server_state.connections)
    stack.server.config.connections = Connections(most)


@pytest.mark.processes
async def test_too_many_connections_cost_the_one_that_has_waited_longest(model_folder):
    ask = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    async with pods() as decodes, running(model_folder, decodes) as stack:
        await limited(stack, 3)
        # Silent ones, one with half a head, and one that is used again and again.
        silent = await asyncio.open_connection("127.0.0.1", stack.port)
        await stack.until(lambda: len(stack.server.server_state.connections) == 1)
        half = await asyncio.open_connection("127.0.0.1", stack.port)
        half[1].write(HEAD)
        await stack.until(lambda: len(stack.server.server_state.connections) == 2)
        used = await asyncio.open_connection("127.0.0.1", stack.port)
        for _ in range(4):
            used[1].write(ask)
            head = await used[0].readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert head.startswith(b"HTTP/1.1 200 ")
            await used[0].readexactly(length)
            assert b"HTTP/1.1 200 " in await exchange(stack.port, ask.replace(b"host", b"connection: close\r\nhost"))
        assert await silent[0].read() == b""
        assert not half[0].at_eof(), "the first new connection made room for all later ones"
        third = await asyncio.open_connection("127.0.0.1", stack.port)
        fourth = await asyncio.open_connection("127.0.0.1", stack.port)
        assert await half[0].read() == b""
        for _, writer in (silent, half, used, third, fourth):
            writer.close()


@pytest.mark.processes
async def test_a_connection_whose_request_is_answered_is_never_closed_for_others(model_folder):
    async with pods() as decodes, running(model_folder, decodes) as stack:
        await limited(stack, 2)
        decodes[0].script = hang(*stack.ids("hello"))
        body = json.dumps({"model": "tiny", "prompt": "x", "stream": True}).encode()
        streams = [await asyncio.open_connection("127.0.0.1", stack.port) for _ in range(2)]
        for reader, writer in streams:
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert b" 200 " in await reader.readline()
        refused = await exchange(stack.port)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert json.loads(refused.split(b"\r\n\r\n")[1])["error"]["code"] == "server_is_overloaded"
        streams[0][1].close()
        await stack.until(lambda: len(stack.server.server_state.connections) == 1)
        answer = await exchange(stack.port, b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        streams[1][1].close()


def test_file_descriptors_are_left_for_pods(monkeypatch: pytest.MonkeyPatch):
    for soft, most in (
        (1024, 512),
        (4096, 3584),
        (1 << 20, MOST_CONNECTIONS),
        (resource.RLIM_INFINITY, MOST_CONNECTIONS),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert most_connections() == most


async def test_many_half_open_connections_do_not_disturb(stack: Stack):
    connections = [await asyncio.open_connection("127.0.0.1", stack.port) for _ in range(100)]
    for _, writer in connections:
        writer.write(HEAD)
    started = time.monotonic()
    assert (await stack.complete()).status_code == 200
    assert time.monotonic() - started < 2
    for _, writer in connections:
        writer.close()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nbroken header\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 100_000, 431),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000, 431),
    ],
    ids=["no HTTP", "bad header", "bad length", "long header", "many headers"],
)
async def test_broken_http(stack: Stack, request_bytes: bytes, status: int):
    answer = await exchange(stack.port, request_bytes)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert set(json.loads(answer.split(b"\r\n\r\n")[1])["error"]) == {"message", "type", "param", "code"}
    assert (await stack.complete()).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_is_never_read_as_the_next_request(stack: Stack, chunked: bool):
    hidden = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(hidden)
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(HEAD + b"upgrade: h2c\r\nconnection: upgrade\r\n" + framing + b"\r\n\r\n")
    answer = await reader.read(65_536)
    writer.write(hidden)
    assert not await reader.read(65_536)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"without the header Upgrade" in answer
    assert (await stack.http.get("/health", headers={"upgrade": "h2c", "connection": "upgrade"})).status_code == 200


async def test_odd_headers(stack: Stack):
    body = b'{"model": "tiny", "prompt": "hello"}'
    odd = b"authorization: \xff\xfe\r\nx-request-id: \xff\r\nconnection: close\r\ntraceparent: ;\r\n"
    answer = await exchange(stack.port, HEAD + odd + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_pod(stack: Stack, stream: bool):
    stack.pod.script = hang(*stack.ids("hello"))
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    job = await stack.pod.job()
    if stream:
        assert b"200" in await reader.readline()
    writer.close()
    async with asyncio.timeout(5):
        await job.cancelled.wait()
    assert stack.pod.cancels == [job.submit.handle]
    await stack.until(lambda: stack.fleet.router.decodes[0].requests.charged == 0)


async def test_a_client_that_leaves_while_several_prompts_run_frees_all(stack: Stack):
    stack.pod.script = hang()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await stack.complete(["a", "b", "c"])
    jobs = [await stack.pod.job(number) for number in range(3)]
    async with asyncio.timeout(5):
        for job in jobs:
            await job.cancelled.wait()


async def test_silence_gets_comment_lines(stack: Stack):
    gate = asyncio.Event()

    async def script(job):
        await gate.wait()
        await say(stack.ids("hello"))(job)

    stack.pod.script = script
    lines = []
    async with stack.http.stream(
        "POST", "/v1/completions", json={"model": "tiny", "prompt": "x", "stream": True}
    ) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if line == ": ping":
                gate.set()
    assert response.status_code == 200
    assert lines[0] == ": ping"
    assert lines[-2] == "data: [DONE]"
    assert not any(line.startswith("id:") or line == "data:" for line in lines)


@pytest.mark.processes
async def test_a_request_that_takes_too_long(model_folder):
    async with pods() as decodes, running(model_folder, decodes, request_timeout_s=0.3) as stack:
        stack.pod.script = hang()
        response = await stack.complete()
        assert (response.status_code, error_of(response)["code"]) == (504, "request_timeout")
        await (await stack.pod.job(0)).cancelled.wait()
        stack.pod.script = hang(*stack.ids("hello"))
        response = await stack.complete(stream=True)
        assert response.status_code == 200
        last = response.text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
        await (await stack.pod.job(1)).cancelled.wait()


@pytest.mark.processes
async def test_a_slow_reader_is_bounded(model_folder):
    """A client that does not read has its tokens put together, and past a limit its request fails, as it can read."""
    async with pods(max_model_len=10**6) as decodes, running(model_folder, decodes, max_unread_tokens=2000) as stack:
        token = stack.ids("hello")[0]

        async def flood(job):
            while True:
                await job.send(job.delta([token] * 100))

        stack.pod.script = flood
        body = json.dumps({"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 900_000}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.port, limit=1024)
        writer.write(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        job = await stack.pod.job()
        async with asyncio.timeout(20):
            await job.cancelled.wait()
            assert b'"code":"slow_reader"' in await reader.read()
        writer.close()
        await stack.until(lambda: stack.fleet.router.decodes[0].requests.charged == 0)


async def test_late_tokens_are_sent_together(stack: Stack):
    """What arrives in one step for a choice makes one chunk."""
    ids = stack.ids("hello lazy dog and fox")
    stack.pod.script = say(ids, step=len(ids))
    chunks = events(await stack.complete("x", stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hello lazy dog and fox", ""]


async def test_keep_alive_and_pipelining(stack: Stack):
    body = b'{"model": "tiny", "prompt": "hello", "add_special_tokens": false}'
    request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    last = request.replace(b"host: x", b"host: x\r\nconnection: close")
    answer = await exchange(stack.port, request + request + last)
    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert answer.count(b'"text":"hello"') == 3


async def test_pipelined_requests_are_bounded(stack: Stack):
    request = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
    last = request.replace(b"host: x", b"connection: close")
    assert (await exchange(stack.port, request * MAX_PIPELINED + last)).count(b"HTTP/1.1 200 ") == MAX_PIPELINED + 1
    connections = stack.server.server_state.connections
    before = set(connections)
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(request * 7000)
    most = 0
    async with asyncio.timeout(5):
        while not reader.at_eof() and reader.exception() is None:
            most = max([most, *(len(connection.pipeline) for connection in connections - before)])
            await asyncio.sleep(0)
    assert most <= MAX_PIPELINED
    writer.close()


async def test_a_client_that_leaves_with_a_request_waiting_frees_the_pod(stack: Stack):
    stack.pod.script = hang(*stack.ids("hello"))
    body = json.dumps({"model": "tiny", "prompt": "x"}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write((HEAD + b"content-length: %d\r\n\r\n" % len(body) + body) * 3)
    job = await stack.pod.job()
    writer.close()
    async with asyncio.timeout(5):
        await job.cancelled.wait()
    await asyncio.sleep(0.05)
    assert len(stack.pod.jobs) == 1  # nobody reads the answers to the requests that waited


async def test_answers_do_not_wait_for_acknowledgements(stack: Stack):
    """Without TCP_NODELAY every small answer takes 40 ms."""
    started = time.monotonic()
    for _ in range(50):
        await stack.http.get("/health")
    assert time.monotonic() - started < 50 * 0.03
