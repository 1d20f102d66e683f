"""Spans of requests, sent to an OpenTelemetry collector. Times are seconds of the monotonic clock."""

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_HEADER = "traceparent"

Attributes = Mapping[str, Any]


class Tracing:
    """Makes spans and sends them in the background. Spans that the collector rejects are lost; no call blocks."""

    def __init__(self, service: str, endpoint: str, share: float, resource: Attributes) -> None:
        """endpoint: URL of OTLP over gRPC. share: fraction of the traces begun here that are recorded, from 0 to 1.
        Traces that another service began follow that service's decision."""
        attributes = {"service.name": f"baton-{service}", **resource}
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(share)), resource=Resource.create(attributes)
        )
        exporter = OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https://"))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("baton")
        self._context = TraceContextTextMapPropagator()
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def begin(
        self, name: str, traceparent: str, attributes: Attributes | None = None, *, at: float | None = None
    ) -> Span:
        """Begin a span in the trace of `traceparent`, or in a new trace when that is empty."""
        parent = self._context.extract({_HEADER: traceparent}) if traceparent else None
        kind, began = SpanKind.SERVER, self._ns(at)
        return self._tracer.start_span(name, parent, kind, attributes=attributes, start_time=began)

    def part(self, of: Span, name: str, began: float, ended: float, attributes: Attributes | None = None) -> None:
        """Record a finished part of a span as its child."""
        if of.is_recording() and ended >= began:
            context = set_span_in_context(of)
            span = self._tracer.start_span(name, context, attributes=attributes, start_time=self._ns(began))
            span.end(self._ns(ended))

    def end(self, span: Span, attributes: Attributes | None = None, error: str | None = None) -> None:
        span.set_attributes(dict(attributes or {}))
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()

    def traceparent(self, span: Span) -> str:
        """Return the W3C header that makes another service's span a child of this one."""
        carrier: dict[str, str] = {}
        self._context.inject(carrier, set_span_in_context(span))
        return carrier.get(_HEADER, "")

    @staticmethod
    def trace_id(span: Span) -> str | None:
        """Return the id of a span's trace in hex, None when the trace is not recorded."""
        return f"{span.get_span_context().trace_id:032x}" if span.is_recording() else None

    def stop(self) -> None:
        """Send the spans that are still queued."""
        self._provider.shutdown()

    def _ns(self, at: float | None) -> int | None:
        return None if at is None else int(at * 1e9) + self._epoch_ns
