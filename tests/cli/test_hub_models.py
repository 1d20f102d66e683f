"""Models by their ids on a hub, from the command line, with a double of the hub."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from huggingface_hub import constants

from baton_cli.hub_models import local_folder
from baton_cli.main import _with_folder
from baton_decode.settings import DecodeSettings
from baton_demo import MODEL_DIR
from baton_gateway.settings import GatewaySettings
from tests.hub.double import COMMIT, REPO, HubDouble

WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(processes: None) -> Iterator[HubDouble]:
    with HubDouble.of_folder(MODEL_DIR).running() as running:
        yield running


@pytest.fixture
def baton(start, hub: HubDouble, tmp_path: Path):
    """Runs `baton` with the hub, and with a home of its own."""

    def run(*args: str, **env: str):
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), **env}
        return start(sys.executable, "-m", "baton_cli", *args, **env)

    return run


def snapshot(root: Path) -> Path:
    return root / "models--acme--tiny" / "snapshots" / COMMIT


def partial_size(root: Path) -> int:
    size = 0
    for path in root.rglob("*.incomplete"):
        with contextlib.suppress(FileNotFoundError):  # it is complete by now
            size += path.stat().st_size
    return size


def test_from_nothing_to_an_answer(baton, hub: HubDouble, free_port: int, tmp_path: Path) -> None:
    running = baton("up", "--model", REPO, "--aggregated", "--port", str(free_port))
    running.when("Ctrl-C stops it", timeout=60)
    assert f"{REPO} at commit {COMMIT} is in {snapshot(tmp_path / 'home' / 'hub')}" in running.text
    body = {"model": REPO, "messages": [{"role": "user", "content": "What is Baton?"}], "max_tokens": 64}
    answer = httpx.post(f"http://127.0.0.1:{free_port}/v1/chat/completions", json=body, timeout=30).json()
    assert answer["choices"][0]["message"]["content"].startswith("Baton is ")
    running.interrupt()
    assert running.wait() == 0


def test_killed_in_the_middle_and_resumed(baton, hub: HubDouble, tmp_path: Path) -> None:
    size = len(hub.files[WEIGHTS])
    hub.bytes_per_s = 2e6
    running = baton("model", "pull", REPO, "--cache", str(tmp_path))
    while partial_size(tmp_path) < size // 4:
        assert running.process.poll() is None, running.text
        time.sleep(0.02)
    running.process.kill()
    running.wait()
    left = partial_size(tmp_path)
    assert left < size

    hub.bytes_per_s = None
    hub.requests.clear()
    again = baton("model", "pull", REPO, "--cache", str(tmp_path))
    assert again.wait() == 0, again.text
    assert [request.range for request in hub.downloads(WEIGHTS)] == [f"bytes={left}-{size - 1}"]
    assert (snapshot(tmp_path) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert again.text.splitlines()[-1] == str(snapshot(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_ends_it_at_once(baton, hub: HubDouble, tmp_path: Path, number: signal.Signals) -> None:
    hub.bytes_per_s = 3e5  # the whole download would take 18 s
    running = baton("model", "pull", REPO, "--cache", str(tmp_path))
    while partial_size(tmp_path) == 0:
        assert running.process.poll() is None, running.text
        time.sleep(0.02)
    os.kill(running.process.pid, number)
    assert running.wait(timeout=10) == 1
    assert running.text.splitlines()[-1].startswith("baton: the download was interrupted; the same command resumes it")


def test_two_pullers_on_one_cache(baton, hub: HubDouble, tmp_path: Path) -> None:
    hub.bytes_per_s = 4e6
    first, second = (baton("model", "pull", f"{REPO}@{COMMIT}", "--cache", str(tmp_path)) for _ in range(2))
    assert (first.wait(), second.wait()) == (0, 0), first.text + second.text
    assert len(hub.downloads(WEIGHTS)) == 1
    assert "another process is downloading model.safetensors" in first.text + second.text
    assert (snapshot(tmp_path) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_a_waiting_puller_goes_on_when_the_other_is_killed(baton, hub: HubDouble, tmp_path: Path) -> None:
    hub.bytes_per_s = 2e6
    first = baton("model", "pull", REPO, "--cache", str(tmp_path))
    while partial_size(tmp_path) == 0:
        time.sleep(0.02)
    second = baton("model", "pull", REPO, "--cache", str(tmp_path))
    second.when("another process is downloading model.safetensors")
    first.process.kill()
    hub.bytes_per_s = None
    assert second.wait() == 0, second.text
    ranges = [request.range for request in hub.downloads(WEIGHTS)]
    assert len(ranges) == 2
    assert ranges[1] is not None
    assert (snapshot(tmp_path) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_the_token_is_in_no_output_and_no_command_line(baton, hub: HubDouble, tmp_path: Path) -> None:
    hub.token, hub.gated, hub.bytes_per_s = "hf_right", True, 4e6
    refused = baton("model", "pull", REPO, "--cache", str(tmp_path), HF_TOKEN="hf_wrong")
    assert refused.wait() == 1
    assert f"baton: {REPO} is gated: accept its terms at {hub.url}/{REPO}." in refused.text
    running = baton("model", "pull", REPO, "--cache", str(tmp_path), HF_TOKEN="hf_right")
    while partial_size(tmp_path) == 0:
        time.sleep(0.02)
    assert "hf_right" not in " ".join(psutil.Process(running.process.pid).cmdline())
    assert running.wait() == 0, running.text
    # The URLs of the CDN contain a signature, which grants access as a token does.
    for secret in ("hf_right", "hf_wrong", "secret-signature"):
        assert secret not in refused.text + running.text


def test_progress_in_log_lines(baton, hub: HubDouble, tmp_path: Path) -> None:
    running = baton("model", "pull", REPO, "--no-weights", "--cache", str(tmp_path))
    assert running.wait() == 0
    lines = [json.loads(line) for line in running.text.splitlines()[:-1]]
    assert [line["event"] for line in lines if "event" in line] == ["downloaded"]
    assert lines[-1]["done"] == lines[-1]["total"] > 0


def test_services_take_ids_too(hub: HubDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    addresses = ["127.0.0.1:1"]
    gateway = _with_folder(GatewaySettings(model=Path(REPO), decode_addresses=addresses), weights=False)
    assert (gateway.model, gateway.served_model_name) == (snapshot(tmp_path), REPO)
    assert not (snapshot(tmp_path) / WEIGHTS).exists()
    decode = _with_folder(DecodeSettings(model=Path(REPO), served_model_name="mine"), weights=True)
    assert (decode.model, decode.served_model_name) == (snapshot(tmp_path), "mine")
    assert (snapshot(tmp_path) / WEIGHTS).exists()
    unchanged = DecodeSettings(model=MODEL_DIR)
    assert _with_folder(unchanged, weights=True) is unchanged
    assert local_folder("/no/such/folder", weights=True) == (Path("/no/such/folder"), None)


def test_the_facts_of_a_model_need_none_of_its_weights(baton, hub: HubDouble, tmp_path: Path) -> None:
    running = baton("model", REPO, "--gpu", "l4")
    assert running.wait() == 0
    assert "2,755,008" in running.text
    assert hub.downloads("config.json")
    assert [request.range for request in hub.downloads(WEIGHTS)] == ["bytes=0-131071"]
    assert "tensors in 1 files, on the hub" in running.text


def test_the_facts_of_a_folder_are_the_default_of_model(baton) -> None:
    for args in ([], [str(MODEL_DIR)], ["show", str(MODEL_DIR)]):
        running = baton("model", *args)
        assert running.wait() == 0
        assert "2,755,008" in running.text
