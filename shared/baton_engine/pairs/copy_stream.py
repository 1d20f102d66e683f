"""Copies that run beside the steps of the engine."""

from collections import deque
from collections.abc import Callable

import torch


class CopyStream:
    """On a GPU, copies run on a CUDA stream of their own. On a CPU, each copy is done at once."""

    def __init__(self, device: torch.device, before_steps: bool = False) -> None:
        """before_steps: whether steps that are launched after a copy must wait until the copy is done."""
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._before_steps = before_steps
        self._under_way: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    def run(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Run `work` on the stream. `then` is called when the work is done: on a GPU by `settle`, on a CPU at once."""
        if self._stream is None:
            work()
            then()
            return
        with torch.cuda.stream(self._stream):
            work()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        if self._before_steps:
            event.wait()
        self._under_way.append((event, then))

    def settle(self) -> None:
        """Call `then` for each copy that is done."""
        while self._under_way and self._under_way[0][0].query():  # type: ignore[no-untyped-call]
            self._under_way.popleft()[1]()
