"""What a worker pod reports of itself."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc

from baton_common.peer_rpc import open_channel
from baton_common.peer_token import PeerToken
from baton_proto import serving_pb2 as pb
from baton_proto.serving_pb2_grpc import WorkerStub
from tests.peer_files import PeerFiles

CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]


class Pod:
    """A worker pod at an address."""

    def __init__(self, address: str, peers: PeerFiles | None = None) -> None:
        """peers: how it speaks TLS, if it does."""
        self.address = address
        self.peers = peers
        self.token: PeerToken | None = None

    def open_channel(self, options: Sequence[tuple[str, int]] = ()) -> grpc.aio.Channel:
        """Return a channel to the pod, as a peer of its has one. options: gRPC's, besides those of all tests."""
        tls = self.peers.load() if self.peers is not None else None
        return open_channel(self.address, [*CHANNEL_OPTIONS, *options], tls, self.token)

    async def info(self) -> pb.WorkerInfo:
        async with self._reports() as reports:
            return (await anext(reports)).info

    async def load(self) -> pb.WorkerLoad:
        return await self.until(lambda load: True)

    async def until(self, condition: Callable[[pb.WorkerLoad], object], timeout_s: float = 30) -> pb.WorkerLoad:
        """Wait for a report that meets a condition."""
        last = None
        try:
            async with asyncio.timeout(timeout_s), self._reports() as reports:
                async for report in reports:
                    last = report.load
                    if condition(last):
                        return last
        except TimeoutError:
            raise AssertionError(f"{self.address} still reports {str(last)!r} after {timeout_s} s") from None
        raise AssertionError(f"{self.address} ended its reports")

    async def idle(self, timeout_s: float = 30) -> pb.WorkerLoad:
        """Wait until the pod holds nothing for anybody."""
        return await self.until(is_idle, timeout_s)

    async def caches(self, keys: set[int], timeout_s: float = 30) -> None:
        """Wait until the pod's prefix cache is said to hold all these blocks, by a stream that begins now."""
        cached: set[int] = set()
        async with asyncio.timeout(timeout_s), self._reports() as reports:
            async for report in reports:
                assert report.HasField("info") == report.cache.snapshot
                cached = cached - set(report.cache.lost) | set(report.cache.gained)
                if keys <= cached:
                    return
        raise AssertionError(f"{self.address} ended its reports")

    @asynccontextmanager
    async def _reports(self) -> AsyncIterator[AsyncIterator[pb.WorkerReport]]:
        async with self.open_channel() as channel:
            call = WorkerStub(channel).Watch(pb.WatchRequest(), wait_for_ready=True)
            try:
                yield aiter(call)
            finally:
                call.cancel()


def is_idle(load: pb.WorkerLoad) -> bool:
    return not (load.running or load.waiting or load.blocks_held or load.tickets or load.queued_prefill_tokens)
