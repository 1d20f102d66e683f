"""An OpenTelemetry collector for tests, which keeps what it gets."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_rpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as traces_rpc
from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint, Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class _Metrics(metrics_rpc.MetricsServiceServicer):
    def __init__(self, taken: dict[str, Metric]) -> None:
        self._taken = taken

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_metrics:
            assert attributes(resource.resource)["service.name"] == "baton-gateway"
            self._taken.update((metric.name, metric) for scope in resource.scope_metrics for metric in scope.metrics)
        return metrics.ExportMetricsServiceResponse()


class Collector(traces_rpc.TraceServiceServicer):
    """Takes spans and metrics over OTLP."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[tuple[str, Span]] = []  # each with its service's name
        self.metrics: dict[str, Metric] = {}  # the last of each name

    def add_to(self, server: grpc.Server) -> None:
        traces_rpc.add_TraceServiceServicer_to_server(self, server)
        metrics_rpc.add_MetricsServiceServicer_to_server(_Metrics(self.metrics), server)

    def points(self, name: str) -> list[tuple[dict[str, Any], HistogramDataPoint]]:
        """Return the points of a histogram, each with its attributes."""
        points = self.metrics[name].histogram.data_points if name in self.metrics else ()
        return [(attributes(point), point) for point in points]

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            name = attributes(resource.resource)["service.name"]
            self.spans += [(name, span) for scope in resource.scope_spans for span in scope.spans]
        return traces.ExportTraceServiceResponse()

    async def until(self, count: int, trace: str) -> dict[tuple[str, str], Span]:
        """Wait for so many spans of a trace; return them by service and name."""
        async with asyncio.timeout(20):
            while True:
                found = [(service, span) for service, span in self.spans if span.trace_id.hex() == trace]
                if len(found) >= count:
                    return {(service.removeprefix("baton-"), span.name): span for service, span in found}
                await asyncio.sleep(0.1)


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector at a free port."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    collector.add_to(server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)


def attributes(of: Any) -> dict[str, Any]:
    """Return the attributes of a span, a resource or a data point."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in of.attributes}
