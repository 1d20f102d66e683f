"""A rank's connections to the GPUs of other pods, and the transfers over these connections."""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
import torch

from .nccl import TRANSFER_S, Communicator, NcclError

Then = Callable[[bool], None]
Behind = Callable[[], None]


class TransferHandle(Protocol):
    def query(self) -> bool: ...


class Connection(Protocol):
    """The interface of Communicator, for which tests use a replacement."""

    failure: str | None
    up: bool
    gone: bool

    def send(self, values: torch.Tensor) -> TransferHandle: ...

    def receive(self, values: torch.Tensor, behind: Behind | None) -> TransferHandle: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class _Transfer(msgspec.Struct):
    over: TransferHandle
    deadline: float
    then: Then


class _Link(msgspec.Struct):
    connection: Connection
    announced: bool = False
    transfers: deque[_Transfer] = msgspec.field(default_factory=deque)


class Links:
    """Connections of two GPUs each. The caller gives each one a number that it uses only once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._links: dict[int, _Link] = {}
        self._closing: dict[int, _Link] = {}

    @property
    def busy(self) -> bool:
        """Whether `settle` may have something to do without a command."""
        return bool(self._closing) or any(not link.announced or link.transfers for link in self._links.values())

    def open(self, number: int, sends: bool, unique_id: bytes) -> None:
        """Begin a connection. sends: whether this end of it sends."""
        self._links[number] = _Link(self._connect(0 if sends else 1, unique_id))

    def close(self, number: int) -> None:
        """End a connection and its transfers. One that has ended already is ignored."""
        link = self._links.pop(number, None)
        if link is not None:
            link.connection.close()
            self._closing[number] = link

    def gone(self, number: int) -> bool:
        """Whether a connection has ended, and all of its transfers with it."""
        return number not in self._links and number not in self._closing

    def send(self, number: int, values: torch.Tensor, then: Then) -> None:
        """Send values. then: called when they may be overwritten; its argument is whether they were sent."""
        self._transfer(number, lambda connection: connection.send(values), then)

    def receive(self, number: int, values: torch.Tensor, behind: Behind | None, then: Then) -> None:
        """Receive into values. behind: launches work on the values, which belongs to the transfer. then: called when
        the transfer is over; its argument is whether it succeeded."""
        self._transfer(number, lambda connection: connection.receive(values, behind), then)

    def settle(self) -> tuple[list[int], dict[int, str]]:
        """Call `then` for each transfer that is over, and close the connections that are lost.

        Return the connections that have come up since the last call, and the reason for each one that was lost.
        """
        up: list[int] = []
        lost: dict[int, str] = {}
        for number, link in list(self._links.items()):
            connection = link.connection
            connection.check()
            while link.transfers and link.transfers[0].over.query():
                link.transfers.popleft().then(True)
            if link.transfers and time.monotonic() > link.transfers[0].deadline:
                connection.failure = connection.failure or "a transfer does not end"
            if connection.failure is not None:
                lost[number] = connection.failure
                self.close(number)
            elif connection.up and not link.announced:
                link.announced = True
                up.append(number)
        for number, link in [entry for entry in self._closing.items() if entry[1].connection.gone]:
            del self._closing[number]
            for transfer in link.transfers:
                transfer.then(False)
        return up, lost

    def _connect(self, rank: int, unique_id: bytes) -> Connection:
        return Communicator(rank, unique_id, self._device)

    def _transfer(self, number: int, begin: Callable[[Connection], TransferHandle], then: Then) -> None:
        link = self._links.get(number)
        if link is None or not link.announced:
            then(False)
            return
        try:
            over = begin(link.connection)
        except NcclError as error:
            link.connection.failure = link.connection.failure or str(error)
            then(False)
        else:
            link.transfers.append(_Transfer(over, time.monotonic() + TRANSFER_S, then))
