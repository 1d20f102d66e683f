"""Memory of each rank's GPU that the GPUs of all ranks read and write (torch.distributed's symmetric memory)."""

import ctypes
import itertools
import os
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Store, _register_process_group, _SymmetricMemory

from baton_kernels.rank_sums import (
    programs_of,
    pushed_rank_sum,
    pushing_programs_of,
    rank_sum,
    two_step_rank_sum,
)

# Of CUdevice_P2PAttribute.
_PEER_ATTRIBUTES = {2: "access", 3: "do atomic operations in"}
_MOST_PUSHED = 1 << 18  # for larger messages, twice as many bytes take longer than a barrier
_CHECKS = 4  # each half of the memory is used twice


class _Place:
    """The part of each rank's memory for one method of adding up: two halves, and flags.

    begin, end: offsets in bytes. half: bytes of a half. programs: the number of programs for the largest message.
    """

    def __init__(self, begin: int, half: int, programs: int, ranks: int) -> None:
        self._begin, self._half, self._programs = begin, half, programs
        self.end = begin + 2 * half + 8 * programs * ranks

    def connect(self, memories: torch.Tensor) -> None:
        """memories: [ranks] int64, the addresses of the ranks' memory."""
        self.first, self.second, self.flags = (memories + self._begin + part * self._half for part in range(3))
        self.counts = torch.zeros(self._programs, dtype=torch.int64, device=memories.device)


class SymmetricMemory:
    """Memory on each rank's GPU, in which the ranks add up messages of at most `most` bytes.

    All ranks call `allocate`, `connect` and `check` together, once and in this order. Each raises RuntimeError or
    another error of torch if it is not possible.
    """

    def __init__(self, rank: int, count: int, device: torch.device, store: Store, name: str) -> None:
        """device: that of this rank; the ranks' GPUs have consecutive numbers. store: shared by all ranks. name: the
        same on all ranks, and not used before in their processes."""
        self._rank, self._count, self.device = rank, count, device
        self._store = store
        self._name: Any = name  # torch has a type of its own for it

    def allocate(self, most: int) -> None:
        """Allocate this rank's memory."""
        own = self.device.index
        for other in range(own - self._rank, own - self._rank + self._count):
            if other != own:
                _check_peer(own, other)
        # NVLink multicast is not used here, because it takes resources of the switches that all GPUs share.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self._most, self.most_pushed = most, min(most, _MOST_PUSHED)
        # A half has room for the messages of all ranks, and for their marks.
        half = 2 * self._count * self.most_pushed
        self._pushed = _Place(0, half, pushing_programs_of(self.most_pushed), self._count)
        self._at_once = _Place(self._pushed.end, most, programs_of(most), self._count)
        self._in_steps = _Place(self._at_once.end, most, programs_of(most, self._count), self._count)
        self._memory = _SymmetricMemory.empty_strided_p2p((self._in_steps.end,), (1,), torch.uint8, self.device)
        # This ends before any rank uses its flags: ranks continue only when all of them have allocated.
        self._memory.zero_()
        torch.cuda.synchronize(self.device)

    def connect(self) -> None:
        """Map the memory of all ranks."""
        self._group = ProcessGroup(self._store, self._rank, self._count)
        self._group._set_group_name(self._name)
        # The version of torch decides which of the two it reads.
        _register_process_group(self._name, self._group)
        _SymmetricMemory.set_group_info(self._name, self._rank, self._count, self._store)
        addresses = _SymmetricMemory.rendezvous(self._memory, self._name).buffer_ptrs
        memories = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        for place in (self._pushed, self._at_once, self._in_steps):
            place.connect(memories)

    def check(self) -> None:
        """Add up numbers whose sum is known, and compare the result."""
        numbers = torch.arange(1024, device=self.device, dtype=torch.float32) % 7
        for factor, dtype in itertools.product(range(1, 1 + _CHECKS), (torch.float32, torch.bfloat16)):
            own, expected = (
                (numbers * (factor * ranks)).to(dtype)
                for ranks in (self._rank + 1, self._count * (self._count + 1) // 2)
            )
            for way in (self.add_up_pushed, self.add_up_at_once, self.add_up_in_steps):
                if not torch.equal(way(own), expected):
                    raise RuntimeError("sums over symmetric memory are wrong")

    def add_up_pushed(self, y: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' y of at most `most_pushed` bytes, as pushed_rank_sum does."""
        place = self._pushed
        return pushed_rank_sum(y, place.first, place.counts, self.most_pushed, self._rank)

    def add_up_at_once(self, y: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' y, as rank_sum does."""
        place = self._at_once
        return rank_sum(y, place.first, place.flags, place.counts, self._most, self._rank)

    def add_up_in_steps(self, y: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' y, as two_step_rank_sum does."""
        place = self._in_steps
        return two_step_rank_sum(y, place.first, place.second, place.flags, place.counts, self._rank)


def _check_peer(device: int, other: int) -> None:
    """Raise RuntimeError unless a GPU can access another's memory, also by atomic operations, which barriers need."""
    driver = ctypes.CDLL("libcuda.so.1")
    handles, found = [ctypes.c_int(), ctypes.c_int()], ctypes.c_int()
    failed = any(
        driver.cuDeviceGet(ctypes.byref(handle), number)
        for handle, number in zip(handles, (device, other), strict=True)
    )
    for attribute, what in _PEER_ATTRIBUTES.items():
        failed = failed or driver.cuDeviceGetP2PAttribute(ctypes.byref(found), attribute, *handles)
        if failed or not found.value:
            raise RuntimeError(f"GPU {device} cannot {what} the memory of GPU {other}")
