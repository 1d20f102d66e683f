"""Metrics in the format that a scraper accepts: OpenMetrics, which alone has exemplars, or Prometheus' text format."""

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics


def exposition(registry: CollectorRegistry, accept: str | None) -> tuple[bytes, str]:
    """Return all metrics and their content type. accept: the Accept header of the scrape."""
    encode, content_type = choose_encoder(accept or "")
    if content_type.startswith("application/openmetrics-text"):
        # The default escaping turns the colons in vLLM's metric names into underscores, and dashboards expect colons.
        text: bytes = openmetrics.generate_latest(registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    return encode(registry), content_type


def exemplar(trace_id: str | None) -> dict[str, str] | None:
    """Return the labels of an exemplar; None when the request is not traced."""
    return {"trace_id": trace_id} if trace_id is not None else None
