"""Capture of device work in CUDA graphs that share one memory pool."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Recorder:
    """Captures the work that functions launch. Graphs of one recorder share memory, so they must run one at a time."""

    def __init__(self) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Return the graph and run's result, whose tensors the graph fills. run must have been called before, since a
        capture allows no compilation and no initialization of libraries."""
        [graph], result = self.record_pieces(lambda cut: run())
        return graph, result

    def record_pieces(self, run: Callable[[Callable[[], None]], Result]) -> tuple[list[torch.cuda.CUDAGraph], Result]:
        """Do the same as `record`, but pass run a function that ends one graph and begins the next. Returns all graphs
        and run's result."""
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool)

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        self._stream.wait_stream(torch.cuda.current_stream())
        # torch.cuda.graph does this too, but empties the allocator's cache each time: too slow for hundreds of graphs.
        with torch.cuda.stream(self._stream):
            begin()
            try:
                result = run(cut)
            finally:
                graphs[-1].capture_end()
        self._graphs += graphs
        return graphs, result

    def release(self) -> None:
        """Free all graphs. They cannot be replayed any more."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


def graph_seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Return the seconds of the work that run launches, in a CUDA graph that repeats it: the least of three replays."""
    run()
    graph, _ = Recorder().record(lambda: [run() for _ in range(repeats)])
    times: list[float] = []
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / repeats)
    return min(times[1:])
