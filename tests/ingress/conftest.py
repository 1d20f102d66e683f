"""Fixtures of the tests with nginx in front."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec
import pytest
import pytest_asyncio

from baton_gateway.tenancy.keys import Key, digest
from baton_gateway.tenancy.tenants import Tenant, TenantsFile
from tests.debian import NoProgramError, find_program
from tests.e2e.stack import Stack as WholeStack
from tests.gateway.harness import Stack, pods, running
from tests.gateway.tiny_models import byte_level_tokenizer, write_model

from .nginx import Nginx, nginx_before

LOOP: Final = "session"
KEY: Final = "bt-0a-of-who-may-ask-a-thousand-times-a-minute"
KEY_OF_ONE_REQUEST: Final = "bt-0b-of-who-may-ask-once-a-minute"


@pytest.fixture(scope="session")
def program(pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    try:
        return find_program("nginx", "nginx", pytestconfig.cache.mkdir("nginx"), "-v")
    except NoProgramError as error:
        pytest.skip(str(error))


@pytest_asyncio.fixture(scope="module", loop_scope=LOOP)
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A gateway with a scripted pod and limits for two tenants."""
    folder = tmp_path_factory.mktemp("gateway")
    model = write_model(folder / "tiny", byte_level_tokenizer())
    tenants = folder / "tenants.json"
    keys = [Key("0a", digest(KEY), "many"), Key("0b", digest(KEY_OF_ONE_REQUEST), "once")]
    limits = {
        "many": Tenant(requests_per_minute=1000, tokens_per_minute=100_000),
        "once": Tenant(requests_per_minute=1),
    }
    tenants.write_bytes(msgspec.json.encode(TenantsFile(limits, keys)))
    async with pods() as decodes, running(model, decodes, keepalive_s=0.2, tenants_file=tenants) as stack:
        stack.http.headers["authorization"] = f"Bearer {KEY}"
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope=LOOP)
async def nginx(program: Path, stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Nginx]:
    async with nginx_before(program, stack.port, tmp_path_factory.mktemp("nginx")) as nginx:
        yield nginx


@pytest_asyncio.fixture(scope="module", loop_scope=LOOP)
async def demo() -> AsyncIterator[WholeStack]:
    """Gateway, prefill and decode pod with the demo model."""
    stack = await WholeStack.start(None, "--num-blocks", "1024")
    yield stack
    await stack.stop()
