"""A rank's end of all pairs: its connections, its slots, and the copies of KV between slots and cache."""

import itertools
from collections.abc import Sequence
from functools import partial

import msgspec
import torch

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout
from baton_common.rank_parts import RankPart, rank_heads, rank_parts
from baton_engine.executor import Fence
from baton_engine.kv_cache import KvCache
from baton_engine.transfer import to_host

from .copy_stream import CopyStream
from .gpu_slots import GpuSlots
from .links import Links
from .messages import (
    CloseLinks,
    Done,
    LinksLost,
    LinksUp,
    OpenLinks,
    PackParts,
    PairCommand,
    ReceiveParts,
    Report,
    SendParts,
    UnpackParts,
)


class _Part(msgspec.Struct):
    """One of the rank's parts of a pair. index: among the parts of all ranks. link: the number of its connection."""

    index: int
    heads: RankPart
    link: int


class _Pair(msgspec.Struct):
    sends: bool
    parts: list[_Part]
    down: set[int]  # the connections that are not up yet


class _Placed(msgspec.Struct):
    """A part of an extent in a slot. extent: with its heads counted from the rank's first one."""

    part: _Part
    extent: Extent
    values: torch.Tensor


class _Transfers(msgspec.Struct):
    """An operation's transfers that are not over yet, and the checksums of those that are."""

    left: int
    succeeded: bool = True
    sums: dict[int, int] = {}


class RankEnd:
    """Executes the commands that all ranks of a pod get. `settle` reports what is over."""

    def __init__(self, cache: KvCache, layout: KvLayout, rank: int, ranks: int) -> None:
        """cache: of this rank. layout: of the KV of all ranks. ranks: how many this pod has."""
        self._cache, self._layout, self._rank, self._ranks = cache, layout, rank, ranks
        self._first_head = rank_heads(layout.num_heads, rank, ranks).start
        self._links = Links(cache.device)
        self._copies = CopyStream(cache.device)
        # This is not the stream of the steps, where received KV would keep its slot until all queued steps are over.
        self._scatters = CopyStream(cache.device, before_steps=True)
        self._outgoing, self._landing = GpuSlots(cache.device), GpuSlots(cache.device)
        self._pairs: dict[int, _Pair] = {}
        self._pair_of: dict[int, int] = {}  # by connection
        self._numbers = itertools.count()
        self._closing: dict[int, list[int]] = {}  # the connections that end, by the number of the command
        self._reports: list[Report] = []
        if cache.device.type == "cuda":
            # A kernel is loaded at its first use, which waits for an idle device.
            cache.warm_up()
            torch.cuda.synchronize(cache.device)

    @property
    def busy(self) -> bool:
        """Whether `settle` may have something to do without a command."""
        return bool(self._reports or self._closing) or self._copies.busy or self._scatters.busy or self._links.busy

    def execute(self, command: PairCommand, fence: Fence | None = None) -> None:
        """fence: the rank's own one at the mark of a PackParts or UnpackParts; None = nothing to wait for."""
        match command:
            case OpenLinks():
                self._open(command)
            case CloseLinks(number, pair):
                links = self._closing[number] = [part.link for part in self._pairs.pop(pair).parts]
                for link in links:
                    self._links.close(link)
            case PackParts():
                self._pack(command, fence)
            case SendParts():
                self._send(command)
            case ReceiveParts():
                self._receive(command)
            case UnpackParts():
                self._unpack(command, fence)

    def settle(self) -> list[Report]:
        """Do the work that follows copies and transfers that are over, and return the reports since the last call."""
        self._copies.settle()
        self._scatters.settle()
        up, lost = self._links.settle()
        for link in up:
            self._note_up(self._pair_of[link], link)
        for link, reason in lost.items():
            self._reports.append(LinksLost(self._pair_of[link], reason))
        for number, links in list(self._closing.items()):
            if all(map(self._links.gone, links)):
                del self._closing[number]
                for link in links:
                    del self._pair_of[link]
                self._reports.append(Done(number, True, {}))
        reports, self._reports = self._reports, []
        return reports

    def _open(self, command: OpenLinks) -> None:
        counts = (self._ranks, command.ranks) if command.sends else (command.ranks, self._ranks)
        pair = self._pairs[command.number] = _Pair(command.sends, [], set())
        memory = self._outgoing if command.sends else self._landing
        try:
            memory.allocate(
                command.slots, command.slot_bytes // self._layout.layer_bytes * self._cache.layout.layer_bytes
            )
            for index, heads in enumerate(rank_parts(self._layout.num_heads, *counts)):
                if self._rank == (heads.sender if command.sends else heads.receiver):
                    link = next(self._numbers)
                    self._links.open(link, command.sends, command.unique_ids[index])
                    self._pair_of[link] = command.number
                    pair.parts.append(_Part(index, heads, link))
                    pair.down.add(link)
        except (RuntimeError, OSError, ValueError) as error:  # no memory for the pair, or an error of NCCL
            self._reports.append(LinksLost(command.number, str(error)))
        else:
            if not pair.parts:
                self._reports.append(LinksUp(command.number))

    def _note_up(self, number: int, link: int) -> None:
        pair = self._pairs[number]
        pair.down.discard(link)
        if not pair.down:
            self._reports.append(LinksUp(number))

    def _placed(self, number: int, slot: int, extent: Extent) -> list[_Placed]:
        """Return where the rank's parts of an extent are in a slot. Parts with the same heads share their place."""
        pair = self._pairs[number]
        memory = (self._outgoing if pair.sends else self._landing)[slot]
        placed: list[_Placed] = []
        at = 0
        for part in pair.parts:
            own = part.heads.within(extent)
            if own is None:
                continue
            own = msgspec.structs.replace(own, first_head=own.first_head - self._first_head)
            same = next((other for other in placed if other.extent == own), None)
            if same is None:
                size = self._cache.layout.size(own)
                placed.append(_Placed(part, own, memory[at : at + size]))
                at += size
            else:
                placed.append(_Placed(part, own, same.values))
        return placed

    def _pack(self, command: PackParts, fence: Fence | None) -> None:
        placed, sums = self._placed(command.pair, command.slot, command.extent), dict[int, torch.Tensor]()

        def gather() -> None:
            if fence is not None:
                fence.wait()
            by_place: dict[int, torch.Tensor] = {}
            for entry in placed:
                place = entry.values.data_ptr()
                if place not in by_place:
                    total = self._cache.gather(command.tables, entry.extent, entry.values, command.check)
                    by_place[place] = to_host(total) if command.check else total
                sums[entry.part.index] = by_place[place]

        def then() -> None:
            found = {index: int(total) for index, total in sums.items()} if command.check else {}
            self._reports.append(Done(command.number, True, found))

        self._copies.run(gather, then)

    def _send(self, command: SendParts) -> None:
        placed = self._placed(command.pair, command.slot, command.extent)
        transfers = self._begin(command.number, placed)
        for entry in placed:
            self._links.send(entry.part.link, entry.values, partial(self._over, command.number, transfers))

    def _receive(self, command: ReceiveParts) -> None:
        placed = self._placed(command.pair, command.slot, command.extent)
        transfers = self._begin(command.number, placed)
        for entry in placed:
            sums: list[torch.Tensor] = []
            behind = partial(self._sum, entry.values, sums) if command.check else None
            then = partial(self._received, command.number, transfers, entry.part.index, sums)
            self._links.receive(entry.part.link, entry.values, behind, then)

    def _begin(self, number: int, placed: Sequence[_Placed]) -> _Transfers:
        if not placed:
            self._reports.append(Done(number, True, {}))
        return _Transfers(len(placed))

    def _sum(self, values: torch.Tensor, sums: list[torch.Tensor]) -> None:
        sums.append(to_host(self._cache.checksum(values)))

    def _received(
        self, number: int, transfers: _Transfers, index: int, sums: list[torch.Tensor], received: bool
    ) -> None:
        if received and sums:
            transfers.sums[index] = int(sums[0])
        self._over(number, transfers, received)

    def _over(self, number: int, transfers: _Transfers, succeeded: bool) -> None:
        transfers.left -= 1
        transfers.succeeded = transfers.succeeded and succeeded
        if not transfers.left:
            self._reports.append(Done(number, transfers.succeeded, transfers.sums))

    def _unpack(self, command: UnpackParts, fence: Fence | None) -> None:
        def scatter() -> None:
            if fence is not None:
                fence.wait()
            for entry in self._placed(command.pair, command.slot, command.extent):
                self._cache.scatter(command.tables, entry.extent, entry.values)

        self._scatters.run(scatter, lambda: self._reports.append(Done(command.number, True, {})))
