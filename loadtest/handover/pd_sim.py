"""Simulates pd_load.py: prefill and decode on a GPU each beside replicas on the same GPUs, with the same arrivals. With
--pods 1 it simulates a single aggregated pod.

    python loadtest/handover/pd_sim.py --load 20.2,1024,128 --load 34.8,1024,128 --seconds 120 --seeds 3

A load is requests a second, prompt tokens and output tokens, or requests a second and a CSV of Azure's traces, whose
lengths are drawn. Admission, router, policy and cost model are those of the gateway, and the scheduler is the engine's;
step times come from measurements and a formula (sim_engine.py). The figures are those of all seeds together, in
milliseconds.
"""

import argparse
import csv
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from baton_bench.arrivals import gamma_arrivals
from baton_engine.config import CHUNK_MS
from baton_gateway.routing.admission import Admission, AdmissionRequest
from baton_gateway.routing.cost import CostModel
from baton_gateway.routing.demand import Demand
from baton_gateway.routing.kv_aware import KvAware
from baton_gateway.routing.pods import Pod
from baton_gateway.routing.prefix_index import PrefixIndex
from baton_gateway.routing.router import Route, Router
from loadtest.common.sim_engine import LLAMA_8B_S, Device, EnginePod, Job
from loadtest.common.sim_pod import Clock

_REPORT_S = 0.2
_MAX_MODEL_LEN = 16_384
_PREFILL_CHUNK_MS = 100.0  # the default of prefill pods
# Seconds from the client to the decode pod or back, from there to a prefill pod or back, and from a first token that
# left a prefill pod until the decode pod can go on. Measured values of RESULTS.md are 2 to 3 ms and 1 to 2 ms.
_GATEWAY_S, _PREFILL_RPC_S, _HANDOVER_S = 0.001, 0.0007, 0.0015


# The Llama-3.1-8B shape. In long steps one after another, a token takes 21 µs, and a pair of tokens 1.1 ns.
H200 = Device(token_s=21e-6, pair_s=1.1e-9, sizes=LLAMA_8B_S)


@dataclass(frozen=True)
class Arrival:
    at: float
    num_tokens: int
    output: int


@dataclass(eq=False)
class Served:
    """A request. tokens: when the client got each. local: whether the decode pod computed the prompt."""

    arrival: Arrival
    local: bool = False
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.arrival.at


def arrivals(load: str, seconds: float, seed: int) -> Iterator[Arrival]:
    rng = random.Random(seed)
    rate, *lengths = load.split(",")
    if len(lengths) == 1:
        with Path(lengths[0]).open() as file:
            rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
        rows = [(tokens, output) for tokens, output in rows if tokens + output <= _MAX_MODEL_LEN]
    else:
        rows = [(int(lengths[0]), int(lengths[1]))]
    for at in takewhile(lambda at: at < seconds, gamma_arrivals(float(rate), 1.0, rng)):
        tokens, output = rng.choice(rows)
        yield Arrival(at, tokens, max(output, 1))


class Fleet:
    """Simulated pods behind a gateway."""

    def __init__(
        self, prefills: int, decodes: int, costs: CostModel, chunk_ms: float, seed: int, device: Device = H200
    ) -> None:
        """chunk_ms: of decode pods. seed: of the moments at which pods send their reports. device: of each pod."""
        self.clock = Clock()
        self._rng = random.Random(seed)
        pods = []
        self._sims: dict[str, EnginePod] = {}
        for number in range(prefills + decodes):
            prefills_only = number < prefills
            sim = EnginePod(self.clock, device, _PREFILL_CHUNK_MS if prefills_only else chunk_ms, prefills_only)
            pod = Pod(
                f"pod-{number}",
                reporting=True,
                max_model_len=_MAX_MODEL_LEN,
                block_size=64,
                num_blocks=device.num_blocks,
                prefill_rate=1 / sim.times.token_s,
                context_cost=sim.times.context_cost,
                token_bytes=device.token_bytes,
                step_tokens=sim.scheduler.step_tokens,
            )
            pods.append(pod)
            self._sims[pod.address] = sim
        self._pods = pods
        index = PrefixIndex()
        self.router = Router(pods[prefills:], pods[:prefills], KvAware(index, costs), self.clock)
        self._admission = Admission(
            self.router, index, costs, self.clock, max_waiting=10_000, pod_queue_s=0.5, ttft_slo_s=30, pod_wait_s=10
        )
        self._left = 0
        self._handed_over: dict[str, tuple[int, float]] = {pod.address: (0, 0.0) for pod in pods}

    def run(self, requests: list[Arrival]) -> list[Served]:
        self._left = len(requests)
        served = [Served(request) for request in requests]
        for each in served:
            self.clock.at(each.arrival.at + _GATEWAY_S / 2, lambda each=each: self._arrive(each))  # type: ignore[misc]
        for pod in self._pods:
            self.clock.at(self._rng.random() * _REPORT_S, lambda pod=pod: self._report(pod))  # type: ignore[misc]
        self.clock.run()
        assert all(len(each.tokens) == each.arrival.output for each in served)
        return served

    def _report(self, pod: Pod) -> None:
        sim = self._sims[pod.address]
        pod.requests.report(sim.num_requests)
        pod.prefill_tokens.report(round(sim.queued_work))
        pod.blocks_held = sim.blocks_held
        pod.note_handovers(*self._handed_over[pod.address])
        self._admission.admit_waiting()
        if self._left:
            self.clock.at(self.clock.now + _REPORT_S, lambda: self._report(pod))

    def _arrive(self, served: Served) -> None:
        tokens, output = served.arrival.num_tokens, served.arrival.output
        demand = Demand(tokens, tokens + output)

        def admit() -> None:
            route = self.router.dispatch(demand)
            assert route is not None
            self._later(_GATEWAY_S / 2, lambda: self._send(served, route))

        def refuse(error: Exception) -> None:
            raise error

        self._admission.submit(AdmissionRequest([demand], admit, refuse))

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        self.clock.at(self.clock.now + seconds, do)

    def _send(self, served: Served, route: Route) -> None:
        """Let the pods serve a request that has reached its decode pod."""
        arrival, decode = served.arrival, self._sims[route.decode.address]
        served.local = not route.prefills

        def arrived() -> None:
            served.tokens.append(self.clock.now)
            if len(served.tokens) == 1:
                route.prefilled(disaggregated=not served.local)
            if len(served.tokens) == arrival.output:
                self._left -= 1
                route.done()

        def token() -> None:
            self._later(_GATEWAY_S, arrived)

        job = Job(arrival.num_tokens, arrival.output, token)
        if served.local:
            decode.prefill(job)
            return
        prefill = self._sims[route.prefilling.address]

        def first_token() -> None:
            self._later(_PREFILL_RPC_S, token)
            self._later(_HANDOVER_S, handed_over)

        def handed_over() -> None:
            address = route.decode.address
            tokens, seconds = self._handed_over[address]
            self._handed_over[address] = tokens + arrival.num_tokens, seconds + _HANDOVER_S - _PREFILL_RPC_S
            prefill.release(first)
            decode.decode(job)

        first = Job(arrival.num_tokens, 1, first_token)
        decode.reserve(job)
        self._later(_PREFILL_RPC_S, lambda: prefill.prefill(first, exports=True))


@dataclass(frozen=True)
class Row:
    """What a layout does with a load. Times in milliseconds. local: share of prompts that decode pods computed."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    local: float


def measure(
    load: str,
    prefills: int,
    decodes: int,
    costs: CostModel,
    chunk_ms: float,
    seconds: float,
    seeds: int,
    device: Device = H200,
) -> Row:
    served: list[Served] = []
    for seed in range(seeds):
        served += Fleet(prefills, decodes, costs, chunk_ms, seed, device).run(list(arrivals(load, seconds, seed)))
    ttft = [1e3 * each.ttft for each in served]
    itl = [1e3 * (second - first) for each in served for first, second in pairwise(each.tokens)]
    local = sum(each.local for each in served) / len(served)
    return Row(*(_percentile(values, share) for values in (ttft, itl) for share in (0.5, 0.99)), local)


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", dest="loads", action="append", required=True)
    parser.add_argument("--seconds", type=float, default=60, help="of arrivals, for each seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--pods", type=int, default=2, help="of each layout, a GPU each; half of those of pd prefill; 1 = one replica"
    )
    parser.add_argument("--chunk-ms", type=float, default=CHUNK_MS, help="of the decode pods of pd, or of one replica")
    parser.add_argument("--decode-delay", type=float, default=CostModel().decode_delay, help="as CostModel has it")
    arguments = parser.parse_args()
    pods, half = arguments.pods, arguments.pods // 2
    costs = CostModel(decode_delay=arguments.decode_delay)
    print(f"{'load':<22}{'layout':<10}{'TTFT p50':>9}{'p99':>7}{'ITL p50':>9}{'p99':>7}{'local':>7}   to replicas'")
    for load in arguments.loads:
        repeats = arguments.seconds, arguments.seeds
        replicas = measure(load, 0, pods, costs, CHUNK_MS if half else arguments.chunk_ms, *repeats)
        rows = {"replicas": replicas}
        if half:
            rows["pd"] = measure(load, half, pods - half, costs, arguments.chunk_ms, *repeats)
        for layout, row in rows.items():
            print(
                f"{load[-21:]:<22}{layout:<10}{row.ttft_p50:>9.1f}{row.ttft_p99:>7.1f}{row.itl_p50:>9.1f}"
                f"{row.itl_p99:>7.1f}{row.local:>7.0%}{row.ttft_p50 / replicas.ttft_p50:>8.2f}"
                f"{row.ttft_p99 / replicas.ttft_p99:>6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
