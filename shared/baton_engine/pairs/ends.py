"""Combines the ends of pairs on all ranks of this pod: an operation is over when it is over on every rank."""

import itertools
from collections.abc import Callable
from typing import Protocol

import msgspec

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout
from baton_common.rank_parts import most_links, rank_parts
from baton_engine.executor import Fence, RanksFence, StepMark

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
from .nccl import make_unique_id
from .rank_end import RankEnd

# Called with whether an operation succeeded on all ranks, and with the checksum of what it moved; 0 = not computed.
Then = Callable[[bool, int], None]


class OtherRanks(Protocol):
    """The other processes of this pod. count: of all ranks, with this process."""

    count: int

    def send(self, command: PairCommand) -> None:
        """Let all other ranks execute a command."""

    def take_reports(self) -> list[tuple[int, Report]]:
        """Return the ranks' reports since the last call, each with the number of its rank."""


class NoOtherRanks:
    """Implements OtherRanks for a pod with one rank."""

    count = 1

    def send(self, command: PairCommand) -> None: ...

    def take_reports(self) -> list[tuple[int, Report]]:
        return []


class _Operation(msgspec.Struct):
    """waiting: how many ranks have not reported its end."""

    waiting: int
    then: Then
    succeeded: bool = True
    sums: dict[int, int] = {}


class _Pair(msgspec.Struct):
    """number: the pair's number on the ranks. links: the most connections of one rank. down: ranks not up yet."""

    number: int
    links: int
    down: set[int]
    announced: bool = False


class PairEnds:
    """Each pod numbers its own pairs. One end of a pair opens it and sends. The other end joins it with its ids."""

    def __init__(self, own: RankEnd, layout: KvLayout, others: OtherRanks) -> None:
        """own: of this process, which is rank 0. layout: of the KV of all ranks."""
        self._own, self._heads, self._others = own, layout.num_heads, others
        self._pairs: dict[int, _Pair] = {}
        self._by_number: dict[int, int] = {}
        self._operations: dict[int, _Operation] = {}
        self._numbers = itertools.count(1)
        self.links = 0  # that one rank has, with those of closed pairs whose transfers are still running

    @property
    def busy(self) -> bool:
        """Whether `settle` may have something to do without a command."""
        return bool(self._operations) or self._own.busy or any(not pair.announced for pair in self._pairs.values())

    def links_of(self, sends: bool, ranks: int) -> int:
        """Return the most connections that one rank has for a pair. ranks: of the other pod."""
        count = self._others.count
        return most_links(self._heads, count, ranks)[0] if sends else most_links(self._heads, ranks, count)[1]

    def up(self, pair: int) -> bool:
        """Whether a pair exists, and `settle` has reported that it is up."""
        return pair in self._pairs and self._pairs[pair].announced

    def open(self, pair: int, ranks: int, slots: list[int], slot_bytes: int) -> list[bytes]:
        """Begin a pair as its sender; return the ids for the other end. ranks, slots, slot_bytes: as in OpenLinks.

        Raises RuntimeError or OSError if NCCL makes no ids.
        """
        ids = [make_unique_id() for _ in rank_parts(self._heads, self._others.count, ranks)]
        self._begin(pair, True, ranks, ids, slots, slot_bytes)
        return ids

    def join(self, pair: int, ranks: int, unique_ids: list[bytes], slots: list[int], slot_bytes: int) -> None:
        """Begin a pair as its receiver. There must be an id for each part."""
        self._begin(pair, False, ranks, unique_ids, slots, slot_bytes)

    def close(self, pair: int) -> None:
        """End a pair and its transfers. An unknown pair is ignored."""
        entry = self._pairs.pop(pair, None)
        if entry is not None:
            del self._by_number[entry.number]
            number = self._operation(lambda _, __: self._free(entry.links))
            self._command(CloseLinks(number, entry.number))

    def pack(
        self,
        pair: int,
        slot: int,
        tables: list[list[int]],
        extent: Extent,
        check: bool,
        fence: Fence | None,
        then: Then,
    ) -> None:
        """Copy an extent into a slot, after the fence. check: whether `then` gets the checksum."""
        mark = _mark(fence)
        self._run(pair, lambda number, known: PackParts(number, known, slot, tables, extent, check, mark), then, fence)

    def send(self, pair: int, slot: int, extent: Extent, then: Then) -> None:
        """Send what was packed. When `then` is called, the slot may be overwritten."""
        self._run(pair, lambda number, known: SendParts(number, known, slot, extent), then)

    def receive(self, pair: int, slot: int, extent: Extent, check: bool, then: Then) -> None:
        """Receive an extent into a slot. check: whether `then` gets the checksum."""
        self._run(pair, lambda number, known: ReceiveParts(number, known, slot, extent, check), then)

    def unpack(
        self, pair: int, slot: int, tables: list[list[int]], extent: Extent, fence: Fence | None, then: Then
    ) -> None:
        """Copy an extent that was received into the cache, after the fence and before later steps."""
        mark = _mark(fence)
        self._run(pair, lambda number, known: UnpackParts(number, known, slot, tables, extent, mark), then, fence)

    def settle(self) -> tuple[list[int], dict[int, str]]:
        """Call `then` for each operation that is over.

        Return the pairs that have come up since the last call, and the reason for each pair that was lost. The caller
        closes these.
        """
        up: list[int] = []
        lost: dict[int, str] = {}
        reports = [(0, report) for report in self._own.settle()]
        if self._pairs or self._operations:
            reports += self._others.take_reports()
        for rank, report in reports:
            match report:
                case Done(number, succeeded, sums):
                    self._take(number, succeeded, sums)
                case LinksUp(number) if number in self._by_number:
                    pair = self._pairs[self._by_number[number]]
                    pair.down.discard(rank)
                    if not pair.down:
                        pair.announced = True
                        up.append(self._by_number[number])
                case LinksLost(number, reason) if number in self._by_number:
                    lost.setdefault(self._by_number[number], self._name(rank, reason))
        return up, lost

    def _name(self, rank: int, reason: str) -> str:
        return reason if self._others.count == 1 else f"rank {rank}: {reason}"

    def _begin(
        self, pair: int, sends: bool, ranks: int, unique_ids: list[bytes], slots: list[int], slot_bytes: int
    ) -> None:
        number, links = next(self._numbers), self.links_of(sends, ranks)
        self._pairs[pair] = _Pair(number, links, set(range(self._others.count)))
        self._by_number[number] = pair
        self.links += links
        self._command(OpenLinks(number, sends, ranks, unique_ids, slots, slot_bytes))

    def _free(self, links: int) -> None:
        self.links -= links

    def _run(self, pair: int, make: Callable[[int, int], PairCommand], then: Then, fence: Fence | None = None) -> None:
        if not self.up(pair):
            then(False, 0)
            return
        number = self._operation(then)
        self._command(make(number, self._pairs[pair].number), fence)

    def _operation(self, then: Then) -> int:
        number = next(self._numbers)
        self._operations[number] = _Operation(self._others.count, then)
        return number

    def _command(self, command: PairCommand, fence: Fence | None = None) -> None:
        self._others.send(command)
        self._own.execute(command, fence)

    def _take(self, number: int, succeeded: bool, sums: dict[int, int]) -> None:
        operation = self._operations[number]
        operation.waiting -= 1
        operation.succeeded = operation.succeeded and succeeded
        operation.sums |= sums
        if not operation.waiting:
            del self._operations[number]
            operation.then(operation.succeeded, combined(operation.sums))


def _mark(fence: Fence | None) -> StepMark | None:
    """Return where the other ranks have their own fence. A pod of one rank has no others."""
    return fence.mark if isinstance(fence, RanksFence) else None


def combined(sums: dict[int, int]) -> int:
    """Return the checksum of a piece from those of its parts, 32 bits. That of one part is the part's own."""
    total = 0
    for _, part in sorted(sums.items()):
        total = (total * 31 + part) & 0xFFFFFFFF
    return total
