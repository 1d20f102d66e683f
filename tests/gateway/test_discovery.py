"""Pods and canaries as the Kubernetes API reports them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton_gateway.routing.canary import CanaryShare
from baton_proto import serving_pb2 as pb
from tests.kube.api_server import ApiServer

from .fake_worker import FakePod, hang
from .harness import Stack, pods, running

LABELS = {"app.kubernetes.io/instance": "it", "baton.dev/model": "tiny"}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, processes: None) -> Iterator[ApiServer]:
    with ApiServer() as server:
        monkeypatch.setattr("baton_gateway.fleet.discovery.connect", server.client)
        yield server


def put_slice(api: ApiServer, name: str, role: str, *every: FakePod, **labels: str) -> None:
    """Put the pods of a Service; each has a slice of its own, as their ports differ."""
    for number, pod in enumerate(every):
        api.put(
            "endpointslices",
            f"{name}-{number}",
            {**LABELS, "baton.dev/role": role, **labels},
            addressType="IPv4",
            endpoints=[{"addresses": ["127.0.0.1"], "conditions": {"ready": False}}],
            ports=[{"name": "metrics", "port": 1}, {"name": "grpc", "port": pod.port}],
        )


@asynccontextmanager
async def discovering(folder: Path, model: Path) -> AsyncIterator[Stack]:
    selector = ",".join(f"{name}={value}" for name, value in LABELS.items())
    file = folder / "models.yaml"
    file.write_text(json.dumps({"models": [{"name": "tiny", "folder": str(model), "pools": [{"selector": selector}]}]}))
    settings = {"models_file": file, "namespace": "default", "canary_configmaps": "it-canary"}
    async with running(None, [], **settings) as stack:
        yield stack


async def test_pods_come_and_go(tmp_path: Path, model_folder: Path, api: ApiServer) -> None:
    async with pods(2) as (first, second), pods(role=pb.ROLE_PREFILL) as (prefill,):
        put_slice(api, "decode", "decode", first)
        put_slice(api, "prefill", "prefill", prefill)
        put_slice(api, "other", "decode", second, **{"baton.dev/model": "other"})
        async with discovering(tmp_path, model_folder) as stack:
            await stack.until(lambda: stack.fleet.live_pods() == {"decode": 1, "prefill": 1})
            first.script = hang(5)
            held = asyncio.create_task(stack.complete())
            job = await first.job()
            began = time.monotonic()
            put_slice(api, "decode", "decode", first, second)
            await stack.until(lambda: stack.fleet.live_pods()["decode"] == 2)
            assert time.monotonic() - began < 2
            # Decode pods are told of the prefill pods.
            await stack.until(lambda: first.peers == second.peers == [prefill.address])
            # One that is not listed any more gets nothing new, finishes what it has, and is forgotten when it is gone.
            api.remove("endpointslices", "decode-0")
            await stack.until(lambda: stack.fleet.live_pods()["decode"] == 1)
            assert [(await stack.complete()).status_code for _ in range(3)] == [200] * 3
            assert (len(first.jobs), len(second.jobs)) == (1, 3)
            await job.send(job.delta([7], finish=pb.FINISH_REASON_STOP))
            assert (await held).json()["choices"][0]["finish_reason"] == "stop"
            assert len(stack.fleet.router.decodes) == 2
            await first.stop()
            await stack.until(lambda: len(stack.fleet.router.decodes) == 1)


async def test_the_api_server_goes_away(tmp_path: Path, model_folder: Path, api: ApiServer) -> None:
    async with pods(2) as (first, second):
        put_slice(api, "decode", "decode", first)
        async with discovering(tmp_path, model_folder) as stack:
            await stack.until(lambda: stack.fleet.live_pods()["decode"] == 1)
            api.down = True
            api.cut()
            put_slice(api, "decode", "decode", first, second)
            assert (await stack.complete()).status_code == 200
            api.compact()
            api.down = False
            await stack.until(lambda: stack.fleet.live_pods()["decode"] == 2)


async def test_the_share_of_a_canary(tmp_path: Path, model_folder: Path, api: ApiServer) -> None:
    def stated(weight: int, generation: str = "") -> None:
        shares = {"tiny": {"revision": "canary", "weight": weight, "generation": generation}}
        api.put("configmaps", "it-canary-values", data={"canary.json": json.dumps(shares)})

    async with discovering(tmp_path, model_folder) as stack:
        router = stack.fleet.router

        async def gets(weight: int) -> None:
            await stack.until(lambda: router.canary == CanaryShare("canary", weight))

        stated(5)
        await gets(5)
        api.put("configmaps", "it-canary-values", data={"canary.json": "nonsense"})
        api.put("configmaps", "another", data={"canary.json": "{}"})
        # The controller's weight is for the settings that it has seen.
        moved = {"tiny": {"generation": "a", "weight": 50}}
        api.put("configmaps", "it-canary-status", data={"weights.json": json.dumps(moved), "analysis.json": "{}"})
        stated(25)
        await gets(25)
        stated(0, "a")
        await gets(50)
        # An operator's comes before both, until it is taken back; one that cannot be read changes nothing.
        api.put("configmaps", "it-canary-override", data={"weights": "tiny: 0\nother: 7"})
        await gets(0)
        api.put("configmaps", "it-canary-override", data={"weights": "tiny: 101"})
        stated(0, "b")
        await stack.until(lambda: True)
        assert router.canary == CanaryShare("canary", 0)
        api.put("configmaps", "it-canary-override", data={"weights": "tiny: 70"})
        await gets(70)
        api.put("configmaps", "it-canary-override")
        await gets(0)
        stated(0, "a")
        await gets(50)
        api.remove("configmaps", "it-canary-status")
        await gets(0)
        api.remove("configmaps", "it-canary-values")
        await stack.until(lambda: router.canary is None)
        # What the gateway's Role has to allow, and no more.
        assert api.requests == {(verb, kind) for verb in ("list", "watch") for kind in ("endpointslices", "configmaps")}
