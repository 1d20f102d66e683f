"""Slots of GPU memory for KV that comes from another GPU or goes to one."""

from collections.abc import Sequence

import torch


class GpuSlots:
    """Equal slots. A slot gets its memory at its first use, and keeps it for later uses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[int, torch.Tensor] = {}

    def allocate(self, slots: Sequence[int], slot_bytes: int) -> None:
        """Allocate the memory of slots that have none yet. Raises torch.OutOfMemoryError."""
        for slot in slots:
            if slot not in self._memory:
                self._memory[slot] = torch.empty(slot_bytes, dtype=torch.uint8, device=self._device)

    def __getitem__(self, slot: int) -> torch.Tensor:
        """Return the bytes of a slot that has memory."""
        return self._memory[slot]
