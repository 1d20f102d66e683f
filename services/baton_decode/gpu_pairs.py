"""The connections over which prefill pods' GPUs send KV to this pod's."""

import itertools
import logging

from baton_kv.link import PrefillLink
from baton_kv.pieces import Piece
from baton_kv.tickets import OpenTicket
from baton_proto import handover_pb2 as kv
from baton_worker.engine_client import EngineClient
from baton_worker.messages import ClosePair, JoinPair, ReceivePiece

from .links import PrefillLinks

log = logging.getLogger(__name__)


class GpuPairs:
    """Owns the numbers by which the engine knows them; a link's `pair` is that of its connection, while it has one."""

    def __init__(self, engine: EngineClient, links: PrefillLinks, checked: bool) -> None:
        """checked: whether what comes over them is compared with its checksum."""
        self._engine = engine
        self._links = links
        self._checked = checked
        self._numbers = itertools.count(1)

    def link(self, number: int) -> PrefillLink | None:
        return next((link for link in self._links if link.pair == number), None)

    def join(self, link: PrefillLink, unique_id: bytes) -> None:
        """unique_id: that of the connection which the prefill pod has opened."""
        link.pair = next(self._numbers)
        self._engine.send(JoinPair(link.pair, unique_id))

    def up(self, number: int) -> None:
        link = self.link(number)
        if link is not None:
            link.send(kv.DecodeToPrefill(gpu_pair=kv.GpuPair(up=True)))
            extra = {"event": "paired", "transport": "nccl"}
            log.info("KV from prefill pod %s comes from GPU to GPU from now on", link.address, extra=extra)

    def receive(self, number: int, piece: Piece, ticket: OpenTicket | None) -> None:
        """Let the engine receive a piece that was announced; without a ticket it throws it away."""
        header = piece.header
        checksum = header.gpu_checksum if self._checked else None
        target = (ticket.request, ticket.generation, piece.extent) if ticket is not None else (0, 0, None)
        self._engine.send(ReceivePiece(number, header.gpu_bytes, checksum, *target))

    def fall_back(self, link: PrefillLink, reason: str) -> None:
        """Close a link's connection, so that KV comes over the link itself again."""
        self.close(link)
        log.warning(
            "no KV from GPU to GPU from prefill pod %s: %s", link.address, reason, extra={"event": "transport_fallback"}
        )

    def close(self, link: PrefillLink) -> None:
        if link.pair is not None:
            self._engine.send(ClosePair(link.pair))
            link.pair = None
