"""Counts why requests left decode pods before their end, and how often the retry budget was spent."""

from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter

Reason = Literal["pod_lost", "missing_tokens", "handed_back", "refused", "first_token_timeout", "inter_token_timeout"]


class RetryMetrics:
    """Retry counters of all models."""

    def __init__(self) -> None:
        prefix = "baton_gateway_"
        self.departures = Counter(
            prefix + "pod_departures",
            "Requests that left a decode pod before their end, by reason.",
            ["model", "reason"],
            registry=None,
        )
        self.exhausted = Counter(
            prefix + "retry_budget_exhausted",
            "Retries that were put off or refused because the gateway's retry budget was spent.",
            ["model"],
            registry=None,
        )

    def register(self, registry: CollectorRegistry) -> None:
        for metric in (self.departures, self.exhausted):
            registry.register(metric)

    def of(self, model: str) -> "ModelRetries":
        return ModelRetries(self, model)


class ModelRetries:
    """The retry counters of one model."""

    def __init__(self, metrics: RetryMetrics, model: str) -> None:
        # Created at 0: Prometheus would miss the increase of a counter whose first sample is 1.
        self._departures = {reason: metrics.departures.labels(model, reason) for reason in get_args(Reason)}
        self._exhausted = metrics.exhausted.labels(model)

    def left(self, reason: Reason) -> None:
        """Count a request that left its pod."""
        self._departures[reason].inc()

    def exhausted(self) -> None:
        """Count a retry that the budget did not allow."""
        self._exhausted.inc()
