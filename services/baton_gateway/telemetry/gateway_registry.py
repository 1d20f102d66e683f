"""The registry of a gateway's metrics, which are collected without holding the event loop."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector


class GatewayRegistry(CollectorRegistry):
    """A registry that tells prometheus_client's counters, which any thread may collect, from the gateway's own
    collectors, which read what only the event loop changes."""

    def __init__(self) -> None:
        super().__init__()
        self._counters: list[Collector] = []
        self._own: list[Collector] = []

    def register(self, collector: Collector) -> None:
        super().register(collector)
        kind = self._counters if isinstance(collector, MetricWrapperBase) else self._own
        kind.append(collector)

    def snapshot(self) -> CollectorRegistry:
        """Return a registry of the same metrics, which a thread may collect. Call it on the event loop."""
        return _Snapshot([metric for collector in self._own for metric in collector.collect()], self._counters)


class _Snapshot(CollectorRegistry):
    def __init__(self, collected: list[Metric], counters: list[Collector]) -> None:
        super().__init__()
        self._collected, self._counters = collected, counters

    def collect(self) -> Iterator[Metric]:
        yield from self._collected
        for counter in self._counters:
            yield from counter.collect()
