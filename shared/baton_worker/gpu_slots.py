"""Slots of GPU memory for KV that comes from another GPU or goes to one."""

from collections.abc import Sequence

import torch


class GpuSlots:
    """Equal slots. A slot gets its memory at its first use, and keeps it for later uses."""

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device) -> None:
        self.slot_bytes = slot_bytes
        self._device = device
        self._memory: list[torch.Tensor | None] = [None] * num_slots

    def allocate(self, slots: Sequence[int]) -> None:
        """Allocate the memory of slots that have none yet. Raises torch.OutOfMemoryError."""
        for slot in slots:
            if self._memory[slot] is None:
                self._memory[slot] = torch.empty(self.slot_bytes, dtype=torch.uint8, device=self._device)

    def bytes(self, slot: int, size: int) -> torch.Tensor:
        """Return the first `size` bytes of a slot. Raises ValueError when it has fewer, or no memory."""
        memory = self._memory[slot] if 0 <= slot < len(self._memory) else None
        if memory is None or not 0 < size <= self.slot_bytes:
            raise ValueError(f"no {size} bytes in slot {slot}: {len(self._memory)} slots have {self.slot_bytes}")
        return memory[:size]
