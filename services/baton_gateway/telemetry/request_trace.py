"""The span of a generation, with names and attributes of OpenTelemetry's conventions for generative AI.

It holds no content. Source: OpenTelemetry's semantic conventions, "Generative AI spans".
"""

from typing import Any, Literal

from baton_common.tracing import Tracing

from .record import RequestRecord

Operation = Literal["chat", "text_completion"]

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "n": "choice.count",
    "max_tokens": "max_tokens",
}


class RequestTrace:
    """The span of one HTTP request, from its arrival to its last token."""

    def __init__(
        self, tracing: Tracing, operation: Operation, request: object, model: str, pool: str, record: RequestRecord
    ) -> None:
        """request: has the sampling parameters as attributes; one that is None or absent is left out."""
        self._tracing = tracing
        self._record = record
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "baton",
            "gen_ai.request.model": model,
            "baton.pool": pool,
            "baton.request_id": record.request_id,
            "baton.tenant": record.identity.name if record.identity is not None else "",
        }
        for name, attribute in _SAMPLING.items():
            value = getattr(request, name, None)
            if value is not None:
                attributes[f"gen_ai.request.{attribute}"] = value
        self._span = tracing.begin(f"{operation} {model}", record.traceparent, attributes, at=record.started)
        record.trace_id = tracing.trace_id(self._span)
        self.traceparent = tracing.traceparent(self._span)

    def end(self) -> None:
        """End the span, because the answer has been sent or has failed."""
        record, part = self._record, self._tracing.part
        if record.prepared is not None:
            part(self._span, "prepare", record.started, record.prepared)
            admitted = record.prepared + (record.queued_s or 0.0)
            sent = admitted + record.routed_s
            part(self._span, "queue", record.prepared, admitted)
            part(self._span, "route", admitted, sent)
            if record.first_token is not None and record.last_token is not None:
                part(self._span, "first token", sent, record.first_token)
                part(self._span, "stream", record.first_token, record.last_token)
        usage = {
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "gen_ai.response.model": record.model or "",
            "gen_ai.response.finish_reasons": record.finish_reasons,
            "http.response.status_code": record.status,
        }
        self._tracing.end(self._span, usage, record.error)
