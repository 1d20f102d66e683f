"""Steady load on a fleet, every answer of which is checked."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from .answer import Answer, MalformedAnswer
from .case import Case, Refused
from .fleet import Fleet

BOUND_S = 60.0  # of an answer
_LATE_S = 45.0  # for an answer that takes longer, the state of the fleet is part of the error
_PAUSE_S = 0.1


class WrongAnswer(AssertionError):
    """What came is not what an undisturbed fleet says, or came too late."""


@dataclass
class _Visit:
    """A request that is being answered."""

    task: asyncio.Task[Answer]
    left: bool = False


class Load:
    """Clients that ask, check, and ask again until `stop`.

    context: tells what went on in the fleet since a time of the event loop, for whoever reads about a wrong answer.
    """

    def __init__(
        self,
        fleet: Fleet,
        cases: Sequence[Case],
        seed: str,
        context: Callable[[float], str],
        clients: int,
        refusals: bool = True,
    ) -> None:
        """clients: how many ask at once. refusals: whether the gateway may refuse a request when no decode worker is
        undisturbed."""
        self.counts: Counter[str] = Counter()
        self._fleet = fleet
        self._cases = cases
        self._seed = seed
        self._context = context
        self._clients = clients
        self._refusals = refusals
        self._ids = map("chaos-{}".format, itertools.count(1))
        self._visits: list[_Visit] = []
        self._stopping = False

    async def run(self) -> None:
        """Keep the load up. Raises WrongAnswer."""
        async with asyncio.TaskGroup() as group:
            for client in range(self._clients):
                group.create_task(self._ask_on(random.Random(f"{self._seed}/{client}")))

    def stop(self) -> None:
        """Let the clients end with the answers that they wait for."""
        self._stopping = True

    def leave(self, count: int) -> int:
        """Let some clients close their connections while they wait; return how many do."""
        leaving = self._visits[:count]
        for visit in leaving:
            visit.left = True
            visit.task.cancel()
        return len(leaving)

    async def _ask_on(self, rng: random.Random) -> None:
        while not self._stopping:
            await self._visit(rng.choice(self._cases), stream=rng.random() < 0.6)
            await asyncio.sleep(rng.uniform(0, 2 * _PAUSE_S))

    async def _visit(self, case: Case, stream: bool) -> None:
        begun = asyncio.get_running_loop().time()
        request_id = f"{next(self._ids)}-{case.number}"
        notes: list[str] = []
        visit = _Visit(asyncio.create_task(self._answer(case, stream, request_id, notes)))
        self._visits.append(visit)
        try:
            answer = await visit.task
        except asyncio.CancelledError:
            if not visit.left:
                visit.task.cancel()
                raise
            self.counts["left"] += 1
            return
        except (MalformedAnswer, httpx.HTTPError, TimeoutError, Refused) as error:
            raise self._wrong(case, stream, begun, "\n".join([repr(error), *notes]), request_id) from error
        finally:
            self._visits.remove(visit)
        if case.expected is None or not answer.same_as(case.expected):
            raise self._wrong(case, stream, begun, f"{answer}\nexpected {case.expected}", request_id)
        self.counts["streamed" if stream else "whole"] += 1

    async def _answer(self, case: Case, stream: bool, request_id: str, notes: list[str]) -> Answer:
        """Ask until there is an answer. Raises Refused for a refusal that need not have been.

        notes: gets each of the others, and the state of the fleet if the answer is late.
        """
        started = asyncio.get_running_loop().time()

        async def note_state() -> None:
            await asyncio.sleep(_LATE_S)
            notes.append(f"after {_LATE_S} s:\n{await self._fleet.state()}")

        noting = asyncio.create_task(note_state())
        try:
            async with asyncio.timeout(BOUND_S):
                while True:
                    begun = asyncio.get_running_loop().time()
                    try:
                        return await case.ask(self._fleet.http, stream, request_id)
                    except Refused as refusal:
                        if not self._refusals or not self._fleet.was_bare(begun):
                            raise
                        self.counts["refused"] += 1
                        after = asyncio.get_running_loop().time() - started
                        notes.append(f"refused after {after:.1f} s: {refusal}, retry after {refusal.retry_after_s} s")
                        await asyncio.sleep(refusal.retry_after_s)
        finally:
            noting.cancel()

    def _wrong(self, case: Case, stream: bool, begun: float, came: str, request_id: str) -> WrongAnswer:
        how = "streamed" if stream else "whole"
        waited = asyncio.get_running_loop().time() - begun
        logged = "\n".join([*self._fleet.lines_about(request_id), *self._fleet.errors()])
        return WrongAnswer(
            f"{case}, {how}, after {waited:.1f} s\ncame: {came}\n{self._context(begun)}\n{logged}\n"
            f"prompt: {case.fields['prompt']}"
        )
