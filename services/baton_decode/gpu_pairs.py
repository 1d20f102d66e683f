"""The connections over which prefill pods' GPUs send KV to this pod's GPU."""

import itertools
import logging
from collections import Counter

import msgspec

from baton_common.rank_parts import UNIQUE_ID_BYTES, divides, most_links, rank_parts
from baton_kv.link import PrefillLink
from baton_kv.pieces import Piece
from baton_kv.tickets import OpenTicket
from baton_proto import handover_pb2 as kv
from baton_worker.engine_client import EngineClient
from baton_worker.messages import MOST_ANNOUNCED, ClosePair, JoinPair, ReceivePiece

from .links import PrefillLinks

log = logging.getLogger(__name__)

# How often a prefill pod may offer a pair over one link, since each offer costs the engine time.
_MOST_OFFERED = 16
# Refusals after which a link ends.
_MOST_REFUSALS = 4
# How many characters of a prefill pod's reason for a lost pair are logged.
_MOST_REASON = 200


class _Pair(msgspec.Struct):
    """up: whether pieces may be announced. credit: how many more; it is counted for all prefill pods.

    links: the most connections that a rank of this pod has for the pair.
    """

    credit: int
    links: int
    up: bool = False


class GpuPairs:
    """Owns the numbers by which the engine knows the pairs. A link's `pair` is the number of its pair, or None.

    Every message of a prefill pod about its pair is checked here before the engine gets a command.
    """

    def __init__(self, engine: EngineClient, links: PrefillLinks, events: Counter[str], checked: bool) -> None:
        """events: counts refusals. checked: whether received pieces are compared with their checksums."""
        self._engine = engine
        self._links = links
        self._events = events
        self._checked = checked
        self._numbers = itertools.count(1)
        self._pairs: dict[int, _Pair] = {}
        self._waiting: dict[PrefillLink, None] = {}  # links whose pair found no room, the oldest first

    def link(self, number: int) -> PrefillLink | None:
        return next((link for link in self._links if link.pair == number), None)

    def offered(self, link: PrefillLink, offer: kv.GpuPair) -> str | None:
        """Join a pair that a prefill pod has opened. Returns why the offer is not valid; None when it is."""
        ready, ranks = self._engine.ready, offer.ranks or 1
        heads, ours = ready.layout.num_heads, len(ready.gpus)
        link.pairs_offered += 1
        if link.pairs_offered > _MOST_OFFERED:
            return self._refuse(link, "too many pairs of GPUs were opened")
        if not ready.gpu_pairs:
            return self._refuse(link, "this pod has no pairs of GPUs")
        if not divides(heads, ranks) or len(offer.id) != UNIQUE_ID_BYTES * len(rank_parts(heads, ranks, ours)):
            return self._refuse(link, f"the ids of a pair of GPUs are not those for the {ours} ranks of the decode pod")
        if link.pair is not None:
            return self._refuse(link, "a second pair of GPUs was opened")
        _, links = most_links(heads, ranks, ours)
        if sum(pair.links for pair in self._pairs.values()) + links > ready.gpu_pairs:
            self._events["pair_refused"] += 1
            most = ready.gpu_pairs // links
            reason = f"the decode pod has room for only {most} pairs of GPUs"
            level = logging.DEBUG if link in self._waiting else logging.WARNING
            log.log(
                level, "KV from prefill pod %s cannot come from GPU to GPU: there is room for only %d pairs",
                link.address, most, extra={"event": "pair_refused"},
            )  # fmt: skip
            self._waiting[link] = None
            link.send(kv.DecodeToPrefill(gpu_pair=kv.GpuPair(lost=reason)))
            return None
        self._waiting.pop(link, None)
        link.pair = next(self._numbers)
        credit = ready.gpu_landing_slots if link.gpu_credit else MOST_ANNOUNCED
        self._pairs[link.pair] = _Pair(credit, links)
        self._engine.send(JoinPair(link.pair, ranks, offer.id))
        return None

    def up(self, number: int) -> None:
        link = self.link(number)
        if link is not None:
            self._pairs[number].up = True
            link.send(kv.DecodeToPrefill(gpu_pair=kv.GpuPair(up=True)))
            extra = {"event": "paired", "transport": "nccl"}
            log.info("KV from prefill pod %s comes from GPU to GPU from now on", link.address, extra=extra)

    def announced(self, link: PrefillLink, piece: Piece, ticket: OpenTicket | None) -> str | None:
        """Let the engine receive a piece, and discard it if it has no ticket. Returns why it is refused, or None."""
        assert link.pair is not None
        pair, header = self._pairs[link.pair], piece.header
        if not pair.up:
            return self._refuse(link, "a piece was announced before the pair of GPUs was up")
        if not 0 < header.gpu_bytes <= self._engine.ready.gpu_slot_bytes:
            return self._refuse(link, "the announced size of a piece is zero or larger than a slot")
        layout, extent = self._engine.ready.layout, piece.extent
        if not layout.holds(extent) or extent.num_heads != layout.num_heads or header.gpu_bytes != layout.size(extent):
            return self._refuse(link, "the announced size of a piece is not that of all heads of its tokens and layers")
        if not pair.credit:
            return self._refuse(link, "more pieces were announced than there are slots for")
        pair.credit -= 1
        checksum = header.gpu_checksum if self._checked else None
        target = (ticket.request, ticket.generation) if ticket is not None else (None, 0)
        self._engine.send(ReceivePiece(link.pair, extent, checksum, *target))
        return None

    def landed(self, numbers: list[int]) -> None:
        """Allow one more piece for each slot that is free again. numbers: the pair of each of these slots."""
        for number, pieces in Counter(numbers).items():
            link, pair = self.link(number), self._pairs.get(number)
            if link is not None and pair is not None:
                pair.credit += pieces
                if link.gpu_credit:
                    link.send(kv.DecodeToPrefill(gpu_credit=kv.GpuCredit(pieces=pieces)))

    def refuse_unknown(self, link: PrefillLink) -> str:
        """Refuse a message about pairs whose kind no correct prefill pod sends. Return the reason."""
        return self._refuse(link, "a message about the pair of GPUs was not valid")

    @staticmethod
    def check(link: PrefillLink) -> None:
        """Raise ConnectionError, which ends a link, when too many of its messages about pairs were refused."""
        if link.refusals >= _MOST_REFUSALS:
            raise ConnectionError("too many messages of the prefill pod about pairs of GPUs were refused")

    def fall_back(self, link: PrefillLink, reason: str) -> None:
        """Close a link's pair, so that KV comes over the link itself again."""
        self.close(link)
        extra = {"event": "transport_fallback"}
        log.warning(
            "KV from prefill pod %s no longer comes from GPU to GPU: %s",
            link.address,
            reason[:_MOST_REASON],
            extra=extra,
        )

    def close(self, link: PrefillLink) -> None:
        if link.pair is None:
            return
        self._engine.send(ClosePair(link.pair))
        del self._pairs[link.pair]
        link.pair = None
        if self._waiting:
            waiting = next(iter(self._waiting))
            del self._waiting[waiting]
            waiting.send(kv.DecodeToPrefill(gpu_pair=kv.GpuPair(room=True)))

    def forget(self, link: PrefillLink) -> None:
        """Close the pair of a link that was lost."""
        self._waiting.pop(link, None)
        self.close(link)

    def _refuse(self, link: PrefillLink, reason: str) -> str:
        """Count an invalid message, and tell the prefill pod that its pair is lost."""
        self._events["refused_announcement"] += 1
        link.refusals += 1
        link.send(kv.DecodeToPrefill(gpu_pair=kv.GpuPair(lost=reason)))
        return reason
