"""A request leaves a pod that reports but sends no tokens for it, and continues on another pod."""

import asyncio
import time

import pytest

from baton_gateway.routing.canary import CanaryShare
from baton_gateway.routing.cost import CostModel
from baton_gateway.routing.demand import Demand
from baton_gateway.routing.policies import LeastLoaded
from baton_gateway.routing.router import Router
from baton_gateway.routing.stalls import StallTimeouts
from baton_proto import serving_pb2 as pb

from .fake_worker import Job, echo, hang
from .harness import Stack, pods, running
from .test_failures import charges
from .test_resume import TEXT, breaking, text_of
from .test_router import Clock, pod

SHORT = {"first_token_timeout_s": 0.2, "inter_token_timeout_s": 0.2}

pytestmark = pytest.mark.processes


def departures(stack: Stack, reason: str) -> float | None:
    labels = {"model": "tiny", "reason": reason}
    return stack.gateway.metrics.registry.get_sample_value("baton_gateway_pod_departures_total", labels)


def exhausted(stack: Stack) -> float:
    labels = {"model": "tiny"}
    value = stack.gateway.metrics.registry.get_sample_value("baton_gateway_retry_budget_exhausted_total", labels)
    assert value is not None
    return value


def errors(stack: Stack, revision: str) -> float | None:
    labels = {"model": "tiny", "outcome": "error", "revision": revision}
    return stack.gateway.metrics.registry.get_sample_value("baton_gateway_revision_requests_total", labels)


def slow(seconds: float, after: int = 0):
    """Echo, with one long pause after some tokens."""

    async def script(job: Job) -> None:
        if after:
            await job.send(job.delta(job.prompt[:after]))
        await asyncio.sleep(seconds)
        last = len(job.prompt) - 1
        for position in range(after, last + 1):
            finish = pb.FINISH_REASON_STOP if position == last else pb.FINISH_REASON_NONE
            await job.send(job.delta([job.prompt[position]], finish=finish))

    return script


@pytest.mark.parametrize(("tokens", "reason"), [(0, "first_token_timeout"), (3, "inter_token_timeout")])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_request_goes_on_on_another_pod(model_folder, tokens, reason, stream):
    async with pods(2) as decodes, running(model_folder, decodes, **SHORT) as stack:
        first, second = decodes
        first.script = breaking(tokens, "never")
        async with asyncio.timeout(5):
            response = await stack.complete(TEXT, max_tokens=64, stream=stream, add_special_tokens=False)
            await first.jobs[0].cancelled.wait()
        assert (text_of(response) if stream else response.json()["choices"][0]["text"]) == TEXT
        assert list(second.jobs[0].submit.continuation.token_ids) == stack.ids(TEXT)[:tokens]
        assert departures(stack, reason) == 1
        assert stack.fleet.router.decodes[0].breaker.failures == 1
        assert charges(stack) == [0, 0]
        assert errors(stack, "r1") == 1


async def test_one_stalled_choice_is_enough(model_folder):
    async def script(job: Job) -> None:
        await job.send(job.delta([job.prompt[0]]), job.delta([job.prompt[0]], choice=1))
        for token in job.prompt[1:-1]:
            await asyncio.sleep(0.1)
            await job.send(job.delta([token]))

    async with pods(2) as decodes, running(model_folder, decodes, **SHORT) as stack:
        decodes[0].script = script
        async with asyncio.timeout(5):
            response = await stack.complete(TEXT, n=2, max_tokens=64, add_special_tokens=False)
        assert [choice["text"] for choice in response.json()["choices"]] == [TEXT] * 2
        assert departures(stack, "inter_token_timeout") == 1


@pytest.mark.parametrize("after", [0, 3])
async def test_a_slow_pod_keeps_its_requests_when_there_is_no_other(model_folder, after):
    async with pods() as decodes, running(model_folder, decodes, **SHORT) as stack:
        stack.pod.script = slow(1.0, after)
        response = await stack.complete(TEXT, max_tokens=64, stream=True, add_special_tokens=False)
        assert text_of(response) == TEXT
        assert (len(stack.pod.jobs), stack.pod.cancels) == (1, [])


async def test_a_request_does_not_return_to_a_slow_pod(model_folder):
    async with pods(2) as decodes, running(model_folder, decodes, **SHORT) as stack:
        decodes[0].script, decodes[1].script = hang(), slow(1.0)
        response = await stack.complete(TEXT, max_tokens=64, add_special_tokens=False)
        assert response.json()["choices"][0]["text"] == TEXT
        assert [len(pod.jobs) for pod in decodes] == [1, 1]


async def test_without_budget_a_request_stays(model_folder):
    options = {**SHORT, "retry_share": 0, "retries_per_s": 0}
    async with pods(2) as decodes, running(model_folder, decodes, **options) as stack:
        decodes[0].script = slow(1.0)
        response = await stack.complete(TEXT, max_tokens=64, add_special_tokens=False)
        assert response.json()["choices"][0]["text"] == TEXT
        assert not decodes[1].jobs
        assert exhausted(stack) > 0


async def test_a_preempted_sequence_has_time_to_be_computed_again(model_folder):
    async with pods(2, prefill_rate=10.0) as decodes, running(model_folder, decodes, **SHORT) as stack:
        decodes[0].script = slow(1.0, after=3)
        response = await stack.complete(TEXT, max_tokens=64, add_special_tokens=False)
        assert response.json()["choices"][0]["text"] == TEXT
        assert not decodes[1].jobs


async def test_a_copy_that_stalls_ends(model_folder):
    async with (
        pods() as decodes,
        pods(revision="r2") as trial,
        running(model_folder, [*decodes, *trial], **SHORT) as stack,
    ):
        stack.fleet.router.canary = CanaryShare("r2", 100, shadow=True)
        trial[0].script = hang()
        assert (await stack.complete()).status_code == 200
        async with asyncio.timeout(5):
            await (await trial[0].job()).cancelled.wait()
        assert charges(stack) == [0, 0]
        assert errors(stack, "r2") == 1


async def test_a_gateway_that_was_held_up_blames_nobody(model_folder):
    """Tokens that arrived while the event loop was held up are read before anybody is judged."""
    async with pods(2) as decodes, running(model_folder, decodes, **SHORT) as stack:
        decodes[0].script = slow(0.0)
        link = stack.fleet._contacts[0].link
        checks = []
        link.check = checks.append
        await asyncio.sleep(0.1)
        checks.clear()
        time.sleep(1.5)  # noqa: ASYNC251 - this is what is tested
        await asyncio.sleep(0)
        assert not checks
        await stack.until(lambda: checks)


def timeouts() -> StallTimeouts:
    return StallTimeouts(60, 30, CostModel(slowest_prefill_rate=200, prefill_margin=3))


@pytest.mark.parametrize(
    ("rate", "stays_s", "leaves_s"), [(1_000, 443, 445), (100_000, 63, 64), (0, 1979, 1981)], ids=["cpu", "gpu", "new"]
)
def test_long_prompts_get_the_time_that_they_need(rate, stays_s, leaves_s):
    decode = pod("a")
    decode.prefill_rate = rate
    route = Router([decode], [], LeastLoaded(), Clock()).dispatch(Demand(128_000))
    assert timeouts().stalled(route, False, stays_s, 128_000) is None
    assert timeouts().stalled(route, False, leaves_s, 128_000) == "first_token_timeout"


def test_what_is_queued_before_a_prompt_counts():
    decode = pod("a")
    decode.prefill_rate = 1_000
    router = Router([decode], [], LeastLoaded(), Clock())
    router.dispatch(Demand(100_000))
    route = router.dispatch(Demand(1_000))
    assert timeouts().stalled(route, False, 362, 1_000) is None
    assert timeouts().stalled(route, False, 364, 1_000) == "first_token_timeout"


async def test_nothing_is_left_behind(model_folder):
    async with pods(3) as decodes, running(model_folder, decodes, **SHORT) as stack:
        for number in range(2):
            decodes[number].script = breaking(number + 1, "never")
        answers = [stack.complete(TEXT, max_tokens=64, add_special_tokens=False) for _ in range(5)]
        texts = [answer.json()["choices"][0]["text"] for answer in await asyncio.gather(*answers)]
        assert texts == [TEXT] * 5
        assert charges(stack) == [0, 0, 0]
        for pod_left in decodes:
            pod_left.script = echo
        assert (await stack.complete()).status_code == 200
