"""Replays a trace of requests over simulated pods, once for each scaler.

    python loadtest/scaling/scale_sim.py azure.csv --copies 4 --fixed 2:2 4:4 --json result.json --svg result.svg

The trace is in Mooncake's format (see route_sim.py) or Azure's (CSV: TIMESTAMP, ContextTokens, GeneratedTokens);
without one, requests of 1,000 and 200 tokens come at a constant rate (`--rate`). Router and scaling policy are those of
gateway and controller; pods, network and clock are simulated. A decode pod reserves the KV of prompt and output before
the prompt is computed. Pod-hours include the time in which pods start and finish what they have.
"""

import argparse
import csv
import json
import random
import sys
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from baton_controller.counters import Buckets, Counters
from baton_controller.load import Load
from baton_gateway.routing.cost import CostModel
from baton_gateway.routing.demand import Demand
from baton_gateway.routing.kv_aware import KvAware
from baton_gateway.routing.pods import Pod
from baton_gateway.routing.prefix_index import PrefixIndex
from baton_gateway.routing.router import Route, Router
from baton_gateway.telemetry.metrics import ITL_BUCKETS, TTFT_BUCKETS
from loadtest.common.sim_pod import Clock, SimPod, Speed, Work
from loadtest.routing.route_sim import BLOCK_SIZE, Request, read_trace
from loadtest.scaling.sim_fleet import Member, SimFleet
from loadtest.scaling.sim_plot import plot
from loadtest.scaling.sim_scalers import Controller, Fixed, Hpa, Scaler, Sizes, View

REPORT_S = 0.2
SPREAD_S = 30.0  # the copies of a request arrive within this time


@dataclass
class Served:
    """Seconds of each request to the first token, and per token after it; None for those with one token."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float | None] = field(default_factory=list)


@dataclass
class Result:
    """samples: for each evaluation, the time and the numbers of prefill and decode pods that take work."""

    served: Served
    samples: list[tuple[float, int, int]]
    pod_hours: float
    changes: int


def read_azure(path: Path, limit: int | None) -> list[Request]:
    """Return the first requests of a trace. The traces do not record which prefixes prompts share."""
    requests: list[Request] = []
    first: datetime | None = None
    with path.open() as lines:
        for row in csv.DictReader(lines):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or at
            tokens, output = int(row["ContextTokens"]), max(int(row["GeneratedTokens"]), 1)
            requests.append(Request((at - first).total_seconds(), max(tokens, 1), output, ()))
            if len(requests) == limit:
                break
    return requests


def constant(rate: float, seconds: float, tokens: int = 1000, output: int = 200) -> list[Request]:
    """Return requests that arrive at random, but at the same rate all the time (Poisson)."""
    draws = random.Random(0)
    gaps = accumulate(draws.expovariate(rate) for _ in range(int(rate * seconds)))
    return [Request(at, tokens, output, ()) for at in gaps]


def copied(requests: Sequence[Request], copies: int) -> list[Request]:
    """Return each request so many times, spread over some seconds, with the same prompt."""
    draws = random.Random(0)
    return [
        Request(request.arrival + (draws.uniform(0, SPREAD_S) if copy else 0), *_shape(request))
        for request in requests
        for copy in range(copies)
    ]


def _shape(request: Request) -> tuple[int, int, Sequence[int]]:
    return request.num_tokens, request.output, request.keys


class Replay:
    """One run of a trace under one scaler."""

    def __init__(self, arguments: argparse.Namespace, scaler: Scaler) -> None:
        self._arguments = arguments
        self._scaler = scaler
        self._clock = Clock()
        self._index = PrefixIndex()
        # A draining pod keeps its slot until its last request has ended.
        places = 2 * max(arguments.max, scaler.first.prefill, scaler.first.decode)
        decodes, prefills = ([self._pod(f"{role}-{i}") for i in range(places)] for role in ("decode", "prefill"))
        costs = CostModel(transfer_rate=arguments.transfer_rate)
        policy = KvAware(self._index, costs, 0.5, arguments.local_prefill)
        self._router = Router(decodes, prefills, policy, self._clock)
        speed = Speed(arguments.prefill_rate, arguments.step_ms / 1e3, arguments.request_us / 1e6)

        def make() -> SimPod:
            return SimPod(self._clock, speed, BLOCK_SIZE, arguments.cache_blocks)

        self._prefill = SimFleet(self._clock, prefills, make, arguments.start_s, self._index.drop)
        self._decode = SimFleet(self._clock, decodes, make, arguments.start_s, self._index.drop)
        self._by_slot = {member.known.slot: member for member in (*self._prefill.members, *self._decode.members)}
        self._waiting: dict[int, deque[tuple[int, Callable[[], None]]]] = {slot: deque() for slot in self._by_slot}
        self._running = 0
        self._served = Served()
        self._since = Served()  # the counts at the last evaluation
        self._was_busy: dict[int, tuple[SimPod, float]] = {}
        self._samples: list[tuple[float, int, int]] = []

    def run(self, requests: Sequence[Request]) -> Result:
        self._running = len(requests)
        self._prefill.begin(self._scaler.first.prefill)
        self._decode.begin(self._scaler.first.decode)
        for request in requests:
            self._clock.at(request.arrival, lambda request=request: self._arrive(request))  # type: ignore[misc]
        self._report()
        self._look()
        self._clock.run()
        fleets = (self._prefill, self._decode)
        for fleet in fleets:
            fleet.finish()
        held = sum(member.blocks_held + member.requests for member in self._by_slot.values())
        assert (len(self._served.ttft), held) == (len(requests), 0)
        hours = sum(fleet.pod_seconds for fleet in fleets) / 3600
        return Result(self._served, self._samples, hours, sum(fleet.changes for fleet in fleets))

    def _pod(self, address: str) -> Pod:
        return Pod(
            address,
            max_model_len=sys.maxsize,
            block_size=BLOCK_SIZE,
            num_blocks=self._arguments.blocks,
            prefill_rate=self._arguments.prefill_rate,
            token_bytes=self._arguments.token_bytes,
        )

    def _report(self) -> None:
        for slot, member in self._by_slot.items():
            if member.known.live:
                pod, sim = member.known, member.sim
                pod.requests.report(len(sim.decoding) + len(sim.queue))
                pod.prefill_tokens.report(sim.queued_tokens)
                pod.blocks_held = member.blocks_held
                gained, lost = sim.cache.changes.take(sys.maxsize)
                self._index.lose(slot, lost)
                self._index.gain(slot, gained)
        if self._running:
            self._clock.at(self._clock.now + REPORT_S, self._report)

    def _look(self) -> None:
        prefills, decodes = self._prefill.live, self._decode.live
        self._samples.append((self._clock.now, len(prefills), len(decodes)))
        rate = self._arguments.prefill_rate
        load = Load(
            self._clock.now,
            [member.known.prefill_tokens.load / rate for member in prefills],
            [member.blocks_held / self._arguments.blocks for member in decodes],
            [member.requests for member in decodes],
            0,
            _counters(self._since),
        )
        self._since = Served()
        busy = [self._busy(member) for member in prefills], [self._busy(member) for member in decodes]
        wanted = self._scaler.look(View(load, Sizes(self._prefill.replicas, self._decode.replicas), busy))
        self._prefill.scale(wanted.prefill)
        self._decode.scale(wanted.decode)
        if self._running:
            self._clock.at(self._clock.now + self._arguments.interval_s, self._look)

    def _busy(self, member: Member) -> float:
        sim, before = self._was_busy.get(member.known.slot, (member.sim, 0.0))
        now = member.sim.busy_s
        self._was_busy[member.known.slot] = member.sim, now
        return min((now - (before if sim is member.sim else 0.0)) / self._arguments.interval_s, 1.0)

    def _arrive(self, request: Request) -> None:
        demand = Demand(request.num_tokens, request.num_tokens + request.output, lambda _size: request.keys)
        route = self._router.dispatch(demand)
        assert route is not None
        decode = self._by_slot[route.decode.slot]
        prefill = self._by_slot[route.prefilling.slot]
        decode.requests += 1
        prefill.requests += prefill is not decode
        blocks = min(-(-(request.num_tokens + request.output) // BLOCK_SIZE), self._arguments.blocks)
        self._waiting[decode.known.slot].append((blocks, lambda: self._begin(request, route, decode, prefill, blocks)))
        self._admit(decode)

    def _admit(self, decode: Member) -> None:
        waiting = self._waiting[decode.known.slot]
        while waiting and decode.blocks_held + waiting[0][0] <= self._arguments.blocks:
            blocks, begin = waiting.popleft()
            decode.blocks_held += blocks
            begin()

    def _begin(self, request: Request, route: Route, decode: Member, prefill: Member, blocks: int) -> None:
        local = prefill is decode
        prompt = Work(request.num_tokens, request.keys, request.output if local else 1)
        first_at = 0.0

        def prefilled() -> None:
            nonlocal first_at
            first_at = self._clock.now
            route.prefilled(disaggregated=not local)
            if not local:
                self._prefill.done(prefill)
                missing = request.num_tokens - decode.sim.cache.match(request.keys) * BLOCK_SIZE
                carried = self._clock.now + missing * self._arguments.token_bytes / self._arguments.transfer_rate
                rest = Work(request.num_tokens, request.keys, request.output - 1, finished=finished)
                self._clock.at(carried, lambda: decode.sim.decode(rest))

        def finished() -> None:
            self._running -= 1
            route.done()
            decode.blocks_held -= blocks
            self._decode.done(decode)
            self._admit(decode)
            tpot = (self._clock.now - first_at) / (request.output - 1) if request.output > 1 else None
            for served in (self._served, self._since):
                served.ttft.append(first_at - request.arrival)
                served.tpot.append(tpot)

        prompt.prefilled = prefilled
        if local:
            prompt.finished = finished
        prefill.sim.prefill(prompt)


def _counters(served: Served) -> Counters:
    tpot = [seconds for seconds in served.tpot if seconds is not None]
    return Counters(len(served.ttft), 0, _buckets(served.ttft, TTFT_BUCKETS), _buckets(tpot, ITL_BUCKETS))


def _buckets(values: Sequence[float], bounds: Sequence[float]) -> Buckets:
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[bisect_left(bounds, value)] += 1
    return dict(zip([*map(str, bounds), "+Inf"], map(float, accumulate(counts)), strict=True))


def summary(name: str, result: Result, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Return a scaler's row; times in seconds."""
    good_ttft = [ttft <= arguments.ttft_slo for ttft in result.served.ttft]
    good_tpot = [tpot is None or tpot <= arguments.tpot_slo for tpot in result.served.tpot]
    return {
        "scaler": name,
        "ttft_attained": _share(good_ttft),
        "tpot_attained": _share(good_tpot),
        "both_attained": _share([ttft and tpot for ttft, tpot in zip(good_ttft, good_tpot, strict=True)]),
        "ttft_p99_s": sorted(result.served.ttft)[int(0.99 * len(good_ttft))],
        "pod_hours": result.pod_hours,
        "changes": result.changes,
        "simulated_in_s": seconds,
        "samples": result.samples,
    }


def _share(good: Sequence[bool]) -> float:
    return sum(good) / len(good)


def scalers(arguments: argparse.Namespace) -> dict[str, Scaler]:
    """Return the scalers to compare, each for one run."""
    first = Sizes(*arguments.first)
    found: dict[str, Scaler] = {
        "controller": Controller(first, arguments.max, arguments.ttft_slo, arguments.tpot_slo),
        "hpa": Hpa(first, arguments.max),
    }
    for prefill, decode in arguments.fixed:
        found[f"fixed {prefill}:{decode}"] = Fixed(prefill, decode)
    return found


def _ratio(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition(":")
    return int(prefill), int(decode)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--rate", type=float, default=20, help="requests a second, without a trace")
    parser.add_argument("--seconds", type=float, default=3600, help="without a trace")
    parser.add_argument("--limit", type=int, help="requests, from the start of the trace")
    parser.add_argument("--copies", type=int, default=1, help="copies of each request")
    parser.add_argument("--first", type=_ratio, default=(2, 2), help="prefill:decode pods at the start")
    parser.add_argument("--fixed", type=_ratio, nargs="*", default=[(2, 2), (4, 4), (8, 8)], help="ratios to compare")
    parser.add_argument("--max", type=int, default=12, help="pods of a role that a scaler may ask for")
    parser.add_argument("--start-s", type=float, default=60, help="time until a new pod takes work")
    parser.add_argument("--interval-s", type=float, default=15, help="time between two evaluations of a scaler")
    parser.add_argument("--ttft-slo", type=float, default=2.0, help="seconds")
    parser.add_argument("--tpot-slo", type=float, default=0.1, help="seconds")
    parser.add_argument("--blocks", type=int, default=128, help="blocks of 512 tokens of KV in a decode pod")
    parser.add_argument("--cache-blocks", type=int, default=1000, help="blocks in a pod's prefix cache")
    parser.add_argument("--prefill-rate", type=float, default=8_000, help="tokens a second")
    parser.add_argument("--step-ms", type=float, default=20, help="a decode step")
    parser.add_argument("--request-us", type=float, default=100, help="added to a decode step by each request in it")
    parser.add_argument("--transfer-rate", type=float, default=5e9, help="bytes a second into a decode pod")
    parser.add_argument("--token-bytes", type=int, default=131_072, help="bytes of KV per token")
    parser.add_argument("--local-prefill", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--svg", type=Path, help="file to draw the pods over time into")
    return parser


def read(arguments: argparse.Namespace) -> list[Request]:
    if arguments.trace is None:
        requests = constant(arguments.rate, arguments.seconds)
    elif arguments.trace.suffix == ".csv":
        requests = read_azure(arguments.trace, arguments.limit)
    else:
        requests = read_trace(arguments.trace, arguments.limit, 1)
    return copied(requests, arguments.copies)


def main() -> None:
    arguments = parser().parse_args()
    requests = read(arguments)
    print(f"{'scaler':<12}{'TTFT':>8}{'TPOT':>8}{'both':>8}{'TTFT p99':>11}{'pod-hours':>11}{'changes':>9}")
    rows = []
    for name, scaler in scalers(arguments).items():
        begun = time.perf_counter()
        result = Replay(arguments, scaler).run(requests)
        row = summary(name, result, arguments, time.perf_counter() - begun)
        rows.append(row)
        print(
            f"{name:<12}{row['ttft_attained']:>8.1%}{row['tpot_attained']:>8.1%}{row['both_attained']:>8.1%}"
            f"{row['ttft_p99_s']:>10.1f}s{row['pod_hours']:>11.1f}{row['changes']:>9}",
            flush=True,
        )
    if arguments.json:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
        arguments.json.write_text(json.dumps({"settings": settings, "requests": len(requests), "rows": rows}, indent=1))
    if arguments.svg:
        arguments.svg.write_text(plot({row["scaler"]: row["samples"] for row in rows}))


if __name__ == "__main__":
    main()
