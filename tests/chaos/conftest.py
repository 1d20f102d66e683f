"""Fixtures of the fault tests."""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from tests.conftest import MakeModel

from .fleet import Fleet

LOOP: Final = "session"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run async tests in one loop: gRPC's channels and the shared processes' pipes belong to it."""
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        if isinstance(item, pytest.Function) and asyncio.iscoroutinefunction(item.obj):
            item.add_marker(pytest.mark.asyncio(loop_scope=LOOP), append=False)


@pytest.fixture(scope="session")
def llama(tiny_model: MakeModel) -> Path:
    return tiny_model("llama", rope="llama3", num_key_value_heads=1, max_position_embeddings=2048)


@pytest.fixture
def seed() -> int:
    """Of everything that is left to chance; CHAOS_SEED gives that of a run before."""
    seed = int(os.environ.get("CHAOS_SEED") or random.randrange(10**6))
    print(f"CHAOS_SEED={seed}", flush=True)
    return seed


@pytest_asyncio.fixture(loop_scope=LOOP)
async def fleet(llama: Path, tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = await Fleet.start(llama, tmp_path)
    yield fleet
    await fleet.stop()
