"""The chart renders and lints cleanly, and refuses invalid values with a clear message."""

import shutil
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from baton_common.buckets import ITL_BUCKETS, TTFT_BUCKETS

from .charts import CASES, CHART, COMMIT, SHA, case, chart, named, of_kind, render, rendered_text


@pytest.mark.parametrize("name", CASES)
def test_lint_finds_nothing(name):
    report = helm_python.lint(CHART, CASES[name], strict=True)
    found = [message for message in report["messages"] if message["error"] != "icon is recommended"]
    assert not report["errors"]
    assert not found


@pytest.mark.parametrize("name", CASES)
def test_every_object_has_its_own_name_and_the_release_s_labels(name):
    manifests = case(name)
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(names) == len(set(names))
    for kind, object_name in names:
        assert len(object_name) <= 63, object_name
        labels = named(manifests, kind, object_name)["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "rel"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"


def test_the_version_is_that_of_the_package():
    project = (CHART.parents[1] / "pyproject.toml").read_text()
    assert f'\nversion = "{chart().metadata["appVersion"]}"\n' in project


def test_notes_have_a_first_request():
    notes = rendered_text({})["baton/templates/NOTES.txt"]
    assert "http://127.0.0.1:8000/v1/chat/completions" in notes
    assert '"model": "baton-demo"' in notes
    assert "Authorization" not in notes
    notes = rendered_text(CASES["everything"])["baton/templates/NOTES.txt"]
    assert "curl https://llm.example/v1/chat/completions" in notes
    assert "Authorization: Bearer" in notes
    assert "WARNING: KV between GPUs is not encrypted" in notes
    assert "WARNING" not in rendered_text(CASES["outside"])["baton/templates/NOTES.txt"]
    assert "WARNING" in rendered_text({"tenants": {"tenants": {"acme": {}}}})["baton/templates/NOTES.txt"]


def _hub(**hub: Any) -> dict[str, Any]:
    return _model(volume={"hub": {"repo": "acme/large", "revision": COMMIT, **hub}})


def _model(**fields: Any) -> dict[str, Any]:
    return {"models": {"a": fields}}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gatway": {}}, ["gatway"]),
        ({"drainSeconds": "a minute"}, ["/drainSeconds", "want integer"]),
        ({"gateway": {"drainDelaySeconds": 0}}, ["/gateway/drainDelaySeconds", "minimum"]),
        ({"image": {"tag": "latest"}}, ["/image/tag"]),
        ({"image": {"pullPolicy": "Sometimes"}}, ["/image/pullPolicy", "IfNotPresent"]),
        ({"models": {"Llama_8B": {}}}, ["Llama_8B"]),
        (_model(decode={"replicas": -1}), ["/models/a/decode/replicas"]),
        (_model(decode={"gpu": 1}), ["/models/a/decode", "gpu"]),
        (_model(decode={"engine": {"maxModelLen": 1}}), ["/models/a/decode/engine", "maxModelLen"]),
        (_model(decode={"engine": {"port": 1}}), ["/models/a/decode/engine", "port"]),
        (_model(decode={"resources": {"limits": {"memory": "much"}}}), ["/models/a/decode/resources/limits/memory"]),
        (_model(canary={"enabled": True, "weight": 101}), ["/models/a/canary/weight", "100"]),
        (_model(canary={"enabled": True, "revision": "stable"}), ["/models/a/canary/revision"]),
        (_model(canary={"enabled": True, "analysis": {"steps": []}}), ["/models/a/canary/analysis/steps"]),
        (_model(volume={"pvc": {}}), ["/models/a/volume/pvc", "claimName"]),
        (_model(volume={"pvc": {"claimName": "m"}, "hostPath": {"path": "/m"}}), ["/models/a/volume"]),
        (_model(volume={"image": {"reference": "m:1", "copy": True}}), ["/models/a/volume/image", "size"]),
        (_hub(revision="main", size="1Gi"), ["/models/a/volume/hub/revision"]),
        (_hub(repo="gpt2", size="1Gi"), ["/models/a/volume/hub/repo"]),
        (_hub(repo="acme/..", size="1Gi"), ["/models/a/volume/hub/repo"]),
        (_hub(), ["/models/a/volume/hub"]),
        (_hub(size="1Gi", cache={"pvc": {"claimName": "m"}}), ["/models/a/volume/hub"]),
        (_hub(cache={}), ["/models/a/volume/hub/cache"]),
        (_hub(size="1Gi", token="hf_secret"), ["/models/a/volume/hub", "token"]),
        (_model(pools=[{"name": "default", "decode": {}}]), ["/models/a/pools/0/name"]),
        (_model(scaler={"slo": {"ttftSeconds": 0}}), ["/models/a/scaler/slo/ttftSeconds"]),
        ({"gateway": {"settings": {"redis-url": "redis://:secret@r"}}}, ["/gateway/settings", "redis-url"]),
        ({"gateway": {"service": {"type": "Public"}}}, ["/gateway/service/type"]),
        ({"tenants": {"tenants": {"acme": {"rpm": 1}}}}, ["/tenants/tenants/acme", "rpm"]),
        ({"tenants": {"keys": [{"id": "a", "hash": "bt-a-secret", "tenant": "acme"}]}}, ["/tenants/keys/0/hash"]),
        ({"httpRoute": {"enabled": True}}, ["/httpRoute/parentRefs"]),
        ({"redis": {"image": "redis"}}, ["/redis/image"]),
        ({"redis": {"image": f"redis:latest@sha256:{SHA}"}}, ["/redis/image"]),
        ({"redis": {"image": "redis:8.2.10@sha256:00"}}, ["/redis/image"]),
        ({"gateway": {"settings": {"peer-token-file": "x"}}}, ["/gateway/settings", "peer-token-file"]),
        ({"worker": {"engine": {"peer-token-file": "x"}}}, ["/worker/engine", "peer-token-file"]),
        ({"peerToken": {"token": "in-the-clear-0123456789"}}, ["/peerToken", "token"]),
        ({"slo": {"ttftSeconds": 3}}, ["/slo/ttftSeconds", "one of 0.001, 0.005", " 2.5, 5, "]),
        ({"slo": {"tpotSeconds": 0.03}}, ["/slo/tpotSeconds", " 0.025, 0.05, "]),
        ({"slo": {"objective": 1}}, ["/slo/objective"]),
        ({"cost": {"gpuHourPrice": 3}}, ["/cost/gpuHourPrice"]),
        # Rules that no schema can express:
        (_model(decode={"hpa": {"enabled": True}}), ["models.a.decode.hpa.metrics: give at least one"]),
        ({"gateway": {"keda": {"enabled": True}}}, ["gateway.keda.triggers: give at least one"]),
        ({"models": {"a": {"name": "x"}, "b": {"name": "x"}}}, ["models.b.name", '"x"']),
        (
            _model(scaler={"enabled": True}, decode={"hpa": {"enabled": True, "metrics": [{"type": "Resource"}]}}),
            ["models.a.decode", "scaler and hpa"],
        ),
        (
            _model(scaler={"enabled": True, "decode": {"minReplicas": 9}}),
            ["models.a.scaler.decode: minReplicas is more than maxReplicas"],
        ),
        ({"tenants": {"existingSecret": "t", "tenants": {"acme": {}}}}, ["tenants: give either existingSecret"]),
        ({"redis": {"enabled": True, "external": {"existingSecret": "r"}}}, ["redis: give either"]),
        ({"gateway": {"tls": {"enabled": True}}}, ["gateway.tls: give existingSecret"]),
        ({"peerTls": {"certManager": {"duration": "90d"}}}, ["/peerTls/certManager/duration"]),
        ({"peerTls": {"certManager": {"issuerRef": {"kind": "Issuer"}}}}, ["/peerTls/certManager/issuerRef", "name"]),
        ({"gateway": {"settings": {"peer-tls-name": "x"}}}, ["/gateway/settings", "peer-tls-name"]),
        ({"peerTls": {"enabled": True}}, ["peerTls: give either existingSecret or certManager.enabled"]),
        (
            {"peerTls": {"enabled": True, "existingSecret": "s", "certManager": {"enabled": True}}},
            ["peerTls: give either existingSecret or certManager.enabled"],
        ),
        (
            {"peerTls": {"enabled": True, "existingSecret": "s"}, "gpuPairs": {"enabled": True}},
            ["peerTls: NCCL encrypts nothing", "gpuPairs.unencrypted"],
        ),
    ],
)
def test_wrong_values_are_refused_by_name(values, words):
    with pytest.raises((helm_python.HelmValuesError, helm_python.HelmRenderError)) as refused:
        render(values)
    for word in words:
        assert word in str(refused.value)


def test_every_default_is_in_the_schema():
    """additionalProperties would refuse it, too, but only where it is false."""
    schema, values = chart().schema, chart().values
    assert schema is not None
    assert set(values) <= set(schema["properties"])
    workload = schema["$defs"]["workload"]["properties"]
    assert set(values["worker"]) == set(workload)


def test_presets_say_what_they_are():
    for name in CASES:
        path = CHART / f"values-{name}.yaml"
        if path.exists():
            assert path.read_text().startswith("# ")


@pytest.fixture
def filled_chart(tmp_path: Path) -> helm_python.Chart:
    """The chart with two rules and two dashboards."""
    copy = shutil.copytree(CHART, tmp_path / "baton")
    for folder in ("rules", "dashboards"):
        shutil.rmtree(copy / folder, ignore_errors=True)
        (copy / folder).mkdir()
    for name in ("gateway", "workers"):
        rule = {"alert": "X", "expr": "up == 0", "annotations": {"summary": "{{ $labels.pod }} is down"}}
        (copy / "rules" / f"{name}.yaml").write_text(yaml.safe_dump({"groups": [{"name": name, "rules": [rule]}]}))
        (copy / "dashboards" / f"{name}.json").write_text('{"title": "{{model}}"}\n')
    return helm_python.Chart.load(copy)


def test_bounds_are_those_of_the_buckets():
    """Objectives must be bucket bounds, because the share of slower requests is unknown for other values."""
    assert chart().schema is not None
    slo = chart().schema["properties"]["slo"]["properties"]
    assert slo["ttftSeconds"]["enum"] == list(TTFT_BUCKETS)
    assert slo["tpotSeconds"]["enum"] == list(ITL_BUCKETS)


def test_rules_follow_from_what_is_promised_and_paid():
    manifests = case("everything")
    slo, cost = (str(named(manifests, "PrometheusRule", f"rel-baton-{name}")["spec"]) for name in ("slo", "cost"))
    assert 'time_to_first_token_seconds_bucket{namespace="ns", le="1.0"}[6h]' in slo
    assert 'time_per_output_token_seconds_bucket{namespace="ns", le="0.025"}[5m]' in slo
    assert "> 14.4 * (1 - 0.999)" in slo
    assert "later than 1 s." in slo
    assert 'role="prefill"}) * 2.5' in cost
    assert 'role="decode"}) * 4' in cost


def test_rules_and_dashboards_come_from_files_as_they_are(filled_chart):
    manifests = render(CASES["everything"], filled_chart)
    rules = {rule["metadata"]["name"]: rule for rule in of_kind(manifests, "PrometheusRule")}
    assert rules.keys() == {f"rel-baton-{name}" for name in ("cost", "gateway", "slo", "workers")}
    assert "{{ $labels.pod }}" in str(rules["rel-baton-gateway"]["spec"])
    dashboard = named(manifests, "ConfigMap", "rel-baton-dashboard-workers")
    assert dashboard["data"] == {"workers.json": '{"title": "{{model}}"}\n'}
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert not of_kind(render({}, filled_chart), "PrometheusRule")
