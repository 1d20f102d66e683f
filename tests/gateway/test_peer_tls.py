"""TLS between the gateway and its pods."""

import logging
from pathlib import Path

import pytest
import trustme

from tests.peer_files import PeerFiles

from .harness import pods, running

pytestmark = pytest.mark.processes


async def test_pods_are_found_anew_by_renewed_files(model_folder: Path, tmp_path: Path):
    """The files that the gateway started with would not do any more."""
    files = PeerFiles(tmp_path)
    async with pods(2, tls=files.load()) as decodes, running(model_folder, decodes, **files.settings) as stack:
        assert (await stack.complete()).status_code == 200
        files.renew(trustme.CA())
        first = decodes[0]
        await first.stop()
        await stack.until(lambda: stack.fleet.live_pods()["decode"] == 1)
        assert (await stack.complete()).status_code == 200
        await first.start()
        await stack.until(lambda: stack.fleet.live_pods()["decode"] == 2)
        await decodes[1].stop()
        assert (await stack.complete()).status_code == 200


async def test_renewed_files_are_logged_though_nobody_connects(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("baton_common.peer_settings._FOLLOW_S", 0.05)
    files = PeerFiles(tmp_path)
    async with pods(tls=files.load()) as decodes, running(model_folder, decodes, **files.settings) as stack:
        files.renew()
        await stack.until(lambda: "the certificate for peers was replaced" in caplog.text)
        assert stack.fleet.live_pods()["decode"] == 1


async def test_a_gateway_without_tls_is_told_what_may_be_wrong(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    files = PeerFiles(tmp_path)
    async with pods(tls=files.load()) as decodes, running(model_folder, decodes, wait=False) as stack:
        await stack.until(lambda: "pod out of reach" in caplog.text)
        reasons = [r.__dict__["reason"] for r in caplog.records if r.getMessage() == "pod out of reach"]
        assert "--peer-tls-cert-file" in reasons[0]
        assert (await stack.complete()).status_code == 503
        assert len(reasons) == 1
