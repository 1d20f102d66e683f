"""What metrics cost: a decode pod's RPC process for each step of a batch and each scrape, a gateway for each request.

Usage: metrics_bench.py [--batch N] [--step-ms MS]. Times are medians.
"""

import argparse
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import generate_latest

from baton_common.peer_refusals import PeerRefusals
from baton_engine.delta import Load
from baton_worker.metrics import WorkerCollector
from baton_worker.request_metrics import RequestMetrics

REPEATS = 500


def median_us(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def request_us() -> float:
    """Record the metrics of a request for a collector that does not exist."""
    # Imported in the functions, because a decode pod does not load these modules.
    from baton_gateway.telemetry.genai_metrics import GenAiMetrics
    from baton_gateway.telemetry.record import RequestRecord

    logging.disable()
    metrics = GenAiMetrics("http://127.0.0.1:9")
    record = RequestRecord("id", route="/v1/completions", model="model", status=200, finish_reasons=["stop"])
    record.prompt_tokens, record.completion_tokens = 1000, 100
    record.first_token, record.last_token = record.started + 0.1, record.started + 1.1
    return median_us(lambda: metrics.finished(record), REPEATS)


def decision_us() -> float:
    """Count a decision of the router and the cached tokens of the prompt."""
    from baton_gateway.telemetry.router_metrics import RouterMetrics

    routing, route = RouterMetrics().of("model"), cast(Any, SimpleNamespace(prefills=["a"], reason="cached"))

    def count() -> None:
        routing.decided(route, 1e-4)
        routing.prefilled(100, 100)

    return median_us(count, REPEATS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256, help="requests in the batch; each gains one token a step")
    parser.add_argument("--step-ms", type=float, default=13.0, help="duration of a step on the device")
    args = parser.parse_args()
    metrics = RequestMetrics()
    requests = [metrics.begin(1000) for _ in range(args.batch)]

    def step() -> None:
        for request in requests:
            request.tokens(0, 1)

    collector = WorkerCollector(
        "model",
        "stable",
        "decode",
        cast(Any, SimpleNamespace(num_blocks=1000, block_size=64)),
        metrics,
        lambda: Load(0, 0, 0, 0, 0, 0, 0, 0),
        cast(Any, SimpleNamespace(draining=False, events=Counter(), handed_over_tokens=0, num_tickets=0)),
        PeerRefusals(),
    )
    registry = collector.registry()
    step_us, scrape_us = median_us(step, REPEATS), median_us(lambda: generate_latest(registry), 50)
    share = step_us / args.step_ms / 1000
    each = f"{step_us:.0f} us, {step_us / args.batch:.2f} us a token"
    print(f"step of {args.batch}: {each}, {share:.1%} of {args.step_ms} ms")
    print(f"scrape: {scrape_us / 1000:.1f} ms")
    print(f"gateway, a request: {decision_us():.1f} us for the router, {request_us():.0f} us for a collector")


if __name__ == "__main__":
    main()
