"""Static checks of the files in k8s/. e2e.py checks them in a cluster."""

import importlib
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from baton_engine.models.registry import SERVED

from ..helm.charts import CHART, ROOT, of_kind, render, workloads

K8S = ROOT / "k8s"
BASE = K8S / "kustomize" / "base"


def test_the_base_renders_our_chart():
    base = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    [inflated] = base["helmCharts"]
    assert (BASE / base["helmGlobals"]["chartHome"] / inflated["name"]).resolve() == CHART
    assert base["namespace"] == inflated["namespace"]  # rendered objects of a chart have no namespace
    names = [workload["metadata"]["name"] for workload in workloads(render(inflated["valuesInline"]))]
    assert "rel-baton-qwen3-0-6b-prefill" in names


def test_the_overlay_patches_what_is_there():
    folder = K8S / "kustomize" / "overlays" / "gpu-node"
    overlay = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert all((folder / resource).exists() for resource in overlay["resources"])
    manifests = render(yaml.safe_load((BASE / "kustomization.yaml").read_text())["helmCharts"][0]["valuesInline"])
    for patch in overlay["patches"]:
        label, _, value = patch["target"]["labelSelector"].partition("=")
        targets = [
            manifest
            for manifest in of_kind(manifests, patch["target"]["kind"])
            if manifest["metadata"]["labels"].get(label) == value
        ]
        assert len(targets) == 2
        for operation in yaml.safe_load(patch["patch"]):
            node = targets[0]
            *parents, _ = operation["path"].strip("/").split("/")
            for part in parents:
                node = node[part]


@pytest.mark.processes
def test_kind_has_the_ports_of_an_ingress():
    kind = yaml.safe_load((K8S / "kind.yaml").read_text())
    [mapped] = [node["extraPortMappings"] for node in kind["nodes"] if "extraPortMappings" in node]
    assert [port["containerPort"] for port in mapped] == [80, 443]
    script = K8S / "kind-up.sh"
    subprocess.run(["bash", "-n", script], check=True)
    for word in re.split(r"[\s\")]+", script.read_text()):
        if word.startswith(("helm/", "k8s/")) and word != "k8s/kind-up.sh":
            assert (ROOT / word).exists(), word


@pytest.mark.parametrize("page", [K8S / "OPERATIONS.md", ROOT / "README.md"], ids=lambda path: path.name)
def test_pages_name_files_that_are_there(page: Path):
    words = page.read_text().replace("`", " ").replace("(", " ").replace(")", " ").split()
    named = {word.rstrip(".,:") for word in words if word.startswith(("helm/", "k8s/", "docker/", "loadtest/"))}
    assert named
    for name in named:
        assert (ROOT / name).exists(), name


@pytest.mark.processes  # Importing it binds a socket.
def test_the_end_to_end_tests_can_be_read():
    module = importlib.import_module("tests.k8s.e2e")
    assert next(name for name in vars(module) if name.startswith("test_")) == "test_installs_and_answers"


def test_the_readme_counts_the_architectures():
    assert f"**{len(set(SERVED))} architectures**" in (ROOT / "README.md").read_text()
