"""Reads ranges of files into the memory of a device, in several threads and before anybody waits for them."""

import math
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import torch

from baton_common.cores import available_cores

from .host_memory import HostMemory

THREADS = 16
# What a thread reads at a time. A GPU's thread has two pinned buffers of this size, so that it reads into one while the
# other is copied to the device.
PIECE_BYTES = 8 << 20
AHEAD_BYTES = 256 << 20


class Range(NamedTuple):
    """Bytes of a file."""

    path: Path
    begin: int
    size: int


class ReadAhead:
    """Threads that read ranges in the order in which they will be taken. Use as a context manager.

    ahead_bytes: the most bytes that are read, or being read, and not taken yet; one range may be larger than that.

    Files are read through the page cache, so that the next start on the same machine finds them there. The container of
    this process is charged for these pages, but the kernel drops them before it ends a process for want of memory.
    """

    def __init__(
        self,
        device: torch.device,
        ahead_bytes: int = AHEAD_BYTES,
        threads: int = THREADS,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        if device.type == "cuda" and device.index is None:
            # Each thread has a current device of its own.
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._ahead_bytes = ahead_bytes
        self._piece_bytes = piece_bytes
        self._expected: deque[Range] = deque()
        self._begun: deque[tuple[Range, _Read]] = deque()
        self._begun_bytes = 0
        self._threads = ThreadPoolExecutor(threads, "read-weights")
        self._files: dict[Path, int] = {}
        self._lanes: list[_Lane] = []
        self._own = threading.local()

    @classmethod
    def for_device(cls, device: torch.device) -> "ReadAhead":
        """Return a ReadAhead whose buffers take at most an eighth of the free memory of the host."""
        host = HostMemory().free() // 8
        if device.type == "cuda":
            # The bytes ahead are in the device's memory, as part of the weights that it will hold anyway.
            return cls(device, threads=max(min(THREADS, host // (2 * PIECE_BYTES)), 1))
        return cls(device, min(AHEAD_BYTES, host), threads=min(THREADS, math.ceil(available_cores())))

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for lane in self._lanes:
            lane.close()
        for file in self._files.values():
            os.close(file)

    def expect(self, ranges: Iterable[Range]) -> None:
        """Begin to read these ranges, in this order."""
        self._expected = deque(ranges)
        self._begin_more()

    def take(self, wanted: Range) -> torch.Tensor:
        """Return a range as uint8 on the device, complete for all later work in the current stream.

        A range that was not expected next is read now, and nothing is read ahead any more. Raises OSError when the file
        cannot be read or ends too early.
        """
        if not self._begun and self._expected and self._expected[0] == wanted:
            self._begin(self._expected.popleft())
        if self._begun and self._begun[0][0] == wanted:
            _, read = self._begun.popleft()
            self._begun_bytes -= wanted.size
            self._begin_more()
            return read.wait()
        self._expected.clear()
        # Copies that are under way would otherwise write to memory that the allocator has handed out again.
        while self._begun:
            self._begun.popleft()[1].wait()
        return self._start(wanted).wait()

    def _begin_more(self) -> None:
        while self._expected and self._begun_bytes + self._expected[0].size <= self._ahead_bytes:
            self._begin(self._expected.popleft())

    def _begin(self, wanted: Range) -> None:
        self._begun.append((wanted, self._start(wanted)))
        self._begun_bytes += wanted.size

    def _start(self, wanted: Range) -> "_Read":
        if wanted.path not in self._files:
            self._files[wanted.path] = os.open(wanted.path, os.O_RDONLY)
        file = self._files[wanted.path]
        target = torch.empty(wanted.size, dtype=torch.uint8, device=self._device)
        # The allocator may hand out memory that queued work in the current stream still uses.
        free = _record() if self._device.type == "cuda" else None
        pieces = [
            self._threads.submit(self._read, file, wanted.begin + at, target[at : at + self._piece_bytes], free)
            for at in range(0, wanted.size, self._piece_bytes)
        ]
        return _Read(target, pieces)

    def _read(
        self, file: int, begin: int, target: torch.Tensor, free: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        if free is None:
            _fill(file, begin, target)
            return None
        # The target may be an inference tensor, which can be written to in this mode only.
        with torch.inference_mode():
            return self._lane().read(file, begin, target, free)

    def _lane(self) -> "_Lane":
        lane: _Lane | None = getattr(self._own, "lane", None)
        if lane is None:
            lane = self._own.lane = _Lane(self._device, self._piece_bytes)
            self._lanes.append(lane)
        return lane


class _Read:
    """A range on its way."""

    def __init__(self, target: torch.Tensor, pieces: Sequence["Future[torch.cuda.Event | None]"]) -> None:
        self._target = target
        self._pieces = pieces

    def wait(self) -> torch.Tensor:
        """Return the bytes as uint8 on the device, once they are all there for work in the current stream.

        Raises OSError when the file cannot be read or ends too early.
        """
        for piece in self._pieces:
            copied = piece.result()
            if copied is not None:
                copied.wait()
        return self._target


class _Lane:
    """The stream of one thread that copies bytes to a GPU, and the two pinned buffers that it uses in turn."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Memory that torch itself pins would stay with the process.
        self._buffers = [torch.empty(piece_bytes, dtype=torch.uint8) for _ in range(2)]
        for buffer in self._buffers:
            self._call("cudaHostRegister", buffer.data_ptr(), piece_bytes, 0)
        self._turns = cycle([(buffer, torch.cuda.Event(blocking=True)) for buffer in self._buffers])  # type: ignore[no-untyped-call]

    def read(self, file: int, begin: int, target: torch.Tensor, free: torch.cuda.Event) -> torch.cuda.Event:
        """Read into the target. Returns an event at the end of the copy. free: the target may be overwritten after
        this event."""
        buffer, emptied = next(self._turns)
        emptied.synchronize()
        buffer = buffer[: len(target)]
        _fill(file, begin, buffer)
        with torch.cuda.stream(self._stream):
            free.wait()
            target.copy_(buffer, non_blocking=True)
            emptied.record()
            return _record()

    def close(self) -> None:
        self._stream.synchronize()
        for buffer in self._buffers:
            self._call("cudaHostUnregister", buffer.data_ptr())

    def _call(self, function: str, *arguments: int) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.check_error(getattr(torch.cuda.cudart(), function)(*arguments))  # type: ignore[no-untyped-call]


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _fill(file: int, begin: int, target: torch.Tensor) -> None:
    """Fill host memory with the bytes of a file from `begin` on."""
    memory = target.numpy().data
    done = 0
    while done < len(memory):
        # The interpreter lock is released while the kernel reads.
        count = os.preadv(file, [memory[done:]], begin + done)
        if count == 0:
            raise OSError(f"the file ends at byte {begin + done}")
        done += count
