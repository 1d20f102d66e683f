"""How long the gateway takes to choose a request's pods, with many pods and many cached blocks.

    python loadtest/routing/router_bench.py --pods 256 --blocks 1000000

A decision is all of Router.dispatch: hashing the prompt's blocks, the index, the costs, the charges. Half of the pods
are decode pods. Prompts share a system prompt that every pod has, and the rest of a prompt is cached on one pod of each
role up to a random point. Beside the time on the wall stands that of the CPU, which other processes do not lengthen.
"""

import argparse
import gc
import json
import random
import resource
import statistics
import time
from array import array

from baton_common.block_hash import block_keys
from baton_gateway.routing.demand import Demand
from baton_gateway.routing.kv_aware import KvAware
from baton_gateway.routing.pods import Pod
from baton_gateway.routing.prefix_index import PrefixIndex
from baton_gateway.routing.router import Router

BLOCK_SIZE = 16
SYSTEM_TOKENS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="cached blocks over all pods")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="tokens of a prompt")
    parser.add_argument("--decisions", type=int, default=5000, help="decisions to time for each length")
    parser.add_argument("--json", help="file to write the figures to")
    arguments = parser.parse_args()
    rng = random.Random(0)
    index = PrefixIndex()
    pods = [_pod(number, rng) for number in range(arguments.pods)]
    half = arguments.pods // 2
    router = Router(pods[:half], pods[half:], KvAware(index), time.monotonic)
    before = _resident_bytes()
    prompts = _fill(index, pods, half, arguments.blocks, max(arguments.lengths), rng)
    rows = [
        {"entries": index.num_entries, "index_bytes": _resident_bytes() - before, "pods": arguments.pods},
        *(_measure(router, prompts, length, arguments.decisions, rng) for length in arguments.lengths),
        _measure_drop(index, pods[0]),
    ]
    for row in rows:
        print(
            "  ".join(
                f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value:,}"
                for name, value in row.items()
            )
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


def _pod(number: int, rng: random.Random) -> Pod:
    pod = Pod(
        f"10.0.{number // 256}.{number % 256}:9000",
        reporting=True,
        revision="r1",
        max_model_len=131_072,
        block_size=BLOCK_SIZE,
        num_blocks=30_000,
        prefill_rate=40_000.0,
        token_bytes=131_072,
    )
    pod.requests.report(rng.randrange(64))
    pod.prefill_tokens.report(rng.randrange(20_000))
    return pod


def _fill(
    index: PrefixIndex, pods: list[Pod], half: int, num_blocks: int, length: int, rng: random.Random
) -> list[list[int]]:
    """Cache so many blocks and return prompts of which some are."""
    system = [rng.randrange(128_000) for _ in range(SYSTEM_TOKENS)]
    for pod in pods:
        index.gain(pod.slot, block_keys([*system, 0], BLOCK_SIZE))
    prompts = []
    for number in range(200):
        prompts.append([*system, *(rng.randrange(128_000) for _ in range(max(length - SYSTEM_TOKENS, 0)))])
        keys = list(block_keys(prompts[-1], BLOCK_SIZE))
        for pod in (pods[number % half], pods[half + number % (len(pods) - half)]):
            index.gain(pod.slot, keys[: rng.randrange(len(keys) + 1)])
    while index.num_entries < num_blocks:
        # In one report, as the blocks of one request.
        count = min(128, num_blocks - index.num_entries)
        index.gain(rng.choice(pods).slot, array("Q", rng.randbytes(8 * count)))
    return prompts


def _measure(router: Router, prompts: list[list[int]], length: int, count: int, rng: random.Random) -> dict[str, float]:
    wall, cpu = [], []
    routes = []
    gc.collect()
    for _ in range(count):
        prompt = rng.choice(prompts)[:length]
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        route = router.dispatch(Demand.of(prompt, length + 512, "a session"))
        cpu.append((time.thread_time() - begun_cpu) * 1e3)
        wall.append((time.perf_counter() - begun) * 1e3)
        assert route is not None
        routes.append(route)
        if len(routes) > 500:
            routes.pop(0).done()
    for route in routes:
        route.done()
    return {
        "prompt_tokens": length,
        "decisions": count,
        "p50_ms": statistics.median(wall),
        "p99_ms": _p99(wall),
        "cpu_p50_ms": statistics.median(cpu),
        "cpu_p99_ms": _p99(cpu),
    }


def _p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]


def _measure_drop(index: PrefixIndex, pod: Pod) -> dict[str, float]:
    before, begun = index.num_entries, time.perf_counter()
    index.drop(pod.slot)
    return {"dropped_entries": before - index.num_entries, "drop_ms": (time.perf_counter() - begun) * 1e3}


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
