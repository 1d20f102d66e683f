"""The process: its flags, its port, its start and its end."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from .conftest import Release

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: it
contexts: [{{name: it, context: {{cluster: it, user: it}}}}]
clusters: [{{name: it, cluster: {{server: "{url}"}}}}]
users: [{{name: it, user: {{}}}}]
"""


def start(*flags: str, kubeconfig: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "baton_cli", "controller", *flags]
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def get(port: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_it_serves_operators_and_ends_in_order(release: Release, tmp_path: Path) -> None:
    release.config.write_text("models: {llama: {canary: {revision: canary}}}")
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG.format(url=release.api.url))
    flags = ["--release", "rel", "--config-file", str(release.config), "--interval-s", "0.2", "--namespace", "default"]
    process = start(*flags, "--admin-host", "127.0.0.1", "--admin-port", "0", kubeconfig=kubeconfig)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        port = line.partition('"admin_port":')[2].rstrip("}\n")
        deadline = time.monotonic() + 20
        while get(port, "/ready")[0] != 200 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert get(port, "/live") == (200, "")
        assert get(port, "/other")[0] == 404
        metrics = get(port, "/metrics")[1]
        assert 'baton_controller_canary_weight{model="llama"} 5.0' in metrics
        assert "baton_controller_gateways 2.0" in metrics
        assert "baton_controller_last_look_timestamp_seconds 1." in metrics
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.stderr.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("config", "kubeconfig", "message"),
    [("models: 3", KUBECONFIG.format(url="http://127.0.0.1:1"), "Expected `object`"), ("", "", "no Kubernetes API")],
)
def test_what_it_cannot_start_with_is_one_line(tmp_path: Path, config: str, kubeconfig: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "kubeconfig").write_text(kubeconfig)
    process = start(
        "--release", "r", "--config-file", str(tmp_path / "config.yaml"), kubeconfig=tmp_path / "kubeconfig"
    )
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert message in stderr
    assert len(stderr.splitlines()) == 1


@pytest.mark.processes
def test_flags_that_are_missing_are_named(tmp_path: Path) -> None:
    process = start(kubeconfig=tmp_path)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "--release (or BATON_RELEASE): Field required" in stderr
