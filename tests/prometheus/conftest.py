"""Fixtures of the tests with a real Prometheus."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import pytest_asyncio
import yaml

from baton_gateway.tenancy.keys import Key, digest
from baton_gateway.tenancy.tenants import Tenant, TenantsFile
from tests.debian import NoProgramError, find_program
from tests.e2e.collector import Collector, collecting
from tests.e2e.stack import Stack
from tests.helm.charts import CHART, NAMESPACE, of_kind, render

from .server import SCRAPE_S, Prometheus, prometheus_of

LOOP: Final = "session"
DASHBOARDS = CHART / "dashboards"

_KEY = "bt-0a-of-who-may-ask-a-thousand-times-a-minute"
_KEY_OF_ONE_REQUEST = "bt-0b-of-who-may-ask-once-a-minute"
_ROLES = ("gateway", "prefill", "decode")
_LOAD_S = 8


@dataclass(frozen=True)
class Watched:
    """A Baton that has had some load, and the Prometheus that saw it."""

    stack: Stack
    prometheus: Prometheus
    collector: Collector
    begin: float
    end: float


def rendered_rules(**values: Any) -> dict[str, Any]:
    """Return the chart's rules as Prometheus reads them, by name."""
    manifests = render({**values, "monitoring": {"prometheusRule": {"enabled": True}}})
    return {rule["metadata"]["name"]: rule["spec"] for rule in of_kind(manifests, "PrometheusRule")}


def write_rules(folder: Path, **values: Any) -> list[Path]:
    """Write them into a new folder; return the files."""
    folder.mkdir()
    files = []
    for name, content in rendered_rules(**values).items():
        files.append(folder / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump(content))
    return files


@pytest.fixture(scope="session")
def rules(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_rules(tmp_path_factory.mktemp("chart") / "rules")


def _program(name: str, config: pytest.Config) -> Path:
    assert config.cache is not None
    try:
        return find_program(name, "prometheus", config.cache.mkdir("prometheus"))
    except NoProgramError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def promtool(pytestconfig: pytest.Config) -> Path:
    return _program("promtool", pytestconfig)


@pytest.fixture(scope="session")
def program(pytestconfig: pytest.Config) -> Path:
    return _program("prometheus", pytestconfig)


@pytest_asyncio.fixture(scope="session", loop_scope=LOOP)
async def watched(program: Path, rules: list[Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    folder = tmp_path_factory.mktemp("prometheus")
    tenants = folder / "tenants.json"
    limits = {
        "many": Tenant(requests_per_minute=100_000, tokens_per_minute=10_000_000),
        "once": Tenant(requests_per_minute=1),
    }
    keys = [Key("0a", digest(_KEY), "many"), Key("0b", digest(_KEY_OF_ONE_REQUEST), "once")]
    tenants.write_bytes(msgspec.json.encode(TenantsFile(limits, keys)))
    with collecting() as collector:
        env = {"BATON_TENANTS_FILE": str(tenants), "BATON_OTLP_ENDPOINT": collector.endpoint}
        stack = await Stack.start(None, "--num-blocks", "512", env=env)
        stack.http.headers["authorization"] = f"Bearer {_KEY}"
        try:
            targets = {role: stack.metrics_addresses(role) for role in _ROLES}
            async with prometheus_of(program, NAMESPACE, targets, rules, folder) as prometheus:
                # What counters gain before they are first seen, nobody sees.
                await prometheus.until("count(up == 1) == 3", timeout_s=20)
                begin = time.time()
                while time.time() < begin + _LOAD_S:
                    await _round(stack)
                await asyncio.sleep(2 * SCRAPE_S)
                yield Watched(stack, prometheus, collector, begin, time.time())
        finally:
            await stack.stop()


async def _round(stack: Stack) -> None:
    """Send some of everything. Prompts are new each time, so that they are computed."""
    text = f"{time.monotonic_ns()} and so on. " * 20
    message = [{"role": "user", "content": text}]
    sent = [
        stack.complete(text, max_tokens=40, stream=True, ignore_eos=True),
        stack.complete(text, max_tokens=20, n=2),
        stack.complete(text, max_tokens=0),
        stack.http.post("/v1/chat/completions", json={"model": stack.model, "messages": message, "max_tokens": 20}),
        stack.http.post("/v1/responses", json={"model": "none", "input": text}),
        stack.http.post(
            "/v1/completions",
            json={"model": stack.model, "prompt": "hello", "max_tokens": 2},
            headers={"authorization": f"Bearer {_KEY_OF_ONE_REQUEST}"},
        ),
    ]
    await asyncio.gather(*sent)
