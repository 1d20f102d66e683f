"""The default installation fits on a node of 2 CPUs and 4 GiB beside the system's own pods."""

import json
import os
import subprocess
import sys
from decimal import Decimal

import pytest
from kubernetes.utils.quantity import parse_quantity

from baton_demo import MODEL_DIR

from .charts import Manifest, case, containers, flags, named, of_kind, pods, render, workloads

GIB = 1 << 30
# A node of 2 CPUs and 4 GiB keeps 0.6 CPUs and 1.2 GiB for the kubelet and the cluster's own pods.
CPUS, MEMORY = Decimal("1.4"), Decimal("2.8") * GIB

# The engine's peak memory: every cache block has been used, in steps of the largest size.
ENGINE = """
import json, re, sys
from baton_engine.config import EngineConfig
from baton_engine.engine import Engine
from baton_engine.sampling import SamplingParams
from baton_engine.sequence import Request

blocks = int(sys.argv[2])
engine = Engine(EngineConfig(model=sys.argv[1], device="cpu", num_blocks=blocks, num_threads=1))
length = engine.max_model_len - 8
sampling = SamplingParams(max_tokens=4, temperature=1.0)
for id in range(blocks * 16 // length + 1):
    engine.add(Request(id=id, prompt=[7 + id] * length, sampling=sampling))
while engine.has_work:
    engine.step()
assert int(engine.runner.cache.planes[0][0].flatten(1).any(1).sum()) >= blocks * 0.9
print(json.dumps(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10))
"""


def request_of(spec: Manifest, resource: str) -> Decimal:
    """Return the resources that the scheduler reserves for a pod. Init containers run before the others."""
    [*first], main = spec.get("initContainers", ()), spec["containers"]
    wanted = [parse_quantity(container["resources"]["requests"][resource]) for container in (*first, *main)]
    return max([sum(wanted[len(first) :], Decimal(0)), *wanted[: len(first)]])


def requested(manifests: tuple[Manifest, ...] | list[Manifest], resource: str, surge: bool) -> Decimal:
    """Return the sum over a release's pods, including the surge pods that an upgrade starts before it ends old ones."""
    total = Decimal(0)
    for workload in workloads(manifests):
        count = workload["spec"]["replicas"]
        if surge and workload["kind"] == "Deployment":
            count += workload["spec"]["strategy"]["rollingUpdate"]["maxSurge"]
        total += count * request_of(workload["spec"]["template"]["spec"], resource)
    return total


def test_the_default_fits_on_a_small_node_while_it_is_upgraded() -> None:
    manifests = case("defaults")
    assert {manifest["kind"] for manifest in workloads(manifests)} == {"Deployment"}
    for surge in (False, True):
        assert 0 < requested(manifests, "cpu", surge) <= CPUS
        assert 0 < requested(manifests, "memory", surge) <= MEMORY
    assert requested(manifests, "memory", True) > requested(manifests, "memory", False)


def test_redis_and_the_chat_of_helm_test_fit_beside_it() -> None:
    manifests = render({"redis": {"enabled": True}})
    assert len(workloads(manifests)) == 4
    [chat] = of_kind(manifests, "Pod")
    for resource, bound in (("cpu", CPUS), ("memory", MEMORY)):
        assert requested(manifests, resource, False) + request_of(chat["spec"], resource) <= bound


def test_nobody_may_take_less_than_is_requested() -> None:
    for name, _, spec in pods(case("defaults")):
        for container in containers(spec):
            for resource, request in container["resources"]["requests"].items():
                limit = container["resources"]["limits"][resource]
                assert parse_quantity(limit) >= parse_quantity(request), name


@pytest.mark.processes
def test_a_worker_of_the_demo_model_holds_what_its_pod_requests() -> None:
    """Beside the engine there are the process that speaks gRPC and staging memory, which add less than 64 MiB."""
    decode = named(case("defaults"), "Deployment", "rel-baton-demo-decode")
    [container] = decode["spec"]["template"]["spec"]["containers"]
    blocks = flags(container)["num-blocks"]
    env = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    assert "MALLOC_MMAP_THRESHOLD_" in env
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, str(MODEL_DIR), str(blocks)],
        capture_output=True, text=True, timeout=240, check=False, env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    held = json.loads(done.stdout.splitlines()[-1])
    print(f"{held / 2**20:.0f} MiB")
    assert held + (64 << 20) <= parse_quantity(container["resources"]["requests"]["memory"])


def test_the_demo_model_s_cache_and_allocator_can_be_chosen() -> None:
    threshold = {"name": "MALLOC_MMAP_THRESHOLD_", "value": "1"}
    env = [{"name": "A", "value": "b"}, threshold]
    manifests = render({"worker": {"engine": {"num-blocks": 700, "num-threads": 1}, "extraEnv": env}})
    own = render({"models": {"mine": {}}})
    [demo], [mine] = (
        named(found, "Deployment", f"rel-baton-{name}-decode")["spec"]["template"]["spec"]["containers"]
        for found, name in ((manifests, "demo"), (own, "mine"))
    )
    assert {"num-blocks": "700", "num-threads": "1"}.items() <= flags(demo).items()
    assert [entry for entry in demo["env"] if entry in env] == env
    assert [entry["name"] for entry in demo["env"]].count("MALLOC_MMAP_THRESHOLD_") == 1
    assert threshold["name"] not in [entry["name"] for entry in mine.get("env", ())]
    assert "num-blocks" not in flags(mine)


def test_the_gateway_scales_whatever_its_pods_request() -> None:
    [hpa] = of_kind(render({"gateway": {"hpa": {"enabled": True}}}), "HorizontalPodAutoscaler")
    assert [metric["resource"]["target"]["type"] for metric in hpa["spec"]["metrics"]] == ["AverageValue"]
