"""The outermost layer of the HTTP application: request ids, errors that nothing else handles, log lines, metrics."""

import logging
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..concurrency.crash_log import log_crash
from ..concurrency.turns import Client
from ..errors import internal_error
from ..telemetry.metrics import Metrics
from ..telemetry.record import SCOPE_KEY, RequestRecord, new_request_id
from ..tenancy.quota import Quota

log = logging.getLogger(__name__)

# Probes come every few seconds. With a log line for each, the other lines would be hard to find.
QUIET_ROUTES = frozenset({"/health", "/live", "/ready"})


class Edge:
    """ASGI middleware around the rest of the application."""

    def __init__(self, app: ASGIApp, metrics: Metrics, quota: Quota, session_header: str) -> None:
        self._app = app
        self._metrics = metrics
        self._quota = quota
        self._session_header = session_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = RequestRecord(
            new_request_id(headers.get("x-request-id")),
            session=headers.get(self._session_header, ""),
            traceparent=headers.get("traceparent", ""),
        )
        scope[SCOPE_KEY] = record

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                elapsed_ms = int((time.monotonic() - record.started) * 1000)
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", record.request_id.encode()),
                    (b"openai-processing-ms", b"%d" % elapsed_ms),
                    *(record.reservation.headers() if record.reservation is not None else ()),
                ]
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            log_crash("request crashed", error, request_id=record.request_id)
            if record.status:
                return  # the server sees an unfinished answer and resets the connection
            await internal_error().response()(scope, receive, send_with_headers)
        finally:
            self._metrics.in_flight.dec()
            if record.reservation is not None:
                self._quota.settle(record.reservation, record.prompt_tokens + record.completion_tokens)
            self._finish(scope, record)

    def _finish(self, scope: Scope, record: RequestRecord) -> None:
        # This breaks a reference cycle: the client refers to the server's request, which refers to the record.
        record.client = Client()
        route = scope.get("route")
        record.route = getattr(route, "path", "unmatched")
        self._metrics.finished(record)
        if record.end_trace is not None:
            record.end_trace()
        if record.route in QUIET_ROUTES:
            return
        fields = {
            "request_id": record.request_id,
            "trace_id": record.trace_id,
            "method": scope["method"] if record.route != "unmatched" else None,
            "route": record.route,
            "status": record.status,
            "model": record.model,
            "pool": record.pool,
            "tenant": record.identity.name if record.identity is not None else None,
            "key": record.identity.key if record.identity is not None else None,
            "duration_ms": _ms(record.started, time.monotonic()),
            "ttft_ms": _ms(record.started, record.first_token),
            "queued_ms": None if record.queued_s is None else round(record.queued_s * 1000, 1),
            "stream": record.stream,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "finish_reasons": record.finish_reasons[:8],
            "error": record.error,
        }
        log.info("request", extra={key: value for key, value in fields.items() if value is not None})


def _ms(start: float, end: float | None) -> float | None:
    return None if end is None else round((end - start) * 1000, 1)
