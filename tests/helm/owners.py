"""A release from installation to uninstall, applied by any tool, while a controller and operators write to it too.

`test_owners.py` plays it against a double of the API server, `tests/k8s/owners.py` with the tools themselves.
"""

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kubernetes import client

from baton_controller.canary_map import CanaryMap
from baton_controller.canary_reconciler import CanaryReconciler
from baton_controller.config_file import ConfigFile, read_config
from baton_controller.counters import Counters, Reading
from baton_controller.events import Events
from baton_controller.metrics import Metrics
from baton_controller.report import Report
from baton_controller.scaler import Scaler

from .charts import NAMESPACE, Values

PREFILL, DECODE = "rel-baton-a-prefill", "rel-baton-a-decode"
VALUES_MAP, STATUS_MAP, OVERRIDE_MAP = (f"rel-baton-canary-{name}" for name in ("values", "status", "override"))
WAIT_S = 30
SCALER: Values = {"scaler": {"enabled": True}}
Objects = set[tuple[str, str]]


class RefusedError(Exception):
    """The tool refused to apply; the message has its reason."""


@dataclass(frozen=True)
class Tool:
    """How a tool applies. lookup: it renders with a view of the cluster. manager: its name in managedFields.

    force: it takes fields from their owners.
    """

    name: str
    server_side: bool
    lookup: bool
    manager: str = "helm"
    force: bool = False


TOOLS = {
    "Helm 4": Tool("helm", server_side=True, lookup=True),
    "Helm 4 --server-side=false": Tool("helm", server_side=False, lookup=True),
    "kubectl apply": Tool("kubectl", server_side=False, lookup=False, manager="kubectl-client-side-apply"),
    "kubectl apply --server-side": Tool("kubectl", server_side=True, lookup=False, manager="kubectl"),
    "Argo CD with ServerSideApply": Tool(
        "kubectl", server_side=True, lookup=False, manager="argocd-controller", force=True
    ),
}


@dataclass
class Release(ABC):
    """A release in a namespace of its own. Revisions count from 1."""

    tool: Tool
    api: client.ApiClient
    folder: Path
    served: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        canary_map = CanaryMap(self.api, NAMESPACE, "rel-baton-canary", "rel-baton-controller")
        self.canary = CanaryReconciler(canary_map, Events(self.api, NAMESPACE, STATUS_MAP, "one"), Metrics())

    def upgrade(self, **model: Any) -> None:
        """Install or upgrade. Raises RefusedError."""
        self.apply(self.values(**model))

    def values(self, **model: Any) -> Values:
        """Return the values of a release with one model that has these settings."""
        return {"peerToken": {"existingSecret": "token"}, "models": {"a": _sized(model)}}

    @abstractmethod
    def apply(self, values: Values) -> None:
        """Raises RefusedError."""

    @abstractmethod
    def rollback(self, revision: int) -> None:
        """Raises RefusedError."""

    @abstractmethod
    def uninstall(self) -> None: ...

    @abstractmethod
    def objects(self) -> Objects:
        """Return kind and name of all objects in the namespace but Events."""

    @abstractmethod
    def before_scaler(self) -> None:
        """Do the step that OPERATIONS.md requires of tools without lookup before a scaler is turned on."""

    def reconcile(self, now: float = 1000, requests: int = 0, config: ConfigFile | None = None) -> None:
        """Have the controller reconcile once, with the configuration from the chart.

        requests: of each revision since the last call, all successful and identical.
        """
        config = config or self.config
        self.served += requests
        times = {le: float(self.served) for le in ("0.1", "+Inf")}
        counters = Counters(ok=float(self.served), ttft=times, tpot=times)
        specs = {name: model.canary for name, model in config.models.items() if model.canary}
        readings = {
            name: Reading(revisions={spec.stable: counters, spec.revision: counters}) for name, spec in specs.items()
        }
        reports = {"gateway": Report(readings)}
        self.canary.reconcile(config, reports, now)
        Scaler(self.api, NAMESPACE, Metrics()).reconcile(config, reports, now, self.canary.weights)

    def scale(self, replicas: int) -> None:
        """Have the controller scale the workers to a size. Bounds force the size more simply than a load."""
        config = self.config
        scaler = config.models["a"].scaler
        assert scaler is not None
        bounds = {
            role: msgspec.structs.replace(getattr(scaler, role), min=replicas, max=replicas)
            for role in ("prefill", "decode")
        }
        models = {"a": msgspec.structs.replace(config.models["a"], scaler=msgspec.structs.replace(scaler, **bounds))}
        self.reconcile(config=msgspec.structs.replace(config, models=models))

    @property
    def config(self) -> ConfigFile:
        path = self.folder / "controller.yaml"
        path.write_text(self.data("rel-baton-controller")["controller.yaml"])
        return read_config(path)

    def data(self, config_map: str) -> dict[str, str]:
        return client.CoreV1Api(self.api).read_namespaced_config_map(config_map, NAMESPACE).data or {}

    def override(self, text: str | None) -> None:
        """As `kubectl patch` does."""
        self.patch(OVERRIDE_MAP, None if text is None else {"weights": text}, "kubectl-patch")

    def patch(self, config_map: str, data: Values | None, manager: str) -> None:
        """Merge data into a ConfigMap, as another client."""
        core = client.CoreV1Api(self.api)
        core.patch_namespaced_config_map(config_map, NAMESPACE, {"data": data}, field_manager=manager)

    def scale_by_hand(self, replicas: int) -> None:
        """As `kubectl scale` does."""
        apps = client.AppsV1Api(self.api)
        for name in (PREFILL, DECODE):
            body = {"spec": {"replicas": replicas}}
            apps.patch_namespaced_deployment_scale(name, NAMESPACE, body, field_manager="kubectl")

    @property
    def replicas(self) -> tuple[int, int]:
        """Return the replicas of prefill and decode."""
        apps = client.AppsV1Api(self.api)
        found = [apps.read_namespaced_deployment(name, NAMESPACE).spec for name in (PREFILL, DECODE)]
        return found[0].replicas, found[1].replicas

    @property
    def weight(self) -> int:
        """Return the canary's weight that the controller wrote."""
        found: int = json.loads(self.data(STATUS_MAP)["weights.json"])["a"]["weight"]
        return found


def canary(revision: str, **more: Any) -> Values:
    return {"canary": {"enabled": True, "revision": revision, "analysis": {"enabled": True}, **more}}


def until(true: Callable[[], bool], what: str) -> None:
    """Wait until the cluster's own controllers have acted."""
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def _sized(model: Values) -> Values:
    return {"prefill": {"replicas": 2}, "decode": {"replicas": 2}, **model}


def off(release: Release, live: int) -> Values:
    """Return values without a scaler. live: the number of replicas, which tools without lookup need."""
    if release.tool.lookup:
        return {}
    return {role: {"replicas": live} for role in ("prefill", "decode")}


class Owners:
    """The sequences of steps. A subclass provides the fixture `release` with an otherwise empty namespace."""

    def test_canaries_come_and_go(self, release: Release) -> None:
        before = release.objects()
        release.upgrade()
        release.upgrade(worker={"startupSeconds": 60})
        release.upgrade(**canary("v2"))
        release.reconcile(now=1000)
        assert release.weight == 5
        release.reconcile(now=1301, requests=1000)
        assert release.weight == 10
        release.override("a: 100")
        release.reconcile(now=1302)
        assert release.weight == 100
        release.upgrade(**canary("v2"), worker={"startupSeconds": 90})
        assert (release.weight, release.data(OVERRIDE_MAP)) == (100, {"weights": "a: 100"})
        release.override(None)
        release.upgrade(**canary("v3"))
        release.reconcile(now=1303)
        assert release.weight == 5
        release.rollback(4)
        release.reconcile(now=1304)
        assert release.weight == 5
        release.upgrade()  # without the controller: the ConfigMap that it owns is deleted with it
        until(lambda: ("ConfigMap", STATUS_MAP) not in release.objects(), "the canaries' status is gone")
        release.upgrade(**canary("v4"))
        release.reconcile(now=1305)
        release.override("a: 0")
        release.uninstall()
        until(lambda: release.objects() <= before, "nothing is left")

    def test_a_release_with_a_scaler_from_the_beginning(self, release: Release) -> None:
        before = release.objects()
        release.upgrade(**SCALER)
        assert release.replicas == (1, 1)
        for size, startup in ((5, 60), (7, 90)):
            release.scale(size)
            release.upgrade(**SCALER, worker={"startupSeconds": startup})
            assert release.replicas == (size, size)
        for revision in (2, 1):
            release.rollback(revision)
            assert release.replicas == (7, 7)
        release.uninstall()
        until(lambda: release.objects() <= before, "nothing is left")

    def test_a_scaler_that_is_turned_on_and_off(self, release: Release) -> None:
        before = release.objects()
        release.upgrade()
        release.before_scaler()
        release.upgrade(**SCALER)
        assert release.replicas == (2, 2)
        release.scale(5)
        for startup in (60, 90):
            release.upgrade(**SCALER, worker={"startupSeconds": startup})
            assert release.replicas == (5, 5)
        release.scale(7)
        release.upgrade(**off(release, 7))
        assert release.replicas == (7, 7)
        # After scaling by hand to the number in the values, an upgrade keeps that number.
        release.scale_by_hand(2)
        release.upgrade()
        assert release.replicas == (2, 2)
        release.uninstall()
        until(lambda: release.objects() <= before, "nothing is left")

    def test_a_rollback_across_a_scaler_that_was_on_first(self, release: Release) -> None:
        release.upgrade(**SCALER)
        release.scale(5)
        release.upgrade(**off(release, 5))
        release.before_scaler()
        for revision in (1, 2):
            release.rollback(revision)
            assert release.replicas == (5, 5)

    def test_a_rollback_to_a_number_of_replicas(self, release: Release) -> None:
        release.upgrade()
        release.before_scaler()
        release.upgrade(**SCALER)
        release.scale(5)
        if release.tool.server_side and not release.tool.force:
            owner = 'conflict with "baton-controller" with subresource "scale" using apps/v1: .spec.replicas'
            with pytest.raises(RefusedError, match=re.escape(owner)):
                release.rollback(1)
            assert release.replicas == (5, 5)
            release.tool = replace(release.tool, force=True)
        release.rollback(1)
        assert release.replicas == (2, 2)

    def test_an_upgrade_that_fails_half_way(self, release: Release) -> None:
        before = release.objects()
        model = {**SCALER, **canary("v2")}
        release.upgrade(**model)
        release.scale(5)
        unselected = {"podLabels": {"baton.dev/role": "none"}}
        with pytest.raises(RefusedError, match="`selector` does not match template `labels`"):
            release.upgrade(**model, decode=unselected, worker={"startupSeconds": 60})
        release.scale(6)
        release.upgrade(**model, worker={"startupSeconds": 90})
        assert (release.replicas, release.weight) == ((6, 6), 5)
        # Helm's uninstall removes the objects of the last revision, even if applying that one was refused.
        with pytest.raises(RefusedError):
            release.upgrade(decode=unselected)
        release.upgrade(**model)
        release.uninstall()
        until(lambda: release.objects() <= before, "nothing is left")
