"""Memory of each rank's GPU that the GPUs of all ranks read and write (torch.distributed's symmetric memory)."""

import ctypes
import os
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Store, _register_process_group, _SymmetricMemory

from baton_kernels.rank_sums import programs_of, rank_sum

# Of CUdevice_P2PAttribute.
_PEER_ATTRIBUTES = {2: "access", 3: "do atomic operations in"}
_CHECKS = 4  # each half of the memory is used twice


class SymmetricMemory:
    """Memory on each rank's GPU, in which the ranks add up messages of at most `most` bytes.

    All ranks call `allocate`, `connect` and `check` together, once and in this order. Each raises RuntimeError, or
    whatever torch raises, where it cannot be done.
    """

    def __init__(self, rank: int, count: int, device: torch.device, store: Store, name: str) -> None:
        """device: that of this rank; the GPUs of ranks follow each other. store: all ranks share it. name: the same on
        all ranks, and new in each of their processes."""
        self._rank, self._count, self.device = rank, count, device
        self._store = store
        self._name: Any = name  # torch has a type of its own for it

    def allocate(self, most: int) -> None:
        """Allocate this rank's memory."""
        own = self.device.index
        for other in range(own - self._rank, own - self._rank + self._count):
            if other != own:
                _check_peer(own, other)
        # No sum here uses NVLink multicast, which takes resources of the switches that all GPUs share.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self._half, programs = most, programs_of(most)
        size = 2 * most + 8 * programs * self._count
        self._memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, self.device)
        # No rank uses its flags before all of them have been told to go on, and this has ended by then.
        self._memory.zero_()
        self._sums = torch.zeros(programs, dtype=torch.int64, device=self.device)
        torch.cuda.synchronize(self.device)

    def connect(self) -> None:
        """Map the memory of all ranks."""
        self._group = ProcessGroup(self._store, self._rank, self._count)
        self._group._set_group_name(self._name)
        # Which of the two torch reads depends on its version.
        _register_process_group(self._name, self._group)
        _SymmetricMemory.set_group_info(self._name, self._rank, self._count, self._store)
        addresses = _SymmetricMemory.rendezvous(self._memory, self._name).buffer_ptrs
        self._memories = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        self._flags = self._memories + 2 * self._half

    def check(self) -> None:
        """Add up numbers whose sum is known."""
        numbers = torch.arange(1024, device=self.device, dtype=torch.float32)
        for factor in range(1, 1 + _CHECKS):
            found = self.add_up(numbers * (factor * (self._rank + 1)))
            if not torch.equal(found, numbers * (factor * self._count * (self._count + 1) // 2)):
                raise RuntimeError("sums over symmetric memory are wrong")

    def add_up(self, y: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' y, as rank_sum does."""
        return rank_sum(y, self._memories, self._flags, self._sums, self._half, self._rank)


def _check_peer(device: int, other: int) -> None:
    """Raise RuntimeError if a GPU cannot do in the memory of another one what ranks do to wait for each other."""
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
