"""How many requests wait for the pods of each pool, and how many of these pods can be used."""

from collections.abc import Iterable
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..routing.breaker import State
from .catalog import Catalog


class PoolMetrics(Collector):
    """What is so at the time of a scrape."""

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
            "Pods by what their breaker does: closed, requests pass; open, none; half_open, one tries.",
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
