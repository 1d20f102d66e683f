"""The engine's connections to the GPUs of other engines, and the transfers over these connections."""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
import torch

from baton_kv.nccl import TRANSFER_S, Communicator, NcclError, make_unique_id

Then = Callable[[bool], None]


class TransferHandle(Protocol):
    def query(self) -> bool: ...


class Link(Protocol):
    """The interface of Communicator, for which tests use a replacement."""

    failure: str | None
    up: bool
    gone: bool

    def send(self, values: torch.Tensor) -> TransferHandle: ...

    def receive(self, values: torch.Tensor) -> TransferHandle: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class _Transfer(msgspec.Struct):
    over: TransferHandle
    deadline: float
    then: Then


class _Pair(msgspec.Struct):
    link: Link
    announced: bool = False
    transfers: deque[_Transfer] = msgspec.field(default_factory=deque)


class Pairs:
    """Each pod numbers its own pairs. One end opens a pair and sends; the other end joins with the id from `open`."""

    def __init__(self, device: torch.device, most: int) -> None:
        """most: how many pairs the memory is enough for."""
        self.most = most
        self._device = device
        self._pairs: dict[int, _Pair] = {}
        self._closing: list[_Pair] = []

    @property
    def busy(self) -> bool:
        """Whether `settle` may have something to do without a command."""
        return bool(self._closing) or any(not pair.announced or pair.transfers for pair in self._pairs.values())

    @property
    def num_open(self) -> int:
        return len(self._pairs)

    @property
    def room(self) -> bool:
        """Whether one more pair can begin. A closed pair holds its memory until its transfers have ended."""
        return len(self._pairs) + len(self._closing) < self.most

    def up(self, pair: int) -> bool:
        """Whether a pair exists, and `settle` has reported that it is up."""
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
        """End a pair and its transfers. An unknown pair is ignored."""
        entry = self._pairs.pop(pair, None)
        if entry is not None:
            entry.link.close()
            self._closing.append(entry)

    def send(self, pair: int, values: torch.Tensor, then: Then) -> None:
        """Send values. then: called when they may be overwritten; its argument is whether they were sent."""
        self._transfer(pair, True, values, then)

    def receive(self, pair: int, values: torch.Tensor, then: Then) -> None:
        """Receive into values. then: called when the transfer is over; its argument is whether it succeeded."""
        self._transfer(pair, False, values, then)

    def settle(self) -> tuple[list[int], dict[int, str]]:
        """Call `then` for each transfer that is over, and close the pairs that are lost.

        Return the pairs that have come up since the last call, and the reason for each pair that was lost.
        """
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
