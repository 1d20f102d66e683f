"""A stage that is connected to its neighbours over torch.distributed: gloo between CPUs, NCCL between GPUs."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from baton_engine.stage import Stage

from .errors import CollectiveError

# In the group of two neighbours.
_SENDER, _RECEIVER = 0, 1


class LinkedStage(Stage):
    """Each rank sends to the rank of the same number in the next stage. Each pair of neighbouring stages has its own
    connection, so that a stage waits for its neighbours only."""

    def __init__(
        self,
        stage: Stage,
        connect: Callable[[str, int], Any],
        join: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> None:
        """connect: returns the process group of two processes, by its name and this process's number in it. join: as
        Stage.join."""
        super().__init__(stage.number, stage.count)
        self._join = join
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()
        # NCCL connects at its first operation, which takes seconds.
        first = torch.zeros(1, device=device)
        if not self.is_first:
            self._before = connect(f"{self.number - 1}-{self.number}", _RECEIVER)
            self.receive(first)
        if not self.is_last:
            self._after = connect(f"{self.number}-{self.number + 1}", _SENDER)
            self.send(first)

    def receive(self, hidden: torch.Tensor) -> None:
        with _explained():
            self._before.recv([hidden], _SENDER, 0).wait()

    def send(self, hidden: torch.Tensor) -> None:
        with _explained():
            # The next stage may still compute an earlier step. Meanwhile this stage continues with its next step.
            self._under_way.append((self._after.send([hidden], _RECEIVER, 0), hidden))
            if len(self._under_way) > self.count:
                work, _ = self._under_way.popleft()
                work.wait()

    def join(self, values: torch.Tensor) -> torch.Tensor:
        return self._join(values)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"hidden states did not come through between two stages: {error}") from error
