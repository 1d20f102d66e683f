"""A histogram whose buckets point to traces, through exemplars."""

import time
from bisect import bisect_left

from prometheus_client.samples import Exemplar

from baton_common.exposition import exemplar
from baton_common.histogram import Histogram


class TracedHistogram(Histogram):
    """Keeps the last exemplar of each bucket, by the bucket's number."""

    exemplars: dict[int, Exemplar] = {}

    def observe_traced(self, value: float, trace_id: str | None) -> None:
        """Count a value. trace_id: of the request that the value belongs to; None when it is not traced."""
        self.observe(value)
        labels = exemplar(trace_id)
        if labels is not None:
            self.exemplars[bisect_left(self.bounds, value)] = Exemplar(labels, value, time.time())
