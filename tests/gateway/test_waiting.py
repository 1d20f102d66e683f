"""Requests that wait in the gateway because pods have enough to do, as a client sees it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from baton_proto import serving_pb2 as pb
from tests.tenant_keys import write_tenants

from .harness import Stack, error_of, pods, running
from .test_observability import metrics

POOL = (("model", "tiny"), ("pool", "default"))
RATE = 10_000  # tokens a second, as long as the pod has told none

pytestmark = pytest.mark.processes


@asynccontextmanager
async def busy(model: Path, seconds: float, **settings: Any) -> AsyncIterator[Stack]:
    """Run a gateway whose only pod has prompts for so many seconds queued."""
    async with pods() as decodes, running(model, decodes, **settings) as stack:
        await queue(stack, seconds)
        yield stack


async def queue(stack: Stack, seconds: float) -> None:
    """Let the pod report so much."""
    tokens = int(seconds * RATE)
    stack.pod.load = pb.WorkerLoad(queued_prefill_tokens=tokens)
    [pod] = stack.fleet.router.decodes
    await stack.until(lambda: pod.prefill_tokens.reported == tokens)


async def begin(stack: Stack, **fields: Any) -> "asyncio.Task[httpx.Response]":
    """Send a request, and return when it waits."""
    before = stack.fleet.admission.waiting
    task = asyncio.create_task(stack.complete(**fields))
    await stack.until(lambda: stack.fleet.admission.waiting == before + 1)
    return task


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_sent_when_the_pod_has_less_to_do(model_folder: Path, stream: bool):
    async with busy(model_folder, seconds=5) as stack:
        task = await begin(stack, stream=stream)
        await asyncio.sleep(0.2)
        assert not stack.pod.jobs
        await queue(stack, 0)
        assert (await task).status_code == 200
        assert len(stack.pod.jobs) == 1


async def test_who_would_wait_too_long_is_told_when_to_come_again(model_folder: Path):
    async with busy(model_folder, seconds=20, ttft_slo_s=8) as stack:
        response = await stack.complete(stream=True)
        assert response.status_code == 503
        assert error_of(response)["code"] == "server_is_overloaded"
        assert 11 <= int(response.headers["retry-after"]) <= 13
        assert not stack.pod.jobs


async def test_nobody_waits_longer_than_may_be(model_folder: Path):
    async with busy(model_folder, seconds=5, queue_timeout_s=0.3) as stack:
        response = await (await begin(stack))
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert stack.fleet.admission.waiting == 0


async def test_a_client_that_leaves_waits_no_longer(model_folder: Path):
    async with busy(model_folder, seconds=5) as stack:
        task = await begin(stack)
        task.cancel()
        await stack.until(lambda: stack.fleet.admission.waiting == 0)
        await queue(stack, 0)
        assert (await stack.complete()).status_code == 200
        assert len(stack.pod.jobs) == 1


async def test_the_newest_leaves_when_too_many_wait(model_folder: Path):
    async with busy(model_folder, seconds=5, max_waiting_requests=1) as stack:
        first = await begin(stack)
        assert (await stack.complete()).status_code == 503
        await queue(stack, 0)
        assert (await first).status_code == 200


async def test_a_request_waits_for_a_pod_that_is_being_replaced(model_folder: Path):
    async with pods() as decodes, running(model_folder, decodes, pod_wait_s=10) as stack:
        await stack.pod.stop()
        await stack.until(lambda: not stack.fleet.ready)
        task, left = await begin(stack), await begin(stack)
        assert (await metrics(stack))["baton_gateway_requests_waiting", POOL] == 2
        left.cancel()
        await stack.until(lambda: stack.fleet.admission.waiting == 1)
        # What no pod could take is refused while none is there.
        assert error_of(await stack.complete([5] * 600))["code"] == "context_length_exceeded"
        await stack.pod.start()
        assert (await task).status_code == 200
        assert len(stack.pod.jobs) == 1


async def test_a_pool_that_expects_a_pod_goes_before_one_that_never_had_any(model_folder: Path, tmp_path: Path):
    folder = {"name": "tiny", "folder": str(model_folder)}
    async with pods() as decodes:
        pools = [{"name": "none", "decode": ["127.0.0.1:1"]}, {"name": "some", "decode": [decodes[0].address]}]
        file = tmp_path / "models.yaml"
        file.write_text(yaml.safe_dump({"models": [{**folder, "pools": pools}]}))
        async with running(None, decodes, wait=False, models_file=file, pod_wait_s=10) as stack:
            fleet = [pool.fleet for _, pool in stack.gateway.catalog.pools][1]
            await stack.until(lambda: fleet.ready)
            await decodes[0].stop()
            await stack.until(lambda: not fleet.ready)
            task = asyncio.create_task(stack.complete())
            await stack.until(lambda: fleet.admission.waiting == 1)
            await decodes[0].start()
            assert (await task).status_code == 200


async def test_waiting_is_measured(model_folder: Path):
    async with busy(model_folder, seconds=5) as stack:
        task = await begin(stack)
        prefix = "baton_gateway_"
        assert (await metrics(stack))[prefix + "requests_waiting", POOL] == 1
        await queue(stack, 50)
        refused = await stack.complete()
        await queue(stack, 0)
        assert (refused.status_code, (await task).status_code) == (503, 200)
        seen = await metrics(stack)
    reason = (("reason", "server_is_overloaded"), ("tenant", "default"))
    assert seen[prefix + "refused_requests_total", reason] == 1
    assert seen[prefix + "requests_waiting", POOL] == 0
    assert seen[prefix + "queue_seconds_count", (("model", "tiny"),)] == 1
    assert 0 < seen[prefix + "queue_seconds_sum", (("model", "tiny"),)] < 10
    # Nobody computed the prompt that was refused.
    assert seen[prefix + "prompt_tokens_total", (("model", "tiny"),)] == len(stack.pod.jobs[0].prompt)


async def test_a_clients_priority_orders_its_own_requests_and_overtakes_nobody(tmp_path: Path, model_folder: Path):
    headers = write_tenants(file := tmp_path / "tenants.yaml", {"pushy": {}, "calm": {}})
    async with busy(model_folder, seconds=5, tenants_file=file, max_waiting_requests=3, pod_queue_s=0.001) as stack:

        async def send(tenant: str, prompt: list[int], priority: int) -> httpx.Response:
            body = {"model": "tiny", "prompt": prompt, "priority": priority}
            return await stack.http.post("/v1/completions", json=body, headers=headers[tenant])

        tasks = []
        for number, (tenant, priority) in enumerate((("calm", 5), ("pushy", 0), ("pushy", -9))):
            tasks.append(asyncio.create_task(send(tenant, [number + 10] * 20, priority)))
            await stack.until(lambda: stack.fleet.admission.waiting == len(tasks))
        # The place of its own less urgent request is the one that it takes.
        tasks.append(asyncio.create_task(send("pushy", [13] * 20, -9)))
        assert (await tasks[1]).status_code == 503
        await queue(stack, 0)
        answers = await asyncio.gather(*tasks)
        assert [answer.status_code for answer in answers] == [200, 503, 200, 200]
        assert [job.prompt[0] for job in stack.pod.jobs] == [10, 12, 13]
