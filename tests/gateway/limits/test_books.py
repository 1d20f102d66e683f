"""The books of a tenant after random requests that end in every way, while Redis goes away and comes back."""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from baton_gateway.concurrency.crash_log import log as crashes
from baton_proto import serving_pb2 as pb
from tests.gateway.fake_worker import Job, echo
from tests.gateway.harness import Stack
from tests.gateway.test_observability import metrics

from .conftest import RedisServer
from .test_quota import House, house

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

SEED = int(os.environ.get("SOAK_SEED") or random.randrange(10**6))
REQUESTS = 200
CLIENTS = 16
LIMITS = {"tokens_per_minute": 10**8, "max_streams": 48, "budget_tokens": 10**9, "budget_period": "ever"}


def pod_script(draw: random.Random) -> Callable[[Job], Any]:
    """Answer, refuse, fail, hang, or lose the stream with all its requests."""

    async def script(job: Job) -> None:
        kind = draw.choices(["echo", "slow", "hang", "refuse", "fail", "lose"], [50, 20, 10, 10, 5, 5])[0]
        match kind:
            case "slow":
                await asyncio.sleep(draw.uniform(0, 0.2))
                await echo(job)
            case "hang":
                await job.send(job.delta([7]))
                await asyncio.Event().wait()
            case "refuse":
                await job.fail(pb.Failure.CODE_OVERLOADED)
            case "fail":
                await job.send(job.delta([7]))
                await job.fail(pb.Failure.CODE_INTERNAL)
            case "lose":
                await job.send(job.delta([7]))
                job.pod.drop_streams()
            case _:
                await echo(job)

    return script


def body_of(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a random path and body, some of which are refused."""
    fields: dict[str, Any] = {"model": "tiny", "stream": draw.random() < 0.5, "n": draw.choice([1, 1, 2, 5])}
    fields["max_tokens"] = draw.choice([1, 4, 4, 60, 60, 60, 60, 10**6])
    match draw.randrange(3):
        case 0:
            return "/v1/chat/completions", {**fields, "messages": [{"role": "user", "content": "a b " * 40}]}
        case 1:
            return "/v1/completions", {**fields, "prompt": ["to be " * draw.choice([1, 60])] * draw.choice([1, 3])}
        case _:
            return "/v1/completions", {**fields, "prompt": [1, 2, 3, 4], "stop": ["b"], "logprobs": 2}


async def request(stack: Stack, key: str, draw: random.Random) -> None:
    """Send a request, and leave at some point of it or stay to its end."""
    path, fields = body_of(draw)
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    leave = draw.choice(["in the body", "early", "first byte", "later", "end"])
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout({"early": draw.uniform(0, 0.02), "later": draw.uniform(0, 0.5)}.get(leave, 3)):
            if leave == "in the body":
                writer.write(head.encode() + body[: len(body) // 2])
                await writer.drain()
            else:
                writer.write(head.encode() + body)
                while (data := await reader.read(65_536)) and leave != "first byte":
                    if data.rstrip().endswith((b"[DONE]", b"}")):
                        break
    writer.close()


@pytest.mark.parametrize("shared", [False, True])
async def test_books(tmp_path: Path, model_folder: Path, redis_server: RedisServer, shared: bool, caplog: Any) -> None:
    print(f"SOAK_SEED={SEED}")
    draw = random.Random(SEED)
    settings: dict[str, Any] = {"redis_url": redis_server.url} if shared else {}
    tenant = f"books-{shared}"
    async with house(tmp_path, model_folder, {tenant: LIMITS}, resume_timeout_s=0.5, **settings) as it:
        [stack] = it.stacks
        stack.pod.script = pod_script(draw)
        left = iter(range(REQUESTS))

        async def client() -> None:
            for _ in left:
                await request(stack, it.keys[tenant], draw)

        clients = asyncio.gather(*(client() for _ in range(CLIENTS)))
        while not clients.done():
            await asyncio.sleep(draw.uniform(0.1, 1))
            if shared:
                os.kill(redis_server.pid, signal.SIGSTOP)
                await asyncio.sleep(draw.uniform(0.1, 1.2))
                os.kill(redis_server.pid, signal.SIGCONT)
        await clients
        await assert_closed(it, stack, tenant, redis_server if shared else None)
    assert not [entry for entry in caplog.records if entry.name == crashes.name and entry.exc_info]


async def assert_closed(it: House, stack: Stack, tenant: str, server: RedisServer | None) -> None:
    """Assert that nothing is reserved any more, and that exactly the tokens of the answers are used."""
    quota = stack.gateway.quota
    await stack.until(lambda: not stack.gateway.services.metrics.in_flight._value.get())
    await stack.until(lambda: not quota._live and not quota._settling and not quota._unsettled)
    local = quota._local._uses.get(tenant)
    used, still_open = (0, 0) if local is None else (local.used, len(local.open))
    if server is not None:
        redis = Redis.from_url(server.url)
        used += int(await redis.hget(f"baton:{{{tenant}}}:limits", "used") or 0)  # type: ignore[misc]
        still_open += await redis.zcard(f"baton:{{{tenant}}}:streams")
        still_open += await redis.hlen(f"baton:{{{tenant}}}:wide")  # type: ignore[misc]
        await redis.aclose()
    counted = sum(
        value
        for (name, labels), value in (await metrics(stack)).items()
        if name == "baton_gateway_tenant_tokens_total" and ("tenant", tenant) in labels
    )
    assert still_open == 0
    assert stack.fleet.admission.waiting == stack.gateway.turns.waiting == 0
    for pod in stack.fleet.router.decodes:
        assert (pod.requests.charged, pod.prefill_tokens.charged) == (0, 0)
    assert used == counted > 0
