"""Who owns which field, with Helm's library, kubectl and an API server: `make owners KUBE=FOLDER`.

The folder has etcd, kube-apiserver, kube-controller-manager and kubectl.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import helm_python
import pytest
import urllib3
import yaml
from helm_python import _native

from tests.helm.charts import CHART, NAMESPACE, RELEASE, Manifest, Values, render
from tests.helm.owners import DECODE, PREFILL, TOOLS, Objects, Owners, RefusedError, Release, Tool

from .control_plane import ControlPlane

pytestmark = pytest.mark.timeout(300)
urllib3.disable_warnings()


@dataclass
class _RealRelease(Release):
    """history: the values of each revision."""

    plane: ControlPlane
    chart: Path = CHART
    history: list[Values] = field(default_factory=list)

    def objects(self) -> Objects:
        kinds = self.plane.kubectl("api-resources", "--namespaced", "--verbs=list", "--output=name").split()
        kinds = [kind for kind in kinds if kind not in ("events", "events.events.k8s.io", "leases.coordination.k8s.io")]
        text = self.plane.kubectl("get", ",".join(kinds), f"--namespace={NAMESPACE}", "--output=json")
        return {(found["kind"], found["metadata"]["name"]) for found in json.loads(text)["items"]}

    def hand_over(self) -> None:
        for name, replicas in zip((PREFILL, DECODE), self.replicas, strict=True):
            config = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}}
            config["spec"] = {"replicas": replicas}
            self._kubectl("apply", "--server-side", "--field-manager=handover", stdin=json.dumps(config))

    def set_last_applied(self, **model: Any) -> None:
        raise NotImplementedError

    def _kubectl(self, *arguments: str, stdin: str = "") -> None:
        try:
            self.plane.kubectl(*arguments, f"--namespace={NAMESPACE}", "--filename=-", stdin=stdin)
        except subprocess.CalledProcessError as error:
            raise RefusedError(error.stderr) from None


class HelmRelease(_RealRelease):
    """The library's Python wrapper does not pass on all options that it has."""

    def apply(self, values: Values) -> None:
        self.history.append(values)
        verb = "helm_upgrade" if len(self.history) > 1 else "helm_install"
        side = self.tool.server_side
        how = {"server_side_apply": str(side).lower() if verb == "helm_upgrade" else side}
        # The API server validates, where it is of a version that the chart supports.
        how["disable_openapi_validation"] = True
        with self._config() as config, helm_python.Chart.load(self.chart) as chart:
            arguments = (_native.HANDLE(0), chart._raw(), None, RELEASE, json.dumps(values), self._options(**how))
            try:
                _native.call_string(verb, config._raw(), *arguments)
            except helm_python.HelmError as error:
                raise RefusedError(str(error)) from None

    def rollback(self, revision: int, force: bool = False) -> None:
        self.history.append(self.history[revision - 1])
        with self._config() as config:
            try:
                options = self._options(version=revision, force_conflicts=force or self.tool.force)
                _native.call_status("helm_rollback", config._raw(), RELEASE, options)
            except helm_python.HelmError as error:
                raise RefusedError(str(error)) from None

    def uninstall(self) -> None:
        with self._config() as config:
            config.uninstall(RELEASE)

    def _config(self) -> helm_python.Config:
        # Its default of 20 requests a second would be most of the time.
        return helm_python.Config(
            kubeconfig_path=self.plane.kubeconfig, namespace=NAMESPACE, qps=1000, burst_limit=1000
        )

    def _options(self, **more: Any) -> str:
        return json.dumps({"force_conflicts": self.tool.force, **more})


class KubectlRelease(_RealRelease):
    def apply(self, values: Values) -> None:
        before = self._manifests(self.history[-1]) if self.history else []
        self.history.append(values)
        now = self._manifests(values)
        self._kubectl("apply", *self._how(), stdin=_text(now))
        kept = {_name(manifest) for manifest in now}
        gone = [manifest for manifest in before if _name(manifest) not in kept]
        if gone:
            self._kubectl("delete", stdin=_text(gone))

    def rollback(self, revision: int, force: bool = False) -> None:
        self.apply(self.history[revision - 1])

    def uninstall(self) -> None:
        self._kubectl("delete", stdin=_text(self._manifests(self.history[-1])))

    def set_last_applied(self, **model: Any) -> None:
        values = self.values(**model)
        self._kubectl("apply", "set-last-applied", stdin=_text(self._manifests(values)))

    def _how(self) -> list[str]:
        how = ["--validate=false"]
        if self.tool.server_side:
            how += ["--server-side", f"--field-manager={self.tool.manager}"]
            how += ["--force-conflicts"] if self.tool.force else []
        return how

    def _manifests(self, values: Values) -> list[Manifest]:
        found = render(values, helm_python.Chart.load(self.chart))
        return [manifest for manifest in found if "helm.sh/hook" not in manifest["metadata"].get("annotations", {})]


def _name(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _text(manifests: list[Manifest]) -> str:
    return yaml.safe_dump_all(manifests)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(Path(os.environ["KUBE"]), tmp_path_factory.mktemp("plane")) as running:
        yield running


@pytest.fixture(params=TOOLS)
def tool(request: pytest.FixtureRequest) -> Tool:
    return TOOLS[request.param]


@pytest.fixture
def release(plane: ControlPlane, tool: Tool, tmp_path: Path) -> Iterator[Release]:
    plane.make_namespace(NAMESPACE)
    kind = HelmRelease if tool.name == "helm" else KubectlRelease
    yield kind(tool, plane.client(), tmp_path, plane)
    plane.remove_namespace(NAMESPACE)


class TestOwners(Owners):
    """With the tools themselves."""
