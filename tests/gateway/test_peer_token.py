"""The token between the gateway and its pods."""

import logging
from pathlib import Path

import pytest

from baton_common.peer_token import PeerToken
from tests.peer_files import write_tokens

from .harness import pods, running

OURS, NEXT, OTHERS = "our-token-0123456789", "our-next-token-0123456789", "their-token-0123456789"

pytestmark = pytest.mark.processes


async def test_a_gateway_follows_its_token(model_folder: Path, tmp_path: Path):
    """Here the pod has only the next token, so that no call but with that is served."""
    ours = write_tokens(tmp_path / "gateway", NEXT)
    token = PeerToken(write_tokens(tmp_path / "pod", NEXT))
    async with pods(token=token) as decodes, running(model_folder, decodes, peer_token_file=ours) as stack:
        assert (await stack.complete()).status_code == 200
        write_tokens(ours, OTHERS)
        await decodes[0].stop()
        await stack.until(lambda: stack.fleet.live_pods()["decode"] == 0)
        await decodes[0].start()
        assert (await stack.complete()).status_code == 503
        write_tokens(ours, NEXT, OTHERS)
        await stack.until(lambda: stack.fleet.live_pods()["decode"] == 1)
        assert (await stack.complete()).status_code == 200


@pytest.mark.parametrize("shown", [None, OTHERS])
async def test_a_gateway_of_another_release_gets_no_pod_and_says_why(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, shown: str | None
):
    caplog.set_level(logging.INFO)
    settings = {"peer_token_file": write_tokens(tmp_path / "gateway", shown)} if shown else {}
    token = PeerToken(write_tokens(tmp_path / "pod", OURS))
    async with pods(token=token) as decodes, running(model_folder, decodes, wait=False, **settings) as stack:
        await stack.until(lambda: "pod out of reach" in caplog.text)
        reasons = [r.__dict__["reason"] for r in caplog.records if r.getMessage() == "pod out of reach"]
        assert "--peer-token-file" in reasons[0]
        assert (await stack.complete()).status_code == 503
        assert not decodes[0].jobs
    assert OURS not in caplog.text
