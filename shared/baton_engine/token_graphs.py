"""The model's work between its attention calls as CUDA graphs, for steps too small to hide their kernels' launches."""

import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import torch

from .attention.backend import AttentionBackend, AttentionBatch
from .cuda_graph import Recorder
from .loading import Progress
from .models.decoder import Decoder, Tokens
from .transfer import host_buffer

log = logging.getLogger(__name__)

_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


class _Pieces(msgspec.Struct):
    """One graph up to each layer's attention and one after the last, for one number of tokens."""

    inputs: torch.Tensor  # [3, T]: Tokens
    graphs: list[torch.cuda.CUDAGraph]
    token_ids: torch.Tensor  # [T], resolved
    hidden: torch.Tensor


class TokenGraphs:
    """Graphs by number of tokens, as far up as they are faster than launching kernel by kernel.

    resolve: puts token ids in place of those that only the device knows.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        resolve: Callable[[torch.Tensor], torch.Tensor],
        recorder: Recorder,
        block_size: int,
        most: int,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self._decoder, self._backend, self._resolve = decoder, backend, resolve
        self._recorder, self._block_size, self._device = recorder, block_size, device
        # Between graphs and attention, for all layers and sizes.
        shape = (min(most, _SIZES[-1]), *decoder.query_shape)
        self._queries, self._attended = torch.zeros(2, *shape, dtype=decoder.dtype, device=device)
        self._pieces: dict[int, _Pieces] = {}
        sizes = [size for size in _SIZES if size <= most]
        for done, size in enumerate(sizes):
            if progress:
                progress("CUDA graphs of prompts", done + 1, len(sizes))
            if not self._capture_if_faster(size):
                break
        log.info("captured token graphs", extra={"event": "graphs", "sizes": list(self._pieces)})

    def size_for(self, tokens: int) -> int | None:
        """Return the smallest size with graphs that holds so many tokens."""
        return next((size for size in self._pieces if size >= tokens), None)

    def forward(
        self, size: int, packed: torch.Tensor, written: Callable[[int], None] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """packed: [3, size] int64 in pinned memory. written: as Decoder.forward has it. Returns hidden states [size,
        hidden] and the resolved token ids [size], valid until the next graph runs."""
        pieces = self._pieces[size]
        pieces.inputs.copy_(packed, non_blocking=True)
        queries, attended = self._queries[:size], self._attended[:size]
        for layer in range(self._decoder.num_layers):
            pieces.graphs[layer].replay()
            if written:
                written(layer)
            self._backend.attend(layer, queries, attended)
        pieces.graphs[-1].replay()
        return pieces.hidden, pieces.token_ids

    def _capture_if_faster(self, size: int) -> bool:
        packed = host_buffer((3, size), torch.int64, self._device)
        packed[:2] = 0
        packed[2] = -1
        inputs = packed.to(self._device, copy=True)
        blocks = np.zeros((1, -(-size // self._block_size)), dtype=np.int32)
        self._backend.prepare(AttentionBatch([0, size], [size], blocks))
        tokens = Tokens(self._resolve(inputs[0]), inputs[1], inputs[2])
        eagerly = _seconds(lambda: self._decoder.forward(tokens, self._backend))
        self._pieces[size] = self._capture(inputs)
        if _seconds(lambda: self.forward(size, packed)) < eagerly:
            return True
        del self._pieces[size]
        return False

    def _capture(self, inputs: torch.Tensor) -> _Pieces:
        decoder = self._decoder
        tokens = Tokens(inputs[0], inputs[1], inputs[2])
        size = inputs.shape[1]
        queries, attended = self._queries[:size], self._attended[:size]

        def first() -> tuple[torch.Tensor, torch.Tensor]:
            tokens.ids = self._resolve(inputs[0])
            residual = decoder.embed(tokens)
            decoder.queries(0, None, residual, tokens, queries)
            return tokens.ids, residual

        graph, (token_ids, residual) = self._recorder.record(first)
        graphs = [graph]
        for layer in range(1, decoder.num_layers):
            piece = partial(decoder.queries, layer, attended, residual, tokens, queries)
            graphs.append(self._recorder.record(piece)[0])
        graph, hidden = self._recorder.record(lambda: decoder.hidden(attended, residual))
        return _Pieces(inputs, [*graphs, graph], token_ids, hidden)


def _seconds(run: Callable[[], object]) -> float:
    """Return how long the host waits for run and what it has launched; the best of a few times, warmed up."""
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])
