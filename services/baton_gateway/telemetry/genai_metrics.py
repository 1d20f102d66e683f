"""Sends the metrics of OpenTelemetry's conventions for generative AI to a collector.

Names, units, attributes and buckets are those of OpenTelemetry's semantic conventions, "Generative AI metrics".
"""

import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from .record import RequestRecord

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/completions": "text_completion"}
_DURATION_BUCKETS = [0.01 * 2**i for i in range(14)]
_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS_BUCKETS = [4**i for i in range(14)]


class GenAiMetrics:
    """Metrics of requests that generate text. A request is recorded once, at its end, so that tokens cost nothing."""

    def __init__(self, endpoint: str) -> None:
        """endpoint: of OTLP over gRPC. Metrics are sent every OTEL_METRIC_EXPORT_INTERVAL milliseconds."""
        exporter = OTLPMetricExporter(endpoint, insecure=not endpoint.startswith("https://"))
        self._provider = MeterProvider(
            [PeriodicExportingMetricReader(exporter)], Resource.create({"service.name": "baton-gateway"})
        )
        self._meter = self._provider.get_meter("baton")
        server = "gen_ai.server."
        self._duration = self._histogram(
            server + "request.duration", "s", "From a request's arrival to its end.", _DURATION_BUCKETS
        )
        self._ttft = self._histogram(
            server + "time_to_first_token", "s", "From a request's arrival to its first token.", _TTFT_BUCKETS
        )
        self._tpot = self._histogram(
            server + "time_per_output_token", "s", "Mean time between the tokens of an answer.", _TPOT_BUCKETS
        )
        self._tokens = self._histogram(
            "gen_ai.client.token.usage", "{token}", "Tokens of prompts and of answers.", _TOKENS_BUCKETS
        )

    def finished(self, record: RequestRecord) -> None:
        """Note a request that has ended."""
        operation = _OPERATIONS.get(record.route)
        if operation is None:
            return
        attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "baton"}
        if record.model is not None:
            attributes["gen_ai.request.model"] = attributes["gen_ai.response.model"] = record.model
        error = record.error or (str(record.status) if record.status >= 400 else None)
        failed = {"error.type": error} if error is not None else {}
        self._duration.record(time.monotonic() - record.started, {**attributes, **failed})
        if record.prompt_tokens:
            self._tokens.record(record.prompt_tokens, {**attributes, "gen_ai.token.type": "input"})
            self._tokens.record(record.completion_tokens, {**attributes, "gen_ai.token.type": "output"})
        if record.first_token is None or record.last_token is None or failed:
            return
        self._ttft.record(record.first_token - record.started, attributes)
        # The choices are generated side by side, so each step brings one token of each.
        steps = record.completion_tokens / len(record.finish_reasons) - 1
        if steps > 0:
            self._tpot.record((record.last_token - record.first_token) / steps, attributes)

    def stop(self) -> None:
        """Send the last values."""
        self._provider.shutdown()

    def _histogram(self, name: str, unit: str, description: str, buckets: Sequence[float]) -> Histogram:
        return self._meter.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=list(buckets))
