"""Reading ranges of files ahead of those who take them."""

import random
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton_engine import read_ahead
from baton_engine.read_ahead import Range, ReadAhead

CPU = torch.device("cpu")
SIZE = 100_000


@pytest.fixture
def content() -> bytes:
    return random.Random(1).randbytes(SIZE)


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    file = tmp_path / "bytes"
    file.write_bytes(content)
    return file


def make_ranges(path: Path, count: int) -> list[Range]:
    """Return ranges of many lengths, some of them empty, in no order."""
    rng = random.Random(2)
    sizes = [rng.choice([0, 1, 999, 1000, 1001, rng.randrange(20_000)]) for _ in range(count)]
    return [Range(path, rng.randrange(SIZE - size), size) for size in sizes]


def part(content: bytes, wanted: Range) -> bytes:
    return content[wanted.begin : wanted.begin + wanted.size]


def taken(files: ReadAhead, wanted: Range) -> bytes:
    return bytes(files.take(wanted).tolist())


def test_ranges_arrive_whole_and_are_never_more_than_the_bound(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = make_ranges(path, 60)
    started: list[int] = []
    start = ReadAhead._start
    monkeypatch.setattr(
        ReadAhead, "_start", lambda files, wanted: (started.append(wanted.size), start(files, wanted))[1]
    )
    most, done = 0, 0
    with ReadAhead(CPU, ahead_bytes=25_000, threads=3, piece_bytes=1000) as files:
        files.expect(ranges)
        for wanted in ranges:
            most = max(most, sum(started) - done)
            assert taken(files, wanted) == part(content, wanted)
            done += wanted.size
    assert len(started) == len(ranges)
    assert 20_000 < most <= 25_000


def test_a_range_larger_than_the_bound_is_read_when_it_is_taken(path: Path, content: bytes) -> None:
    ranges = [Range(path, 5, 100), Range(path, 0, SIZE), Range(path, 7, 100)]
    with ReadAhead(CPU, ahead_bytes=1000, threads=2, piece_bytes=1000) as files:
        files.expect(ranges)
        assert [taken(files, wanted) for wanted in ranges] == [part(content, wanted) for wanted in ranges]


def test_a_range_that_was_not_expected_is_read_all_the_same(path: Path, content: bytes) -> None:
    ranges = make_ranges(path, 9)
    order = [ranges[0], Range(path, 3, 4), *ranges[3:], ranges[1]]
    with ReadAhead(CPU, threads=2, piece_bytes=1000) as files:
        files.expect(ranges)
        assert [taken(files, wanted) for wanted in order] == [part(content, wanted) for wanted in order]


def test_a_file_that_ends_too_early_is_an_error_of_the_range(path: Path, content: bytes) -> None:
    with ReadAhead(CPU, threads=2, piece_bytes=1000) as files:
        files.expect([Range(path, 0, 10), Range(path, SIZE - 10, 20)])
        assert taken(files, Range(path, 0, 10)) == content[:10]
        with pytest.raises(OSError, match=f"ends at byte {SIZE}"):
            files.take(Range(path, SIZE - 10, 20))


class FakeEvent:
    """Fails when somebody waits for an event that was never recorded, except for an empty buffer."""

    waits = 0

    def __init__(self, blocking: bool = False) -> None:
        self.recorded = blocking

    def record(self) -> None:
        self.recorded = True

    def wait(self) -> None:
        assert self.recorded
        FakeEvent.waits += 1

    synchronize = wait


def test_a_gpu_gets_its_bytes_through_pinned_buffers(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls that a GPU needs, on a CPU: it cannot show that copies run beside reads."""
    pinned: Counter[int] = Counter()
    cudart = SimpleNamespace(
        cudaHostRegister=lambda pointer, size, flags: pinned.update([pointer]),
        cudaHostUnregister=lambda pointer: pinned.subtract([pointer]),
    )
    stream = SimpleNamespace(synchronize=lambda: None)
    cuda = SimpleNamespace(
        Event=FakeEvent, Stream=lambda device: stream, stream=nullcontext, device=nullcontext, cudart=lambda: cudart,
        check_error=lambda code: None, current_device=lambda: 0,
    )  # fmt: skip

    class FakeTorch:
        def __init__(self) -> None:
            self.cuda = cuda

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *shape: Any, **fields: Any) -> torch.Tensor:
            return torch.empty(*shape, **{**fields, "device": None})

    monkeypatch.setattr(read_ahead, "torch", FakeTorch())
    ranges = make_ranges(path, 30)
    with ReadAhead(torch.device("cuda"), ahead_bytes=25_000, threads=3, piece_bytes=1000) as files:
        files.expect(ranges)
        assert [taken(files, wanted) for wanted in ranges] == [part(content, wanted) for wanted in ranges]
        assert 2 <= pinned.total() <= 6, "each thread that read has two buffers"
    assert pinned.total() == 0, "no memory stays pinned"
    pieces = sum(-(-wanted.size // 1000) for wanted in ranges)
    assert FakeEvent.waits == 3 * pieces, "for the buffer, for the target's memory, and by whoever takes the range"
