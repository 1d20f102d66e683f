"""The choice between NCCL and the three ways over symmetric memory for the sums of ranks."""

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from baton_engine.ranks.small_sums import SmallSums, find_small_sums
from baton_engine.ranks.symmetric_memory import SymmetricMemory

ALWAYS = (1 << 40, 1 << 40, 1 << 40)  # each way over the memory is faster for all messages


class Memory(SymmetricMemory):
    """Memory of the CPU. The other rank always has the same message. fails: the step that raises."""

    def __init__(self, fails: str = "") -> None:
        super().__init__(0, 2, torch.device("cpu"), HashStore(), "test")
        self._fails = fails
        self.steps: list[str] = []
        self.ways: list[str] = []
        self.most_pushed = 512 << 10

    def allocate(self, most: int) -> None:
        self._step("allocate")

    def connect(self) -> None:
        self._step("connect")

    def check(self) -> None:
        self._step("check")

    def add_up_pushed(self, y: torch.Tensor) -> torch.Tensor:
        assert y.nbytes <= self.most_pushed
        self.ways.append("pushed")
        return 2 * y

    def add_up_at_once(self, y: torch.Tensor) -> torch.Tensor:
        self.ways.append("at once")
        return 2 * y

    def add_up_in_steps(self, y: torch.Tensor) -> torch.Tensor:
        self.ways.append("in steps")
        return 2 * y

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if self._fails == name:
            raise RuntimeError(f"{name} cannot be done")


Votes = Callable[[int], int]


def find(
    memory: Memory | SymmetricMemory, up_to: tuple[int, int, int], other_rank: Votes = lambda own: own
) -> tuple[int, int, int]:
    """Return the bytes of the largest message that is pushed, that is pushed or added up at once, and that is added up
    in the memory; 0 = none.

    up_to: bytes up to which pushing is the fastest way, up to which adding up at once is faster than in steps, and up
    to which the memory is faster than NCCL. other_rank: what the other rank says where this one says `own`.
    """
    size = 0

    def large(y: torch.Tensor) -> None:
        nonlocal size
        size = y.nbytes
        if isinstance(memory, Memory):
            memory.ways.append("large")

    def seconds(run: Callable[[], object]) -> float:
        run()
        assert isinstance(memory, Memory)
        fastest = ["pushed", "at once", "in steps"] if size <= up_to[0] else ["at once", "in steps", "pushed"]
        if size > up_to[1]:
            fastest = ["in steps", "at once", "pushed"]
        return float(["large", *fastest, "large"].index(memory.ways[-1], int(size <= up_to[2])))

    sums = find_small_sums(memory, large, lambda own: min(own, other_rank(own)), seconds)
    if sums is None:
        return 0, 0, 0
    assert isinstance(memory, Memory)
    found = {"pushed": 0, "at once": 0, "in steps": 0}
    for size in (1 << exponent for exponent in range(4, 27)):
        if sums.sum(torch.zeros(size // 2, dtype=torch.bfloat16)) is not None:
            found[memory.ways[-1]] = size
    most = max(found.values())
    return found["pushed"], max(found["pushed"], found["at once"]), most


@pytest.mark.parametrize(
    ("up_to", "found"),
    [
        ((0, 0, 0), (0, 0, 0)),
        ((0, 1 << 40, 8 << 10), (0, 8 << 10, 8 << 10)),
        ((0, 1 << 40, 100_000), (0, 64 << 10, 64 << 10)),
        ((0, 1 << 40, 1 << 40), (0, 4 << 20, 4 << 20)),
        ((20_000, 300_000, 1 << 40), (16 << 10, 256 << 10, 4 << 20)),
        (ALWAYS, (512 << 10, 4 << 20, 4 << 20)),
        ((1 << 40, 1 << 40, 64 << 10), (64 << 10, 64 << 10, 64 << 10)),
        ((0, 0, 1 << 20), (0, 0, 1 << 20)),
    ],
)
def test_each_message_goes_the_fastest_way(up_to: tuple[int, int, int], found: tuple[int, int, int]) -> None:
    assert find(Memory(), up_to) == found


@pytest.mark.parametrize(
    ("votes", "found"),
    [
        # 0 is for NCCL, 1 for two steps, 2 for one step, 3 for pushing.
        ([3, 3, 0], (16 << 10, 16 << 10, 16 << 10)),
        ([3, 2, 1, 0], (8 << 10, 16 << 10, 32 << 10)),
        ([1, 3, 0], (0, 0, 16 << 10)),
    ],
)
def test_a_rank_on_which_a_way_is_slower_decides_for_all(votes: list[int], found: tuple[int, int, int]) -> None:
    answers = iter([1, 1, 1, *votes])
    assert find(Memory(), ALWAYS, other_rank=lambda _: next(answers)) == found


@pytest.mark.parametrize(("fails", "steps"), [("allocate", 1), ("connect", 2), ("check", 3)])
def test_a_step_that_fails_on_any_rank_leaves_all_sums_to_nccl(
    fails: str, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    own, healthy = Memory(fails), Memory()
    assert find(own, ALWAYS) == (0, 0, 0)
    assert f"symmetric memory cannot be used: {fails} cannot be done" in caplog.messages
    answers: Iterator[int] = iter([1] * (steps - 1) + [0])
    assert find(healthy, ALWAYS, other_rank=lambda _: next(answers)) == (0, 0, 0)
    # The rank that could go on stops where the other one failed, and each says so once.
    assert healthy.steps == own.steps
    assert len(own.steps) == steps
    assert sum("NCCL adds up" in message for message in caplog.messages) == 2


def test_without_a_gpu_all_sums_are_left_to_nccl(caplog: pytest.LogCaptureFixture) -> None:
    memory = SymmetricMemory(0, 2, torch.device("cuda", 1000), HashStore(), "test")
    assert find(memory, ALWAYS) == (0, 0, 0)
    assert "symmetric memory cannot be used" in caplog.text


class Sums(Memory):
    """Memory in which the other rank's message is twice this one's. wrong: the way and the dtype of wrong sums."""

    def __init__(self, wrong: tuple[str, torch.dtype] | None = None) -> None:
        super().__init__()
        self._wrong = wrong

    def check(self) -> None:
        SymmetricMemory.check(self)

    def add_up_pushed(self, y: torch.Tensor) -> torch.Tensor:
        return self._sum(y, "pushed")

    def add_up_at_once(self, y: torch.Tensor) -> torch.Tensor:
        return self._sum(y, "at once")

    def add_up_in_steps(self, y: torch.Tensor) -> torch.Tensor:
        return self._sum(y, "in steps")

    def _sum(self, y: torch.Tensor, way: str) -> torch.Tensor:
        total = 3 * y
        return total.roll(1) if self._wrong == (way, y.dtype) else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["pushed", "at once", "in steps"])
def test_each_way_is_checked_in_both_sizes_of_numbers(way: str, dtype: torch.dtype) -> None:
    Sums().check()
    with pytest.raises(RuntimeError, match="sums over symmetric memory are wrong"):
        Sums((way, dtype)).check()


@pytest.mark.parametrize(("rows", "columns"), [(8, 65), (1, 3), (0, 64)])
def test_other_messages_are_left_to_nccl(rows: int, columns: int) -> None:
    """They are too large, no multiple of 16 bytes, or empty."""
    sums = SmallSums(Memory(), 512, 1024, 2048)
    assert sums.sum(torch.ones(rows, columns)) is None
    found = sums.sum(torch.ones(8, 64))
    assert found is not None
    assert torch.equal(found, torch.full((8, 64), 2.0))
