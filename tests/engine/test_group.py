"""Operations of ranks as NCCL begins them. A group over gloo stands for it."""

from pathlib import Path
from typing import Any

import torch

from baton_engine.ranks.group import Group
from baton_engine.ranks.seat import Seat


class InStream:
    """Works in the current stream, as NCCL does if it is asked to, and then returns nothing to wait for."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        self._group.allreduce(tensors, options).wait()

    def _allgather_base(self, out: torch.Tensor, y: torch.Tensor, options: Any) -> None:
        self._group._allgather_base(out, y, options).wait()


def test_operations_in_the_current_stream_are_not_waited_for(tmp_path: Path) -> None:
    group = Group(Seat(0, 1, 1), tmp_path, torch.device("cpu"), lambda: None)
    group._device = InStream(group._host)
    assert group.sum(torch.tensor([[1.0, 2.0]])).tolist() == [[1.0, 2.0]]
    assert group.join(torch.tensor([[1.0], [2.0]])).tolist() == [[1.0], [2.0]]
