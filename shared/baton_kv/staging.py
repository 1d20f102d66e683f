"""Slots of memory that two processes of a pod share, so that no pipe has to copy KV pieces."""

import mmap
import os


class StagingArena:
    """Equal slots in an anonymous memory file. One process writes a slot; the other reads and frees it.

    The file has no name and vanishes with the last process that holds it.
    """

    def __init__(self, fd: int, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._map = mmap.mmap(fd, slot_bytes * num_slots)

    @staticmethod
    def create_file(name: str) -> int:
        """Return the descriptor of a new, empty memory file that child processes can inherit."""
        fd = os.memfd_create(name)
        os.set_inheritable(fd, True)
        return fd

    @classmethod
    def sized(cls, fd: int, slot_bytes: int, num_slots: int) -> "StagingArena":
        """Give the memory file its size. The other process then opens it with the same number and size of slots."""
        os.ftruncate(fd, slot_bytes * num_slots)
        return cls(fd, slot_bytes, num_slots)

    def slot(self, index: int, size: int | None = None) -> memoryview:
        """Return the first `size` bytes of a slot, or all of it, writable. Raises IndexError when there are fewer."""
        size = self.slot_bytes if size is None else size
        if not 0 <= index < self.num_slots or size > self.slot_bytes:
            raise IndexError(f"no {size} bytes in slot {index}: there are {self.num_slots} slots of {self.slot_bytes}")
        start = index * self.slot_bytes
        return memoryview(self._map)[start : start + size]

    @property
    def buffer(self) -> mmap.mmap:
        return self._map
