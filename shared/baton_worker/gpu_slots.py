"""Memory of the GPU through which KV comes or goes, in equal slots."""

from collections.abc import Sequence

import torch


class GpuSlots:
    """A slot takes no memory before it is needed, and keeps it then for the next use."""

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device) -> None:
        self.slot_bytes = slot_bytes
        self._device = device
        self._memory: list[torch.Tensor | None] = [None] * num_slots

    def allocate(self, slots: Sequence[int]) -> None:
        """Have the memory of some slots. Raises torch.OutOfMemoryError."""
        for slot in slots:
            if self._memory[slot] is None:
                self._memory[slot] = torch.empty(self.slot_bytes, dtype=torch.uint8, device=self._device)

    def bytes(self, slot: int, size: int) -> torch.Tensor:
        """Return the first bytes of a slot. Raises ValueError when it has not so many."""
        memory = self._memory[slot] if 0 <= slot < len(self._memory) else None
        if memory is None or not 0 < size <= self.slot_bytes:
            raise ValueError(f"{size} bytes of slot {slot}: there are {len(self._memory)} of {self.slot_bytes}")
        return memory[:size]
