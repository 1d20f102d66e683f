"""Keeps the one Serve stream between this gateway and a decode pod. It carries all requests for that pod."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio

from baton_common.peer_rpc import read_message
from baton_proto import serving_pb2 as pb
from baton_proto import serving_pb2_grpc as rpc

from ..concurrency.background import keep_running
from ..routing.pods import Pod

log = logging.getLogger(__name__)

RETRY_S = 0.2


class Receiver(Protocol):
    """Handles the messages of the pod about one request."""

    def deliver(self, delta: pb.Delta) -> bool:
        """Handle new tokens, or the failure of the request. Return True when no more messages are expected."""
        ...

    def handover_failed(self, prefill_address: str) -> None:
        """Handle that a prefill pod failed to hand its KV cache over to the decode pod."""
        ...

    def lost(self) -> None:
        """Handle that the stream broke before the request was complete."""
        ...

    def check(self, now: float) -> None:
        """Leave the pod if it has sent no token for too long. now: seconds of the monotonic clock."""
        ...


class DecodeLink:
    """Sends requests to a decode pod, and passes the pod's messages to the receiver of each request."""

    def __init__(self, pod: Pod, channel: Callable[[], grpc.aio.Channel], changed: Callable[[Pod], None]) -> None:
        """channel: returns the channel for the next stream. changed: called when the stream has opened or broken."""
        self.pod = pod
        self._channel = channel
        self._changed = changed
        self._receivers: dict[int, Receiver] = {}
        self._outbox: deque[pb.GatewayMessage] = deque()
        self._outgoing = asyncio.Event()
        self._last_handle = 0
        self._peers = pb.Peers()
        self._task: asyncio.Task[None] | None = None
        pod.connected = False

    def submit(self, submit: pb.Submit, receiver: Receiver) -> int:
        """Send a request and return its handle, which is also stored in `submit`."""
        self._last_handle += 1
        submit.handle = self._last_handle
        self._receivers[submit.handle] = receiver
        self._send(pb.GatewayMessage(submit=submit))
        return submit.handle

    def set_prefill_addresses(self, prefill_addresses: Sequence[str]) -> None:
        """Send the pod the addresses of the prefill pods that may prefill its requests."""
        peers = pb.Peers(prefill_addresses=prefill_addresses)
        if peers != self._peers:
            self._peers = peers
            self._send(pb.GatewayMessage(peers=peers))

    def cancel(self, handle: int) -> None:
        """Stop a request. Its receiver gets no more messages."""
        if self._receivers.pop(handle, None) is not None:
            self._send(pb.GatewayMessage(cancel=pb.Cancel(handle=handle)))

    def cancel_choice(self, handle: int, choice: int) -> None:
        """Stop one choice of a request. Its other choices continue."""
        self._send(pb.GatewayMessage(cancel=pb.Cancel(handle=handle, choice=choice)))

    def check(self, now: float) -> None:
        """Let every receiver check whether its request has stalled. now: seconds of the monotonic clock."""
        for receiver in list(self._receivers.values()):
            receiver.check(now)

    def open(self) -> None:
        """Open the stream, and reopen it whenever it breaks."""
        if self._task is None:
            self._task = keep_running("decode stream", self._run)

    def close(self) -> None:
        """Close the stream. Its unfinished requests are lost."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._disconnect()

    def _send(self, message: pb.GatewayMessage) -> None:
        self._outbox.append(message)
        self._outgoing.set()

    async def _run(self) -> None:
        while True:
            call = rpc.DecodeStub(self._channel()).Serve()  # type: ignore[no-untyped-call]
            self._outbox.clear()
            self._send(pb.GatewayMessage(peers=self._peers))
            self.pod.connected = True
            self._changed(self.pod)
            writer = asyncio.create_task(self._write(call))
            try:
                await self._read(call)
            except grpc.aio.AioRpcError as error:
                log.warning("stream lost", extra={"pod": self.pod.address, "reason": error.code().name})
            except Exception:
                # After any error the receivers must learn that their requests are lost, or they would wait for ever.
                self._disconnect()
                raise
            finally:
                writer.cancel()
                call.cancel()
            self._disconnect()
            await asyncio.sleep(RETRY_S)

    def _disconnect(self) -> None:
        if not self.pod.connected:
            return
        self.pod.connected = False
        lost, self._receivers = self._receivers, {}
        for receiver in lost.values():
            receiver.lost()
        self._changed(self.pod)

    async def _read(self, call: Any) -> None:
        receivers = self._receivers
        while (message := await read_message(call)) is not grpc.aio.EOF:
            for failed in message.step.failed_handovers:
                receiver = receivers.get(failed.handle)
                if receiver is not None:
                    receiver.handover_failed(failed.prefill_address)
            for delta in message.step.deltas:
                receiver = receivers.get(delta.handle)
                if receiver is not None and receiver.deliver(delta):
                    receivers.pop(delta.handle, None)

    async def _write(self, call: Any) -> None:
        while True:
            await self._outgoing.wait()
            self._outgoing.clear()
            while self._outbox:
                try:
                    await call.write(self._outbox.popleft())
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # `_read` fails for the same reason and handles the lost stream
