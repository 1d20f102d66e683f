"""A decode pod's links to prefill pods."""

import asyncio
from collections.abc import Iterator

from baton_kv.link import PrefillLink, Receiver
from baton_proto import handover_pb2 as kv
from baton_worker.messages import Ready
from baton_worker.server import channel_options

from .settings import DecodeSettings


class PrefillLinks:
    """Owns one link to each address that was asked for; one that was lost is made anew when it is asked for again."""

    def __init__(self, settings: DecodeSettings, ready: Ready, epoch: int, receiver: Receiver) -> None:
        self._settings = settings
        self._receiver = receiver
        self._options = channel_options(ready.slot_bytes)
        self._hello = kv.Hello(
            epoch=epoch,
            fingerprint=ready.fingerprint,
            gpu_piece_bytes=ready.gpu_slot_bytes,
            gpu_unchecked=not settings.kv_gpu_checksum,
            gpu_credit=ready.gpu_landing_slots,
        )
        self._links: dict[str, PrefillLink] = {}

    def __iter__(self) -> Iterator[PrefillLink]:
        return iter(self._links.values())

    def to(self, address: str) -> PrefillLink:
        if address not in self._links:
            transport, tls = self._settings.kv_transport, self._settings.peer_tls
            self._links[address] = PrefillLink(
                address, self._hello, self._receiver, self._options, transport, tls, self._settings.peer_token
            )
        return self._links[address]

    def forget(self, link: PrefillLink) -> None:
        if self._links.get(link.address) is link:
            del self._links[link.address]

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in list(self)))
