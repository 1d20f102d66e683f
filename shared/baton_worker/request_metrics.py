"""Measurements of a worker's requests. Times are seconds of the monotonic clock."""

import time
from collections import Counter

from baton_common.buckets import E2E_BUCKETS, HANDOVER_BUCKETS, ITL_BUCKETS, TOKENS_BUCKETS, TTFT_BUCKETS
from baton_common.histogram import Histogram

from .traced_histogram import TracedHistogram


class RequestMetrics:
    """Measurements of all requests since the start."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.ended: Counter[str] = Counter()  # by finish reason
        self.prefills: Counter[str] = Counter()  # prompts by the kind of pod that computed them: prefill or decode
        self.pieces: Counter[str] = Counter()  # KV pieces that arrived, by way: host or gpu
        self.piece_bytes: Counter[str] = Counter()
        self.ttft = TracedHistogram(TTFT_BUCKETS)
        self.inter_token = Histogram(ITL_BUCKETS)
        self.e2e = Histogram(E2E_BUCKETS)
        self.queued = Histogram(TTFT_BUCKETS)
        self.prefill = Histogram(TTFT_BUCKETS)
        self.decode = Histogram(E2E_BUCKETS)
        self.inference = Histogram(E2E_BUCKETS)
        self.prompt_lengths = Histogram(TOKENS_BUCKETS)
        self.generation_lengths = Histogram(TOKENS_BUCKETS)
        self.exposed_handover = Histogram(HANDOVER_BUCKETS)

    def begin(self, prompt_tokens: int, trace_id: str | None = None) -> "RequestTimes":
        """Count a request that has arrived. trace_id: None when it is not traced."""
        self.prompt_tokens += prompt_tokens
        self.prompt_lengths.observe(prompt_tokens)
        return RequestTimes(self, trace_id)

    def piece(self, way: str, size: int) -> None:
        self.pieces[way] += 1
        self.piece_bytes[way] += size


class RequestTimes:
    """Measurements of one request."""

    __slots__ = ("_began", "_first", "_last", "_metrics", "_queued_s", "_tokens", "_trace_id")

    def __init__(self, metrics: RequestMetrics, trace_id: str | None) -> None:
        self._metrics = metrics
        self._began = time.monotonic()
        self._first = 0.0
        self._last: dict[int, float] = {}  # by choice
        self._queued_s = 0.0
        self._tokens = 0
        self._trace_id = trace_id

    def prompt(self, cached_tokens: int, queued_s: float, prefill_s: float, by: str) -> None:
        """Record how the prompt was computed. by: the kind of pod that computed it, prefill or decode."""
        metrics = self._metrics
        metrics.cached_tokens += cached_tokens
        metrics.prefills[by] += 1
        metrics.queued.observe(queued_s)
        metrics.prefill.observe(prefill_s)
        self._queued_s = queued_s

    def tokens(self, choice: int, count: int) -> None:
        """Record that tokens of a choice have arrived."""
        now, metrics = time.monotonic(), self._metrics
        metrics.generation_tokens += count
        self._tokens += count
        last = self._last.get(choice)
        if last is not None:
            metrics.inter_token.observe((now - last) / count, count)
        elif not self._first:
            self._first = now
            metrics.ttft.observe_traced(now - self._began, self._trace_id)
        self._last[choice] = now

    def end(self, reason: str) -> None:
        """Record the end of the request. reason: stop, length, error or abort."""
        now, metrics = time.monotonic(), self._metrics
        metrics.ended[reason] += 1
        if reason != "abort":
            metrics.e2e.observe(now - self._began)
            metrics.inference.observe(now - self._began - self._queued_s)
            metrics.decode.observe(now - self._first if self._first else 0.0)
            metrics.generation_lengths.observe(self._tokens)
