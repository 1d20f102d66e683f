"""Canaries from the configuration to the ConfigMap and the Events, against an API server and gateways."""

import asyncio
import json
import time
from typing import Any

import pytest

from baton_common.buckets import ITL_BUCKETS, TTFT_BUCKETS
from baton_controller.canary_map import CanaryMap
from baton_controller.canary_reconciler import CanaryReconciler
from baton_controller.config_file import read_config
from baton_controller.counters import Counters, Reading
from baton_controller.events import Events
from baton_controller.report import Report

from .conftest import OWNER, Release, until

CONFIG = """
models:
  llama:
    canary:
      {{revision: canary, steps: [5, 50, 100], minRequests: 50, intervalSeconds: {interval}, generation: {generation}}}
"""
VERBS = {
    *(("list", "endpointslices"), ("watch", "endpointslices")),
    *(("get", "configmaps"), ("create", "configmaps"), ("patch", "configmaps"), ("get", "deployments")),
}


@pytest.fixture(autouse=True)
def configured(release: Release) -> None:
    configure(release)


def configure(release: Release, generation: int = 1, interval: float = 0.3) -> None:
    release.config.write_text(CONFIG.format(generation=generation, interval=interval))


def weight(release: Release) -> Any:
    return release.weights().get("llama")


async def at(release: Release, wanted: int) -> None:
    await until(lambda: weight(release) == wanted)


def serve(release: Release, **canary: Any) -> None:
    """Each revision gets 60 requests, half of them through each gateway."""
    for gateway in release.gateways:
        gateway.serve("stable", 30)
        gateway.serve("canary", 30, **canary)


async def test_a_good_one_is_promoted(release: Release) -> None:
    async with release.controller():
        for wanted in (5, 50, 100):
            await at(release, wanted)
            serve(release)
    assert release.weights() == {"llama": 100}
    assert release.reasons() == ["CanaryAdvanced", "CanaryAdvanced", "CanaryPromoted"]
    event = release.api.all("events")[1]
    assert "60 requests, 0.00% failed, TTFT p95" in event["message"]
    assert event["involvedObject"]["name"] == "rel-canary-status"
    assert event["involvedObject"]["uid"] == release.api.get("configmaps", "rel-canary-status")["metadata"]["uid"]
    assert event["type"] == "Normal"
    assert release.api.requests == {*VERBS, ("create", "events")}
    assert release.metrics.canary_weight.labels("llama")._value.get() == 100


@pytest.mark.parametrize("worse", [{"errors": 10}, {"ttft": 0.4}, {"tpot": 0.04}])
async def test_a_worse_one_is_rolled_back_until_it_is_another(release: Release, worse: dict[str, Any]) -> None:
    async with release.controller():
        await at(release, 5)
        serve(release, **worse)
        await at(release, 0)
        serve(release)
        await asyncio.sleep(0.6)
        assert weight(release) == 0
        assert release.reasons() == ["CanaryAdvanced", "CanaryRolledBack"]
        assert release.api.all("events")[1]["type"] == "Warning"
        assert release.metrics.rollbacks.labels("llama")._value.get() == 1
        configure(release, generation=2)
        await at(release, 5)
        serve(release)
        await at(release, 50)


async def test_it_waits_for_requests_and_says_so_once(release: Release) -> None:
    async with release.controller():
        await until(lambda: "CanaryWaiting" in release.reasons())
        await asyncio.sleep(0.5)
        assert release.reasons() == ["CanaryAdvanced", "CanaryWaiting"]
        serve(release)
        await at(release, 50)


async def test_a_restart_in_the_middle_goes_on(release: Release) -> None:
    configure(release, interval=2.0)
    async with release.controller():
        await at(release, 5)
        serve(release)
        await until(lambda: release.analysis()["llama"]["canary"].get("ok") == 60 or weight(release) == 50)
    before = release.analysis()["llama"]
    async with release.controller():
        await at(release, 50)
    assert release.reasons().count("CanaryAdvanced") == 2
    assert before["step"] == 1, "the first controller must end before the interval does"
    assert release.analysis()["llama"]["step"] == 2


async def test_a_gateway_that_restarts_or_goes_does_no_harm(release: Release) -> None:
    one, two = release.gateways
    two.serve("stable", 1000)
    two.serve("canary", 1000, errors=1000)
    async with release.controller():
        await at(release, 5)
        release.api.remove("endpointslices", "gateway-1")
        await until(lambda: release.metrics.gateways._value.get() == 1)
        one.serve("canary", 20, errors=20)  # of which the restart leaves nothing
        one.restart()
        one.serve("stable", 60)
        one.serve("canary", 60)
        await at(release, 50)
        release.publish("gateway-1", two.port)
        await until(lambda: release.metrics.gateways._value.get() == 2)
        one.serve("stable", 60)
        one.serve("canary", 60)
        await at(release, 100)


async def test_who_else_writes_is_not_overwritten(release: Release) -> None:
    """Another controller, as one that has not ended yet, comes between reading and writing, every time but the last."""
    api = release.api
    answer, others = api.answer, 0

    def late(verb: str, place: Any, *rest: Any) -> Any:
        nonlocal others
        if (verb, place.resource) in {("create", "configmaps"), ("patch", "configmaps")} and others < 3:
            others += 1
            state = {"revision": "canary", "generation": "1", "weight": 60 + others, "step": 2, "since": time.time()}
            analysis = json.dumps({"llama": {**state, "verdict": ""}})
            api.put("configmaps", "rel-canary-status", data={"analysis.json": analysis})
        return answer(verb, place, *rest)

    api.answer = late  # type: ignore[method-assign]
    configure(release, interval=1.0)
    async with release.controller():
        await until(lambda: others)
        serve(release)
        await at(release, 100)
    assert release.reasons() == ["CanaryPromoted"]


def override(release: Release, text: str) -> None:
    release.api.put("configmaps", "rel-canary-override", data={"weights": text})


async def test_a_canary_that_an_operator_has_stopped_stays_stopped(release: Release) -> None:
    async with release.controller():
        await at(release, 5)
        override(release, "llama: 0")
        await until(lambda: release.analysis()["llama"]["rolledBack"])
        release.api.remove("configmaps", "rel-canary-override")
        serve(release)
        await asyncio.sleep(0.5)
    assert release.weights() == {"llama": 0}


async def test_an_override_holds_a_canary_until_it_is_taken_back(release: Release) -> None:
    async with release.controller():
        await at(release, 5)
        override(release, "llama: 10")
        await at(release, 10)
        serve(release)
        await asyncio.sleep(0.5)
        assert weight(release) == 10
        override(release, "llama: a lot")  # An invalid override is ignored, and the previous one stays.
        await asyncio.sleep(0.3)
        assert weight(release) == 10
        override(release, "")
        await asyncio.sleep(0.3)
        serve(release)
        await at(release, 50)


async def test_without_the_api_server_it_carries_on_later(release: Release, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with release.controller() as controller:
        await at(release, 5)
        release.api.down = True
        release.api.cut()
        serve(release)
        await asyncio.sleep(0.7)
        assert weight(release) == 5
        assert controller.live
        release.api.down = False
        await at(release, 50)
    events = [getattr(record, "event", None) for record in caplog.records]
    assert events.count("kubernetes_failed") == events.count("kubernetes_works") == 1


async def test_a_canary_that_is_over_leaves_no_weight_behind(release: Release) -> None:
    async with release.controller():
        await at(release, 5)
        release.config.write_text("models: {llama: {}}")
        await until(lambda: release.weights() == release.analysis() == {})


async def test_a_broken_configuration_changes_nothing(release: Release, caplog: pytest.LogCaptureFixture) -> None:
    async with release.controller():
        await at(release, 5)
        release.config.write_text("models: 3")
        serve(release)
        await at(release, 50)
    assert [record for record in caplog.records if getattr(record, "event", "") == "config_refused"]


def test_the_state_is_small_with_many_gateways_and_models(release: Release) -> None:
    """1,000 gateways with a canary of each of 10 models, with as many buckets as gateways have."""
    release.config.write_text("models:\n" + "".join(f"  m{i}: {{canary: {{revision: canary}}}}\n" for i in range(10)))
    canary_map = CanaryMap(release.api.client(), "default", "rel-canary", OWNER)
    events = Events(release.api.client(), "default", "rel-canary-status", "one")
    canary = CanaryReconciler(canary_map, events, release.metrics)
    config = read_config(release.config)
    for number in (0, 1):
        ttft = {str(float(bound)): number * 1e6 * i for i, bound in enumerate((*TTFT_BUCKETS, "inf"), 1)}
        tpot = {str(float(bound)): number * 1e6 * i for i, bound in enumerate((*ITL_BUCKETS, "inf"), 1)}
        counters = Counters(number * 1e8, number * 1e3, ttft, tpot)
        reading = Reading(1.0, {"canary": counters, "stable": counters, "another": counters})
        reports = {f"gateway-{i}": Report({f"m{model}": reading for model in range(10)}) for i in range(1000)}
        canary.reconcile(config, reports, 1000.0 + number)
    state = release.analysis()["m0"]
    assert state["canary"]["ok"] == 1e11
    assert len(state["canary"]["ttft"]) == len(TTFT_BUCKETS) + 1
    assert sum(len(value) for value in release.api.get("configmaps", "rel-canary-status")["data"].values()) < 64 * 1024


async def test_a_state_that_cannot_be_read_begins_anew(release: Release) -> None:
    release.api.put("configmaps", "rel-canary-status", data={"weights.json": "}", "analysis.json": '{"llama": 7}'})
    async with release.controller():
        await until(release.reasons)
    assert weight(release) == 5


async def test_its_config_map_goes_with_the_release(release: Release) -> None:
    async with release.controller():
        await at(release, 5)
        owner = release.api.get("deployments", OWNER)
        made = release.api.get("configmaps", "rel-canary-status")["metadata"]["ownerReferences"]
        assert made == [{"apiVersion": "apps/v1", "kind": "Deployment", "name": OWNER, "uid": owner["metadata"]["uid"]}]
        # Kubernetes removes the ConfigMap with its owner, and the controller does not create it again.
        release.api.remove("deployments", OWNER)
        await asyncio.sleep(0.5)
    assert release.weights() == {}
