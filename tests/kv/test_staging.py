"""A staging arena is the same memory in two processes."""

import os
import subprocess
import sys

import pytest

from baton_kv.staging import StagingArena

SLOT_BYTES, NUM_SLOTS = 5000, 3

CHILD = """
import sys
from baton_kv.staging import StagingArena
arena = StagingArena(int(sys.argv[1]), 5000, 3)
for slot in range(3):
    view = arena.slot(slot, 5000)
    assert bytes(view[:4]) == bytes([slot + 1] * 4), bytes(view[:4])
    view[-4:] = bytes([slot + 101] * 4)
"""


@pytest.fixture
def arena() -> StagingArena:
    fd = StagingArena.create_file("test")
    try:
        return StagingArena.sized(fd, SLOT_BYTES, NUM_SLOTS)
    finally:
        os.close(fd)


@pytest.mark.processes
def test_two_processes_see_each_others_writes() -> None:
    fd = StagingArena.create_file("test")
    arena = StagingArena.sized(fd, SLOT_BYTES, NUM_SLOTS)
    for slot in range(NUM_SLOTS):
        arena.slot(slot, 4)[:] = bytes([slot + 1] * 4)
    subprocess.run([sys.executable, "-c", CHILD, str(fd)], pass_fds=[fd], check=True, timeout=60)
    os.close(fd)
    for slot in range(NUM_SLOTS):
        view = bytes(arena.slot(slot, SLOT_BYTES))
        assert view[:4] == bytes([slot + 1] * 4)
        assert view[-4:] == bytes([slot + 101] * 4)
        assert set(view[4:-4]) == {0}


def test_slots_do_not_overlap(arena: StagingArena) -> None:
    for slot in range(NUM_SLOTS):
        arena.slot(slot, SLOT_BYTES)[:] = bytes([slot + 1]) * SLOT_BYTES
    for slot in range(NUM_SLOTS):
        assert set(bytes(arena.slot(slot, SLOT_BYTES))) == {slot + 1}
    assert len(arena.buffer) == SLOT_BYTES * NUM_SLOTS


def test_the_memory_outlives_its_descriptor(arena: StagingArena) -> None:
    arena.slot(2, 3)[:] = b"abc"
    assert bytes(arena.slot(2, 3)) == b"abc"


@pytest.mark.parametrize(("index", "size"), [(0, SLOT_BYTES + 1), (NUM_SLOTS, 1), (-1, 1)])
def test_a_slot_that_is_none_is_an_error(arena: StagingArena, index: int, size: int) -> None:
    """Written all the same it would fall into a neighbour's KV."""
    with pytest.raises(IndexError):
        arena.slot(index, size)
