"""Copies beside the steps of the engine."""

from collections import deque
from collections.abc import Callable

import torch


class CopyStream:
    """On a GPU a stream of its own. On a CPU all is done at once."""

    def __init__(self, device: torch.device, before_steps: bool = False) -> None:
        """before_steps: whether steps that are launched from then on are to find the copies done."""
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._before_steps = before_steps
        self._under_way: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    def run(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Queue what `work` launches; `then` is called when that is done, at once or by `settle`."""
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
        """Do what was to follow the copies that are done."""
        while self._under_way and self._under_way[0][0].query():  # type: ignore[no-untyped-call]
            self._under_way.popleft()[1]()
