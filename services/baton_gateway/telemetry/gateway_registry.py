"""The registry of a gateway's metrics, which are collected without holding the event loop."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector


class OfAnyThread(Collector):
    """A collector that any thread may run, because it reads nothing that is changed in place."""


class GatewayRegistry(CollectorRegistry):
    """A registry that tells collectors that any thread may run, as it may prometheus_client's own counters, from those
    that read what the event loop changes."""

    def __init__(self) -> None:
        super().__init__()
        self._of_any_thread: list[Collector] = []
        self._of_loop: list[Collector] = []

    def register(self, collector: Collector) -> None:
        super().register(collector)
        anywhere = isinstance(collector, MetricWrapperBase | OfAnyThread)
        (self._of_any_thread if anywhere else self._of_loop).append(collector)

    def snapshot(self) -> CollectorRegistry:
        """Return a registry of the same metrics, which a thread may collect. Call it on the event loop."""
        collected = [metric for collector in self._of_loop for metric in collector.collect()]
        return _Snapshot(collected, self._of_any_thread)


class _Snapshot(CollectorRegistry):
    def __init__(self, collected: list[Metric], collectors: list[Collector]) -> None:
        super().__init__()
        self._collected, self._collectors = collected, collectors

    def collect(self) -> Iterator[Metric]:
        yield from self._collected
        for collector in self._collectors:
            yield from collector.collect()
