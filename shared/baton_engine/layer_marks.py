"""How far the device has got with the layers of a step."""

from collections import deque

import torch


class LayerMarks:
    """Events between the layers of a step, after each of some groups of layers but the last."""

    def __init__(self, num_layers: int, groups: int) -> None:
        self._ends = {num_layers * group // groups for group in range(1, groups)}
        self._events: deque[tuple[int, torch.cuda.Event]] = deque()
        self._done = 0

    def written(self, layer: int) -> None:
        """The KV of a layer has been launched."""
        if layer + 1 in self._ends:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._events.append((layer + 1, event))

    def done(self) -> int:
        """Return how many layers are complete, as far as there are marks."""
        while self._events and self._events[0][1].query():  # type: ignore[no-untyped-call]
            self._done = self._events.popleft()[0]
        return self._done
