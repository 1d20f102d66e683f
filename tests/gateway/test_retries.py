"""Retries have a budget; requests whose pod was lost wait for another one without polling."""

import asyncio

import httpx
import pytest

from baton_gateway.fleet import resume_queue
from baton_gateway.fleet.resume_queue import BATCH, ResumeQueue
from baton_gateway.routing.retry_budget import WINDOW_S, RetryBudget
from baton_proto import serving_pb2 as pb

from .fake_worker import Job, echo, failing
from .harness import error_of, pods, running
from .test_failures import UNAVAILABLE, charges
from .test_resume import TEXT, restarted, text_of
from .test_router import Clock
from .test_stalls import departures, exhausted

NO_BUDGET = {"retry_share": 0, "retries_per_s": 0}


class TestBudget:
    def test_a_share_of_the_requests(self):
        budget = RetryBudget(0.2, 0, Clock())
        assert not budget.take()
        for _ in range(50):
            budget.note_request()
        assert [budget.take() for _ in range(11)] == [True] * 10 + [False]

    def test_some_in_any_case(self):
        budget = RetryBudget(0, 0.5, Clock())
        assert [budget.take() for _ in range(6)] == [True] * 5 + [False]

    def test_what_is_older_than_the_window_counts_no_more(self):
        clock = Clock()
        budget = RetryBudget(0.5, 0.1, clock)
        budget.note_request()
        budget.note_request()
        assert [budget.take() for _ in range(3)] == [True, True, False]
        clock.now += WINDOW_S - 1
        assert not budget.take()
        clock.now += 1
        assert [budget.take() for _ in range(2)] == [True, False]
        clock.now += 1_000_000
        assert [budget.take() for _ in range(2)] == [True, False]


class Waiting:
    """Counts how often it is tried; starts when `pods` holds anything."""

    def __init__(self, tries: list["Waiting"], pods: list[str]) -> None:
        self._tries = tries
        self._pods = pods

    def try_start(self) -> bool:
        self._tries.append(self)
        return bool(self._pods)


async def test_a_thousand_that_wait_do_not_poll(monkeypatch):
    monkeypatch.setattr(resume_queue, "STEP_S", 0.0)
    queue, live = ResumeQueue(), []
    tries: list[Waiting] = []
    waiting = [Waiting(tries, live) for _ in range(1_000)]
    for waiter in waiting:
        queue.add(waiter)
    await asyncio.sleep(1.0)
    assert tries[:1_000] == waiting
    assert len(tries) <= 1_000 + 8 * BATCH
    tries.clear()
    live.append("pod")
    queue.pods_changed()
    async with asyncio.timeout(5):
        while len(queue):
            await asyncio.sleep(0)
    assert len(tries) == 1_000
    assert set(tries) == set(waiting)


async def test_they_start_at_a_bounded_pace(monkeypatch):
    monkeypatch.setattr(resume_queue, "STEP_S", 60.0)
    queue, tries = ResumeQueue(), []
    for _ in range(3 * BATCH):
        queue.add(Waiting(tries, ["pod"]))
    await asyncio.sleep(0.05)
    assert (len(tries), len(queue)) == (BATCH, 2 * BATCH)
    queue.close()


async def test_a_pod_that_nobody_has_announced_is_found():
    queue, live, tries = ResumeQueue(), [], []
    for _ in range(2 * BATCH):
        queue.add(Waiting(tries, live))
    await asyncio.sleep(0.05)
    live.append("pod")
    async with asyncio.timeout(5):
        while len(queue):
            await asyncio.sleep(0.01)


async def test_who_waits_long_does_not_hold_up_who_comes_later(monkeypatch):
    monkeypatch.setattr(resume_queue, "FIRST_PAUSE_S", 60.0)
    queue, tries = ResumeQueue(), []
    queue.add(Waiting(tries, []))
    await asyncio.sleep(0.05)
    queue.add(newcomer := Waiting(tries, ["pod"]))
    await asyncio.sleep(0.05)
    assert tries[1:] == [newcomer]
    queue.remove(tries[0])
    assert not len(queue)
    queue.close()


@pytest.mark.processes
async def test_streams_that_wait_ask_for_pods_seldom(model_folder):
    async with pods() as decodes, running(model_folder, decodes, resume_timeout_s=20) as stack:
        held = asyncio.Event()
        stack.pod.script = _held(held)
        answers = [
            asyncio.create_task(stack.complete(TEXT, max_tokens=64, stream=True, add_special_tokens=False))
            for _ in range(50)
        ]
        await stack.until(lambda: len(stack.pod.jobs) == 50)
        calls, dispatch = [], stack.fleet.router.dispatch
        stack.fleet.router.dispatch = lambda *args: calls.append(args) or dispatch(*args)
        await stack.pod.stop()
        await stack.until(lambda: not stack.fleet.ready)
        await asyncio.sleep(1)
        assert 50 <= len(calls) <= 4 * 50
        stack.pod.script = echo
        await restarted(stack.pod)
        assert [text_of(await answer) for answer in answers] == [TEXT] * 50


def _held(held: asyncio.Event):
    async def script(job: Job) -> None:
        await job.send(job.delta(job.prompt[:2]))
        await held.wait()

    return script


@pytest.mark.processes
async def test_a_burst_of_refusals_draws_the_budget_down(model_folder):
    options = {"retry_share": 0, "retries_per_s": 0.5, "resume_timeout_s": 5}
    async with pods(2) as decodes, running(model_folder, decodes, **options) as stack:
        for pod in decodes:
            pod.script = failing(UNAVAILABLE)
        responses = await asyncio.gather(*(stack.complete() for _ in range(20)))
        for response in responses:
            assert response.status_code == 503
            assert error_of(response)["code"] == "server_is_overloaded"
            assert int(response.headers["retry-after"]) > 0
        assert sum(len(pod.jobs) for pod in decodes) == 20 + 5
        assert departures(stack, "refused") == 5
        assert exhausted(stack) == 20
        assert charges(stack) == [0, 0]


@pytest.mark.processes
async def test_what_a_pod_hands_back_as_it_shuts_down_costs_nothing(model_folder):
    """Also when the gateway hears only a little later that it shuts down."""
    async with pods(2) as decodes, running(model_folder, decodes, resume_timeout_s=5, **NO_BUDGET) as stack:

        async def script(job: Job) -> None:
            job.pod.load = pb.WorkerLoad(draining=True)
            await job.fail(UNAVAILABLE, "shutting down")

        decodes[0].script = script
        assert (await stack.complete()).status_code == 200
        assert departures(stack, "handed_back") == 1


@pytest.mark.processes
async def test_all_streams_of_a_killed_pod_go_on(model_folder):
    count = 300
    async with pods(2) as decodes, running(model_folder, decodes, resume_timeout_s=20, **NO_BUDGET) as stack:
        first, second = decodes
        first.script, second.load = _held(asyncio.Event()), pb.WorkerLoad(running=10_000)
        await stack.until(lambda: stack.fleet.router.decodes[1].requests.reported)
        no_limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=stack.url, timeout=60, limits=no_limits) as stack.http:
            answers = [
                asyncio.create_task(stack.complete(TEXT, max_tokens=64, stream=True, add_special_tokens=False))
                for _ in range(count)
            ]
            await stack.until(lambda: len(first.jobs) + len(second.jobs) == count)
            assert len(first.jobs) == count
            await first.stop()
            assert [text_of(await answer) for answer in answers] == [TEXT] * count
        assert departures(stack, "pod_lost") == count
        assert exhausted(stack) == 0
        assert charges(stack) == [0, 0]
