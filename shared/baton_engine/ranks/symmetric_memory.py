"""Memory of each rank's GPU that the GPUs of all ranks read and write (torch.distributed's symmetric memory)."""

import ctypes
import os
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Store, _register_process_group, _SymmetricMemory

# Of CUdevice_P2PAttribute.
_PEER_ATTRIBUTES = {2: "access", 3: "do atomic operations in"}


class SymmetricMemory:
    """A buffer on each rank's GPU, and the sum of what the ranks have in their buffers.

    All ranks call `allocate`, `connect` and `check` together, once and in this order. Each raises RuntimeError, or
    whatever torch raises, where it cannot be done.
    """

    buffer: torch.Tensor  # [bytes] uint8 on this rank's GPU

    def __init__(self, rank: int, count: int, device: torch.device, store: Store, name: str) -> None:
        """device: that of this rank; the GPUs of ranks follow each other. store: all ranks share it. name: the same on
        all ranks, and new in each of their processes."""
        self._rank, self._count, self._device = rank, count, device
        self._store = store
        self._name: Any = name  # torch has a type of its own for it

    def allocate(self, size: int) -> None:
        """Allocate this rank's buffer. size: bytes."""
        own = self._device.index
        for other in range(own - self._rank, own - self._rank + self._count):
            if other != own:
                _check_peer(own, other)
        # No sum here uses NVLink multicast, which takes resources of the switches that all GPUs share.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self.buffer = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, self._device)

    def connect(self) -> None:
        """Map the buffers of all ranks."""
        self._group = ProcessGroup(self._store, self._rank, self._count)
        self._group._set_group_name(self._name)
        # Which of the two torch reads depends on its version.
        _register_process_group(self._name, self._group)
        _SymmetricMemory.set_group_info(self._name, self._rank, self._count, self._store)
        _SymmetricMemory.rendezvous(self.buffer, self._name)

    def check(self) -> None:
        """Add up numbers whose sum is known."""
        numbers = torch.arange(1024, device=self._device, dtype=torch.float32)
        mine = self.buffer[: numbers.nbytes].view(torch.float32).copy_(numbers * (self._rank + 1))
        found = torch.empty_like(mine)
        self.add_up(mine, found)
        if not torch.equal(found, numbers * (self._count * (self._count + 1) // 2)):
            raise RuntimeError("sums over symmetric memory are wrong")

    def add_up(self, y: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sum of the ranks' y into out, which has the same shape and is not in the buffer.

        y: the first bytes of the buffer, as bfloat16 or float32 and a multiple of 4 bytes. Each rank reads the y of all
        ranks and adds them up in the order of the ranks, so that the sums are equal to the bit. Then it waits until all
        ranks have read, so that the buffer may be written again. The variant of this operation that copies an ordinary
        tensor into the buffer by itself is not used: it signals the other ranks before all of its threads have copied.
        """
        torch.ops.symm_mem.one_shot_all_reduce_out(y, "sum", self._name, out)


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
