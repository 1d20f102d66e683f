"""Capture of device work in CUDA graphs that share one memory pool."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Recorder:
    """Captures what functions launch. Graphs of one recorder share memory, so they must run in turn."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Return the graph and run's result, whose tensors the graph fills. run has run before: a capture allows no
        compilation and no set-up of libraries."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        # torch.cuda.graph does this too, but empties the allocator's cache each time: too slow for hundreds of graphs.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                result = run()
            finally:
                graph.capture_end()
        return graph, result
