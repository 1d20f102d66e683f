"""One load on one target: an open loop, which sends when a request is due and not when the server is ready."""

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from baton_bench.answer import Answer
from baton_bench.dialect import Conversation
from baton_bench.plan import Plan, Session
from baton_bench.pod_watch import PodSample, PodWatch
from baton_bench.settings import BenchSettings
from baton_bench.target import Target

_TICK_S = 0.01
_LEAST_SLEEP_S = 0.002  # timers of event loops fire up to a millisecond late


@dataclass
class LoadResult:
    """The result of a plan. Times are seconds since its start. ticks: how late the client's timer was, each 10 ms."""

    target: str
    plan: Plan
    answers: list[Answer] = field(default_factory=list)
    ticks: list[float] = field(default_factory=list)
    pods: list[PodSample] = field(default_factory=list)


async def run_load(target: Target, plan: Plan, settings: BenchSettings, watch: PodWatch | None = None) -> LoadResult:
    """Run a plan until its last answer has ended."""
    return await _Load(target, plan, settings).run(watch)


class _Load:
    def __init__(self, target: Target, plan: Plan, settings: BenchSettings) -> None:
        self._target = target
        self._settings = settings
        self._plan = plan
        self._result = LoadResult(target.name, plan)
        self._began = 0.0

    async def run(self, watch: PodWatch | None) -> LoadResult:
        # Requests are encoded in advance, because encoding a long prompt takes longer than sending it.
        openings = [self._opening(number, session) for number, session in enumerate(self._plan.sessions, 1)]
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(_prompts_left_out_of_collections())
            self._began = time.perf_counter()
            await stack.enter_async_context(_beside(self._tick()))
            if watch is not None:
                await stack.enter_async_context(_beside(watch.follow(self._began, self._result.pods)))
            async with asyncio.TaskGroup() as group:
                for session, opening in zip(self._plan.sessions, openings, strict=True):
                    await self._wait_until(session.due)
                    group.create_task(self._converse(session, *opening))
        return self._result

    def _opening(self, number: int, session: Session) -> tuple[Conversation, Answer, bytes]:
        conversation = Conversation(self._target.dialect.form)
        conversation.say(session.turns[0].tokens)
        named = number if self._settings.turns > 1 else 0
        answer = Answer(session.due, conversation.tokens, session.turns[0].outputs, named)
        return conversation, answer, self._target.request(conversation, answer)

    async def _converse(self, session: Session, conversation: Conversation, answer: Answer, request: bytes) -> None:
        for number, turn in enumerate(session.turns):
            if number:
                due = answer.end + self._settings.think_s
                conversation.say(turn.tokens)
                answer = Answer(due, conversation.tokens, turn.outputs, answer.session, number)
                request = self._target.request(conversation, answer)
                await self._wait_until(due)
            self._result.answers.append(answer)
            timeout = self._settings.request_timeout_s
            await self._target.send(request, conversation, answer, self._began, timeout, turn.cancel_after)
            if answer.outcome == "failed":
                return

    async def _wait_until(self, due: float) -> None:
        left = self._began + due - time.perf_counter()
        if left > _LEAST_SLEEP_S:
            await asyncio.sleep(left - _LEAST_SLEEP_S)
        while time.perf_counter() < self._began + due:
            await asyncio.sleep(0)

    async def _tick(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due + _TICK_S, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())
            self._result.ticks.append(max(time.perf_counter() - due, 0.0))


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.contextmanager
def _prompts_left_out_of_collections() -> Iterator[None]:
    """Exclude the prompts from garbage collections, which would scan them while every stream waits."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
