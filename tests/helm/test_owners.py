"""A release from installation to uninstall, as each tool applies it, beside a controller and operators that write, too.

The API server is that of tests/kube, which refuses what another manager owns. Helm's engine renders the chart.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton_controller.canary import Canary
from baton_controller.canary_map import CanaryMap
from baton_controller.config_file import RoleSpec, read_config
from baton_controller.events import Events
from baton_controller.metrics import Metrics
from baton_controller.scaler import Scaler
from tests.kube.api_server import KINDS, ApiServer, Place, StatusError
from tests.kube.fields import three_way

from .charts import NAMESPACE, Manifest, Values, render
from .test_lookup import _Api as LookupApi
from .test_lookup import api, upgraded  # noqa: F401

RESOURCES = {kind: resource for resource, (_, kind) in KINDS.items()}
DECODE, STATUS = "rel-baton-a-decode", "rel-baton-canary-status"


@dataclass(frozen=True)
class Tool:
    """How a tool applies. lookup: it renders with a view of the cluster. force: it takes fields from their owners."""

    server_side: bool
    lookup: bool
    force: bool = False


TOOLS = {
    "Helm 4": Tool(server_side=True, lookup=True),
    "Helm 3, Helm 4 --server-side=false": Tool(server_side=False, lookup=True),
    "kubectl apply": Tool(server_side=False, lookup=False),
    "kubectl apply --server-side": Tool(server_side=True, lookup=False),
    "Argo CD with ServerSideApply": Tool(server_side=True, lookup=False, force=True),
}


@dataclass
class Release:
    tool: Tool
    server: ApiServer
    view: LookupApi
    folder: Path
    history: list[list[Manifest]] = field(default_factory=list)

    def upgrade(self, **model: Any) -> None:
        values = _values(model)
        for (resource, _, name), body in self.server.objects.items():
            if resource in ("deployments", "configmaps"):
                content = {key: body[key] for key in ("spec", "data") if key in body}
                metadata = {"namespace": NAMESPACE, **body["metadata"]}
                self.view.put(body["kind"], name, **content, metadata=metadata)
        manifests = upgraded(self.view, values) if self.tool.lookup else render(values)
        self._bring(_without_hooks(manifests))

    def rollback(self, revision: int) -> None:
        self._bring(self.history[revision - 1])

    def uninstall(self) -> None:
        self._bring([])

    def _bring(self, manifests: list[Manifest]) -> None:
        before = {_name(found): found for found in self.history[-1]} if self.history else {}
        self.history.append(manifests)
        for manifest in manifests:
            self._apply(before.get(_name(manifest)), copy.deepcopy(manifest))
        for kind, name in before.keys() - {_name(found) for found in manifests}:
            self.server.answer("delete", Place(RESOURCES[kind], NAMESPACE, name, None), {}, None)

    def _apply(self, before: Manifest | None, manifest: Manifest) -> None:
        kind, name = _name(manifest)
        place = Place(RESOURCES[kind], NAMESPACE, name, None)
        live = self.server.objects.get((place.resource, NAMESPACE, name))
        query = {"fieldManager": "helm", "force": str(self.tool.force).lower()}
        if self.tool.server_side:
            self.server.answer("apply", place, query, manifest)
        elif live is None:
            self.server.answer("create", place, query, manifest)
        else:
            self.server.answer("update", place, query, three_way(before or {}, manifest, live))

    def hand_over(self, replicas: int) -> None:
        """Give the replicas of all workers a second owner."""
        for name in (DECODE, "rel-baton-a-prefill"):
            config = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}}
            config["spec"] = {"replicas": replicas}
            place = Place("deployments", NAMESPACE, name, None)
            self.server.answer("apply", place, {"fieldManager": "handover"}, config)

    def set_last_applied(self, **model: Any) -> None:
        """As `kubectl apply set-last-applied` does."""
        self.history[-1] = _without_hooks(render(_values(model)))

    def reconcile(self, now: float) -> None:
        """Have the controller look at its canaries, by the configuration that the chart has given it."""
        config = self.folder / "controller.yaml"
        config.write_text(self.get("configmaps", "rel-baton-controller")["data"]["controller.yaml"])
        client = self.server.client()
        canary_map = CanaryMap(client, NAMESPACE, "rel-baton-canary", "rel-baton-controller")
        Canary(canary_map, Events(client, NAMESPACE, STATUS, "one"), Metrics()).reconcile(read_config(config), {}, now)

    def scale(self, replicas: int) -> None:
        """Have the controller size the decode pods."""
        role = RoleSpec(deployment=DECODE, max=9)
        Scaler(self.server.client(), NAMESPACE, Metrics())._scale(role, replicas)

    def override(self, text: str | None) -> None:
        """As `kubectl patch` does."""
        place = Place("configmaps", NAMESPACE, "rel-baton-canary-override", None)
        data = None if text is None else {"weights": text}
        self.server.answer("patch", place, {"fieldManager": "kubectl-patch"}, {"data": data})

    def get(self, resource: str, name: str) -> Manifest:
        return self.server.objects[resource, NAMESPACE, name]

    @property
    def replicas(self) -> Any:
        return self.get("deployments", DECODE)["spec"]["replicas"]

    @property
    def weights(self) -> Any:
        return yaml.safe_load(self.get("configmaps", STATUS)["data"]["weights.json"])["a"]["weight"]


def _values(model: Values) -> Values:
    workers = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}
    return {"peerToken": {"existingSecret": "token"}, "models": {"a": {**workers, **model}}}


def _without_hooks(manifests: list[Manifest]) -> list[Manifest]:
    return [found for found in manifests if "helm.sh/hook" not in found["metadata"].get("annotations", {})]


def _name(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


@pytest.fixture(params=TOOLS)
def release(request: pytest.FixtureRequest, api: LookupApi, tmp_path: Path) -> Iterator[Release]:  # noqa: F811
    with ApiServer() as server:
        yield Release(TOOLS[request.param], server, api, tmp_path)


def canary(revision: str, **more: Any) -> Values:
    return {"canary": {"enabled": True, "revision": revision, "analysis": {"enabled": True}, **more}}


def test_canaries_come_and_go(release: Release) -> None:
    release.upgrade()
    release.upgrade(worker={"startupSeconds": 60})
    release.upgrade(**canary("v2"))
    release.reconcile(now=1000)
    assert release.weights == 5
    release.override("a: 100")
    release.reconcile(now=1001)
    assert release.weights == 100
    release.upgrade(**canary("v2"), worker={"startupSeconds": 90})
    assert (release.weights, release.get("configmaps", "rel-baton-canary-override")["data"]) == (
        100,
        {"weights": "a: 100"},
    )
    release.override(None)
    release.upgrade(**canary("v3"))
    release.reconcile(now=1002)
    assert release.weights == 5
    release.rollback(4)
    release.reconcile(now=1003)
    assert release.weights == 5
    release.upgrade()  # without the controller: what it made goes with it
    assert ("configmaps", NAMESPACE, STATUS) not in release.server.objects
    release.upgrade(**canary("v4"))
    release.reconcile(now=1004)
    release.override("a: 0")
    release.uninstall()
    assert [name for name in release.server.objects if name[0] != "events"] == []


def test_a_release_with_a_scaler_from_the_beginning(release: Release) -> None:
    scaler = {"scaler": {"enabled": True}}
    release.upgrade(**scaler)
    assert release.replicas == 1
    for size, startup in ((5, 60), (7, 90)):
        release.scale(size)
        release.upgrade(**scaler, worker={"startupSeconds": startup})
        assert release.replicas == size
    for revision in (2, 1):
        release.rollback(revision)
        assert release.replicas == 7
    release.uninstall()
    assert not release.server.objects


def test_a_scaler_that_is_turned_on_and_off(release: Release) -> None:
    """Tools that do not see the cluster need what OPERATIONS.md says."""
    tool = release.tool
    scaler = {"scaler": {"enabled": True}}
    release.upgrade()
    if not tool.lookup and tool.server_side:
        release.hand_over(2)
    elif not tool.lookup:
        release.set_last_applied(**scaler)
    release.upgrade(**scaler)
    assert release.replicas == 2
    release.scale(5)
    for startup in (60, 90):
        release.upgrade(**scaler, worker={"startupSeconds": startup})
        assert release.replicas == 5
    release.scale(7)
    if tool.lookup:
        release.upgrade()
        assert release.replicas == 7
        # Scaled by hand to what values say, it goes back to them.
        place = Place("deployments", NAMESPACE, DECODE, "scale")
        release.server.answer("patch", place, {"fieldManager": "kubectl"}, {"spec": {"replicas": 2}})
        release.upgrade()
        assert release.replicas == 2
    else:
        release.tool = replace(tool, force=True)
        release.upgrade(decode={"replicas": 7})
        assert release.replicas == 7
    release.uninstall()
    assert not release.server.objects


def test_a_field_of_somebody_else_is_refused_in_the_words_of_the_api_server() -> None:
    with ApiServer() as server:
        place = Place("configmaps", NAMESPACE, "x", None)
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "data": {"canary.json": "{}"}}
        server.answer("apply", place, {"fieldManager": "helm"}, config)
        server.answer("patch", place, {}, {"data": {"canary.json": "{1}"}})
        with pytest.raises(StatusError) as refused:
            server.answer("apply", place, {"fieldManager": "helm"}, config)
        message = 'Apply failed with 1 conflict: conflict with "OpenAPI-Generator" using v1: .data.canary.json'
        assert (refused.value.code, refused.value.body["message"]) == (409, message)
        server.answer("apply", place, {"fieldManager": "helm", "force": "true"}, config)
        assert server.objects["configmaps", NAMESPACE, "x"]["data"] == {"canary.json": "{}"}
