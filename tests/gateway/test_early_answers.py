"""Answers that are sent before the whole request has arrived: who can read them, and what happens to the connection."""

import asyncio
import contextlib
import http.client
import json
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from baton_gateway.web import server
from baton_gateway.web.body import MAX_ARRIVING
from baton_gateway.web.certificate import Certificate
from baton_gateway.web.connections import most_connections

from .fake_worker import Job, hang, say
from .harness import Stack, events, pods, raw_connection, running
from .test_tls import trusting, write_certificate

KEY = "the-right-one"
BODY_TIMEOUT_S = 0.5
MAX_BODY = 100_000
# More than the buffers of a loopback connection hold, so that somebody must read it.
LARGE = 16_000_000


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def keyed(model_folder: Path, processes: None) -> AsyncIterator[Stack]:
    """A gateway that asks for a key, takes 4 MiB, and waits half a second for the rest of a body."""
    async with (
        pods() as decodes,
        running(model_folder, decodes, api_keys=[KEY], body_timeout_s=BODY_TIMEOUT_S, keepalive_s=0.2) as stack,
    ):
        stack.http.headers["authorization"] = f"Bearer {KEY}"
        yield stack


def head(length: int | str, key: str = KEY, *extra: str) -> bytes:
    """Write the head of a POST. length: of the body, or a header line in its place."""
    framing = f"content-length: {length}" if isinstance(length, int) else length
    lines = ["POST /v1/completions HTTP/1.1", "host: x", f"authorization: Bearer {key}", framing, *extra, "", ""]
    return "\r\n".join(lines).encode()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Read an answer with a length; return status, headers and body."""
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().removesuffix("\r\n\r\n").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def over_a_while(job: Job) -> None:
    """Say a token now and then for three times as long as the rest of a body may take."""
    tokens = job.prompt[:1] * 12
    for index in range(len(tokens)):
        await say(tokens[index : index + 1])(job) if index == len(tokens) - 1 else await job.send(job.delta(tokens[:1]))
        await asyncio.sleep(3 * BODY_TIMEOUT_S / len(tokens))


async def test_a_stream_after_refused_requests_is_not_cut(keyed: Stack):
    """One kept connection, as from a proxy: requests with a wrong key, then the stream of somebody else."""
    keyed.pod.script = over_a_while
    reader, writer = await asyncio.open_connection("127.0.0.1", keyed.port)
    for _ in range(6):
        writer.write(head(100_000, "wrong"))
        status, headers, _ = await read_answer(reader)  # the body has not even begun
        assert (status, "connection" in headers) == (401, False)
        writer.write(b"x" * 100_000)
        await writer.drain()
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": True}).encode()
    writer.write(head(len(body), KEY, "connection: close") + body)
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"data: [DONE]" in answer
    assert answer.endswith(b"0\r\n\r\n")
    writer.close()


def post_large_with_http_client(port: int, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/v1/completions", body, {"authorization": f"Bearer {KEY}"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def post_large_with_httpx(port: int, body: bytes) -> tuple[int, bytes]:
    with httpx.Client() as client:
        answer = client.post(
            f"http://127.0.0.1:{port}/v1/completions", content=body, headers={"authorization": f"Bearer {KEY}"}
        )
    return answer.status_code, answer.content


def post_large_with_a_socket(port: int, body: bytes) -> tuple[int, bytes]:
    """As the others, but slower than the gateway could answer: all is sent before anything is read."""
    with raw_connection(port) as connection:
        connection.sendall(head(len(body), KEY, "connection: close"))
        for start in range(0, len(body), len(body) // 10):
            connection.sendall(body[start : start + len(body) // 10])
            time.sleep(BODY_TIMEOUT_S / 50)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return int(answer.split()[1]), answer.split(b"\r\n\r\n", 1)[1]


def post_large_in_chunks(port: int, body: bytes) -> tuple[int, bytes]:
    with raw_connection(port) as connection:
        connection.sendall(head("transfer-encoding: chunked"))
        for start in range(0, len(body), 100_000):
            chunk = body[start : start + 100_000]
            connection.sendall(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        connection.sendall(b"0\r\n\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.read()


@pytest.mark.parametrize(
    "post", [post_large_with_http_client, post_large_with_httpx, post_large_with_a_socket, post_large_in_chunks]
)
async def test_who_sends_all_of_a_large_body_first_can_read_the_refusal(keyed: Stack, post):
    status, body = await asyncio.to_thread(post, keyed.port, b"x" * LARGE)
    assert status == 413
    assert json.loads(body)["error"]["code"] == "request_too_large"


@pytest.mark.processes
async def test_over_tls_too(model_folder: Path, tmp_path: Path):
    certificate = Certificate(*write_certificate(tmp_path))
    async with pods() as decodes, running(model_folder, decodes, wait=False, certificate=certificate) as stack:

        def post() -> tuple[int, bytes]:
            context: ssl.SSLContext = trusting()
            connection = http.client.HTTPSConnection("localhost", stack.port, timeout=10, context=context)
            connection.request("POST", "/v1/completions", b"x" * LARGE, {"connection": "close"})
            answer = connection.getresponse()
            return answer.status, answer.read()

        status, body = await asyncio.to_thread(post)
    assert status == 413
    assert json.loads(body)["error"]["code"] == "request_too_large"


async def test_a_body_beyond_the_bound_is_refused_with_the_end_of_the_connection(keyed: Stack):
    bound = server.SENT_BYTES_FACTOR * keyed.gateway.settings.max_body_bytes
    reader, writer = await asyncio.open_connection("127.0.0.1", keyed.port)
    writer.write(head(bound + 1))
    status, headers, _ = await read_answer(reader)
    assert (status, headers["connection"]) == (413, "close")
    assert await reader.read() == b""  # at once, also while the client goes on
    writer.close()


async def sent_until_reset(writer: asyncio.StreamWriter, part: bytes, most: int) -> int:
    """Send until the other side has closed; return how many bytes that were."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most:
            writer.write(part)
            await writer.drain()
            sent += len(part)
    writer.close()
    return sent


@pytest.mark.processes
async def test_what_follows_a_refusal_is_bounded(model_folder: Path):
    """Neither a declared length nor chunks, nor what frames them, are read without end."""
    bound = server.SENT_BYTES_FACTOR * MAX_BODY
    kinds = {
        b"x" * 65_536: "content-length: 1000000000000",
        b"10000\r\n" + b"x" * 65_536 + b"\r\n": "transfer-encoding: chunked",
        b"1\r\nx\r\n" * 10_000: "transfer-encoding: chunked",
        b"1;" + b"e" * 65_536 + b"\r\nx\r\n": "transfer-encoding: chunked",
    }
    async with pods() as decodes, running(model_folder, decodes, max_body_bytes=MAX_BODY, wait=False) as stack:
        for part, framing in kinds.items():
            _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
            writer.write(head(framing))
            # What the kernels of both ends hold is not read.
            assert await sent_until_reset(writer, part, most=100 * bound) < bound + 20_000_000


@pytest.mark.parametrize("framing", ["content-length: 100", "transfer-encoding: chunked"])
async def test_who_never_finishes_a_body_is_closed(keyed: Stack, framing: str):
    reader, writer = await asyncio.open_connection("127.0.0.1", keyed.port)
    writer.write(head(framing, "wrong") + b"1")
    assert (await read_answer(reader))[0] == 401
    started = time.monotonic()
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    assert time.monotonic() - started > BODY_TIMEOUT_S * 0.8
    writer.close()


async def test_who_waits_to_be_told_to_continue_learns_that_the_connection_ends(keyed: Stack):
    """Such a client may leave the body out: its next request would be taken for it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", keyed.port)
    writer.write(head(1000, "wrong", "expect: 100-continue"))
    status, headers, _ = await read_answer(reader)
    assert (status, headers["connection"]) == (401, "close")
    assert await reader.read() == b""
    writer.close()
    body = json.dumps({"model": "tiny", "prompt": "x"}).encode()
    keyed.pod.script = say(keyed.ids("hello"))
    reader, writer = await asyncio.open_connection("127.0.0.1", keyed.port)
    writer.write(head(len(body), KEY, "expect: 100-continue"))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await read_answer(reader))[0] == 200
    writer.close()


async def test_a_request_behind_an_unread_body_is_answered(keyed: Stack):
    """Both in one packet, and the second one with a body that comes after the first one's answer."""
    keyed.pod.script = say(keyed.ids("hello"))
    body = json.dumps({"model": "tiny", "prompt": "x"}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", keyed.port)
    writer.write(head(5, "wrong") + b"12345" + head(len(body)))
    assert (await read_answer(reader))[0] == 401
    await asyncio.sleep(BODY_TIMEOUT_S / 2)
    writer.write(body)
    assert (await read_answer(reader))[0] == 200
    writer.close()


async def test_what_is_wrong_with_the_rest_of_a_body_gets_no_second_answer(keyed: Stack):
    """A proxy would take it for the answer to the next request on the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", keyed.port)
    writer.write(head("transfer-encoding: chunked", "wrong"))
    assert (await read_answer(reader))[0] == 401
    writer.write(b"no chunk\r\n")
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("rest", [b"x" * 10, b"x" * 10 + b"\r\n"], ids=["body", "body and a line end"])
async def test_a_connection_that_falls_idle_by_the_rest_of_a_body_does_not_stay_for_ever(
    keyed: Stack, monkeypatch: pytest.MonkeyPatch, rest: bytes
):
    monkeypatch.setattr(keyed.server.config, "timeout_keep_alive", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", keyed.port)
    writer.write(head(10, "wrong"))
    assert (await read_answer(reader))[0] == 401
    writer.write(rest)
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    writer.close()


async def test_trailers_are_not_kept(keyed: Stack):
    keyed.pod.script = hang()
    connections = keyed.server.server_state.connections
    before = set(connections)
    reader, writer = await asyncio.open_connection("127.0.0.1", keyed.port)
    writer.write(head("transfer-encoding: chunked") + b"1\r\n{\r\n0\r\n")
    await keyed.until(lambda: any(c.cycle is not None for c in connections - before))
    [connection] = connections - before
    writer.write(b"a: b\r\n" * 10_000)
    await writer.drain()
    await asyncio.sleep(0.1)
    assert len(connection.headers) < 10
    writer.write(b"\r\n")
    assert (await read_answer(reader))[0] == 400
    writer.close()


@pytest.mark.processes
async def test_unfinished_bodies_of_a_tenant_are_bounded(model_folder: Path):
    async with pods() as decodes, running(model_folder, decodes, max_body_bytes=MAX_BODY) as stack:
        connections = [await asyncio.open_connection("127.0.0.1", stack.port) for _ in range(MAX_ARRIVING + 2)]
        for _, writer in connections:
            writer.write(head(MAX_BODY) + b"x" * (MAX_BODY - 1))
        answers = [asyncio.create_task(read_answer(reader)) for reader, _ in connections]
        await stack.until(lambda: any(answer.done() for answer in answers))
        assert {answer.result()[0] for answer in answers if answer.done()} == {503}
        for answer, (_, writer) in zip(answers, connections, strict=True):
            answer.cancel()
            writer.close()
        await stack.until(lambda: not stack.server.server_state.tasks)
        assert (await stack.complete("x" * (MAX_BODY - 1000))).status_code == 400  # only its prompt is too long


@pytest.mark.processes
async def test_the_number_of_unfinished_bodies_of_a_tenant_is_bounded(model_folder: Path, monkeypatch):
    monkeypatch.setattr("baton_gateway.web.app.UNFINISHED_SHARE", most_connections() // 3)
    async with pods() as decodes, running(model_folder, decodes) as stack:
        connections = [await asyncio.open_connection("127.0.0.1", stack.port) for _ in range(4)]
        for _, writer in connections:
            writer.write(head(100) + b"x")
        answers = [asyncio.create_task(read_answer(reader)) for reader, _ in connections]
        await stack.until(lambda: any(answer.done() for answer in answers))
        assert [answer.result()[0] for answer in answers if answer.done()] == [503]
        connections[0][1].write(b"x" * 99)
        assert (await answers[0])[0] == 400  # no JSON
        for answer, (_, writer) in zip(answers, connections, strict=True):
            answer.cancel()
            writer.close()
        await stack.until(lambda: not stack.server.server_state.tasks)
        assert (await stack.complete()).status_code == 200


async def test_many_unfinished_bodies_hold_no_memory(keyed: Stack):
    connections = [await asyncio.open_connection("127.0.0.1", keyed.port) for _ in range(50)]
    for _, writer in connections:
        writer.write(head(1_000_000, "wrong") + b"x" * 200_000)
    for reader, _ in connections:
        assert (await read_answer(reader))[0] == 401
    assert sum(len(c.cycle.body) for c in keyed.server.server_state.connections if c.cycle) == 0
    keyed.pod.script = say(keyed.ids("hello"))
    assert events(await keyed.complete(stream=True))
    for _, writer in connections:
        writer.close()
