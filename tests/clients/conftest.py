"""Fixtures of the tests of independent clients."""

from collections.abc import AsyncIterator
from typing import Final

import pytest
import pytest_asyncio

from tests.e2e.stack import Stack

# They need other versions of what constraints.txt pins: `make clients`.
collect_ignore = ["apart"]

LOOP: Final = "session"
API_KEY: Final = "sk-of-the-tests"


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> None:
    """Libraries of Hugging Face would otherwise ask the hub for tokenizers and data sets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")


@pytest_asyncio.fixture(scope="session", loop_scope=LOOP)
async def demo() -> AsyncIterator[Stack]:
    """A Baton with the demo model, one prefill and one decode pod, which asks for a key."""
    stack = await Stack.start(None, "--num-blocks", "1024", api_key=API_KEY)
    yield stack
    await stack.stop()
