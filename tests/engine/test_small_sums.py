"""The choice between symmetric memory and NCCL for the sums of ranks, and which messages go where."""

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from baton_engine.ranks.small_sums import SmallSums, find_small_sums
from baton_engine.ranks.symmetric_memory import SymmetricMemory


class Memory(SymmetricMemory):
    """Memory of the CPU. The other rank always has the same message. fails: the step that raises."""

    def __init__(self, fails: str = "") -> None:
        super().__init__(0, 2, torch.device("cpu"), HashStore(), "test")
        self._fails = fails
        self.steps: list[str] = []

    def allocate(self, most: int) -> None:
        self._step("allocate")

    def connect(self) -> None:
        self._step("connect")

    def check(self) -> None:
        self._step("check")

    def add_up(self, y: torch.Tensor) -> torch.Tensor:
        return 2 * y

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if self._fails == name:
            raise RuntimeError(f"{name} cannot be done")


def find(memory: SymmetricMemory, faster_up_to: int, other_rank: Callable[[int], int] = lambda own: own) -> int:
    """Return the bytes of the largest message that is added up in the memory; 0 = none.

    faster_up_to: bytes up to which that is faster. other_rank: what the other rank says where this one says `own`.
    """
    sizes: list[int] = []

    def large(y: torch.Tensor) -> None:
        sizes.append(y.nbytes)

    def seconds(run: Callable[[], object]) -> float:
        run()
        timed = clock.setdefault("small", True)
        clock["small"] = not timed
        return 1.0 if timed else (2.0 if sizes[-1] <= faster_up_to else 0.5)

    clock: dict[str, bool] = {}
    sums = find_small_sums(memory, large, lambda own: min(own, other_rank(own)), seconds)
    if sums is None:
        return 0
    sizes = (1 << exponent for exponent in range(24, 3, -1))
    return next(size for size in sizes if sums.sum(torch.zeros(size // 2, dtype=torch.bfloat16)) is not None)


@pytest.mark.parametrize(
    ("faster_up_to", "most"), [(0, 0), (8 << 10, 8 << 10), (100_000, 64 << 10), (1 << 40, 4 << 20)]
)
def test_messages_are_small_as_long_as_symmetric_memory_is_faster(faster_up_to: int, most: int) -> None:
    assert find(Memory(), faster_up_to) == most


def test_a_rank_on_which_it_is_slower_decides_for_all() -> None:
    answers = iter([1, 1, 1, 1, 1, 0])  # three steps, then 8 KiB, 16 KiB and 32 KiB
    assert find(Memory(), 1 << 40, lambda _: next(answers)) == 16 << 10


@pytest.mark.parametrize(("fails", "steps"), [("allocate", 1), ("connect", 2), ("check", 3)])
def test_a_step_that_fails_on_any_rank_leaves_all_sums_to_nccl(
    fails: str, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    own, healthy = Memory(fails), Memory()
    assert find(own, 1 << 40) == 0
    assert f"symmetric memory cannot be used: {fails} cannot be done" in caplog.messages
    answers: Iterator[int] = iter([1] * (steps - 1) + [0])
    assert find(healthy, 1 << 40, lambda _: next(answers)) == 0
    # The rank that could go on stops where the other one failed, and each says so once.
    assert healthy.steps == own.steps
    assert len(own.steps) == steps
    assert sum("NCCL adds up" in message for message in caplog.messages) == 2


def test_without_a_gpu_all_sums_are_left_to_nccl(caplog: pytest.LogCaptureFixture) -> None:
    memory = SymmetricMemory(0, 2, torch.device("cuda", 1000), HashStore(), "test")
    assert find(memory, 1 << 40) == 0
    assert "symmetric memory cannot be used" in caplog.text


@pytest.mark.parametrize(("rows", "columns"), [(8, 65), (1, 3), (0, 64)])
def test_other_messages_are_left_to_nccl(rows: int, columns: int) -> None:
    """They are too large, no multiple of 16 bytes, or empty."""
    sums = SmallSums(Memory(), 2048)
    assert sums.sum(torch.ones(rows, columns)) is None
    found = sums.sum(torch.ones(8, 64))
    assert found is not None
    assert torch.equal(found, torch.full((8, 64), 2.0))
