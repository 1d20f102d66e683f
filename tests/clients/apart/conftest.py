"""A local Baton for clients that live in an environment without it."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import openai
import pytest

from tests.conformance.local_baton import MODEL_NAME, local_baton

MODEL_FOLDER: Final = Path(__file__).parents[3] / "shared" / "baton_demo" / "model"
KEY: Final = "bt-0a-of-who-may-ask-for-anything"
KEY_OF_ONE_REQUEST: Final = "bt-0b-of-who-may-ask-once-a-minute"
TENANTS: Final = f"""
tenants:
  anything: {{}}
  once: {{requests_per_minute: 1}}
keys:
  - {{id: 0a, tenant: anything, hash: {hashlib.sha256(KEY.encode()).hexdigest()}}}
  - {{id: 0b, tenant: once, hash: {hashlib.sha256(KEY_OF_ONE_REQUEST.encode()).hexdigest()}}}
"""


@dataclass(frozen=True)
class Baton:
    """Where it is, and the official client for it, which says what others must get."""

    address: str
    openai: openai.OpenAI
    model: str = MODEL_NAME

    @property
    def url(self) -> str:
        return f"{self.address}/v1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--baton", default="baton", help="the command that starts Baton")


@pytest.fixture(scope="session")
def baton(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baton]:
    """Gateway, prefill and decode pod with the demo model, for KEY and KEY_OF_ONE_REQUEST."""
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    tenants.write_text(TENANTS)
    with local_baton(request.config.getoption("--baton"), BATON_TENANTS_FILE=str(tenants)) as address:
        yield Baton(address, openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0))
