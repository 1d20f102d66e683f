"""The trace span of a request on a worker, and the parts of the span."""

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton_common.tracing import Tracing


class RequestSpan:
    """Parts follow one another. Each begins at the end of the part before it, and ends when it is recorded."""

    def __init__(self, tracing: "Tracing", name: str, request_id: str, traceparent: str) -> None:
        self._tracing = tracing
        self._since = time.monotonic()
        self._span = tracing.begin(name, traceparent, {"baton.request_id": request_id}, at=self._since)
        self.traceparent = tracing.traceparent(self._span)
        self.trace_id = tracing.trace_id(self._span)  # None when it is not recorded

    def part(self, name: str, **attributes: Any) -> None:
        now = time.monotonic()
        named = {f"baton.{key}": value for key, value in attributes.items()}
        self._tracing.part(self._span, name, self._since, now, named)
        self._since = now

    def prefilled(self, queued_s: float, prefill_s: float) -> None:
        """Record the prefill of the prompt, which has just ended on this pod."""
        now = time.monotonic()
        began = now - prefill_s
        self._tracing.part(self._span, "prefill queue", began - queued_s, began)
        self._tracing.part(self._span, "prefill compute", began, now)
        self._since = now

    def end(self, reason: str) -> None:
        self._tracing.end(self._span, {"baton.finish_reason": reason}, None if reason != "error" else reason)


def begin_span(tracing: "Tracing | None", name: str, request_id: str, traceparent: str) -> RequestSpan | None:
    """Begin a span if the request is traced, else return None."""
    return RequestSpan(tracing, name, request_id, traceparent) if tracing is not None and traceparent else None
