"""Fixtures of the end-to-end tests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from tests.conftest import MakeModel

from .process import Process
from .stack import STEP_TOKENS, Stack
from .workers import Role, Worker

LOOP: Final = "session"
StartWorker = Callable[..., Awaitable[Worker]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run async tests in one loop: gRPC's channels and the shared processes' pipes belong to it."""
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(90))
        if isinstance(item, pytest.Function) and asyncio.iscoroutinefunction(item.obj):
            item.add_marker(pytest.mark.asyncio(loop_scope=LOOP), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the processes of a failed test have written last."""
    report = yield
    for name, fixture in item.funcargs.items() if report.failed else ():
        process = getattr(fixture, "process", None)
        if isinstance(process, Process):
            report.sections.append((f"Last lines of {name}", "\n".join(map(str, process.lines[-30:]))))
    return report


@pytest.fixture(scope="session")
def llama(tiny_model: MakeModel) -> Path:
    return tiny_model("llama", rope="llama3", num_key_value_heads=1, max_position_embeddings=2048)


@pytest_asyncio.fixture(scope="session", loop_scope=LOOP)
async def prefill(llama: Path) -> AsyncIterator[Worker]:
    """A prefill pod that tests share and leave as they found it; prompts above 48 tokens take several chunks."""
    worker = await Worker.start("prefill", llama, max_num_batched_tokens=48)
    yield worker
    await worker.kill()


@pytest_asyncio.fixture(scope="session", loop_scope=LOOP)
async def decode(llama: Path) -> AsyncIterator[Worker]:
    """A decode pod that tests share."""
    worker = await Worker.start("decode", llama, max_num_batched_tokens=48)
    yield worker
    await worker.kill()


@pytest_asyncio.fixture(scope="session", loop_scope=LOOP)
async def stack(llama: Path) -> AsyncIterator[Stack]:
    """A Baton that tests share and leave as they found it, with one prefill and one decode pod."""
    stack = await Stack.start(llama, "--num-blocks", "512", "--max-num-batched-tokens", str(STEP_TOKENS))
    yield stack
    await stack.stop()


@pytest_asyncio.fixture(loop_scope=LOOP)
async def start_worker(llama: Path) -> AsyncIterator[StartWorker]:
    """Return `start_worker(role, model=llama, **flags)`, whose workers live as long as the test."""
    started: list[Worker] = []

    async def start(role: Role, model: Path = llama, **flags: Any) -> Worker:
        worker = await Worker.start(role, model, **flags)
        started.append(worker)
        return worker

    yield start
    await asyncio.gather(*(worker.kill() for worker in started))
