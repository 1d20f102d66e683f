"""Replicas of Deployments, from the gateways' reports to the scale subresource."""

import asyncio
from typing import Any

import pytest

from .conftest import Release, until
from .fake_gateway import FakeGateway

CONFIG = """
models:
  llama:
    {canary}
    scaler: {{prefill: {{deployment: p, max: 6}}, decode: {{deployment: d, max: 6}}, {more}}}
"""
VERBS = {("list", "endpointslices"), ("watch", "endpointslices"), ("get", "configmaps")}
SCALE = {("get", "deployments/scale"), ("patch", "deployments/scale")}


def configure(release: Release, more: str = "ttftSloSeconds: 2", canary: str = "") -> None:
    release.config.write_text(CONFIG.format(more=more, canary=canary))


@pytest.fixture(autouse=True)
def deployed(release: Release) -> None:
    configure(release)
    for name in ("p", "d"):
        release.api.put("deployments", name, spec={"replicas": 2})
    for gateway in release.gateways:
        show(gateway)


def show(gateway: FakeGateway, queued: int = 0, held: int = 50, revision: str = "", pods: int = 2) -> None:
    """Have a gateway list this many identical pods of each role."""
    gateway.pods = [
        {
            **{"model": "llama", "pool": "default", "role": role, "address": f"{revision}{role}-{number}:1"},
            **{"revision": revision, "live": True, "draining": False, "failures": 0, "requests": 5, "dispatched": 9},
            **{"queued_prefill_tokens": queued, "prefill_tokens_per_s": 1000, "blocks_held": held, "blocks": 100},
        }
        for role in ("prefill", "decode")
        for number in range(pods)
    ]


def replicas(release: Release) -> tuple[Any, Any]:
    first, second = (release.api.get("deployments", name)["spec"]["replicas"] for name in ("p", "d"))
    return first, second


def desired(release: Release, role: str) -> float:
    value = release.metrics.registry.get_sample_value(
        "baton_controller_desired_replicas", {"model": "llama", "role": role}
    )
    return value or 0


def event(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if getattr(record, "event", "") == name]


async def test_a_backlog_scales_both_deployments(release: Release, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    show(release.gateways[0], queued=9000, held=60)
    async with release.controller():
        await until(lambda: replicas(release) == (4, 4))
    assert release.api.requests == VERBS | SCALE
    assert any("prefill of llama: 2 → 4: p90 of the wait 9.00 s" in line for line in event(caplog, "scaled"))


async def test_requests_waiting_in_the_gateways_count(release: Release) -> None:
    for gateway in release.gateways:
        show(gateway, queued=100)
        gateway.wait(50)
    async with release.controller():
        await until(lambda: replicas(release)[0] > 2)


@pytest.mark.parametrize("more", ["mode: metrics", "dryRun: true"])
async def test_it_only_says_so(release: Release, caplog: pytest.LogCaptureFixture, more: str) -> None:
    caplog.set_level("INFO")
    configure(release, more)
    show(release.gateways[0], queued=9000)
    async with release.controller():
        await until(lambda: desired(release, "prefill") == 4)
        await asyncio.sleep(0.5)
    assert replicas(release) == (2, 2)
    assert ("patch", "deployments/scale") not in release.api.requests
    assert 1 <= len([line for line in event(caplog, "scaled") if line.startswith("prefill")]) <= 2


async def test_bounds_of_the_configuration_hold_at_once(release: Release) -> None:
    release.api.put("deployments", "p", spec={"replicas": 9})
    async with release.controller():
        await until(lambda: replicas(release) == (6, 2))


async def test_without_gateways_nothing_changes(release: Release) -> None:
    release.api.put("deployments", "p", spec={"replicas": 9})
    release.api.remove("endpointslices", "gateway-0")
    release.api.remove("endpointslices", "gateway-1")
    async with release.controller() as controller:
        await until(lambda: controller.ready)
        await asyncio.sleep(0.5)
    assert replicas(release) == (9, 2)
    assert not SCALE & release.api.requests


async def test_who_wants_no_pods_gets_none(release: Release) -> None:
    release.api.put("deployments", "p", spec={"replicas": 0})
    show(release.gateways[0], queued=9000)
    async with release.controller():
        await until(lambda: ("get", "deployments/scale") in release.api.requests)
        await asyncio.sleep(0.5)
    assert replicas(release) == (0, 2)


async def test_only_stable_is_looked_at(release: Release) -> None:
    configure(release, canary="canary: {revision: canary, stable: stable, intervalSeconds: 1000}")
    show(release.gateways[0], revision="stable")
    show(release.gateways[1], revision="canary", queued=9000)
    async with release.controller():
        await until(lambda: desired(release, "prefill") == 2)
        await asyncio.sleep(0.5)
        assert replicas(release) == (2, 2)
        show(release.gateways[0], revision="stable", queued=9000)
        await until(lambda: replicas(release)[0] == 4)


async def test_a_model_without_its_deployment_leaves_the_others_alone(
    release: Release, caplog: pytest.LogCaptureFixture
) -> None:
    text = release.config.read_text()
    broken = "  broken: {scaler: {prefill: {deployment: x, max: 2}, decode: {deployment: y, max: 2}}}\n"
    release.config.write_text(text.replace("models:\n", "models:\n" + broken))
    show(release.gateways[0], queued=9000)
    async with release.controller():
        await until(lambda: replicas(release)[0] == 4)
    assert event(caplog, "kubernetes_failed") == ["replicas cannot be reconciled: 404 Not Found"]
