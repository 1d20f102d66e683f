"""The reports that a worker pod sends about itself."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from baton_proto import serving_pb2 as pb
from baton_proto.serving_pb2_grpc import WorkerServicer

from .cache_view import CacheView

_INTERVAL_S = 0.2
_MOST_KEYS = 8_192  # in one report, so that reading it does not delay the gateway's streams


class Reporter(WorkerServicer):
    """Serves Worker.Watch: at first the pod's info and the keys in its cache, then load and changes at intervals."""

    def __init__(self, info: pb.WorkerInfo, load: Callable[[], pb.WorkerLoad], cache: CacheView) -> None:
        self._info = info
        self._load = load
        self._cache = cache

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WorkerReport]:
        changes = self._cache.watch()
        try:
            gained, _ = changes.take(_MOST_KEYS)
            cache = pb.CacheChanges(snapshot=True, gained=gained)
            yield pb.WorkerReport(info=self._info, load=self._load(), cache=cache)
            while True:
                await asyncio.sleep(_INTERVAL_S)
                report = pb.WorkerReport(load=self._load())
                gained, lost = changes.take(_MOST_KEYS)
                if gained or lost:
                    report.cache.CopyFrom(pb.CacheChanges(gained=gained, lost=lost))
                yield report
        finally:
            self._cache.leave(changes)
