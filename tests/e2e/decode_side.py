"""The decode pod's end of a link, as far as tests of a prefill pod need it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from baton_kv.link import pieces_of
from baton_kv.pieces import decode
from baton_proto import handover_pb2 as kv
from baton_proto import serving_pb2 as pb
from baton_proto.handover_pb2_grpc import PrefillStub

from .pod import Pod

EPOCH = 4711


class DecodeSide:
    """Both streams of a link, spoken by hand."""

    def __init__(self, channel: grpc.aio.Channel, fingerprint: str) -> None:
        self._channel = channel
        self._fingerprint = fingerprint
        self._control: Any = None
        self._bulk: Any = None

    async def open(self) -> None:
        self._control = PrefillStub(self._channel).Handover(wait_for_ready=True)
        await self.send(hello=kv.Hello(epoch=EPOCH, fingerprint=self._fingerprint))
        welcome = (await self.receive()).welcome
        self._bulk = pieces_of(self._channel)(kv.PiecesRequest(session=welcome.session))

    async def send(self, **kind: Any) -> None:
        await self._control.write(kv.DecodeToPrefill(**kind))

    async def receive(self) -> kv.PrefillToDecode:
        """Return the next message that says more than that the pod is alive."""
        async with asyncio.timeout(20):
            while True:
                message: kv.PrefillToDecode = await self._control.read()
                if not message.HasField("alive"):
                    return message

    async def order(
        self,
        ticket_id: int,
        prompt: list[int],
        lease_ms: int,
        first_token: int = 0,
        cache_scope: pb.CacheScope | None = None,
    ) -> None:
        sampling = pb.SamplingParams(max_tokens=8, top_p=1, repetition_penalty=1, n=1)
        ticket = kv.Ticket(
            ticket_id=ticket_id,
            request_id=f"ticket-{ticket_id}",
            prompt_token_ids=prompt,
            sampling=sampling,
            first_token=first_token,
            generation=7,
            lease_ms=lease_ms,
            cache_scope=cache_scope,
        )
        await self.send(ticket=ticket)

    async def tokens(self, ticket_id: int, count: int) -> None:
        """Read pieces until the KV of that many tokens has come, each once, in order and with the ticket's words."""
        come: list[int] = []
        async with asyncio.timeout(20):
            while len(come) < count:
                header = decode(await self._bulk.read()).header
                assert (header.epoch, header.ticket_id, header.generation) == (EPOCH, ticket_id, 7)
                come += range(header.first_token, header.first_token + header.num_tokens)
        assert come == list(range(come[0], come[0] + count))


@asynccontextmanager
async def decode_side(prefill: Pod, options: Sequence[tuple[str, int]] = ()) -> AsyncIterator[DecodeSide]:
    """Link to a prefill pod; the link breaks at the end. options: gRPC's, of the connection."""
    async with prefill.open_channel(options) as channel:
        side = DecodeSide(channel, (await prefill.info()).fingerprint)
        await side.open()
        yield side
