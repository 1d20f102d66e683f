"""Metrics of each pool: the requests that wait for its pods, and the state of these pods."""

from collections.abc import Iterable
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..routing.breaker import State
from .catalog import Catalog


class PoolMetrics(Collector):
    """Reads the state of all pools at each scrape."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def collect(self) -> Iterable[Metric]:
        labels = ["model", "pool"]
        waiting = GaugeMetricFamily(
            "baton_gateway_requests_waiting", "Requests that wait for their turn.", labels=labels
        )
        live = GaugeMetricFamily("baton_gateway_live_pods", "Pods that take requests.", labels=[*labels, "role"])
        breakers = GaugeMetricFamily(
            "baton_gateway_breakers",
            "Pods by the state of their breaker: closed, requests pass; open, none passes; half_open, one may pass.",
            labels=[*labels, "role", "state"],
        )
        for model, pool in self._catalog.pools:
            waiting.add_metric([model, pool.spec.name], pool.fleet.admission.waiting)
            for role, count in pool.fleet.live_pods().items():
                live.add_metric([model, pool.spec.name, role], count)
            for role, states in pool.fleet.breakers().items():
                for state in get_args(State):
                    breakers.add_metric([model, pool.spec.name, role, state], states[state])
        return [waiting, live, breakers]
