"""The threads of the engines that `baton up` starts."""

from pathlib import Path

import httpx
import pytest

from .prompts import make_prompt
from .stack import Stack

REQUESTS = 25


@pytest.fixture(autouse=True)
def _as_users_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what the environment of the tests says about threads."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "BATON_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def cpu_seconds(stack: Stack) -> tuple[float, float]:
    """Return the CPU time of the engines' main threads, and that of their other threads."""
    main = other = 0.0
    for name, process in stack.all_processes().items():
        for thread in process.threads() if name.endswith("-engine") else ():
            seconds = thread.user_time + thread.system_time
            main, other = (main + seconds, other) if thread.id == process.pid else (main, other + seconds)
    return main, other


async def test_threads_that_wait_leave_the_cores_to_others(llama: Path) -> None:
    stack = await Stack.start(llama, env={"BATON_NUM_THREADS": "2"})
    try:
        main_before, other_before = cpu_seconds(stack)
        for seed in range(REQUESTS):
            await stack.tokens(make_prompt(64, seed), max_tokens=24)
        main, other = cpu_seconds(stack)
    finally:
        await stack.stop()
    # A tiny model leaves the second thread nearly nothing to do. One that spins takes as much CPU as the first.
    assert other - other_before < 0.4 * (main - main_before)


async def test_a_tiny_model_is_computed_by_one_thread_and_that_is_told(llama: Path) -> None:
    stack = await Stack.start(llama)
    try:
        said = [line["message"] for line in stack.process.lines if "threads: " in line["message"]]
        addresses = [address for role in ("prefill", "decode") for address in stack.metrics_addresses(role)]
        async with httpx.AsyncClient() as http:
            scraped = [(await http.get(f"http://{address}/metrics")).text for address in addresses]
    finally:
        await stack.stop()
    assert len(said) == 2
    assert all(
        "threads: 1 (" in line and "cores for 2 engine processes" in line and "they sleep" in line for line in said
    )
    threads = [line for text in scraped for line in text.splitlines() if line.startswith("baton_engine_threads{")]
    assert len(threads) == 2
    assert all('waiting="sleep"' in line and line.endswith(" 1.0") for line in threads)
