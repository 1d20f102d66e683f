"""The decode pod's end of one gateway's stream: which requests it carries, and what is still to be sent."""

import asyncio

from baton_proto import serving_pb2 as pb


class GatewayStream:
    """Deltas put in between two sends leave in one message."""

    def __init__(self) -> None:
        self.requests: dict[int, int] = {}  # the gateway's handle -> the engine's request id
        self.open_tokens = 0  # of prompts and continuations of the requests
        self.peers: list[str] = []  # addresses of the prefill pods that its requests may be handed to
        self._deltas: list[pb.Delta] = []
        self._failed_handovers: list[pb.FailedHandover] = []
        self._some = asyncio.Event()
        self._sending = False

    @property
    def unsent(self) -> bool:
        """Whether the gateway still lacks something."""
        return self._sending or bool(self._deltas)

    @property
    def num_unread(self) -> int:
        """Messages of this pod that wait for the gateway to read those before them."""
        return len(self._deltas) + len(self._failed_handovers)

    def put(self, deltas: list[pb.Delta]) -> None:
        self._deltas += deltas
        self._some.set()

    def put_failed_handover(self, handle: int, prefill_address: str) -> None:
        """Tell which prefill pod did not deliver; it leaves with the next deltas at the latest."""
        self._failed_handovers.append(pb.FailedHandover(handle=handle, prefill_address=prefill_address))
        self._some.set()

    async def next(self) -> pb.DecodeMessage:
        """Return what is to be sent next; the message before it has been sent."""
        self._sending = False
        await self._some.wait()
        self._some.clear()
        self._sending = True
        deltas, self._deltas = self._deltas, []
        failed, self._failed_handovers = self._failed_handovers, []
        return pb.DecodeMessage(step=pb.StepOutput(deltas=deltas, failed_handovers=failed))
