"""A stream whose decode pod is lost goes on on another one, and the client does not notice."""

import asyncio
import json
from collections.abc import Callable

import pytest
from prometheus_client import generate_latest

from baton_gateway.generation.leg import Leg
from baton_proto import serving_pb2 as pb

from .fake_worker import FakePod, Job, echo, hang
from .harness import Stack, error_of, pods, running
from .test_failures import UNAVAILABLE, charges

TEXT = "hello lazy dog hello lazy dog"

pytestmark = pytest.mark.processes


def breaking(at: int, how: str = "stream", when: Callable[[], bool] = lambda: True):
    """Echo the first `at` tokens of each choice, one fewer for each after the first, then lose the pod.

    when: says whether the pod may be lost already. Tokens that are under way to the gateway can be lost with it.
    """

    async def script(job: Job) -> None:
        done, first = list(job.submit.continuation.token_ids), job.submit.continuation.choice
        for position in range(len(done), at):
            choices = range(first, first + job.submit.sampling.n)
            going_on = [choice for choice in choices if position < at - (choice - first)]
            await job.send(*[job.delta([job.prompt[position]], choice=choice) for choice in going_on])
        while not when():
            await asyncio.sleep(0.005)
        if how == "stream":
            job.pod.drop_streams()
        elif how == "pod":
            job.pod.die()
        elif how == "handed back":
            await job.fail(UNAVAILABLE, "the decode pod is shutting down")
        await asyncio.Event().wait()

    return script


def text_of(response) -> str:
    """Return the text of a streamed completion with one choice, checking its end."""
    events = [event.removeprefix("data: ") for event in response.text.strip().split("\n\n")]
    assert events.pop() == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    return "".join(choice["text"] for choice in choices)


async def restarted(pod: FakePod) -> None:
    await pod.stop()
    await pod.start()


async def metric(stack: Stack, name: str) -> float:
    lines = (await stack.admin("/metrics")).text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"baton_gateway_{name} ")))


@pytest.mark.parametrize("how", ["stream", "pod", "handed back"])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_rest_comes_from_another_pod(model_folder, how, stream, monkeypatch):
    delivered, deliver = [], Leg.deliver
    monkeypatch.setattr(Leg, "deliver", lambda leg, delta: delivered.append(delta) or deliver(leg, delta))
    async with pods(2) as decodes, running(model_folder, decodes) as stack:
        first, second = decodes
        first.script, first.cached_tokens = breaking(3, how, lambda: len(delivered) == 3), 2
        second.cached_tokens = 1
        options = {"stream_options": {"include_usage": True}} if stream else {}
        response = await stack.complete(TEXT, max_tokens=64, stream=stream, add_special_tokens=False, **options)
        ids = stack.ids(TEXT)
        assert second.jobs[0].submit.continuation == pb.Continuation(choice=0, token_ids=ids[:3])
        assert second.jobs[0].prompt == ids
        if stream:
            assert text_of(response) == TEXT
            usage = json.loads(response.text.strip().split("\n\n")[-2].removeprefix("data: "))["usage"]
        else:
            assert response.status_code == 200
            assert response.json()["choices"][0]["text"] == TEXT
            usage = response.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), len(ids))
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2
        assert await metric(stack, "resumed_streams_total") == 1
        assert await metric(stack, "retries_total") == 0
        assert charges(stack) == [0, 0]


async def test_every_choice_goes_on_from_its_own_last_token(model_folder):
    async with pods(3) as decodes, running(model_folder, decodes) as stack:
        decodes[0].script = breaking(4)
        response = await stack.complete(TEXT, n=3, max_tokens=64, seed=7, logprobs=2, add_special_tokens=False)
        assert [choice["text"] for choice in response.json()["choices"]] == [TEXT] * 3
        ids = stack.ids(TEXT)
        for choice in response.json()["choices"]:
            assert len(choice["logprobs"]["token_logprobs"]) == len(ids)
            lengths = [len(token) for token in choice["logprobs"]["tokens"]]
            assert choice["logprobs"]["text_offset"] == [sum(lengths[:i]) for i in range(len(ids))]
        jobs = [job for pod in decodes[1:] for job in pod.jobs]
        begun = sorted((job.submit.continuation.choice, len(job.submit.continuation.token_ids)) for job in jobs)
        assert begun == [(0, 4), (1, 3), (2, 2)]
        assert {(job.submit.sampling.n, job.submit.sampling.seed) for job in jobs} == {(1, 7)}
        assert charges(stack) == [0, 0, 0]


async def test_a_stop_string_that_the_break_parts(model_folder):
    async with pods(2) as decodes, running(model_folder, decodes) as stack:
        whole = await stack.complete(TEXT, max_tokens=64, stop=["lazy dog"], add_special_tokens=False)
        for at in range(1, len(stack.ids(TEXT))):
            decodes[0].script = decodes[1].script = echo
            first = min(decodes, key=lambda pod: len(pod.jobs))
            first.script = breaking(at)
            before = len(first.jobs)
            response = await stack.complete(TEXT, max_tokens=64, stop=["lazy dog"], add_special_tokens=False)
            assert response.json()["choices"] == whole.json()["choices"]
            assert response.json()["usage"] == whole.json()["usage"]
            await stack.until(lambda: stack.fleet.live_pods()["decode"] == 2)
            assert len(first.jobs) > before


async def test_a_stream_survives_one_pod_after_another(model_folder):
    async with pods(4) as decodes, running(model_folder, decodes) as stack:
        for at, pod in enumerate(decodes[:3], 1):
            pod.script = breaking(at, "pod")
        response = await stack.complete(TEXT, max_tokens=64, stream=True, add_special_tokens=False)
        assert text_of(response) == TEXT


async def test_what_kills_pod_after_pod_ends(model_folder):
    async with pods(4) as decodes, running(model_folder, decodes, max_lost_pods=2) as stack:
        for pod in decodes:
            pod.script = breaking(1)
        response = await stack.complete(TEXT, stream=True)
        *_, last = response.text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_is_overloaded"
        assert "[DONE]" not in response.text
        assert sum(len(pod.jobs) for pod in decodes) == 3
        assert charges(stack) == [0, 0, 0, 0]


async def test_the_only_pod_comes_back_in_time(model_folder):
    async with pods() as decodes, running(model_folder, decodes, resume_timeout_s=10) as stack:
        stack.pod.script = breaking(3, "pod")
        answer = asyncio.create_task(stack.complete(TEXT, max_tokens=64, stream=True, add_special_tokens=False))
        await stack.until(lambda: not stack.fleet.ready and stack.pod.jobs)
        # A new request waits for less time than one that has begun.
        assert (await stack.complete()).status_code == 503
        stack.pod.script = echo
        await restarted(stack.pod)
        assert text_of(await answer) == TEXT


@pytest.mark.parametrize("stream", [True, False])
async def test_no_pod_comes_back(model_folder, stream):
    async with pods() as decodes, running(model_folder, decodes, resume_timeout_s=0.2) as stack:
        stack.pod.script = breaking(3, "pod")
        response = await stack.complete(TEXT, stream=stream)
        if stream:
            *_, last = response.text.strip().split("\n\n")
            error = json.loads(last.removeprefix("data: "))["error"]
            assert "[DONE]" not in response.text
        else:
            assert response.status_code == 503
            error = error_of(response)
        assert error["code"] == "server_is_overloaded"
        assert charges(stack) == [0]


async def test_a_client_that_leaves_while_its_stream_waits(model_folder):
    async with pods() as decodes, running(model_folder, decodes, resume_timeout_s=10) as stack:
        stack.pod.script = breaking(3, "pod")
        answer = asyncio.create_task(stack.complete(TEXT))
        await stack.until(lambda: not stack.fleet.ready and stack.pod.jobs)
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        await stack.until(lambda: "baton_gateway_requests_in_flight 0.0" in scrape(stack))
        await restarted(stack.pod)
        await stack.until(lambda: stack.fleet.ready)
        assert len(stack.pod.jobs) == 1
        assert charges(stack) == [0]


def scrape(stack: Stack) -> str:
    return generate_latest(stack.gateway.metrics.registry).decode()


@pytest.mark.parametrize("offset", [1, 5])
async def test_tokens_that_come_twice_or_are_missing_are_not_shown(model_folder, offset):
    """The pod is at fault; what the client has is right, and goes on elsewhere."""

    async def confused(job: Job) -> None:
        for position in range(3):
            await job.send(job.delta([job.prompt[position]]))
        job.sent[0] = offset
        await job.send(job.delta([job.prompt[offset]]))
        await asyncio.Event().wait()

    async with pods(2) as decodes, running(model_folder, decodes) as stack:
        decodes[0].script = confused
        response = await stack.complete(TEXT, max_tokens=64, add_special_tokens=False)
        assert response.json()["choices"][0]["text"] == TEXT
        async with asyncio.timeout(5):
            await decodes[0].jobs[0].cancelled.wait()


async def test_a_begun_stream_waits_for_the_weights_that_began_it(model_folder):
    async def once(job: Job) -> None:
        await (echo if job.submit.continuation.token_ids else breaking(3))(job)

    async with (
        pods() as decodes,
        pods(fingerprint="other") as others,
        running(model_folder, [*decodes, *others], resume_timeout_s=10) as stack,
    ):
        (first,), (other,) = decodes, others
        first.script, other.load = once, pb.WorkerLoad(running=100)
        await stack.until(lambda: stack.fleet.router.decodes[1].requests.reported)
        response = await stack.complete(TEXT, stream=True, max_tokens=64, add_special_tokens=False)
        assert text_of(response) == TEXT
        assert (len(first.jobs), len(other.jobs)) == (2, 0)


async def test_nothing_is_left_when_a_resumed_choice_is_stopped(model_folder):
    async with pods(2) as decodes, running(model_folder, decodes) as stack:
        decodes[0].script, decodes[1].script = breaking(2), hang()
        answer = asyncio.create_task(stack.complete(TEXT, n=2))
        await decodes[1].job(1)
        answer.cancel()
        async with asyncio.timeout(5):
            for job in decodes[1].jobs:
                await job.cancelled.wait()
        assert charges(stack) == [0, 0]
