"""A release in a cluster: an API server, two gateways and a controller."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton_controller.config_follower import ConfigFollower
from baton_controller.controller import Controller
from baton_controller.main import build
from baton_controller.metrics import Metrics
from baton_controller.settings import ControllerSettings
from tests.kube.api_server import ApiServer

from .fake_gateway import FakeGateway

LABELS = {"app.kubernetes.io/instance": "rel", "app.kubernetes.io/component": "gateway"}
INTERVAL_S = 0.1
OWNER = "rel-controller"


class Release:
    """The state of a release that a test reads and changes."""

    def __init__(self, api: ApiServer, gateways: list[FakeGateway], config: Path) -> None:
        self.api = api
        self.gateways = gateways
        self.config = config
        self.metrics = Metrics()
        for number, gateway in enumerate(gateways):
            self.publish(f"gateway-{number}", gateway.port)
        pod = {"metadata": {}, "spec": {"containers": [{"name": "controller"}]}}
        api.put("deployments", OWNER, spec={"replicas": 1, "selector": {}, "template": pod})

    def publish(self, name: str, port: int) -> None:
        """Publish a gateway's address in its own EndpointSlice."""
        endpoint = {"addresses": ["127.0.0.1"], "targetRef": {"kind": "Pod", "name": name}}
        ports = [{"name": "http", "port": 1}, {"name": "admin", "port": port}]
        self.api.put("endpointslices", name, LABELS, addressType="IPv4", endpoints=[endpoint], ports=ports)

    @contextlib.asynccontextmanager
    async def controller(self) -> AsyncIterator[Controller]:
        """Run a controller until the block ends."""
        settings = ControllerSettings(
            namespace="default",
            release="rel",
            config_file=self.config,
            owner=OWNER,
            interval_s=INTERVAL_S,
            admin_port=0,
        )
        self.metrics = Metrics()
        controller = build(settings, ConfigFollower(self.config), self.api.client(), self.metrics)
        running = asyncio.create_task(controller.run())
        try:
            yield controller
        finally:
            controller.stop()
            await running

    def weights(self) -> dict[str, int]:
        """The weights that gateways read, by model."""
        return {model: entry["weight"] for model, entry in self._data("weights.json").items()}

    def analysis(self) -> dict[str, Any]:
        return self._data("analysis.json")

    def reasons(self) -> list[str]:
        return [event["reason"] for event in self.api.all("events")]

    def _data(self, key: str) -> dict[str, Any]:
        found = self.api.objects.get(("configmaps", "default", "rel-canary-status"), {})
        loaded: dict[str, Any] = json.loads(found.get("data", {}).get(key, "{}"))
        return loaded


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


@pytest.fixture
def release(tmp_path: Path, processes: None) -> Iterator[Release]:
    with ApiServer() as api, FakeGateway() as one, FakeGateway() as two:
        yield Release(api, [one, two], tmp_path / "controller.yaml")
