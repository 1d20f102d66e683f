"""Tracks how many layers of a step the device has completed."""

from collections import deque

import torch


class LayerMarks:
    """CUDA events between the layers of a step whose KV is handed over in groups of layers."""

    def __init__(self, num_layers: int, groups: int, ahead: int) -> None:
        """ahead: so many layers before the end of a group, `ready` counts it already."""
        ends = [num_layers * group // groups for group in range(1, groups + 1)]
        self._groups = deque((max(end - ahead, 1), end) for end in ends)
        self._unmarked = {mark for group in self._groups for mark in group}
        self._events: dict[int, torch.cuda.Event] = {}  # by how many layers have been written
        self._ready: tuple[int, torch.cuda.Event | None] = 0, None

    def written(self, layer: int) -> None:
        """Note that the kernels that write the KV of a layer have been launched. Later calls for it change nothing."""
        if layer + 1 in self._unmarked:
            self._unmarked.remove(layer + 1)
            event = self._events[layer + 1] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()

    def ready(self) -> tuple[int, torch.cuda.Event | None]:
        """Return the end of the last group that counts, and the event behind its KV; 0 and None before the first."""
        while self._groups and all(mark in self._events for mark in self._groups[0]):
            early, end = self._groups[0]
            if not self._events[early].query():  # type: ignore[no-untyped-call]
                break
            self._groups.popleft()
            self._ready = end, self._events[end]
        return self._ready

    def behind(self, layers: int) -> torch.cuda.Event:
        """Return the event behind the KV of so many layers, which must be the end of a group."""
        return self._events[layers]
