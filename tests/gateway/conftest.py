"""Fixtures of the gateway's tests."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from .fake_worker import echo
from .harness import Stack, pods, running
from .tiny_models import byte_level_tokenizer, write_model

SESSION = pytest.mark.asyncio(loop_scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run async tests with sockets in one loop: gRPC's channels and the shared gateway belong to it."""
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        item.add_marker(pytest.mark.timeout(120))
        alone = item.get_closest_marker("unit") is not None
        if not alone and isinstance(item, pytest.Function) and asyncio.iscoroutinefunction(item.obj):
            item.add_marker(SESSION, append=False)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_stack(model_folder: Path, processes: None) -> AsyncIterator[Stack]:
    async with pods() as decodes, running(model_folder, decodes, keepalive_s=0.2, request_timeout_s=10) as stack:
        yield stack


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    """The gateway most tests share, its one pod back at echoing and its memory of requests empty."""
    pod = shared_stack.pod
    pod.script = echo
    pod.cached_tokens = 0
    pod.jobs.clear()
    pod.cancels.clear()
    return shared_stack
