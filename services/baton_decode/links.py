"""A decode pod's links to prefill pods."""

import asyncio
from collections.abc import Iterator

from baton_kv.link import PrefillLink, Receiver
from baton_proto import handover_pb2 as kv
from baton_worker.messages import Ready
from baton_worker.server import channel_options

from .allowed_prefills import AllowedPrefills, parse_entry
from .settings import DecodeSettings

_MOST_LINKS = 1_024


class PrefillLinks:
    """Owns at most one link to each address. `to` opens it, and opens a new one after it was lost."""

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
            kv_format=ready.kv_format,
            gpus=ready.gpus,
        )
        self._links: dict[str, PrefillLink] = {}
        entries = map(parse_entry, settings.prefill_networks.split(","))
        self._allowed = AllowedPrefills(entries, f"{settings.host}:{settings.port}")
        self._following = asyncio.create_task(self._allowed.follow())

    def __iter__(self) -> Iterator[PrefillLink]:
        return iter(self._links.values())

    def may_link(self, address: str) -> bool:
        """Whether this pod may link to an address: the address is allowed, and there are not too many links."""
        return self._allowed.allow(address) and (address in self._links or len(self._links) < _MOST_LINKS)

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
        self._following.cancel()
        await asyncio.gather(*(link.close() for link in list(self)))
