"""The collective operations of ranks over torch.distributed: gloo between CPUs, between GPUs NCCL and, for small sums,
symmetric memory."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    FileStore,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
)

from baton_engine.cuda_graph import graph_seconds
from baton_engine.stage import Stage
from baton_engine.turns import give_way, in_turn

from .errors import CollectiveError
from .linked_stage import LinkedStage
from .seat import Seat

if TYPE_CHECKING:
    from .small_sums import SmallSums

# Loading a model takes minutes, and ranks may wait for the slowest one. Hanging ranks are detected elsewhere.
_TIMEOUT = timedelta(hours=1)
_CONNECT = timedelta(seconds=60)
# At start one rank may compile kernels while the others wait. After this time torch ends the process.
_GPU_TIMEOUT = timedelta(minutes=5)


class Group:
    """Implements Ranks for the ranks of a stage. On GPUs tensors go through NCCL. Decisions of the host go through
    gloo, which notices at once when another process ends.

    stage: the stage of these ranks, connected to its neighbours.
    """

    def __init__(
        self,
        seat: Seat,
        folder: Path,
        device: torch.device,
        work: Callable[[], None],
        symmetric_memory: bool = False,
    ) -> None:
        """Connect to the other ranks. folder: one that all ranks see, used once. work: called at each operation.
        symmetric_memory: as in EngineConfig.

        Raises CollectiveError if the ranks cannot be connected.
        """
        self.rank, self.count = seat.rank, seat.ranks
        self._work = work
        # All ranks are on one machine, whose name may have no address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = FileStore(str(folder / "store"), seat.count)
        store.set_timeout(_CONNECT)
        # On a GPU, operations run in the current stream, since waiting for another stream would take longer.
        self._sum, self._join = AllreduceOptions(), AllgatherOptions()
        self._sum.asyncOp = self._join.asyncOp = False
        # While passes take turns, the sums of one are computed in a stream of their own beside the other's work.
        self._sum_aside, self._takes_turns = AllreduceOptions(), False
        self._least = AllreduceOptions()
        self._least.reduceOp = ReduceOp.MIN  # type: ignore[assignment]
        self._largest = AllreduceOptions()
        self._largest.reduceOp = ReduceOp.MAX  # type: ignore[assignment]
        self._host: Any = _connect_hosts(PrefixStore("host", store), seat.number, seat.count)
        self._small: SmallSums | None = None
        stage = seat.stage
        ranks = PrefixStore(f"stage {stage.number}", store)
        if device.type == "cuda":
            self._device = self._connect_gpus(ranks, device)
        elif stage.count > 1:
            self._device = _connect_hosts(ranks, self.rank, self.count)
        else:
            self._device = self._host
        if device.type == "cuda" and symmetric_memory and self.count > 1:
            # These have a kernel, and a CPU has no Triton.
            from .small_sums import find_small_sums
            from .symmetric_memory import SymmetricMemory

            name = f"{folder.name}-{stage.number}"
            memory = SymmetricMemory(self.rank, self.count, device, PrefixStore("memory", ranks), name)
            self._small = find_small_sums(memory, self.sum_large, self.least, graph_seconds)
        self.stage = stage if stage.count == 1 else self._link(stage, store, device)

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        small = self._small.sum(y) if self._small is not None else None
        if small is None:
            return self.sum_large(y)
        self._work()
        return small

    def sum_large(self, y: torch.Tensor) -> torch.Tensor:
        """Do the same as `sum`, but never over symmetric memory, whatever the size of y."""
        options = self._sum_aside if self._takes_turns else self._sum
        self._run(lambda: self._device.allreduce([y], options))
        return y

    def in_turn(self, passes: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        self._takes_turns = True
        try:
            return in_turn(passes)
        finally:
            self._takes_turns = False

    def join(self, y: torch.Tensor) -> torch.Tensor:
        rows, own = len(y), y.contiguous()
        parts = y.new_empty(self.count * rows, y.shape[1])
        self._run(lambda: self._device._allgather_base(parts, own, self._join))
        return parts.view(self.count, rows, -1).transpose(0, 1).flatten(1)

    def least(self, value: int) -> int:
        found = torch.tensor([value])
        self._run(lambda: self._host.allreduce([found], self._least))
        return int(found)

    def _link(self, stage: Stage, store: FileStore, device: torch.device) -> Stage:
        def connect(neighbours: str, number: int) -> Any:
            name = PrefixStore(f"rank {self.rank} of stages {neighbours}", store)
            return _connect_hosts(name, number, 2) if device.type == "cpu" else _nccl(name, number, 2)

        def join(values: torch.Tensor) -> torch.Tensor:
            self._run(lambda: self._host.allreduce([values], self._largest))
            return values

        return LinkedStage(stage, connect, join, device)

    def _run(self, begin: Callable[[], Any]) -> None:
        """Begin an operation and let the current stream, or on a CPU this thread, wait for its end."""
        self._work()
        try:
            operation = begin()
            # NCCL returns nothing for an operation in the current stream, in which later work comes after it anyway.
            if operation is not None:
                give_way()
                operation.wait()
        except RuntimeError as error:
            raise CollectiveError(f"an operation of all ranks failed: {error}") from error

    def _connect_gpus(self, store: PrefixStore, device: torch.device) -> Any:
        self._device = _nccl(store, self.rank, self.count)
        try:
            # NCCL connects at its first operation, which must not be part of a CUDA graph.
            self.sum_large(torch.ones(1, device=device))
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise CollectiveError(
                f"no connection to the other GPUs over NCCL: {error}. NCCL_DEBUG=INFO tells more; in a container, "
                "/dev/shm may be too small"
            ) from error
        return self._device


def _connect_hosts(store: PrefixStore, number: int, count: int) -> Any:
    """Return a group over gloo. Raises CollectiveError if its processes cannot be connected."""
    try:
        return ProcessGroupGloo(store, number, count, _TIMEOUT)
    except RuntimeError as error:
        raise CollectiveError(f"no connection to the other ranks over gloo: {error}") from error


def _nccl(store: PrefixStore, number: int, count: int) -> Any:
    """Return a group over NCCL, which connects at its first operation."""
    from torch._C._distributed_c10d import ProcessGroupNCCL

    # Otherwise a thread of torch asks the store each second whether another process has failed. As the store's folder
    # has been removed by then, the thread waits a minute for it, and destroying the group waits for the thread.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    options = ProcessGroupNCCL.Options()
    options._timeout = _GPU_TIMEOUT
    # Sums beside other work get multiprocessors first, as both passes wait for them.
    options.is_high_priority_stream = True
    return ProcessGroupNCCL(store, number, count, options)
