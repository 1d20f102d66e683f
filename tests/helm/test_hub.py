"""The init containers that download models from a hub: their own commands, run here with a double of the hub."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton_demo import MODEL_DIR
from tests.hub.double import COMMIT, REPO, HubDouble

from .charts import Manifest, flags, named, render

WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(processes: None) -> Iterator[HubDouble]:
    with HubDouble.of_folder(MODEL_DIR).running() as running:
        yield running


def manifests(hub: HubDouble, **options: Any) -> list[Manifest]:
    values = {"repo": REPO, "revision": COMMIT, "endpoint": hub.url, "tokenSecret": {"name": "hub", "key": "token"}}
    return render({"models": {"tiny": {"volume": {"hub": {**values, **options}}, "prefill": {}}}})


def pod(found: list[Manifest], component: str) -> Manifest:
    spec: Manifest = named(found, "Deployment", f"rel-baton-{component}")["spec"]["template"]["spec"]
    return spec


def run_init(spec: Manifest, root: Path, token: str = "hf_right") -> subprocess.CompletedProcess[str]:
    """Run a pod's init container, with a folder in place of its file system, and a token in place of its Secret."""
    [init] = spec["initContainers"]
    assert "command" not in init  # so that the image's own entry point runs, which is `baton`
    env = {variable["name"]: variable.get("value", token) for variable in init["env"]}
    args = [argument.replace("/models/", f"{root}/models/") for argument in init["args"]]
    path = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-m", "baton_cli", *args], env={**path, **env}, capture_output=True, text=True, timeout=60
    )


def model_folder(spec: Manifest, root: Path) -> Path:
    return root / str(flags(spec["containers"][0])["model"]).lstrip("/")


def test_they_fill_the_folders_that_the_pods_read(hub: HubDouble, tmp_path: Path) -> None:
    hub.token = "hf_right"
    found = manifests(hub, size="1Gi")
    for component in ("tiny-prefill", "tiny-decode"):
        root, spec = tmp_path / component, pod(found, component)
        done = run_init(spec, root)
        assert done.returncode == 0, done.stderr
        folder = model_folder(spec, root)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            path.name: path.read_bytes() for path in MODEL_DIR.iterdir()
        }
    done = run_init(pod(found, "gateway"), tmp_path / "gateway")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "gateway" / folder.relative_to(root)
    assert {path.name for path in folder.iterdir()} == {path.name for path in MODEL_DIR.iterdir()} - {WEIGHTS}
    assert len(hub.downloads(WEIGHTS)) == 2


def test_pods_share_a_cache(hub: HubDouble, tmp_path: Path) -> None:
    found = manifests(hub, cache={"pvc": {"claimName": "models"}})
    for component in ("gateway", "tiny-prefill", "tiny-decode"):
        done = run_init(pod(found, component), tmp_path)
        assert done.returncode == 0, done.stderr
    assert len(hub.downloads(WEIGHTS)) == len(hub.downloads("config.json")) == 1
    # A pod that starts later needs no hub.
    hub.failures = 1000
    assert run_init(pod(found, "tiny-decode"), tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("options", "token", "text"),
    [
        ({"size": "1Gi"}, "hf_wrong", f"{REPO} is gated: accept its terms at"),
        ({"size": "1M"}, "hf_right", f"{REPO}@{COMMIT} takes 5,"),
        ({"size": "1Gi", "revision": "2" * 40}, "hf_right", f"has no revision '{'2' * 40}'"),
    ],
)
def test_the_end_of_a_failed_one_says_why(
    hub: HubDouble, tmp_path: Path, options: dict[str, str], token: str, text: str
) -> None:
    hub.token, hub.gated = "hf_right", True
    spec = pod(manifests(hub, **options), "tiny-decode")
    done = run_init(spec, tmp_path, token)
    assert done.returncode == 1
    assert text in done.stderr.splitlines()[-1]
    assert token not in done.stderr + done.stdout
    # Kubernetes shows the last lines of the log then.
    assert spec["initContainers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"
