"""Messages from one process to several others, through memory that they share.

Every reader gets every message. The memory is a ring of bytes, in which a message may be longer than the ring. Event
counters of the kernel (eventfd(2)) tell the readers how many bytes are new, and the writer how many bytes each reader
has taken. They also order memory accesses on every kind of processor, and readers can sleep until they change.
"""

import mmap
import os
import select
import struct
import time
from collections.abc import Callable

_LENGTH = struct.Struct("<I")
RING_BYTES = 4 << 20
_CHECK_S = 0.1


def map_memory(fd: int) -> mmap.mmap:
    """Return the contents of a memory file."""
    return mmap.mmap(fd, os.fstat(fd).st_size)


def create_memory(name: str, size: int) -> int:
    """Return the descriptor of a new memory file, which child processes can inherit."""
    fd = os.memfd_create(name)
    os.ftruncate(fd, size)
    return fd


def create_counter() -> int:
    """Return the descriptor of a new event counter, which child processes can inherit."""
    return os.eventfd(0, os.EFD_NONBLOCK)


def read_counter(counter: int) -> int:
    """Return what was added to a counter since the last call."""
    try:
        return os.eventfd_read(counter)
    except BlockingIOError:
        return 0


class RingWriter:
    """The end that writes."""

    def __init__(self, memory: int, readers: list[tuple[int, int]], check: Callable[[], None]) -> None:
        """readers: for each reader the counter of new bytes and that of bytes taken. check: called while the ring is
        full; it raises an error if a reader is gone."""
        self._map = map_memory(memory)
        self._readers, self._check = readers, check
        self._at = 0
        self._room = [len(self._map)] * len(readers)

    def send(self, message: bytes) -> None:
        data = memoryview(_LENGTH.pack(len(message)) + message)
        while data:
            count = min(self._find_room(len(data)), len(data), len(self._map) - self._at)
            self._map[self._at : self._at + count] = data[:count]
            self._at = (self._at + count) % len(self._map)
            for reader, (new, _) in enumerate(self._readers):
                self._room[reader] -= count
                os.eventfd_write(new, count)
            data = data[count:]

    def _find_room(self, wanted: int) -> int:
        """Return how many bytes every reader has room for, at least one."""
        while True:
            for reader, (_, taken) in enumerate(self._readers):
                if self._room[reader] < wanted:
                    self._room[reader] += read_counter(taken)
            if room := min(self._room):
                return room
            self._check()
            full = [taken for room, (_, taken) in zip(self._room, self._readers, strict=True) if not room]
            select.select(full, [], [], _CHECK_S)


class RingReader:
    """One of the ends that read."""

    def __init__(self, memory: int, new: int, taken: int, closed: int, spin_s: float = 0.0) -> None:
        """new, taken: the counters. closed: a descriptor that becomes readable when the writer is gone. spin_s: how
        long this end polls for a message before it sleeps, since waking up takes time."""
        self.spin_s = spin_s
        self._map = map_memory(memory)
        self._new, self._taken, self._closed = new, taken, closed
        self._at = self._ready = 0

    def arrived(self, timeout: float = 0.0) -> bool:
        """Whether a message has come, or has begun to, within so many seconds."""
        if not self._ready:
            if timeout:
                select.select([self._new], [], [], timeout)
            self._ready = read_counter(self._new)
        return self._ready > 0

    def receive(self) -> bytes:
        """Wait for the next message. Raises EOFError when the writer is gone."""
        [size] = _LENGTH.unpack(self._take(_LENGTH.size))
        return self._take(size)

    def _take(self, size: int) -> bytes:
        parts = []
        while size:
            if not self._ready:
                self._ready = self._wait()
            count = min(self._ready, size, len(self._map) - self._at)
            parts.append(self._map[self._at : self._at + count])
            self._at = (self._at + count) % len(self._map)
            self._ready -= count
            size -= count
            os.eventfd_write(self._taken, count)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _wait(self) -> int:
        until = time.monotonic() + self.spin_s
        while not (new := read_counter(self._new)):
            if time.monotonic() >= until:
                readable, _, _ = select.select([self._new, self._closed], [], [])
                if self._new not in readable:
                    raise EOFError
        return new
