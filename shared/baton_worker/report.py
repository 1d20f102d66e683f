"""What a worker pod tells of itself to whoever watches it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from baton_proto import serving_pb2 as pb
from baton_proto.serving_pb2_grpc import WorkerServicer

_INTERVAL_S = 0.2


class Reporter(WorkerServicer):
    """Serves Worker.Watch: who the pod is, then its load at short intervals."""

    def __init__(self, info: pb.WorkerInfo, load: Callable[[], pb.WorkerLoad]) -> None:
        self._info = info
        self._load = load

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WorkerReport]:
        yield pb.WorkerReport(info=self._info, load=self._load())
        while True:
            await asyncio.sleep(_INTERVAL_S)
            yield pb.WorkerReport(load=self._load())
