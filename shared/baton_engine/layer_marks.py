"""Tracks how many layers of a step the device has completed."""

from collections import deque

import torch


class LayerMarks:
    """CUDA events between the layers of a step: one after each of `groups` groups of layers, except the last."""

    def __init__(self, num_layers: int, groups: int) -> None:
        self._ends = {num_layers * group // groups for group in range(1, groups)}
        self._events: deque[tuple[int, torch.cuda.Event]] = deque()
        self._done = 0

    def written(self, layer: int) -> None:
        """Note that the kernels that write the KV of a layer have been launched. Later calls for it change nothing."""
        if layer + 1 in self._ends:
            self._ends.remove(layer + 1)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._events.append((layer + 1, event))

    def done(self) -> int:
        """Return the number of layers before the last event that the device has reached."""
        while self._events and self._events[0][1].query():  # type: ignore[no-untyped-call]
            self._done = self._events.popleft()[0]
        return self._done
