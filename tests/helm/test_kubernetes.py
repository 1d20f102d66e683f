"""Every object is valid by Kubernetes' schemas, strictly; objects of third-party kinds have their required fields."""

import functools
import json
from typing import Any

import jsonschema
import pytest
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from .charts import CASES, Manifest, case

VERSIONS = ("1.30", "1.31", "1.32", "1.33", "1.34", "1.35")
# Third-party kinds, and the fields that their schemas require.
FOREIGN: dict[str, tuple[str, set[str]]] = {
    "ServiceMonitor": ("monitoring.coreos.com/v1", {"selector", "endpoints"}),
    "PodMonitor": ("monitoring.coreos.com/v1", {"selector", "podMetricsEndpoints"}),
    "PrometheusRule": ("monitoring.coreos.com/v1", {"groups"}),
    "HTTPRoute": ("gateway.networking.k8s.io/v1", {"parentRefs", "rules"}),
    "ScaledObject": ("keda.sh/v1alpha1", {"scaleTargetRef", "triggers"}),
    "Certificate": ("cert-manager.io/v1", {"secretName", "issuerRef"}),
    "Issuer": ("cert-manager.io/v1", set()),
}


def _folder(version: str) -> str:
    return f"kubernetes-json-schema/v{version}.0-local-strict"


@functools.cache
def _definitions(version: str) -> "Registry[Any]":
    return Resource.from_contents(schema_contents(f"{_folder(version)}/_definitions.json", version)) @ Registry()


@functools.cache
def _validator(version: str, kind: str, api_version: str) -> jsonschema.Draft202012Validator:
    """Return a cached validator. kubernetes_validate.validate makes one per object, which is 100 times slower."""
    group, _, number = api_version.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.split(".")[0], number) if part)
    schema = schema_contents(f"{_folder(version)}/{name}.json", version)
    return jsonschema.Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions(version))


@functools.cache
def _errors(version: str, text: str) -> list[str]:
    manifest: Manifest = json.loads(text)
    validator = _validator(version, manifest["kind"], manifest["apiVersion"])
    where = f"{manifest['kind']} {manifest['metadata']['name']}"
    return [f"{where}: {error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


# Image volumes came with Kubernetes 1.31.
@pytest.mark.parametrize(
    ("name", "version"),
    [(name, version) for name in CASES for version in VERSIONS if (name, version) != ("image volume", "1.30")],
)
def test_objects_are_valid(name, version):
    ours = [manifest for manifest in case(name) if manifest["kind"] not in FOREIGN]
    assert len(ours) > 10
    assert [error for manifest in ours for error in _errors(version, json.dumps(manifest))] == []


def test_an_unknown_field_would_be_found():
    [deployment] = [
        manifest
        for manifest in case("defaults")
        if manifest["metadata"]["name"] == "rel-baton-demo-decode" and manifest["kind"] == "Deployment"
    ]
    wrong = {**deployment, "spec": {**deployment["spec"], "replica": 2}}
    assert "replica" in str(_errors("1.35", json.dumps(wrong)))


def test_foreign_objects_have_what_they_must():
    seen = set()
    for manifest in case("everything"):
        if manifest["kind"] in FOREIGN:
            api_version, fields = FOREIGN[manifest["kind"]]
            seen.add(manifest["kind"])
            assert manifest["apiVersion"] == api_version
            assert fields <= set(manifest["spec"])
    assert seen >= set(FOREIGN) - {"PrometheusRule"}
