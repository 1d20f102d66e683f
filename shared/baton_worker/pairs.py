"""The engine's connections to other engines, GPU to GPU, and what is on its way over them."""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
import torch

from baton_kv.nccl import TRANSFER_S, Communicator, NcclError, make_unique_id

Then = Callable[[bool], None]


class OnItsWay(Protocol):
    def query(self) -> bool: ...


class Link(Protocol):
    """What Communicator is; in tests another."""

    failure: str | None
    up: bool
    gone: bool

    def send(self, values: torch.Tensor) -> OnItsWay: ...

    def receive(self, values: torch.Tensor) -> OnItsWay: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class _Transfer(msgspec.Struct):
    over: OnItsWay
    deadline: float
    then: Then


class _Pair(msgspec.Struct):
    link: Link
    announced: bool = False
    transfers: deque[_Transfer] = msgspec.field(default_factory=deque)


class Pairs:
    """Each pair has a number of its pod's; one end opens it and sends, the other joins with the id that this gave."""

    def __init__(self, device: torch.device, most: int) -> None:
        """most: pairs at a time for which there is memory."""
        self.most = most
        self._device = device
        self._pairs: dict[int, _Pair] = {}
        self._closing: list[_Pair] = []

    @property
    def busy(self) -> bool:
        """Whether anything may change without a command."""
        return bool(self._closing) or any(not pair.announced or pair.transfers for pair in self._pairs.values())

    @property
    def num_open(self) -> int:
        return len(self._pairs)

    @property
    def room(self) -> bool:
        """Whether one more can begin. A closed one holds its memory until nothing is on its way over it."""
        return len(self._pairs) + len(self._closing) < self.most

    def up(self, pair: int) -> bool:
        """Whether a pair is there, and `settle` has told that it is up."""
        return pair in self._pairs and self._pairs[pair].announced

    def open(self, pair: int) -> bytes:
        """Begin a pair as its sender; return the id for the other end."""
        unique_id = make_unique_id()
        self._pairs[pair] = _Pair(self._connect(0, unique_id))
        return unique_id

    def join(self, pair: int, unique_id: bytes) -> None:
        """Begin a pair as its receiver."""
        self._pairs[pair] = _Pair(self._connect(1, unique_id))

    def close(self, pair: int) -> None:
        """End a pair, and what is on its way over it. Unknown ones are ignored."""
        entry = self._pairs.pop(pair, None)
        if entry is not None:
            entry.link.close()
            self._closing.append(entry)

    def send(self, pair: int, values: torch.Tensor, then: Then) -> None:
        """then: called when values may be overwritten, with whether they were sent."""
        self._transfer(pair, True, values, then)

    def receive(self, pair: int, values: torch.Tensor, then: Then) -> None:
        """then: called when values may be used, with whether they were received."""
        self._transfer(pair, False, values, then)

    def settle(self) -> tuple[list[int], dict[int, str]]:
        """Do what was to follow the transfers that are over; return the pairs that are up since the last call, and why
        others were lost, which are closed now."""
        up: list[int] = []
        lost: dict[int, str] = {}
        for number, pair in list(self._pairs.items()):
            link = pair.link
            link.check()
            while pair.transfers and pair.transfers[0].over.query():
                pair.transfers.popleft().then(True)
            if pair.transfers and time.monotonic() > pair.transfers[0].deadline:
                link.failure = link.failure or "a transfer does not end"
            if link.failure is not None:
                lost[number] = link.failure
                self.close(number)
            elif link.up and not pair.announced:
                pair.announced = True
                up.append(number)
        for pair in [pair for pair in self._closing if pair.link.gone]:
            self._closing.remove(pair)
            for transfer in pair.transfers:
                transfer.then(False)
        return up, lost

    def _connect(self, rank: int, unique_id: bytes) -> Link:
        return Communicator(rank, unique_id, self._device)

    def _transfer(self, number: int, sends: bool, values: torch.Tensor, then: Then) -> None:
        pair = self._pairs.get(number)
        if pair is None or not pair.announced:
            then(False)
            return
        try:
            over = pair.link.send(values) if sends else pair.link.receive(values)
        except NcclError as error:
            pair.link.failure = pair.link.failure or str(error)
            then(False)
        else:
            pair.transfers.append(_Transfer(over, time.monotonic() + TRANSFER_S, then))
