"""The last seconds of a gateway: first it is not ready, then it refuses, then it ends."""

import asyncio
import json
import signal
import time
from pathlib import Path

import pytest

from .fake_worker import Job, echo, hang
from .harness import Stack, error_of, events, pods, running

BODY = json.dumps({"model": "tiny", "prompt": "hello"}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)

pytestmark = pytest.mark.processes


def terminate(stack: Stack) -> None:
    stack.server.handle_exit(signal.SIGTERM, None)


def end_delay(stack: Stack) -> None:
    stack.server._drained_at = 0.0


def close_announced(head: bytes) -> bool:
    return b"\r\nconnection: close\r\n" in head.lower()


async def head_of_answer(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def test_requests_are_served_while_load_balancers_still_send_them(model_folder: Path):
    async with pods() as decodes, running(model_folder, decodes, drain_delay_s=60) as stack:
        kept = await asyncio.open_connection("127.0.0.1", stack.port)
        kept[1].write(REQUEST)
        assert not close_announced(await head_of_answer(kept[0]))
        terminate(stack)
        assert (await stack.admin("/ready")).status_code == 503
        assert (await stack.admin("/live")).status_code == 200
        for path in ("/ready", "/v1/models"):
            answer = await stack.http.get(path)
            assert answer.status_code == (503 if path == "/ready" else 200)
            assert answer.headers["connection"] == "close"
        assert events(await stack.complete(stream=True))
        # Its client, which has heard nothing of it, may be sending: it is closed by its next answer, and not before.
        await asyncio.sleep(0.3)
        kept[1].write(REQUEST)
        answers = await kept[0].read()
        assert answers.count(b"HTTP/1.1 200 OK\r\n") == 1
        assert close_announced(answers)
        refused = await stack.complete(n=0)
        assert (refused.status_code, refused.headers["connection"]) == (400, "close")
        end_delay(stack)


async def test_pipelined_requests_are_all_answered(model_folder: Path):
    async with pods() as decodes, running(model_folder, decodes, drain_delay_s=60) as stack:
        terminate(stack)
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        writer.write(REQUEST * 2)
        answers = await reader.read()
        assert answers.count(b"HTTP/1.1 200 OK\r\n") == 2
        assert answers.lower().count(b"connection: close\r\n") == 1
        writer.close()
        end_delay(stack)


async def test_after_the_delay_what_runs_may_finish_and_nothing_new_begins(model_folder: Path):
    async with pods() as decodes, running(model_folder, decodes, drain_delay_s=0.3) as stack:
        gate = asyncio.Event()

        async def script(job: Job) -> None:
            await job.send(job.delta(stack.ids("hello")))
            await gate.wait()
            await echo(job)

        stack.pod.script = script
        streaming = asyncio.create_task(stack.complete("world", stream=True))
        await stack.pod.job()
        idle, half_a_head = [await asyncio.open_connection("127.0.0.1", stack.port) for _ in range(2)]
        idle[1].write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        await head_of_answer(idle[0])
        half_a_head[1].write(REQUEST[:20])
        terminate(stack)
        async with asyncio.timeout(5):
            assert await idle[0].read() == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", stack.port)
        half_a_head[1].write(REQUEST[20:])
        refused = await half_a_head[0].read()
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: " in refused
        assert close_announced(refused)
        # Operators see it until the end.
        assert (await stack.admin("/ready")).status_code == 503
        assert "baton_gateway_draining 1.0" in (await stack.admin("/metrics")).text
        gate.set()
        assert events(await streaming)[-1]["choices"][0]["finish_reason"] == "stop"


async def test_the_date_goes_on_while_it_drains(model_folder: Path):
    async with pods() as decodes, running(model_folder, decodes, drain_delay_s=60) as stack:
        terminate(stack)
        before = (await stack.http.get("/live")).headers["date"]
        async with asyncio.timeout(5):
            while (await stack.http.get("/live")).headers["date"] == before:
                await asyncio.sleep(0.1)
        end_delay(stack)


@pytest.mark.parametrize("drain_delay_s", [0, 60], ids=["in the grace period", "in the delay"])
async def test_a_second_signal_ends_it_at_once(model_folder: Path, drain_delay_s: float):
    settings = {"drain_delay_s": drain_delay_s, "shutdown_grace_s": 60}
    async with pods() as decodes:
        async with running(model_folder, decodes, **settings) as stack:
            stack.pod.script = hang(*stack.ids("hello"))
            asking = asyncio.create_task(stack.complete("x", stream=True))
            await stack.pod.job()
            terminate(stack)
            await asyncio.sleep(0.3)
            started = time.monotonic()
            terminate(stack)
        # What still ran goes with the process.
        assert time.monotonic() - started < 5
        asking.cancel()
        await asyncio.wait([asking])
        await stack.gateway.stop()


async def test_a_refusal_says_so(model_folder: Path):
    async with pods() as decodes, running(model_folder, decodes) as stack:
        stack.gateway.catalog.refusing = True
        refused = await stack.complete()
        assert (refused.status_code, error_of(refused)["code"]) == (503, "server_is_overloaded")
        assert (await stack.http.get("/v1/models")).status_code == 503
