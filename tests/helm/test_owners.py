"""The sequences of `owners.py` on the double of tests/kube, which refuses what another manager owns.

Helm's engine renders the chart.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.kube.api_server import KINDS, ApiServer, Place, StatusError
from tests.kube.fields import three_way

from .charts import NAMESPACE, Manifest, Values, render
from .owners import DECODE, PREFILL, TOOLS, Objects, Owners, RefusedError, Release, Tool
from .test_lookup import _Api as LookupApi
from .test_lookup import api, upgraded  # noqa: F401

RESOURCES = {kind: resource for resource, (_, kind) in KINDS.items()}


@dataclass
class OnDouble(Release):
    """applied: the manifests of each revision. whole: the manifests of the last revision that was not refused."""

    server: ApiServer
    view: LookupApi
    applied: list[list[Manifest]] = field(default_factory=list)
    whole: list[Manifest] = field(default_factory=list)

    def apply(self, values: Values) -> None:
        for (resource, _, name), body in self.server.objects.items():
            if resource in ("deployments", "configmaps"):
                content = {key: body[key] for key in ("spec", "data") if key in body}
                metadata = {"namespace": NAMESPACE, **body["metadata"]}
                self.view.put(body["kind"], name, **content, metadata=metadata)
        manifests = upgraded(self.view, values) if self.tool.lookup else render(values)
        self._bring(_without_hooks(manifests))

    def rollback(self, revision: int) -> None:
        self._bring(copy.deepcopy(self.applied[revision - 1]))

    def uninstall(self) -> None:
        self._remove(self.applied[-1])

    def objects(self) -> Objects:
        found = self.server.objects.values()
        return {(body["kind"], body["metadata"]["name"]) for body in found if body["kind"] != "Event"}

    def before_scaler(self) -> None:
        if self.tool.lookup:
            return
        for name, replicas in zip((PREFILL, DECODE), self.replicas, strict=True):
            if self.tool.server_side:
                config = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}}
                config["spec"] = {"replicas": replicas}
                place = Place("deployments", NAMESPACE, name, None)
                self.server.answer("apply", place, {"fieldManager": "handover"}, config)
            else:
                [last] = [found for found in self.whole if _name(found) == ("Deployment", name)]
                del last["spec"]["replicas"]

    def _bring(self, manifests: list[Manifest]) -> None:
        """After a refusal, tools apply the remaining objects but remove none."""
        before = {_name(found): found for found in self.whole}
        self.applied.append(manifests)
        refused = []
        for manifest in manifests:
            try:
                self._write(before.get(_name(manifest)), copy.deepcopy(manifest))
            except StatusError as error:
                refused.append(error.body["message"])
        if refused:
            raise RefusedError(" && ".join(refused))
        kept = {_name(manifest) for manifest in manifests}
        self._remove([manifest for manifest in self.whole if _name(manifest) not in kept])
        self.whole = copy.deepcopy(manifests)

    def _remove(self, manifests: list[Manifest]) -> None:
        for kind, name in map(_name, manifests):
            self.server.answer("delete", Place(RESOURCES[kind], NAMESPACE, name, None), {}, None)

    def _write(self, before: Manifest | None, manifest: Manifest) -> None:
        kind, name = _name(manifest)
        place = Place(RESOURCES[kind], NAMESPACE, name, None)
        live = self.server.objects.get((place.resource, NAMESPACE, name))
        query = {"fieldManager": self.tool.manager, "force": str(self.tool.force).lower()}
        if self.tool.server_side:
            self.server.answer("apply", place, query, manifest)
        elif live is None:
            self.server.answer("create", place, query, manifest)
        else:
            self.server.answer("update", place, query, three_way(before or {}, manifest, live))


def _without_hooks(manifests: list[Manifest]) -> list[Manifest]:
    return [found for found in manifests if "helm.sh/hook" not in found["metadata"].get("annotations", {})]


def _name(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


@pytest.fixture(params=TOOLS)
def tool(request: pytest.FixtureRequest) -> Tool:
    return TOOLS[request.param]


@pytest.fixture
def release(tool: Tool, api: LookupApi, tmp_path: Path) -> Iterator[Release]:  # noqa: F811
    with ApiServer() as server:
        yield OnDouble(tool, server.client(), tmp_path, server, api)


class TestOwners(Owners):
    """The sequences with each tool's way to apply."""


@pytest.mark.processes
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
