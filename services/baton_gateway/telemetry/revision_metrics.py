"""Errors and latencies of each revision of each model."""

import time

from prometheus_client import CollectorRegistry, Counter, Histogram

from baton_common.buckets import ITL_BUCKETS, TTFT_BUCKETS
from baton_common.exposition import exemplar

_LABELS = ("model", "revision")


class RevisionMetrics:
    """Counts each request once per pod.

    A request that fails on a pod and continues elsewhere is an error of the first pod's revision.
    """

    def __init__(self) -> None:
        prefix = "baton_gateway_revision_"
        self._requests = Counter(prefix + "requests", "Requests on decode pods.", [*_LABELS, "outcome"], registry=None)
        self._ttft = Histogram(
            prefix + "time_to_first_token_seconds",
            "From sending a request to pods to its first token.",
            _LABELS,
            buckets=TTFT_BUCKETS,
            registry=None,
        )
        self._tpot = Histogram(
            prefix + "time_per_output_token_seconds",
            "Mean time between the tokens of a request.",
            _LABELS,
            buckets=ITL_BUCKETS,
            registry=None,
        )

    def register(self, registry: CollectorRegistry) -> None:
        for metric in (self._requests, self._ttft, self._tpot):
            registry.register(metric)

    def begin(self, model: str, revision: str) -> "Run":
        """Note that a request has been sent to pods of a revision."""
        return Run(self, model, revision)

    def ended(self, run: "Run", ok: bool) -> None:
        self._requests.labels(run.model, run.revision, "ok" if ok else "error").inc()
        if run.first_token is not None:
            ttft = self._ttft.labels(run.model, run.revision)
            ttft.observe(run.first_token - run.sent, exemplar(run.trace_id))
        if run.first_token is not None and run.tokens_after_first:
            seconds = (run.last_token - run.first_token) / run.tokens_after_first
            self._tpot.labels(run.model, run.revision).observe(seconds)


class Run:
    """A request, or a part of it, on one decode pod. Times are in seconds on the monotonic clock."""

    __slots__ = ("_metrics", "first_token", "last_token", "model", "revision", "sent", "tokens_after_first", "trace_id")

    def __init__(self, metrics: RevisionMetrics, model: str, revision: str) -> None:
        self._metrics = metrics
        self.model = model
        self.revision = revision
        self.sent = time.monotonic()
        self.first_token: float | None = None
        self.last_token = self.sent
        self.tokens_after_first = 0
        self.trace_id: str | None = None  # None if the request is not traced

    def tokens(self, count: int) -> None:
        """Note that `count` tokens of one choice have arrived."""
        self.last_token = time.monotonic()
        if self.first_token is None:
            self.first_token = self.last_token
        else:
            self.tokens_after_first += count

    def ended(self, ok: bool) -> None:
        self._metrics.ended(self, ok)
