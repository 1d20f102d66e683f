"""KV from the GPUs of one pod's ranks to those of another's, with links that a test advances in place of NCCL."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout, Plane
from baton_common.rank_parts import UNIQUE_ID_BYTES, divides, most_links, rank_heads, rank_parts
from baton_engine.executor import Fence, RanksFence, StepMark
from baton_engine.kv_cache import KvCache
from baton_engine.ops import TORCH
from baton_engine.pairs.ends import PairEnds, combined
from baton_engine.pairs.messages import PackParts, PairCommand, Report, UnpackParts
from baton_engine.pairs.nccl import NcclError
from baton_engine.pairs.rank_end import RankEnd

LAYERS, TOKENS, PAIR = 2, 40, 7
SLOTS = [0, 1]
TURNS = 400
# KV heads, ranks that send, ranks that receive.
COUNTS = [
    (4, 1, 1), (4, 1, 2), (4, 2, 1), (4, 2, 2), (4, 2, 4), (4, 4, 2), (2, 2, 4), (2, 4, 1), (2, 4, 4), (1, 1, 2),
    (1, 2, 1), (1, 2, 2), (1, 2, 4),
]  # fmt: skip


class Over:
    def __init__(self, is_over: Callable[[], bool]) -> None:
        self.query = is_over


class Wire:
    """Between the two ends of a link. damaged: the next message is. stalled: nothing arrives any more."""

    def __init__(self) -> None:
        self.messages: deque[torch.Tensor] = deque()
        self.waiting: deque[tuple[torch.Tensor, Callable[[], None] | None, list[bool]]] = deque()
        self.damaged = self.stalled = False

    def deliver(self) -> None:
        while self.messages and self.waiting and not self.stalled:
            message, (into, behind, over) = self.messages.popleft(), self.waiting.popleft()
            assert message.shape == into.shape, "NCCL pairs messages up in order"
            into.copy_(message)
            if behind is not None:
                behind()
            over.append(True)


class FakeLink:
    """In place of a Communicator."""

    def __init__(self, world: "World", sends: bool, unique_id: bytes) -> None:
        self.failure: str | None = None
        self.up, self.gone = True, False
        self.wire = world.wires.setdefault(unique_id, Wire())
        self._world = world

    def send(self, values: torch.Tensor) -> Over:
        if self.wire.damaged:
            values[len(values) // 3] ^= 4
            self.wire.damaged = False
        self.wire.messages.append(values.clone())
        return Over(lambda: not self.wire.stalled)

    def receive(self, values: torch.Tensor, behind: Callable[[], None] | None) -> Over:
        if self._world.refuses:
            raise NcclError("refused for a test")
        over: list[bool] = []
        self.wire.waiting.append((values, behind, over))
        return Over(lambda: bool(over))

    def check(self) -> None:
        self.wire.deliver()

    def close(self) -> None:
        self.up, self.gone = False, True


class World:
    """The links of all pods."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.wires: dict[bytes, Wire] = {}
        self.refuses = False
        self._ids = 0
        patch.setattr("baton_engine.pairs.links.Communicator", lambda rank, id, _: FakeLink(self, rank == 0, id))
        patch.setattr("baton_engine.pairs.ends.make_unique_id", self._make_id)

    def _make_id(self) -> bytes:
        self._ids += 1
        return self._ids.to_bytes(UNIQUE_ID_BYTES, "little")


class Others:
    """The ranks of a pod but the first one. Each gets its commands late, when the dice say so."""

    def __init__(self, ends: list[RankEnd], dice: random.Random) -> None:
        self.count = len(ends) + 1
        self.fence: Callable[[int, StepMark], Fence]
        self._ends, self._dice = ends, dice
        self._commands: list[deque[PairCommand]] = [deque() for _ in ends]

    def send(self, command: PairCommand) -> None:
        for commands in self._commands:
            commands.append(command)

    def take_reports(self) -> list[tuple[int, Report]]:
        reports: list[tuple[int, Report]] = []
        for number, (end, commands) in enumerate(zip(self._ends, self._commands, strict=True), start=1):
            while commands and self._dice.random() < 0.6:
                command = commands.popleft()
                mark = command.behind if isinstance(command, PackParts | UnpackParts) else None
                end.execute(command, self.fence(number, mark) if mark else None)
            # Else a rank sleeps until the next command.
            if end.busy:
                reports += [(number, report) for report in end.settle()]
        return reports


class Pod:
    """The caches of a pod's ranks, and their ends of pairs. value: of all KV before anything arrives."""

    def __init__(self, layout: KvLayout, ranks: int, block_size: int, seed: int, value: int) -> None:
        self.layout, self.ranks = layout, ranks
        dice = random.Random(seed)
        self.caches = []
        for rank in range(ranks):
            count = len(rank_heads(layout.num_heads, rank, ranks))
            own = msgspec.structs.replace(
                layout, planes=tuple(msgspec.structs.replace(plane, heads=count) for plane in layout.planes)
            )
            cache = KvCache(own, block_size, torch.device("cpu"), TORCH)
            cache.allocate(TOKENS // block_size + 4)
            for plane in cache.planes:
                plane.view(torch.uint8).fill_(value)
            self.caches.append(cache)
        blocks = list(range(self.caches[0].num_blocks))
        dice.shuffle(blocks)
        self.tables = [blocks[: -(-TOKENS // block_size)]]
        own_end, *others = [RankEnd(cache, layout, rank, ranks) for rank, cache in enumerate(self.caches)]
        self.others = Others(others, dice)
        self.ends = PairEnds(own_end, layout, self.others)
        self.up: list[int] = []
        self.lost: dict[int, str] = {}

    def settle(self) -> None:
        up, lost = self.ends.settle()
        self.up += up
        self.lost |= lost
        for pair in lost:
            self.ends.close(pair)

    def write(self, whole: list[torch.Tensor]) -> None:
        """Put the KV of all heads, [layers, tokens, heads, bytes] for each plane, into the ranks' blocks."""
        for rank, cache in enumerate(self.caches):
            heads = rank_heads(self.layout.num_heads, rank, self.ranks)
            parts = [plane[:, :, heads.start : heads.stop] for plane in whole]
            values = torch.cat([part[layer].flatten() for layer in range(LAYERS) for part in parts])
            cache.scatter(self.tables, cache.layout.extent(0, TOKENS), values)

    def read(self, rank: int) -> torch.Tensor:
        cache = self.caches[rank]
        out = torch.empty(cache.layout.size(cache.layout.extent(0, TOKENS)), dtype=torch.uint8)
        cache.gather(self.tables, cache.layout.extent(0, TOKENS), out)
        return out


class Pair:
    """A pod that sends and one that receives, which has different blocks."""

    def __init__(self, patch: pytest.MonkeyPatch, heads: int, senders: int, receivers: int, dtype: str) -> None:
        names = ("latent",) if heads == 1 else ("key", "value")
        self.layout = KvLayout(LAYERS, tuple(Plane(name, heads, 8, dtype) for name in names))
        self.world = World(patch)
        self.sender = Pod(self.layout, senders, 16, senders, 0)
        self.receiver = Pod(self.layout, receivers, 8, 10 + receivers, 255)
        head_bytes = self.layout.planes[0].head_bytes
        torch.manual_seed(heads)
        self.kv = [torch.randint(0, 120, (LAYERS, TOKENS, heads, head_bytes), dtype=torch.uint8) for _ in names]
        self.sender.write(self.kv)
        slot_bytes = TOKENS * self.layout.token_bytes
        ids = self.sender.ends.open(PAIR, receivers, SLOTS, slot_bytes)
        assert len(ids) == len(rank_parts(heads, senders, receivers))
        self.receiver.ends.join(PAIR, senders, ids, SLOTS, slot_bytes)
        self.until(lambda: self.sender.up == self.receiver.up == [PAIR])

    def until(self, condition: Callable[[], Any]) -> None:
        for _ in range(TURNS):
            if condition():
                return
            self.sender.settle()
            self.receiver.settle()
        raise AssertionError("it does not happen")

    def pack(self, extent: Extent, slot: int) -> int:
        """Return the checksum."""
        sums: list[int] = []
        self.sender.ends.pack(PAIR, slot, self.sender.tables, extent, True, None, lambda _, total: sums.append(total))
        self.until(lambda: sums)
        return sums[0]

    def transfer(self, extent: Extent, slot: int) -> tuple[list[bool], list[tuple[bool, int]]]:
        """Begin to send and to receive; return the lists that get the results."""
        sent: list[bool] = []
        received: list[tuple[bool, int]] = []
        self.sender.ends.send(PAIR, slot, extent, lambda done, _: sent.append(done))
        self.receiver.ends.receive(PAIR, slot, extent, True, lambda *result: received.append(result))
        return sent, received

    def unpack(self, extent: Extent, slot: int) -> None:
        written: list[bool] = []
        tables = self.receiver.tables
        self.receiver.ends.unpack(PAIR, slot, tables, extent, None, lambda done, _: written.append(done))
        self.until(lambda: written == [True])


@pytest.mark.parametrize(("heads", "senders", "receivers"), COUNTS)
def test_every_bit_arrives(monkeypatch: pytest.MonkeyPatch, heads: int, senders: int, receivers: int) -> None:
    pair = Pair(monkeypatch, heads, senders, receivers, "float8_e4m3fn" if heads == 2 else "float32")
    extents = [pair.layout.extent(0, 16), pair.layout.extent(16, TOKENS - 16, 0, 1), pair.layout.extent(16, 24, 1, 1)]
    for number, extent in enumerate(extents):
        slot = number % len(SLOTS)
        checksum = pair.pack(extent, slot)
        sent, received = pair.transfer(extent, slot)
        pair.until(lambda sent=sent, received=received: sent and received)
        assert (sent, received) == ([True], [(True, checksum)])
        pair.unpack(extent, slot)
    # One rank has received these heads and nothing else, in blocks in another order; other blocks are as they were.
    expected = Pod(pair.layout, receivers, 8, 10 + receivers, 255)
    expected.write(pair.kv)
    for rank in range(receivers):
        assert torch.equal(pair.receiver.read(rank), expected.read(rank))
        for plane, wanted in zip(pair.receiver.caches[rank].planes, expected.caches[rank].planes, strict=True):
            assert torch.equal(plane.view(torch.uint8), wanted.view(torch.uint8))
    for pod in (pair.sender, pair.receiver):
        assert pod.ends.links == most_links(heads, senders, receivers)[pod is pair.receiver]
        pod.ends.close(PAIR)
        pair.until(lambda pod=pod: not pod.ends.busy)
        assert pod.ends.links == 0


def test_kv_is_packed_behind_its_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, 4, 1, 1, "float32")
    extent = pair.layout.extent(0, TOKENS)

    late = [255 - plane for plane in pair.kv]

    class Fence:
        def wait(self) -> None:
            pair.sender.write(late)

    pair.sender.ends.pack(PAIR, 0, pair.sender.tables, extent, True, Fence(), lambda *_: None)
    _, received = pair.transfer(extent, 0)
    pair.until(lambda: received)
    pair.unpack(extent, 0)
    expected = Pod(pair.layout, 1, 8, 11, 255)
    expected.write(late)
    assert torch.equal(pair.receiver.read(0), expected.read(0))


def test_every_rank_packs_and_unpacks_behind_its_own_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, 4, 2, 2, "float32")
    extent = pair.layout.extent(0, TOKENS)
    waited: list[str] = []

    class Own:
        def __init__(self, name: str) -> None:
            self._name = name

        def wait(self) -> None:
            waited.append(self._name)

    pair.sender.others.fence = lambda rank, mark: Own(f"packs on {rank} behind {mark}")
    pair.receiver.others.fence = lambda rank, mark: Own(f"unpacks on {rank} behind {mark}")
    packs = RanksFence(StepMark(5, 2), Own("packs on 0"))
    unpacks = RanksFence(StepMark(9), Own("unpacks on 0"))
    over: list[bool] = []
    pair.sender.ends.pack(PAIR, 0, pair.sender.tables, extent, True, packs, lambda *_: over.append(True))
    pair.until(lambda: over)
    assert sorted(waited) == ["packs on 0", f"packs on 1 behind {StepMark(5, 2)}"]
    waited.clear()
    _, received = pair.transfer(extent, 0)
    pair.until(lambda: received)
    pair.receiver.ends.unpack(PAIR, 0, pair.receiver.tables, extent, unpacks, lambda *_: over.append(True))
    pair.until(lambda: len(over) == 2)
    assert sorted(waited) == ["unpacks on 0", f"unpacks on 1 behind {StepMark(9)}"]


@pytest.mark.parametrize("part", [0, 1])
def test_the_checksum_is_that_of_all_parts(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    pair = Pair(monkeypatch, 4, 2, 1, "float32")
    extent = pair.layout.extent(0, 16)
    checksum = pair.pack(extent, 0)
    list(pair.world.wires.values())[part].damaged = True
    _, received = pair.transfer(extent, 0)
    pair.until(lambda: received)
    assert received[0][0]
    assert received[0][1] != checksum


@pytest.mark.parametrize(("senders", "receivers"), [(2, 1), (1, 2), (2, 2)])
def test_a_part_that_fails_is_the_end_of_the_pair(
    monkeypatch: pytest.MonkeyPatch, senders: int, receivers: int
) -> None:
    """A transfer of which one part hangs is not over. Once the pair is lost, it is, and holds nothing."""
    pair = Pair(monkeypatch, 4, senders, receivers, "float32")
    extent = pair.layout.extent(0, 16)
    pair.pack(extent, 0)
    list(pair.world.wires.values())[-1].stalled = True
    sent, received = pair.transfer(extent, 0)
    for _ in range(TURNS):
        pair.sender.settle()
        pair.receiver.settle()
    assert (sent, received) == ([], [])
    monkeypatch.setattr("baton_engine.pairs.links.time.monotonic", lambda: 1e9)
    pair.until(lambda: sent and received)
    assert (sent, [succeeded for succeeded, _ in received]) == ([False], [False])
    for pod in (pair.sender, pair.receiver):
        pair.until(lambda pod=pod: not pod.ends.busy)
        [reason] = pod.lost.values()
        assert "a transfer does not end" in reason
        assert pod.ends.links == 0
        assert not pod.ends.up(PAIR)
    # What comes for a pair that has ended does nothing.
    sent, received = pair.transfer(extent, 0)
    assert (sent, received) == ([False], [(False, 0)])


def test_a_pair_is_lost_where_nccl_refuses_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, 4, 1, 2, "float32")
    extent = pair.layout.extent(0, 16)
    pair.pack(extent, 0)
    pair.world.refuses = True
    _, received = pair.transfer(extent, 0)
    pair.until(lambda: received and not pair.receiver.ends.busy)
    assert (received[0][0], pair.receiver.ends.links) == (False, 0)
    assert "refused for a test" in pair.receiver.lost[PAIR]


def test_a_pair_that_begins_anew_is_not_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank reports late of the pair that was lost says nothing about the next one with its number."""
    pair = Pair(monkeypatch, 4, 2, 2, "float32")
    for pod in (pair.sender, pair.receiver):
        pod.ends.close(PAIR)
        pod.up.clear()
    slot_bytes = TOKENS * pair.layout.token_bytes
    ids = pair.sender.ends.open(PAIR, 2, SLOTS, slot_bytes)
    pair.receiver.ends.join(PAIR, 2, ids, SLOTS, slot_bytes)
    pair.until(lambda: pair.sender.up == pair.receiver.up == [PAIR])
    assert pair.sender.ends.links in (1, 2)
    extent = pair.layout.extent(0, 16)
    checksum = pair.pack(extent, 1)
    _, received = pair.transfer(extent, 1)
    pair.until(lambda: received)
    assert received == [(True, checksum)]
    assert not pair.sender.lost


def test_ranks_without_memory_for_a_pair_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, 4, 2, 1, "float32")

    def allocate(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory for a test")

    monkeypatch.setattr("baton_engine.pairs.gpu_slots.GpuSlots.allocate", allocate)
    pair.sender.ends.open(PAIR + 1, 1, SLOTS, 1 << 20)
    pair.until(lambda: PAIR + 1 in pair.sender.lost)
    pair.until(lambda: not pair.sender.ends.busy)
    assert pair.sender.ends.up(PAIR)


def test_which_rank_sends_what() -> None:
    for heads in (1, 2, 3, 4, 8):
        counts = [count for count in range(1, 9) if divides(heads, count)]
        for senders in counts:
            for receivers in counts:
                parts = rank_parts(heads, senders, receivers)
                for receiver in range(receivers):
                    got = [
                        head
                        for part in parts
                        if part.receiver == receiver
                        for head in range(part.first_head, part.first_head + part.num_heads)
                    ]
                    assert sorted(got) == list(rank_heads(heads, receiver, receivers))
                for part in parts:
                    held = rank_heads(heads, part.sender, senders)
                    assert held.start <= part.first_head
                    assert part.first_head + part.num_heads <= held.stop
    # Copies of a head are sent by different ranks, and where there are as many ranks each has one peer.
    assert [(part.sender, part.receiver) for part in rank_parts(1, 2, 4)] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert most_links(1, 4, 4) == most_links(8, 4, 4) == (1, 1)
    assert not any(divides(heads, ranks) for heads, ranks in [(4, 3), (4, 0), (1, 65), (6, 4)])


def test_the_checksum_of_one_part_is_its_own() -> None:
    assert combined({0: 0xFFFFFFFF}) == 0xFFFFFFFF
    assert combined({0: 1, 1: 2}) != combined({0: 2, 1: 1})
    assert combined({1: 2, 0: 1}) == combined({0: 1, 1: 2}) < 1 << 32
