"""Field ownership with Helm's library, kubectl and a real API server: `make owners KUBE=FOLDER`.

The folder has etcd, kube-apiserver, kube-controller-manager and kubectl.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
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
    plane: ControlPlane
    chart: Path = CHART

    def objects(self) -> Objects:
        kinds = self.plane.kubectl("api-resources", "--namespaced", "--verbs=list", "--output=name").split()
        kinds = [kind for kind in kinds if kind not in ("events", "events.events.k8s.io", "leases.coordination.k8s.io")]
        text = self.plane.kubectl("get", ",".join(kinds), f"--namespace={NAMESPACE}", "--output=json")
        return {(found["kind"], found["metadata"]["name"]) for found in json.loads(text)["items"]}

    def _kubectl(self, *arguments: str, stdin: str = "") -> None:
        try:
            self.plane.kubectl(*arguments, f"--namespace={NAMESPACE}", "--filename=-", stdin=stdin)
        except subprocess.CalledProcessError as error:
            raise RefusedError(error.stderr) from None


@dataclass
class HelmRelease(_RealRelease):
    """The library's Python wrapper does not pass on all options that it has."""

    installed: bool = False

    def apply(self, values: Values) -> None:
        side = self.tool.server_side
        options: Values = {"server_side_apply": str(side).lower() if self.installed else side}
        # The API server validates, where it is of a version that the chart supports.
        options["disable_openapi_validation"] = True
        verb = "helm_upgrade" if self.installed else "helm_install"
        self.installed = True
        with self._config() as config, helm_python.Chart.load(self.chart) as chart, _refusals():
            arguments = (_native.HANDLE(0), chart._raw(), None, RELEASE, json.dumps(values), self._options(**options))
            _native.call_string(verb, config._raw(), *arguments)

    def rollback(self, revision: int) -> None:
        with self._config() as config, _refusals():
            _native.call_status("helm_rollback", config._raw(), RELEASE, self._options(version=revision))

    def uninstall(self) -> None:
        with self._config() as config:
            config.uninstall(RELEASE)

    def before_scaler(self) -> None:
        """The chart looks up how many there are."""

    def _config(self) -> helm_python.Config:
        # Its default of 20 requests a second would be most of the time.
        return helm_python.Config(
            kubeconfig_path=self.plane.kubeconfig, namespace=NAMESPACE, qps=1000, burst_limit=1000
        )

    def _options(self, **more: Any) -> str:
        return json.dumps({"force_conflicts": self.tool.force, **more})


@dataclass
class KubectlRelease(_RealRelease):
    """history: the manifests of each revision."""

    history: list[list[Manifest]] = field(default_factory=list)

    def apply(self, values: Values) -> None:
        found = render(values, helm_python.Chart.load(self.chart))
        self._bring([one for one in found if "helm.sh/hook" not in one["metadata"].get("annotations", {})])

    def rollback(self, revision: int) -> None:
        self._bring(self.history[revision - 1])

    def uninstall(self) -> None:
        self._remove([])

    def before_scaler(self) -> None:
        for name, replicas in zip((PREFILL, DECODE), self.replicas, strict=True):
            if self.tool.server_side:
                config = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}}
                config["spec"] = {"replicas": replicas}
                self._kubectl(
                    "apply", "--server-side", "--field-manager=handover", "--validate=false", stdin=json.dumps(config)
                )
            else:
                target = (
                    "apply",
                    "edit-last-applied",
                    "--validate=false",
                    f"deployment/{name}",
                    f"--namespace={NAMESPACE}",
                )
                self.plane.kubectl(*target, KUBE_EDITOR="sed -i /replicas:/d")

    def _bring(self, manifests: list[Manifest]) -> None:
        self.history.append(manifests)
        how = ["--validate=false"]
        if self.tool.server_side:
            how += ["--server-side", f"--field-manager={self.tool.manager}"]
            how += ["--force-conflicts"] if self.tool.force else []
        self._kubectl("apply", *how, stdin=_text(manifests))
        self._remove(manifests)

    def _remove(self, kept: list[Manifest]) -> None:
        """Delete all objects that were applied before, including those of a failed apply."""
        names = {_name(manifest) for manifest in kept}
        gone = {_name(one): one for manifests in self.history for one in manifests if _name(one) not in names}
        if gone:
            self._kubectl("delete", "--ignore-not-found", stdin=_text(list(gone.values())))


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except helm_python.HelmError as error:
        raise RefusedError(str(error)) from None


def _name(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _text(manifests: list[Manifest]) -> str:
    return yaml.safe_dump_all(manifests)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, processes: None) -> Iterator[ControlPlane]:
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
    """The sequences with the real tools."""
