"""The chart rendered with several sets of values; each is rendered only once."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "baton"
RELEASE, NAMESPACE = "rel", "ns"

Values = dict[str, Any]
Manifest = dict[str, Any]

SHA = "0" * 64
COMMIT = "0" * 40
_HUB = {"repo": "acme/Large-1.0", "revision": COMMIT}
_EVERYTHING: Values = {
    "image": {"registry": "registry.example/mirror/"},
    "imagePullSecrets": [{"name": "pull"}],
    "commonLabels": {"team": "llm"},
    "drainSeconds": 45,
    "gpuPairs": {"enabled": True, "unencrypted": True},
    "peerToken": {"existingSecret": "peer-tokens"},
    "peerTls": {"enabled": True, "certManager": {"enabled": True}},
    "models": {
        "large": {
            "name": "acme/Large",
            "chatTemplate": "other.jinja",
            "useGenerationConfig": False,
            "publishedPrefixes": [
                {"messages": [{"role": "system", "content": "You are Acme's assistant."}]},
                {"text": "Translate:\n"},
            ],
            "specialTokensInContent": "reject",
            "toolCallParser": "glm",
            "reasoningParser": "think",
            "volume": {
                "hub": {
                    **_HUB,
                    "size": "20Gi",
                    "tokenSecret": {"name": "hub", "key": "token"},
                    "endpoint": "https://hub.example:8443",
                    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
                    "egressPorts": [8443, 3128],
                }
            },
            "worker": {
                "gpus": 1,
                "engine": {"enable-prefix-caching": True, "kv-cache-dtype": "fp8", "max-model-len": 1_048_576},
            },
            "prefill": {"replicas": 2, "podAnnotations": {"note": "a"}, "extraArgs": ["--log-level=debug"]},
            "decode": {"keda": {"enabled": True, "triggers": [{"type": "cpu", "metadata": {"value": "60"}}]}},
            "pools": [
                {"name": "long", "tenants": ["acme"], "maxPromptTokens": 0, "decode": {"extraEnv": [{"name": "A"}]}},
                {"name": "short", "maxPromptTokens": 2000, "prefill": {}, "decode": {"replicas": 3}},
            ],
            "canary": {
                "enabled": True,
                "weight": 10,
                "shadow": True,
                "revision": "v2",
                "worker": {"image": {"tag": "0.2.0"}, "engine": {"enable-prefix-caching": False}},
                "prefill": {"replicas": 1},
                "analysis": {"enabled": True, "steps": [10, 100]},
            },
        },
        "small": {
            "volume": {"image": {"reference": "models/small:1", "path": "model", "copy": True, "size": "5Gi"}},
            "prefill": {},
            "scaler": {"enabled": True, "decode": {"minReplicas": 2, "maxReplicas": 8}},
        },
        "disk": {
            "volume": {"hostPath": {"path": "/data/disk"}},
            "decode": {
                "hpa": {
                    "enabled": True,
                    "metrics": [
                        {
                            "type": "Resource",
                            "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}},
                        }
                    ],
                }
            },
            "worker": {"tensorParallel": 2, "pipelineParallel": 2, "expertParallel": True},
            "canary": {"enabled": True, "weight": 0, "volume": {"pvc": {"claimName": "other"}}},
        },
    },
    "gateway": {
        "drainDelaySeconds": 25,
        "settings": {"prefix-index-entries": 5_000_000, "ttft-slo-s": 7.5, "local-prefill": False},
        "extraArgs": ["--log-level=debug"],
        "extraEnv": [{"name": "BATON_API_KEYS", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "keys"}}}],
        "tls": {"enabled": True, "certManager": {"issuerRef": {"name": "ca", "kind": "Issuer"}}},
        "hpa": {"enabled": True},
        "priorityClassName": "high",
        "nodeSelector": {"pool": "cpu"},
        "podAnnotations": {"note": "b"},
    },
    "tenants": {
        "tenants": {
            "acme": {"requests_per_minute": 600, "tokens_per_minute": 100_000_000, "weight": 2.5, "cache_group": "eu"}
        },
        "keys": [{"id": "0a1b2c3d", "hash": SHA, "tenant": "acme"}],
    },
    "redis": {"enabled": True},
    "ingress": {"enabled": True, "host": "llm.example", "tlsSecret": "llm-tls", "annotations": {"x": "y"}},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "edge"}], "hostnames": ["llm.example"]},
    "networkPolicy": {"collector": [{"namespaceSelector": {"matchLabels": {"team": "telemetry"}}}]},
    "monitoring": {
        name: {"enabled": True} for name in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
    },
    "slo": {"ttftSeconds": 1, "tpotSeconds": 0.025, "objective": 0.999},
    "cost": {"gpuHourPrice": {"prefill": 2.5, "decode": 4}},
    "tests": {"apiKeySecret": {"name": "test-key"}},
}

PRESETS = {path.stem.removeprefix("values-"): path for path in sorted(CHART.glob("values-*.yaml"))}
CASES: dict[str, Values] = {
    "defaults": {},
    **{name: yaml.safe_load(path.read_text()) for name, path in PRESETS.items()},
    "everything": _EVERYTHING,
    "image volume": {"models": {"a": {"volume": {"image": {"reference": "models/a:1", "path": "model"}}}}},
    "hub caches": {
        "models": {
            "a": {"volume": {"hub": {**_HUB, "cache": {"pvc": {"claimName": "models"}}}}, "prefill": {}},
            "b": {"volume": {"hub": {**_HUB, "cache": {"hostPath": {"path": "/data/hub"}}}}},
        }
    },
    "outside": {
        "peerTls": {"enabled": True, "existingSecret": "peers", "name": "llm-pods"},
        "redis": {"external": {"existingSecret": "redis-url", "port": 6380}},
        "tenants": {"existingSecret": "tenants"},
        "gateway": {
            "tls": {"enabled": True, "existingSecret": "tls"},
            "service": {"type": "LoadBalancer"},
            "keda": {"enabled": True, "triggers": [{"type": "cpu", "metadata": {"value": "60"}}]},
        },
    },
    "bare": {
        "peerTls": {
            "enabled": True,
            "certManager": {"enabled": True, "issuerRef": {"name": "ca", "kind": "ClusterIssuer"}},
        },
        "networkPolicy": {"enabled": False},
        "redis": {"enabled": True, "existingSecret": "redis", "persistence": {"enabled": False}},
        "fullnameOverride": "a-name-that-is-much-longer-than-anybody-would-want",
        "models": {"a-model-of-some-name": {"prefill": {}, "canary": {"enabled": True, "revision": "a-long-revision"}}},
    },
}


@functools.cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def rendered_text(values: Values, source: helm_python.Chart | None = None) -> dict[str, str]:
    """Return the rendered text of each template."""
    return (source or chart()).render(values, name=RELEASE, namespace=NAMESPACE)


def render(values: Values, source: helm_python.Chart | None = None) -> list[Manifest]:
    """Return all manifests, those of hooks too."""
    texts = (text for name, text in rendered_text(values, source).items() if name.endswith(".yaml"))
    return [manifest for text in texts for manifest in yaml.load_all(text, yaml.CSafeLoader) if manifest]


@functools.cache
def case(name: str) -> tuple[Manifest, ...]:
    return tuple(render(CASES[name]))


def of_kind(manifests: tuple[Manifest, ...] | list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def named(manifests: tuple[Manifest, ...] | list[Manifest], kind: str, name: str) -> Manifest:
    [found] = [manifest for manifest in of_kind(manifests, kind) if manifest["metadata"]["name"] == name]
    return found


def workloads(manifests: tuple[Manifest, ...] | list[Manifest]) -> list[Manifest]:
    return of_kind(manifests, "Deployment", "StatefulSet")


def pods(manifests: tuple[Manifest, ...] | list[Manifest]) -> Iterator[tuple[str, Mapping[str, str], Manifest]]:
    """Yield name, labels and spec of all pods, including the pod of `helm test`."""
    for manifest in workloads(manifests):
        template = manifest["spec"]["template"]
        yield manifest["metadata"]["name"], template["metadata"]["labels"], template["spec"]
    for manifest in of_kind(manifests, "Pod"):
        yield manifest["metadata"]["name"], manifest["metadata"]["labels"], manifest["spec"]


def containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector that has nothing but matchLabels, or is empty, fits."""
    assert not set(selector) - {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()


def flags(container: Manifest) -> dict[str, str | None]:
    """Return the flags of one of Baton's containers, without dashes. A flag without a value maps to None."""
    parts = (argument.removeprefix("--").partition("=") for argument in container["args"][1:])
    return {name: value if equals else None for name, equals, value in parts}
