"""Announcements and pairs in an engine, with links that a test advances by hand in place of NCCL."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from baton_common.extent import Extent
from baton_engine.engine import Engine
from baton_engine.exports import Export
from baton_engine.pair_ends import make_pair_ends
from baton_kv.staging import StagingArena
from baton_worker.kv_mover import KvMover
from baton_worker.messages import JoinPair, OpenPair, ReceivePiece, SendPiece
from baton_worker.pair_memory import LANDING_SLOTS, PairMemory
from tests.conftest import MakeModel
from tests.engine.harness import make_engine, make_prompt, make_request

ID = b"\0" * 128
# Nothing in these tests takes longer than so many turns of the engine's loop.
TURNS = 20


class Over:
    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over


class FakeLink:
    """A pair whose transfers end when they begin, unless it is stalled; closed, it is gone when the test says so."""

    def __init__(self, *_: Any) -> None:
        self.failure: str | None = None
        self.up = True
        self.gone = False
        self.stalled = False
        self.received: list[torch.Tensor] = []
        self.sent: list[torch.Tensor] = []

    def _begin(self, values: torch.Tensor, into: list[torch.Tensor]) -> Over:
        into.append(values)
        transfer = Over()
        transfer.over = not self.stalled
        return transfer

    def send(self, values: torch.Tensor) -> Over:
        return self._begin(values, self.sent)

    def receive(self, values: torch.Tensor, behind: Callable[[], None] | None) -> Over:
        if behind is not None:
            behind()
        return self._begin(values, self.received)

    def check(self) -> None: ...

    def close(self) -> None:
        self.up = False


class Mover:
    """A KvMover, its engine and its links."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, most: int) -> None:
        self.links: list[FakeLink] = []
        patch.setattr("baton_engine.pairs.links.Communicator", self._connect)
        patch.setattr("baton_engine.pairs.ends.make_unique_id", lambda: ID)
        patch.setattr("baton_worker.kv_mover.SLOT_BYTES", 1 << 16)
        self.engine: Engine = make_engine(folder)
        fds = [StagingArena.create_file("test") for _ in range(2)]
        self.mover = KvMover(self.engine, make_pair_ends(self.engine.runner), *fds, PairMemory(most))
        for fd in fds:
            os.close(fd)

    def _connect(self, *arguments: Any) -> FakeLink:
        self.links.append(FakeLink(*arguments))
        return self.links[-1]

    def turns(self, count: int = TURNS) -> None:
        for _ in range(count):
            self.mover.settle()
            self.mover.pack()

    def order(self, id: int, tokens: int) -> int:
        """Have a request wait for the KV of its prompt; return the generation."""
        self.engine.add(make_request(id, make_prompt(tokens, seed=id), 4, imports_kv=True))
        return next(r for r in self.engine.reserve() if r.id == id).generation

    def join(self, pair: int) -> None:
        self.mover.begin_pair(JoinPair(pair, 1, ID))

    def open(self, pair: int) -> None:
        self.mover.begin_pair(OpenPair(pair, 1))

    def extent(self, first: int, count: int) -> Extent:
        return self.engine.runner.cache.layout.extent(first, count)

    def announce(self, pair: int, id: int, generation: int, first: int, count: int) -> None:
        self.mover.receive(ReceivePiece(pair, self.extent(first, count), None, id, generation))

    @property
    def lost(self) -> list[int]:
        return [lost.pair for lost in self.mover.output.pairs_lost]


@pytest.fixture
def llama(tiny_model: MakeModel) -> Path:
    return tiny_model("llama")


def test_a_stalled_peer_holds_nobody_up(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Mover(llama, monkeypatch, most=2)
    for pair in (1, 2):
        it.join(pair)
    it.turns()
    assert it.mover.output.pairs_up == [1, 2]
    stalled, other = it.links
    stalled.stalled = True
    generation = it.order(1, 64)
    for first in range(0, 64, 16):
        it.announce(1, 1, generation, first, 16)
    generation = it.order(2, 64)
    for first in range(0, 64, 16):
        it.announce(2, 2, generation, first, 16)
    it.turns()
    assert [imported.id for imported in it.mover.output.imported] == [2]
    assert len(other.received) == 4
    # What it has begun it holds; the rest waits for its own slots, each of which is told when it is free again.
    assert len(stalled.received) == LANDING_SLOTS
    assert it.mover.output.landed == [2] * 4
    # It goes on, or it ends: either way nothing is held.
    it.mover.close_pair(1)
    it.join(3)
    it.turns()
    assert len(it.links) == 2
    stalled.gone = True
    it.turns()
    assert len(it.links) == 3
    assert it.mover.output.pairs_up == [1, 2, 3]


@pytest.mark.parametrize(
    "changes", [{"num_tokens": 0}, {"num_tokens": 1 << 31}, {"first_layer": 1}, {"num_heads": 1}, {"first_head": 1}]
)
def test_an_announcement_that_cannot_be_ends_its_pair_alone(
    llama: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    it = Mover(llama, monkeypatch, most=2)
    for pair in (1, 2):
        it.join(pair)
    it.turns()
    it.mover.receive(ReceivePiece(1, msgspec.structs.replace(it.extent(0, 16), **changes)))
    it.turns()
    assert it.lost == [1]
    generation = it.order(5, 32)
    it.announce(2, 5, generation, 0, 32)
    it.turns()
    assert [imported.id for imported in it.mover.output.imported] == [5]


@pytest.mark.parametrize("seed", range(8))
def test_any_announcements(llama: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Random, repeated, reordered, too large, of pairs that are not there: the mover lives and holds nothing after."""
    dice, it, pair = random.Random(seed), Mover(llama, monkeypatch, most=2), 0
    generation = it.order(1, 64)
    past: list[ReceivePiece] = []
    it.join(100)
    for number in range(300):
        if number % 40 == 0:
            pair += 1
            it.join(pair)
        first, count = dice.choice([0, 16, 63, 1 << 31]), dice.choice([0, 1, 16, 64, 1 << 31])
        extent = it.extent(first, count)
        if dice.random() < 0.2:
            field = dice.choice(["first_layer", "num_layers", "first_head", "num_heads"])
            extent = msgspec.structs.replace(extent, **{field: dice.choice([0, 1, 2, 1 << 31])})
        target = dice.choice([1, 7, None]), dice.choice([generation, 0])
        past.append(ReceivePiece(dice.choice([pair, 0, 99]), extent, dice.choice([None, 5]), *target))
        it.mover.receive(dice.choice(past))
        it.turns(1)
        for link in it.links[1:]:
            link.stalled = dice.random() < 0.3
            link.gone = not link.up
    for closed in range(pair + 1):
        it.mover.close_pair(closed)
    for link in it.links[1:]:
        link.gone = True
    it.turns()
    # The pair beside them was never touched, and there is room for another one.
    assert 100 not in it.lost
    it.mover.output.imported.clear()
    generation = it.order(9, 48)
    it.announce(100, 9, generation, 0, 48)
    it.join(500)
    it.turns()
    assert [imported.id for imported in it.mover.output.imported] == [9]
    assert 500 not in it.lost
    assert not it.mover.busy


def test_a_further_pair_than_the_memory_is_enough_for(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Mover(llama, monkeypatch, most=2)
    for pair in (1, 2, 3):
        it.open(pair)
    it.turns()
    assert it.lost == [3]
    assert it.mover.output.pairs_up == [1, 2]
    assert len(it.links) == 2


def test_a_sender_without_credit_waits_and_takes_nobodys_slots(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Mover(llama, monkeypatch, most=2)
    for pair in (1, 2):
        it.open(pair)
    it.turns()
    for pair in (1, 2):
        it.mover.use_pair(pair, check=False, credit=1)
        it.mover.expect(pair, pair)
        for first in range(0, 64, 16):
            it.mover.put(Export(pair, it.extent(first, 16), [[0, 1, 2, 3]]))

    def packed() -> list[int]:
        """Send what was packed; return whose it was."""
        it.turns()
        pieces, it.mover.output.pieces = it.mover.output.pieces, []
        for piece in pieces:
            it.mover.send(SendPiece(piece.id, piece.slot))
        return [piece.id for piece in pieces]

    assert sorted(packed()) == [1, 2]
    assert packed() == []
    for _ in range(3):  # the peer of the first says nothing
        it.mover.grant_pair(2, 1)
        assert packed() == [2]
    # What was packed and not announced did not use its credit up.
    it.mover.grant_pair(1, 1)
    it.turns()
    [piece] = it.mover.output.pieces
    it.mover.output.pieces = []
    it.mover.free(piece.slot, on_gpu=True)
    assert packed() == [1]
    # The rest goes through the host once the peer's pair is lost.
    it.mover.close_pair(1)
    it.turns()
    assert [(piece.id, piece.on_gpu) for piece in it.mover.output.pieces] == [(1, False)]
