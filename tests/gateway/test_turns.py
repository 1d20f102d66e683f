"""Threads for long work: which request gets a thread when, which gives way, and what happens to those that leave."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton_gateway.concurrency.turns import INLINE_BYTES, LONG_BYTES, MAX_WAITING_BYTES, Client, Turns
from baton_gateway.errors import ApiError

MEDIUM = INLINE_BYTES + 1
LONG = LONG_BYTES + 1


class Gate:
    """Work that does not end before it may, and the order in which works began."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.begun: list[str] = []

    def work(self, name: str) -> Any:
        def run() -> str:
            self.begun.append(name)
            assert self.opened.wait(10)
            return name

        return run


@pytest.fixture
async def turns() -> AsyncIterator[Turns]:
    made = Turns(threads=2, max_waiting=5)
    yield made
    made.close()


async def begun(gate: Gate, count: int) -> None:
    async with asyncio.timeout(5):
        while len(gate.begun) < count:
            await asyncio.sleep(0.001)


def start(turns: Turns, gate: Gate, name: str, size: int, tenant: str = "a", **client: Any) -> asyncio.Task[str]:
    return asyncio.create_task(turns.run(gate.work(name), size, Client(tenant, **client)))


async def test_what_is_small_is_done_at_once(turns: Turns) -> None:
    assert await turns.run(threading.get_ident, INLINE_BYTES, Client()) == threading.get_ident()
    assert await turns.run(threading.get_ident, MEDIUM, Client()) != threading.get_ident()


async def test_errors_reach_who_asked(turns: Turns) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await turns.run(fail, MEDIUM, Client())
    assert await turns.run(lambda: 1, MEDIUM, Client()) == 1


async def test_long_work_leaves_a_thread_to_the_others(turns: Turns) -> None:
    long, short = Gate(), Gate()
    short.opened.set()
    flood = [start(turns, long, f"long {number}", LONG) for number in range(4)]
    await begun(long, 1)
    assert await asyncio.wait_for(start(turns, short, "short", MEDIUM, "b"), 5) == "short"
    assert len(long.begun) == 1
    long.opened.set()
    assert await asyncio.gather(*flood) == [f"long {number}" for number in range(4)]


async def test_a_tenant_does_not_wait_for_all_of_another(turns: Turns) -> None:
    gate = Gate()
    tasks = [start(turns, gate, f"flood {number}", MEDIUM) for number in range(6)]
    await begun(gate, 2)
    tasks.append(start(turns, gate, "calm", MEDIUM, "b"))
    await asyncio.sleep(0)
    gate.opened.set()
    await asyncio.gather(*tasks)
    assert gate.begun.index("calm") <= 3


async def test_who_waits_with_too_much_is_refused(turns: Turns) -> None:
    gate = Gate()
    tasks = [start(turns, gate, str(number), MEDIUM) for number in range(8)]
    await begun(gate, 2)
    with pytest.raises(ApiError) as caught:
        await tasks[7]
    assert caught.value.status == 503
    assert turns.waiting == 5
    calm = start(turns, gate, "calm", MEDIUM, "b")
    await asyncio.sleep(0)
    gate.opened.set()
    done = await asyncio.gather(*tasks, calm, return_exceptions=True)
    assert [name for name in done if isinstance(name, str)] == ["0", "1", "2", "3", "4", "5", "calm"]


async def test_memory_that_waits_is_bounded(turns: Turns) -> None:
    gate = Gate()
    running = [start(turns, gate, "1", MEDIUM), start(turns, gate, "2", MEDIUM)]
    await begun(gate, 2)
    waiting = [start(turns, gate, str(number), MAX_WAITING_BYTES // 2) for number in (3, 4, 5)]
    with pytest.raises(ApiError) as caught:
        await waiting[2]
    assert caught.value.status == 503
    gate.opened.set()
    assert await asyncio.gather(*running, *waiting[:2]) == ["1", "2", "3", "4"]


async def test_who_leaves_takes_its_work_along(turns: Turns) -> None:
    gate, left = Gate(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    running = [start(turns, gate, "1", MEDIUM), start(turns, gate, "2", MEDIUM)]
    await begun(gate, 2)
    leaving = start(turns, gate, "3", MEDIUM, receive=receive)
    cancelled = start(turns, gate, "4", MEDIUM)
    await asyncio.sleep(0.01)
    assert turns.waiting == 2
    left.set()
    cancelled.cancel()
    with pytest.raises(ApiError) as caught:
        await leaving
    assert caught.value.status == 499
    await asyncio.sleep(0)
    assert turns.waiting == 0
    gate.opened.set()
    await asyncio.gather(*running)
    assert gate.begun == ["1", "2"]
