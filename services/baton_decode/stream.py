"""The decode pod's end of one gateway's stream: the requests on it, and the deltas that are still to be sent."""

import asyncio

from baton_proto import serving_pb2 as pb

# Bytes of the deltas in one message, without the last one. The log probabilities of a long prompt take 31 MB, and a
# message of 64 MiB would end the stream of all requests of the gateway.
_MESSAGE_BYTES = 8 << 20


class GatewayStream:
    """Collects the deltas that are put between two sends, and sends them in one message, or in several if they are
    large."""

    def __init__(self) -> None:
        self.requests: dict[int, int] = {}  # the gateway's handle -> the engine's request id
        self.open_tokens = 0  # of prompts and continuations of the requests
        self.peers: list[str] = []  # addresses of the prefill pods that its requests may be handed to
        self._deltas: list[pb.Delta] = []
        self._failed_handovers: list[pb.FailedHandover] = []
        self._not_empty = asyncio.Event()
        self._sending = False

    @property
    def unsent(self) -> bool:
        """Whether some deltas have not been sent."""
        return self._sending or bool(self._deltas)

    @property
    def num_unread(self) -> int:
        """How many answers wait because the gateway has not read earlier ones."""
        return len(self._deltas) + len(self._failed_handovers)

    def put(self, deltas: list[pb.Delta]) -> None:
        self._deltas += deltas
        self._not_empty.set()

    def put_failed_handover(self, handle: int, prefill_address: str) -> None:
        """Report a prefill pod that did not deliver. It is sent with the next deltas at the latest."""
        self._failed_handovers.append(pb.FailedHandover(handle=handle, prefill_address=prefill_address))
        self._not_empty.set()

    async def next(self) -> pb.DecodeMessage:
        """Wait for the next message to send, and return it. The call implies that the previous message was sent."""
        self._sending = False
        await self._not_empty.wait()
        self._not_empty.clear()
        self._sending = True
        step = pb.StepOutput(deltas=self._deltas, failed_handovers=self._failed_handovers)
        rest: list[pb.Delta] = []
        # The size of the whole message is known much faster than those of its deltas.
        if step.ByteSize() > _MESSAGE_BYTES:
            count = self._deltas_of_a_message()
            del step.deltas[count:]
            rest = self._deltas[count:]
        if rest:
            self._not_empty.set()
        self._deltas, self._failed_handovers = rest, []
        return pb.DecodeMessage(step=step)

    def _deltas_of_a_message(self) -> int:
        """Return how many of the unsent deltas go into the next message: as many as reach its size, and at least
        one."""
        size = count = 0
        while count < len(self._deltas) and size < _MESSAGE_BYTES:
            size += self._deltas[count].ByteSize()
            count += 1
        return count
