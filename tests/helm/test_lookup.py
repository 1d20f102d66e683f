"""Which existing state in the cluster an upgrade keeps. The cluster is a small fake API server."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import helm_python
import pytest
import yaml

from .charts import NAMESPACE, RELEASE, Manifest, chart, named

_KINDS = {
    "v1": [("configmaps", "ConfigMap"), ("secrets", "Secret")],
    "apps/v1": [("deployments", "Deployment")],
}


class _Api(ThreadingHTTPServer):
    """Serves some objects by their paths."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, Manifest] = {}

    def put(self, kind: str, name: str, **content: Any) -> None:
        [(version, plural)] = [(v, plural) for v, kinds in _KINDS.items() for plural, k in kinds if k == kind]
        root = "/api/v1" if version == "v1" else f"/apis/{version}"
        metadata = {"name": name, "namespace": NAMESPACE}
        found = {"apiVersion": version, "kind": kind, "metadata": metadata, **content}
        self.objects[f"{root}/namespaces/{NAMESPACE}/{plural}/{name}"] = found

    def answer(self, path: str) -> Manifest | None:
        if path == "/version":
            return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            version = {"groupVersion": "apps/v1", "version": "v1"}
            group = {"name": "apps", "versions": [version], "preferredVersion": version}
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}
        for version, kinds in _KINDS.items():
            if path == ("/api/v1" if version == "v1" else f"/apis/{version}"):
                resources = [
                    {"name": plural, "kind": kind, "namespaced": True, "verbs": ["get"], "singularName": ""}
                    for plural, kind in kinds
                ]
                return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        return self.objects.get(path)


class _Handler(BaseHTTPRequestHandler):
    server: _Api

    def do_GET(self) -> None:
        found = self.server.answer(self.path.partition("?")[0])
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self.send_response(200 if found else 404)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(found or status).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def api(processes: None) -> Iterator[_Api]:
    with _Api() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def upgraded(api: _Api, values: dict[str, Any]) -> list[Manifest]:
    """Render as an upgrade in the cluster does."""
    files = [text for name, text in upgraded_text(api, values).items() if name.endswith(".yaml")]
    return [manifest for text in files for manifest in yaml.load_all(text, yaml.CSafeLoader) if manifest]


def upgraded_text(api: _Api, values: dict[str, Any]) -> dict[str, str]:
    """Return the text of each template that an upgrade renders."""
    server = f"http://127.0.0.1:{api.server_address[1]}"
    user = {"apiVersion": "v1", "kind": "Config", "clusters": [{"name": "a", "cluster": {"server": server}}]}
    user |= {"contexts": [{"name": "a", "context": {"cluster": "a", "user": ""}}], "current-context": "a"}
    with helm_python.Config(kubeconfig_content=json.dumps(user), namespace=NAMESPACE) as config:
        return config.render(chart(), values, name=RELEASE, namespace=NAMESPACE, is_upgrade=True)


def test_the_password_of_redis_stays(api):
    values = {"redis": {"enabled": True}}
    first, second = (named(upgraded(api, values), "Secret", "rel-baton-redis")["stringData"] for _ in range(2))
    assert first["password"] != second["password"]
    data = {key: base64.b64encode(value.encode()).decode() for key, value in first.items()}
    api.put("Secret", "rel-baton-redis", data=data)
    assert named(upgraded(api, values), "Secret", "rel-baton-redis")["stringData"] == first


def test_the_token_of_peers_stays(api):
    first, second = (named(upgraded(api, {}), "Secret", "rel-baton-peer-token")["stringData"] for _ in range(2))
    assert first["tokens"] != second["tokens"]
    assert len(first["tokens"]) == 43
    kept = f"{first['tokens']}\n{second['tokens']}\n"  # as while it is being replaced
    api.put("Secret", "rel-baton-peer-token", data={"tokens": base64.b64encode(kept.encode()).decode()})
    assert named(upgraded(api, {}), "Secret", "rel-baton-peer-token")["stringData"]["tokens"] == kept


KEDA = {"enabled": True, "triggers": [{}]}
APPLIED = {"manager": "helm", "operation": "Apply", "fieldsV1": {"f:spec": {"f:template": {}}}}
UPDATED = {"manager": "helm", "operation": "Update", "fieldsV1": {"f:spec": {"f:template": {}}}}
SCALED = {
    **{"manager": "kube-controller-manager", "operation": "Update", "subresource": "scale"},
    "fieldsV1": {"f:spec": {"f:replicas": {}}},
}


@pytest.mark.parametrize(
    ("autoscaled", "marked", "owners", "replicas"),
    [
        (True, False, [UPDATED], 7),  # the last release rendered replicas; leaving them out would reset them to 1
        (True, False, [UPDATED, SCALED], 7),
        (True, False, [APPLIED], 7),
        (True, False, [APPLIED, SCALED], None),  # the autoscaler keeps it, and a number here would conflict
        (True, True, [UPDATED, SCALED], None),
        (False, True, [APPLIED, SCALED], None),  # no longer autoscaled, but the autoscaler still owns the field
        (False, True, [UPDATED, SCALED], None),
        (False, False, [UPDATED, SCALED], 7),
        (False, True, [UPDATED, {**SCALED, "manager": "kubectl"}], 2),
        (False, False, [APPLIED], 2),
        (False, False, [APPLIED, {**SCALED, "manager": "kubectl"}], 2),
    ],
)
def test_replicas_have_one_owner_and_are_never_reset(api, autoscaled, marked, owners, replicas):
    annotations = {"baton.dev/replicas": "scaled"} if marked else {}
    metadata = {"name": "rel-baton-a-decode", "annotations": annotations, "managedFields": owners}
    api.put("Deployment", "rel-baton-a-decode", metadata=metadata, spec={"replicas": 7})
    values = {"models": {"a": {"decode": {"replicas": 2, "keda": {**KEDA, "enabled": autoscaled}}}}}
    found = named(upgraded(api, values), "Deployment", "rel-baton-a-decode")
    assert found["spec"].get("replicas") == replicas
    mark = found["metadata"].get("annotations", {}).get("baton.dev/replicas")
    assert mark == ("scaled" if replicas is None else None)


def test_an_override_that_still_holds_is_told(api):
    def notes() -> str:
        return upgraded_text(api, {})["baton/templates/NOTES.txt"]

    for data in (None, {}, {"weights": " \n"}):
        api.put("ConfigMap", "rel-baton-canary-override", **({} if data is None else {"data": data}))
        assert "weights of canaries" not in notes()
    api.put("ConfigMap", "rel-baton-canary-override", data={"weights": "a: 0\nacme/Large: 5\n"})
    assert "(a: 0, acme/Large: 5)" in notes()
    assert "patch configmap rel-baton-canary-override --type merge --patch '{\"data\": null}'" in notes()
