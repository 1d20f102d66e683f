"""Pods that fail, vanish, come back and drain."""

import asyncio
import json
import time

import pytest

from baton_proto import serving_pb2 as pb

from .fake_worker import FakePod, failing, hang, say
from .harness import Stack, error_of, pods, running

INVALID, UNAVAILABLE, INTERNAL = pb.Failure.CODE_INVALID, pb.Failure.CODE_UNAVAILABLE, pb.Failure.CODE_INTERNAL

pytestmark = pytest.mark.processes


def charges(stack: Stack) -> list[int]:
    router = stack.fleet.router
    return [pod.requests.charged + pod.prefill_tokens.charged for pod in (*router.decodes, *router.prefills)]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("script", "status", "code", "param"),
    [
        (failing(INVALID, "no such adapter", "model"), 400, None, "model"),
        (failing(INVALID, "cannot"), 400, None, None),
        (failing(UNAVAILABLE, "no blocks"), 503, "server_is_overloaded", None),
        (failing(INTERNAL, "cuda: secret detail"), 500, "internal_error", None),
        (failing(pb.Failure.CODE_UNSPECIFIED), 500, "internal_error", None),
    ],
    ids=["invalid with param", "invalid", "unavailable", "internal", "unspecified"],
)
async def test_failures_before_any_token(
    stack: Stack, stream, script, status, code, param, monkeypatch: pytest.MonkeyPatch
):
    # On a busy machine a failure may come later than the first comment line of these tests' gateway.
    monkeypatch.setattr(stack.gateway.settings, "keepalive_s", 10)
    stack.pod.script = script
    response = await stack.complete(stream=stream)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert ("retry-after" in response.headers) == (status == 503)
    assert "secret" not in response.text
    assert charges(stack) == [0]


async def test_a_request_that_computes_nan_costs_its_pod_no_trust(stack: Stack):
    stack.pod.script = failing(pb.Failure.CODE_NOT_FINITE, "The model computed NaN or infinity for this request.")
    [pod] = stack.fleet.router.decodes
    failures = pod.breaker.failures
    for _ in range(5):
        response = await stack.complete()
        assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert pod.breaker.failures <= failures
    assert charges(stack) == [0]


def broken_streams(stack: Stack) -> float | None:
    return stack.gateway.metrics.registry.get_sample_value("baton_gateway_broken_streams_total", {"model": "tiny"})


async def test_failure_in_a_stream_is_an_error_event(stack: Stack):
    broken_before = broken_streams(stack)
    stack.pod.script = failing(INTERNAL, after=stack.ids("hello"))
    response = await stack.complete(stream=True)
    assert response.status_code == 200
    *_, last = response.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
    await stack.until(lambda: broken_streams(stack) == broken_before + 1)
    assert "[DONE]" not in response.text
    assert '"finish_reason":"' not in response.text


async def test_one_prompt_failing_ends_the_others(stack: Stack):
    async def script(job):
        await (failing(INTERNAL) if len(stack.pod.jobs) > 1 else hang())(job)

    stack.pod.script = script
    assert (await stack.complete(["a", "b"])).status_code == 500
    async with asyncio.timeout(5):
        await stack.pod.jobs[0].cancelled.wait()
    assert charges(stack) == [0]


async def test_no_pod_at_all(model_folder):
    pod = FakePod(port=1)
    async with running(model_folder, [pod], wait=False) as stack:
        response = await stack.complete()
        error = error_of(response)
        assert response.status_code == 503
        assert (error["type"], error["code"]) == ("service_unavailable_error", "server_is_overloaded")
        assert 0 < int(response.headers["retry-after"]) <= 60
        assert (await stack.http.get("/ready")).status_code == 503
        assert (await stack.http.get("/health")).status_code == 200
        assert (await stack.http.get("/live")).status_code == 200
        for path in ("/v1/models", "/v1/models/tiny"):
            assert error_of(await stack.http.get(path))["code"] == "server_is_overloaded"


@pytest.mark.parametrize("loss", ["stream", "pod", "unavailable"])
async def test_a_request_without_tokens_moves_to_another_pod(model_folder, loss):
    async with pods(2) as decodes, running(model_folder, decodes) as stack:
        first, second = decodes
        begun = asyncio.Event()

        async def stuck(job):
            begun.set()
            if loss == "unavailable":
                await job.fail(UNAVAILABLE)
            await asyncio.Event().wait()

        first.script = stuck
        answer = asyncio.create_task(stack.complete("hello"))
        await begun.wait()
        if loss == "stream":
            first.drop_streams()
        elif loss == "pod":
            await first.stop()
        response = await answer
        assert response.status_code == 200
        assert response.json()["choices"][0]["text"] == "hello"
        assert len(second.jobs) == 1
        assert charges(stack) == [0, 0]
        metrics = (await stack.admin("/metrics")).text
        assert "baton_gateway_retries_total 1.0" in metrics


async def test_a_request_that_every_pod_refuses(model_folder):
    async with pods(3) as decodes, running(model_folder, decodes) as stack:
        for pod in decodes:
            pod.script = failing(UNAVAILABLE)
        assert (await stack.complete()).status_code == 503
        assert all(pod.jobs for pod in decodes)
        assert charges(stack) == [0, 0, 0]


async def test_a_pod_that_comes_back_is_used_again(model_folder):
    async with pods() as decodes, running(model_folder, decodes) as stack:
        (pod,) = decodes
        await pod.stop()
        await stack.until(lambda: not stack.fleet.ready)
        assert (await stack.complete()).status_code == 503
        await pod.start()
        await stack.until(lambda: stack.fleet.ready)
        assert (await stack.complete()).status_code == 200


async def test_a_broken_stream_is_opened_again(stack: Stack):
    stack.pod.drop_streams()
    await stack.until(lambda: not stack.fleet.ready)
    await stack.until(lambda: stack.fleet.ready)
    assert (await stack.complete()).status_code == 200


async def test_a_silent_pod_is_lost_with_its_requests(model_folder):
    async with pods() as decodes, running(model_folder, decodes, worker_timeout_s=0.3) as stack:
        stack.pod.script = hang()
        answer = asyncio.create_task(stack.complete())
        await stack.pod.job()
        stack.pod.silent = True
        assert (await answer).status_code == 503
        assert not stack.fleet.ready


async def test_a_gateway_that_stood_still_keeps_its_pods(model_folder, caplog):
    async with pods() as decodes, running(model_folder, decodes, worker_timeout_s=0.6) as stack:
        time.sleep(1)  # noqa: ASYNC251 the loop must not run
        assert (await stack.complete()).status_code == 200
        assert "pod lost" not in caplog.text


async def test_a_draining_pod_gets_nothing_new_and_finishes_its_own(model_folder):
    async with pods(2) as decodes, running(model_folder, decodes) as stack:
        first, second = decodes
        gate = asyncio.Event()

        async def waiting(job):
            await gate.wait()
            await say(stack.ids("done"))(job)

        first.script = waiting
        answer = asyncio.create_task(stack.complete())
        await first.job()
        first.load = pb.WorkerLoad(draining=True)
        await stack.until(lambda: not stack.fleet.router.decodes[0].live)
        for _ in range(4):
            assert (await stack.complete()).status_code == 200
        assert (len(first.jobs), len(second.jobs)) == (1, 4)
        gate.set()
        assert (await answer).json()["choices"][0]["text"] == "done"


async def test_prefill_pods_of_the_revision_are_named_to_the_decode_pod(model_folder):
    async with (
        pods() as decodes,
        pods(2, pb.ROLE_PREFILL) as prefills,
        running(model_folder, decodes, prefills) as stack,
    ):
        for _ in range(4):
            await stack.complete()
        addresses = [job.submit.prefill_addresses[0] for job in stack.pod.jobs]
        assert sorted(addresses) == sorted([pod.address for pod in prefills] * 2)
        prefills[0].load = pb.WorkerLoad(queued_prefill_tokens=10_000)
        await stack.until(lambda: stack.fleet.router.prefills[0].prefill_tokens.reported == 10_000)
        await stack.complete()
        assert stack.pod.jobs[-1].submit.prefill_addresses == [prefills[1].address, prefills[0].address]
        assert charges(stack) == [0, 0, 0]
        for pod in prefills:
            await pod.stop()
        await stack.until(lambda: not stack.fleet.ready)
        assert (await stack.http.get("/ready")).status_code == 503
        assert (await stack.complete()).status_code == 200
        assert stack.pod.jobs[-1].submit.prefill_addresses == []


async def test_decode_pods_learn_which_prefill_pods_there_are(model_folder):
    async with (
        pods(2) as decodes,
        pods(2, pb.ROLE_PREFILL) as prefills,
        pods(1, pb.ROLE_PREFILL, revision="r2") as strangers,
        running(model_folder, decodes, [*prefills, *strangers]) as stack,
    ):
        first, second = (pod.address for pod in prefills)
        await stack.until(lambda: all(sorted(pod.peers) == sorted([first, second]) for pod in decodes))
        await prefills[0].stop()
        await stack.until(lambda: all(pod.peers == [second] for pod in decodes))
        decodes[0].peers = []
        decodes[0].drop_streams()
        await stack.until(lambda: decodes[0].peers == [second])


async def test_the_prefill_charge_is_given_back_at_the_first_token(model_folder):
    async with (
        pods() as decodes,
        pods(1, pb.ROLE_PREFILL) as prefills,
        running(model_folder, decodes, prefills) as stack,
    ):
        gate = asyncio.Event()

        async def script(job):
            await gate.wait()
            await hang(5)(job)

        stack.pod.script = script
        answer = asyncio.create_task(stack.complete("hello lazy dog", add_special_tokens=False))
        await stack.pod.job()
        assert charges(stack) == [1, len(stack.ids("hello lazy dog"))]
        gate.set()
        await stack.until(lambda: charges(stack) == [1, 0])
        answer.cancel()
        await stack.until(lambda: charges(stack) == [0, 0])


async def test_a_prefill_pod_of_another_revision_is_no_pair(model_folder):
    async with (
        pods(revision="r1") as decodes,
        pods(1, pb.ROLE_PREFILL, revision="r2") as prefills,
        running(model_folder, decodes, prefills) as stack,
    ):
        assert (await stack.http.get("/ready")).status_code == 503
        assert (await stack.complete()).status_code == 200
        assert stack.pod.jobs[0].submit.prefill_addresses == []


async def test_a_pod_of_the_wrong_role_is_not_used(model_folder, caplog):
    async with pods(1, pb.ROLE_PREFILL) as wrong, running(model_folder, wrong, wait=False) as stack:
        await stack.until(lambda: "pod has the wrong role" in caplog.text)
        assert (await stack.complete()).status_code == 503


async def test_limits_are_those_of_the_smallest_pod(model_folder):
    async with (
        pods(max_model_len=100) as small,
        pods(max_model_len=200) as large,
        running(model_folder, [*small, *large]) as stack,
    ):
        assert (await stack.complete([5] * 100)).status_code == 400
        assert (await stack.complete([5] * 84)).status_code == 200


async def test_a_stream_that_outlives_the_grace_period_ends_by_an_error_event(model_folder):
    async with pods() as decodes, running(model_folder, decodes, shutdown_grace_s=0) as stack:
        stack.pod.script = hang(*stack.ids("hello"))
        body = {"model": "tiny", "prompt": "x", "stream": True}
        lines = []
        async with stack.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                stack.server.should_exit = True
        assert "shutting down" in json.loads(lines[-2].removeprefix("data: "))["error"]["message"]
        await stack.pod.jobs[0].cancelled.wait()
