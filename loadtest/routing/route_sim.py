"""Replays a trace of requests through the gateway's router over simulated pods, once for each policy.

    python loadtest/routing/route_sim.py trace.jsonl --prefills 8 --decodes 8 --json result.json --plot result.svg

The trace is in Mooncake's format: a JSON object a line with timestamp (ms), input_length, output_length (tokens) and
hash_ids, which name the prompt's blocks of 512 tokens by content and all that comes before. Router, policies, cost
model and index are those of the gateway; pods, network and clock are simulated (sim_pod.py). Reports come as late as
those of real pods. Hit rate: the share of prompt tokens that the pod which prefilled had cached.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

sys.path.append(str(Path(__file__).parents[2]))

from baton_gateway.routing.cost import CostModel
from baton_gateway.routing.demand import Demand
from baton_gateway.routing.kv_aware import KvAware
from baton_gateway.routing.pods import Pod
from baton_gateway.routing.policies import LeastLoaded, Policy, PolicyName, Random, RoundRobin
from baton_gateway.routing.prefix_index import PrefixIndex
from baton_gateway.routing.router import Route, Router
from loadtest.common.sim_pod import Clock, SimPod, Speed, Work
from loadtest.routing.route_plot import Curve, plot

BLOCK_SIZE = 512
REPORT_S = 0.2


@dataclass(frozen=True)
class Request:
    """arrival: seconds from the start. keys: of the prompt's full blocks, without one that ends with its last token."""

    arrival: float
    num_tokens: int
    output: int
    keys: Sequence[int]


@dataclass
class Result:
    """Times in seconds, one for each request; tokens of all prompts, and of these the cached ones."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    local: int = 0  # requests whose prompt a decode pod computed


def read_trace(path: Path, limit: int | None, speed: float) -> list[Request]:
    """Return the first requests of a trace, arriving `speed` times as fast."""
    requests = []
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            keys = row["hash_ids"][: (row["input_length"] - 1) // BLOCK_SIZE]
            arrival = row["timestamp"] / 1000 / speed
            requests.append(Request(arrival, row["input_length"], max(row["output_length"], 1), keys))
            if len(requests) == limit:
                break
    return requests


class Replay:
    """One run of a trace under one policy."""

    def __init__(self, arguments: argparse.Namespace, make_policy: Callable[[PrefixIndex], Policy]) -> None:
        self.result = Result()
        self._clock = Clock()
        self._token_bytes = arguments.token_bytes
        self._transfer_rate = arguments.transfer_rate
        self._index = PrefixIndex()
        speed = Speed(arguments.prefill_rate, arguments.step_ms / 1e3, arguments.request_us / 1e6)
        decodes = [self._pod(f"decode-{i}", arguments) for i in range(arguments.decodes)]
        prefills = [self._pod(f"prefill-{i}", arguments) for i in range(arguments.prefills)]
        self._router = Router(decodes, prefills, make_policy(self._index), self._clock)
        self._pods = {pod.slot: pod for pod in (*decodes, *prefills)}
        self._sims = {slot: SimPod(self._clock, speed, BLOCK_SIZE, arguments.blocks) for slot in self._pods}
        self._link_free = dict.fromkeys(self._pods, 0.0)  # when the link into a decode pod becomes idle
        self._running = 0

    def run(self, requests: Sequence[Request]) -> Result:
        self._running = len(requests)
        for request in requests:
            self._clock.at(request.arrival, lambda request=request: self._arrive(request))  # type: ignore[misc]
        self._report()
        self._clock.run()
        charged = sum(pod.requests.charged + pod.prefill_tokens.charged for pod in self._pods.values())
        assert (len(self.result.ttft), charged) == (len(requests), 0)
        return self.result

    @staticmethod
    def _pod(address: str, arguments: argparse.Namespace) -> Pod:
        return Pod(
            address,
            reporting=True,
            max_model_len=sys.maxsize,
            block_size=BLOCK_SIZE,
            num_blocks=arguments.blocks,
            prefill_rate=arguments.prefill_rate,
            token_bytes=arguments.token_bytes,
        )

    def _report(self) -> None:
        for slot, sim in self._sims.items():
            pod = self._pods[slot]
            pod.requests.report(len(sim.decoding) + len(sim.queue))
            pod.prefill_tokens.report(sim.queued_tokens)
            gained, lost = sim.cache.changes.take(sys.maxsize)
            self._index.lose(slot, lost)
            self._index.gain(slot, gained)
        if self._running:
            self._clock.at(self._clock.now + REPORT_S, self._report)

    def _arrive(self, request: Request) -> None:
        demand = Demand(request.num_tokens, request.num_tokens + request.output, lambda _size: request.keys)
        route = self._router.dispatch(demand)
        assert route is not None
        local = not route.prefills
        on_prefill_pod = Work(request.num_tokens, request.keys, request.output if local else 1)
        first_at = 0.0

        def prefilled() -> None:
            nonlocal first_at
            first_at = self._clock.now
            route.prefilled(disaggregated=not local)
            self.result.ttft.append(first_at - request.arrival)
            self.result.prompt_tokens += request.num_tokens
            self.result.cached_tokens += on_prefill_pod.cached or 0
            self.result.local += local
            if not local:
                self._hand_over(request, route, finished)

        def finished() -> None:
            self._running -= 1
            route.done()
            if request.output > 1:
                self.result.tpot.append((self._clock.now - first_at) / (request.output - 1))

        on_prefill_pod.prefilled = prefilled
        if local:
            on_prefill_pod.finished = finished
        self._sims[route.prefilling.slot].prefill(on_prefill_pod)

    def _hand_over(self, request: Request, route: Route, finished: Callable[[], None]) -> None:
        """Carry the KV to the decode pod, which generates all but the first token."""
        slot = route.decode.slot
        missing = request.num_tokens - self._sims[slot].cache.match(request.keys) * BLOCK_SIZE
        begun = max(self._clock.now, self._link_free[slot])
        self._link_free[slot] = begun + missing * self._token_bytes / self._transfer_rate
        work = Work(request.num_tokens, request.keys, request.output - 1, finished=finished)
        self._clock.at(self._link_free[slot], lambda: self._sims[slot].decode(work))


def policies(arguments: argparse.Namespace) -> dict[str, Callable[[PrefixIndex], Policy]]:
    """Return how each policy is made from an index."""
    costs = CostModel(transfer_rate=arguments.transfer_rate)
    return {
        "random": lambda _: Random(0),
        "round_robin": lambda _: RoundRobin(),
        "least_loaded": lambda _: LeastLoaded(),
        "kv_aware": lambda index: KvAware(index, costs, arguments.stay_margin, arguments.local_prefill),
    }


def summary(name: str, result: Result, seconds: float) -> dict[str, Any]:
    """Return a policy's row; times in ms."""
    return {
        "policy": name,
        "hit_rate": result.cached_tokens / result.prompt_tokens,
        "ttft_p50_ms": _percentile(result.ttft, 0.5) * 1e3,
        "ttft_p99_ms": _percentile(result.ttft, 0.99) * 1e3,
        "tpot_p50_ms": _percentile(result.tpot, 0.5) * 1e3,
        "tpot_p99_ms": _percentile(result.tpot, 0.99) * 1e3,
        "local_share": result.local / len(result.ttft),
        "simulated_in_s": seconds,
    }


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--policies", nargs="+", choices=get_args(PolicyName), default=list(get_args(PolicyName)))
    parser.add_argument("--prefills", type=int, default=4)
    parser.add_argument("--decodes", type=int, default=4, help="prefill and decode pods")
    parser.add_argument("--blocks", type=int, default=1000, help="blocks of 512 tokens in a pod's prefix cache")
    parser.add_argument("--prefill-rate", type=float, default=20_000, help="tokens a second")
    parser.add_argument("--step-ms", type=float, default=5, help="a decode step")
    parser.add_argument("--request-us", type=float, default=35, help="added to a decode step by each request in it")
    parser.add_argument("--transfer-rate", type=float, default=5e9, help="bytes a second into a decode pod")
    parser.add_argument("--token-bytes", type=int, default=131_072, help="bytes of KV per token")
    parser.add_argument("--speed", type=float, default=1, help="factor for the arrival rate of the trace")
    parser.add_argument("--limit", type=int, help="requests, from the start of the trace")
    parser.add_argument("--stay-margin", type=float, default=0.5)
    parser.add_argument("--local-prefill", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--plot", type=Path, help="SVG to draw TTFT and hit rates into")
    arguments = parser.parse_args()
    requests = read_trace(arguments.trace, arguments.limit, arguments.speed)
    print(f"{'policy':<14}{'hit rate':>9}{'TTFT p50':>11}{'p99':>11}{'TPOT p50':>10}{'p99':>9}{'local':>8}   (ms)")
    rows = []
    curves = {}
    for name, make in policies(arguments).items():
        if name in arguments.policies:
            begun = time.perf_counter()
            result = Replay(arguments, make).run(requests)
            row = summary(name, result, time.perf_counter() - begun)
            rows.append(row)
            curves[name] = Curve(result.ttft, row["hit_rate"])
            print(
                f"{name:<14}{row['hit_rate']:>9.1%}{row['ttft_p50_ms']:>11.0f}{row['ttft_p99_ms']:>11.0f}"
                f"{row['tpot_p50_ms']:>10.1f}{row['tpot_p99_ms']:>9.1f}{row['local_share']:>8.1%}",
                flush=True,
            )
    if arguments.plot:
        arguments.plot.write_text(plot(curves))
    if arguments.json:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
        arguments.json.write_text(json.dumps({"settings": settings, "requests": len(requests), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
