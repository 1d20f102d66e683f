"""Memory of the GPU through which KV comes or goes, in equal slots."""

import math
from collections.abc import Sequence

import torch


class GpuSlots:
    """Takes no memory before it is needed."""

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device) -> None:
        self.slot_bytes = slot_bytes
        self._shape = (num_slots, slot_bytes)
        self._device = device
        self._memory: torch.Tensor | None = None
        self._free = list(range(num_slots))

    def allocate(self) -> None:
        """Have the memory; raises torch.OutOfMemoryError."""
        if self._memory is None:
            self._memory = torch.empty(self._shape, dtype=torch.uint8, device=self._device)

    def take(self) -> int | None:
        return self._free.pop(0) if self._free else None

    def free(self, slot: int) -> None:
        self._free.append(slot)

    def bytes(self, slot: int, size: int) -> torch.Tensor:
        """Return the first bytes of a slot. Raises ValueError when it has not so many."""
        if self._memory is None or not 0 <= slot < self._shape[0] or not 0 < size <= self._shape[1]:
            raise ValueError(f"{size} bytes of slot {slot}: there are {self._shape[0]} of {self._shape[1]}")
        return self._memory[slot, :size]

    def view(self, slot: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.bytes(slot, math.prod(shape) * dtype.itemsize).view(dtype).view(*shape)
