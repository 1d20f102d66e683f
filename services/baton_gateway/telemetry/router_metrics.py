"""Counts the decisions of the router, and compares the cached tokens that it predicted with those that pods had."""

from collections.abc import Iterable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram

from baton_common.buckets import DECISION_BUCKETS

from ..routing.router import Route

Outcome = Literal["disaggregated", "local", "none"]

# Created at 0: Prometheus would miss the increase of a counter whose first sample is 1.
_DECISIONS: Iterable[tuple[Outcome, str]] = (
    *(("disaggregated", reason) for reason in ("least_ttft", "cached", "policy")),
    *(("local", reason) for reason in ("least_ttft", "cached", "no_prefill_pods")),
    ("none", "no_decode_pods"),
)


class RouterMetrics:
    """The routing metrics of all models. Copies of requests for a canary are not counted."""

    def __init__(self) -> None:
        prefix = "baton_gateway_router_"
        self.decisions = Counter(
            prefix + "decisions",
            "Prompts by where they were sent to be computed, and why there.",
            ["model", "outcome", "reason"],
            registry=None,
        )
        self.seconds = Histogram(
            prefix + "decision_seconds",
            "How long it took to choose pods.",
            ["model"],
            buckets=DECISION_BUCKETS,
            registry=None,
        )
        self.cached_tokens = Counter(
            prefix + "cached_tokens",
            "Prompt tokens that the computing pod had in its prefix cache, as predicted and as it turned out.",
            ["model", "kind"],
            registry=None,
        )

    def register(self, registry: CollectorRegistry) -> None:
        for metric in (self.decisions, self.seconds, self.cached_tokens):
            registry.register(metric)

    def of(self, model: str) -> "ModelRouting":
        return ModelRouting(self, model)


class ModelRouting:
    """The routing metrics of one model."""

    def __init__(self, metrics: RouterMetrics, model: str) -> None:
        self._decisions = {key: metrics.decisions.labels(model, *key) for key in _DECISIONS}
        self._seconds = metrics.seconds.labels(model)
        self._predicted = metrics.cached_tokens.labels(model, "predicted")
        self._actual = metrics.cached_tokens.labels(model, "actual")

    def decided(self, route: Route | None, seconds: float) -> None:
        """Count a decision. route: None when there was no decode pod. seconds: how long the decision took."""
        if route is None:
            self._decisions["none", "no_decode_pods"].inc()
        else:
            self._decisions["disaggregated" if route.prefills else "local", route.reason].inc()
        self._seconds.observe(seconds)

    def prefilled(self, predicted: int, actual: int) -> None:
        """Note how many tokens of a prompt were cached."""
        self._predicted.inc(predicted)
        self._actual.inc(actual)
