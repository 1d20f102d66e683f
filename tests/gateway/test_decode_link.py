"""The stream of requests to a decode pod, without a pod."""

import asyncio
from typing import Any

import grpc
import grpc.aio

from baton_gateway.fleet.decode_link import DecodeLink
from baton_gateway.routing.pods import Pod


class FailingCall:
    """A call that waits for its first answer, and that fails just when it is cancelled. The failure hides that."""

    def __init__(self) -> None:
        self.reading = asyncio.Event()

    async def read(self) -> Any:
        self.reading.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "Connection reset") from None

    async def write(self, message: Any) -> None: ...

    def cancel(self) -> None: ...


class Channel:
    def __init__(self) -> None:
        self.calls: list[FailingCall] = []

    def stream_stream(self, *_: Any, **__: Any) -> Any:
        return self._call

    def _call(self) -> FailingCall:
        self.calls.append(FailingCall())
        return self.calls[-1]


async def test_a_closed_stream_is_not_opened_again_beside_the_next_one(monkeypatch):
    """Two streams would share what is to be sent, and the answers on the first would be for nobody."""
    monkeypatch.setattr("baton_gateway.fleet.decode_link.RETRY_S", 0.001)
    pod, channel = Pod("10.0.0.1:8000"), Channel()
    link = DecodeLink(pod, lambda: channel, lambda _pod: None)
    for number in range(3):
        link.open()
        while len(channel.calls) <= number:
            await asyncio.sleep(0)
        await channel.calls[number].reading.wait()
        assert pod.connected
        link.close()
        assert not pod.connected
        await asyncio.sleep(0.05)
        assert len(channel.calls) == number + 1
        assert [task for task in asyncio.all_tasks() if task.get_name() == "decode stream"] == []
