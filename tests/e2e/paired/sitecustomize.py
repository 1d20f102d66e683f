"""Lets engines on CPU act as pairs of GPUs. Python loads this file at its start from PYTHONPATH. Sockets take the place
of NCCL and behave like it: messages pair up in order, a size that does not match is an error, and a lost peer ends
everything.

PAIR_FAULT: "break:N", "stall:N" or "damage:N" does this to the N-th message that is sent; "refuse" refuses the
connection. On a machine with two GPUs the fault happens to NCCL.
"""

import contextlib
import json
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_SIZE = struct.Struct("<Q")
_CONNECT_S = 5.0
_RANKS = "baton_engine.ranks.process"


def rank() -> int:
    """Return the rank of this process."""
    return int(sys.orig_argv[sys.orig_argv.index(_RANKS) + 1]) if _RANKS in sys.orig_argv else 0


def fault() -> tuple[str, int]:
    """Return the fault of this process's links, and the number of the message at which it happens."""
    kind, _, number = os.environ.get("PAIR_FAULT", "").partition(":")
    return kind, int(number or 0)


class Event:
    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened


class SocketLink:
    """In place of baton_engine.pairs.nccl.Communicator. The id is the name of an abstract socket."""

    def __init__(self, rank: int, unique_id: bytes, device: Any) -> None:
        self.failure: str | None = None
        self.up = False
        self.gone = False
        self._rank = rank
        self._name = b"\0" + unique_id.rstrip(b"\0")
        self._socket: socket.socket | None = None
        self._queue: queue.Queue[tuple[Any, Callable[[], None] | None, Event] | None] = queue.Queue()
        self._closed = threading.Event()
        self._fault, self._left = fault()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, values: Any) -> Event:
        return self._put(values, None)

    def receive(self, values: Any, behind: Callable[[], None] | None) -> Event:
        return self._put(values, behind)

    def check(self) -> None: ...

    def close(self) -> None:
        self.up = False
        self._closed.set()
        self._queue.put(None)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _put(self, values: Any, behind: Callable[[], None] | None) -> Event:
        event = Event()
        self._queue.put((values, behind, event))
        return event

    def _run(self) -> None:
        try:
            self._socket = self._connect()
            self.up = True
            while (entry := self._queue.get()) is not None:
                values, behind, event = entry
                view = memoryview(values.numpy())
                (self._receive if self._rank else self._send)(view)
                if behind is not None:
                    behind()
                event.happened = True
        except OSError as error:
            self.failure = str(error)
            while self._queue.get() is not None:
                pass
        finally:
            if self._socket is not None:
                self._socket.close()
            self.gone = True

    def _connect(self) -> socket.socket:
        if self._fault == "refuse":
            raise OSError("refused for a test")
        if self._rank:
            return self._reach()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._name)
            listener.listen()
            listener.settimeout(_CONNECT_S)
            connection, _ = listener.accept()
            connection.settimeout(None)
            return connection

    def _reach(self) -> socket.socket:
        """Connect to the other end, which may begin later."""
        until = time.monotonic() + _CONNECT_S
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self._name)
            except ConnectionRefusedError:
                connection.close()
                if time.monotonic() > until or self._closed.wait(0.02):
                    raise
            else:
                return connection

    def _send(self, view: memoryview) -> None:
        assert self._socket is not None
        self._left -= 1
        data = bytearray(view)
        if self._left == 0 and self._fault == "break":
            self._socket.sendall(_SIZE.pack(len(data)) + data[: len(data) // 2])
            raise OSError("broken for a test")
        if self._left == 0 and self._fault == "stall":
            self._closed.wait()
        if self._left == 0 and self._fault == "damage":
            data[len(data) // 3] ^= 4
        self._socket.sendall(_SIZE.pack(len(data)) + data)
        print(json.dumps({"event": "sent_to_pair", "bytes": len(data), "rank": rank()}), flush=True)

    def _receive(self, view: memoryview) -> None:
        assert self._socket is not None
        self._socket.settimeout(None)
        [size] = _SIZE.unpack(self._exactly(_SIZE.size))
        if size != len(view):
            raise OSError(f"{size} bytes were sent, {len(view)} are expected")
        view[:] = self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        assert self._socket is not None
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise OSError("the peer is gone")
            data += part
        return bytes(data)


def make_unique_id() -> bytes:
    return secrets.token_hex(32).encode().ljust(128, b"\0")


def gpu_ids(device: Any, count: int) -> list[str]:
    return [f"{os.getpid()} {rank}" for rank in range(count)]


def faulty_nccl() -> Any:
    """Return NCCL's Communicator with the fault, and a word on each message sent."""
    import torch

    from baton_engine.pairs.nccl import Communicator, NcclError

    class Faulty(Communicator):
        def __init__(self, rank: int, unique_id: bytes, device: Any) -> None:
            self._fault, self._left = fault()
            super().__init__(rank, unique_id, device)

        def send(self, values: Any) -> Any:
            if not self.up:  # the first message, by which the connection is made
                if self._fault == "refuse":
                    raise NcclError("refused for a test")
                return super().send(values)
            self._left -= 1
            if self._left == 0 and self._fault == "break":
                raise NcclError("broken for a test")
            if self._left == 0 and self._fault == "stall":
                return Event()
            if self._left == 0 and self._fault == "damage":
                values[len(values) // 3] ^= 4
                torch.cuda.synchronize()
            transfer = super().send(values)
            print(json.dumps({"event": "sent_to_pair", "bytes": len(values), "rank": rank()}), flush=True)
            return transfer

    return Faulty


if {"baton_worker.engine_process", _RANKS} & set(sys.orig_argv):
    import torch

    # Each module takes these names from here when it is imported.
    from baton_engine.pairs import nccl

    if torch.cuda.is_available():
        replacements = {"Communicator": faulty_nccl()}
    else:
        replacements = {"Communicator": SocketLink, "make_unique_id": make_unique_id, "gpu_ids": gpu_ids}
    for name, value in replacements.items():
        setattr(nccl, name, value)
    if "baton_worker.engine_process" in sys.orig_argv and not torch.cuda.is_available():
        from baton_worker import pair_memory
        from baton_worker.pair_memory import PairMemory

        most = int(os.environ.get("PAIR_MOST", "8"))
        pair_memory.set_aside = lambda *_, **__: PairMemory(most, 0)  # type: ignore[assignment]
