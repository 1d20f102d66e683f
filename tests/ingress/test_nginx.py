"""nginx in front of a gateway must not change when tokens arrive, how disconnects are noticed, errors or headers."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_proto import serving_pb2 as pb
from tests.e2e.stack import Stack as WholeStack
from tests.gateway.fake_worker import Job, echo, failing, hang, say
from tests.gateway.harness import Stack, error_of, events, running

from .conftest import KEY, KEY_OF_ONE_REQUEST, LOOP
from .nginx import Nginx, nginx_before

pytestmark = [pytest.mark.asyncio(loop_scope=LOOP), pytest.mark.timeout(60)]
FREED_S = 1
# Of the connection, of the moment, and nginx's own name.
NOT_COMPARED = {"connection", "transfer-encoding", "date", "server", "openai-processing-ms"}


def client(nginx: Nginx) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=nginx.url, headers={"authorization": f"Bearer {KEY}"}, timeout=20)


@pytest.mark.parametrize("gathering", [False, True])
async def test_each_token_arrives_before_the_next_is_made(
    program: Path, stack: Stack, tmp_path: Path, gathering: bool
) -> None:
    """The pod makes a token when the client has the one before, whatever nginx would rather do."""
    tokens = stack.ids("The quick brown fox jumps over the lazy dog")
    arrived: asyncio.Queue[str] = asyncio.Queue()

    async def script(job: Job) -> None:
        for index, token in enumerate(tokens):
            last = index == len(tokens) - 1
            await job.send(job.delta([token], finish=pb.FINISH_REASON_STOP if last else pb.FINISH_REASON_NONE))
            await arrived.get()

    stack.pod.script = script
    body = {"model": "tiny", "prompt": "hello", "stream": True}
    count = 0
    async with (
        nginx_before(program, stack.port, tmp_path, gathering=gathering) as nginx,
        client(nginx) as http,
        asyncio.timeout(10),
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                count += 1
                arrived.put_nowait(line)
    assert count >= len(tokens)


async def test_keepalives_arrive_while_nothing_else_does(stack: Stack, nginx: Nginx) -> None:
    stack.pod.script = hang(*stack.ids("hello"))
    body = {"model": "tiny", "prompt": "hello", "stream": True}
    async with (
        client(nginx) as http,
        asyncio.timeout(10),
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        pings = 0
        async for line in response.aiter_lines():
            pings += line == ": ping"
            if pings == 2:
                break


async def test_an_error_within_a_stream_arrives(stack: Stack, nginx: Nginx) -> None:
    stack.pod.script = failing(pb.Failure.CODE_INTERNAL, after=stack.ids("hello"))
    async with client(nginx) as http:
        response = await http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "stream": True})
    assert response.status_code == 200
    assert '"code":"internal_error"' in response.text.rstrip().splitlines()[-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_frees_the_kv(program: Path, demo: WholeStack, tmp_path: Path, stream: bool) -> None:
    body = {"model": demo.model, "prompt": "Baton is", "max_tokens": 8_000, "ignore_eos": True, "stream": stream}
    lines = []

    async def read(http: httpx.AsyncClient) -> None:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                lines.append(line)  # noqa: PERF401 the task is cancelled meanwhile

    [decode] = demo.pods("decode")
    async with nginx_before(program, demo.port, tmp_path) as nginx, client(nginx) as http:
        reading = asyncio.create_task(read(http))
        await decode.until(lambda load: load.running and load.blocks_held and len(lines) >= 2 * stream)
        assert not reading.done()
        reading.cancel()
        await asyncio.gather(*(pod.idle(timeout_s=FREED_S) for pod in demo.pods()))
        await demo.idle()
    assert bool(lines) == stream
    # 499: the client has closed the request; a stream has its status by then.
    assert nginx.log()[-1][0] == (200 if stream else 499)


@pytest.mark.parametrize(
    ("status", "code", "request_fields"),
    [
        (200, None, {"json": {"model": "tiny", "prompt": "hello"}}),
        (400, None, {"json": {"model": "tiny", "prompt": "hello", "temperature": 9}}),
        (400, None, {"content": b"{"}),
        (400, "context_length_exceeded", {"json": {"model": "tiny", "prompt": "hello", "max_tokens": 1_000}}),
        (401, "invalid_api_key", {"headers": {"authorization": "Bearer wrong"}}),
        (404, "model_not_found", {"json": {"model": "nobody", "prompt": "hello"}}),
        (405, None, {"method": "PUT"}),
        (413, "request_too_large", {"content": b" " * (5 << 20)}),
        (429, "rate_limit_exceeded", {"headers": {"authorization": f"Bearer {KEY_OF_ONE_REQUEST}"}}),
    ],
)
async def test_answers_are_those_of_the_gateway(
    stack: Stack, nginx: Nginx, status: int, code: str | None, request_fields: dict[str, Any]
) -> None:
    stack.pod.script = say(stack.ids("lazy fox"))
    asked: dict[str, Any] = {"method": "POST", "url": "/v1/completions", **request_fields}
    if asked.keys().isdisjoint({"json", "content"}):
        asked["json"] = {"model": "tiny", "prompt": "hello"}
    asked["headers"] = {"x-request-id": "of-the-client-1", **asked.get("headers", {})}
    if status == 429:
        await stack.http.request(**asked)
    direct = await stack.http.request(**asked)
    async with client(nginx) as http:
        passed = await http.request(**asked)
    assert (passed.status_code, direct.status_code) == (status, status)
    if status == 200:
        assert passed.json()["choices"] == direct.json()["choices"]
    else:
        assert error_of(passed) == error_of(direct)
        assert error_of(passed)["code"] == code
    assert passed.headers["x-request-id"] == "of-the-client-1"
    assert headers_of(passed) == headers_of(direct)
    if status == 200:
        assert passed.headers["x-ratelimit-limit-requests"] == "1000"
        assert int(passed.headers["x-ratelimit-remaining-requests"]) < 1000
    if status == 429:
        assert int(passed.headers["retry-after"]) > 0


def headers_of(response: httpx.Response) -> dict[str, str]:
    """Return those that must be the same twice: of what counts down, only the names."""
    return {
        name: "" if name.startswith(("x-ratelimit-re", "retry-after")) else value
        for name, value in response.headers.items()
        if name not in NOT_COMPARED
    }


async def test_refused_bodies_do_not_cut_the_stream_behind_them(program: Path, stack: Stack, tmp_path: Path) -> None:
    """nginx keeps its connections: a stream comes on one on which keys were wrong while bodies were arriving."""
    tokens = stack.ids("The quick brown fox jumps over the lazy dog")

    async def script(job: Job) -> None:
        for token in tokens:
            await job.send(job.delta([token]))
            await asyncio.sleep(1.5 / len(tokens))
        await job.send(job.delta(finish=pb.FINISH_REASON_STOP))

    own = {"api_keys": [KEY], "body_timeout_s": 0.5, "keepalive_s": 0.2}
    assert stack.gateway.settings.model is not None
    async with (
        running(stack.gateway.settings.model, stack.decodes, **own) as gateway,
        nginx_before(program, gateway.port, tmp_path) as nginx,
        client(nginx) as http,
    ):
        stack.pod.script = script
        for _ in range(6):
            refused = await http.post(
                "/v1/completions", content=b"x" * 100_000, headers={"authorization": "Bearer wrong"}
            )
            assert refused.status_code == 401
        streamed = await http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "stream": True})
    assert streamed.status_code == 200
    assert events(streamed)[-1]["choices"][0]["finish_reason"] == "stop"


async def test_the_request_id_of_nginx_is_taken(stack: Stack, nginx: Nginx) -> None:
    stack.pod.script = echo
    async with client(nginx) as http:
        response = await http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "stream": True})
    assert events(response)
    assert nginx.log()[-1] == (200, response.headers["x-request-id"])
