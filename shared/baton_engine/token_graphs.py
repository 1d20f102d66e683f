"""CUDA graphs of the model's work between attention calls, for steps too small to hide the time of kernel launches."""

import logging
import time
from collections.abc import Callable
from typing import cast

import msgspec
import numpy as np
import torch

from .attention.backend import AttentionBackend, AttentionBatch, SelectingBackend
from .context import Context, Tokens
from .cuda_graph import Recorder
from .kv_cache import KvCache
from .loading import Progress
from .models.model import Model
from .shard import Ranks
from .transfer import host_buffer

log = logging.getLogger(__name__)

SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


class _Attention(msgspec.Struct):
    """Calls of the attention backend between two graphs.

    reads: the layer whose KV is read. sinks, up: as AttentionBackend.attend has them. selection: the arguments of the
    call of `select` before the one of `attend`; None = there is no such call.
    """

    layer: int
    reads: int
    queries: torch.Tensor
    attended: torch.Tensor
    sinks: torch.Tensor | None
    up: torch.Tensor | None
    selection: tuple[torch.Tensor, torch.Tensor | None] | None


class _Pieces(msgspec.Struct):
    """One graph up to each attention call and one after the last, for one number of tokens.

    fewest: from this number of tokens on, a step that is padded to replay these graphs is faster than without graphs.
    """

    fewest: int
    inputs: torch.Tensor  # [3, T]: Tokens
    graphs: list[torch.cuda.CUDAGraph]
    calls: list[_Attention]
    token_ids: torch.Tensor  # [T], resolved
    hidden: torch.Tensor


class _Recording(Context):
    """A context that ends a graph where the model attends, notes the call and begins the next graph.

    memory: the tensors for queries and for the results of attention, by heads and head_dim. All layers and sizes share
    them, since only one call at a time needs them. selections: such tensors for the arguments of `select`, by their
    shapes without the first dimension.
    """

    def __init__(
        self,
        tokens: Tokens,
        cache: KvCache,
        backend: AttentionBackend,
        cut: Callable[[], None],
        memory: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]],
        selections: dict[torch.Size, torch.Tensor],
        received: torch.Tensor | None,
    ) -> None:
        super().__init__(tokens, cache, backend, received=received)
        self.calls: list[_Attention] = []
        self._cut, self._memory, self._selections = cut, memory, selections
        self._selection: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def queries(self, tokens: int, heads: int, head_dim: int) -> torch.Tensor:
        return self._memory[heads, head_dim][0][:tokens]

    def attend(
        self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None, *, up: torch.Tensor | None = None,
        reads: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        attended = self._memory[q.shape[1], q.shape[2]][1][: len(q)]
        read = layer if reads is None else reads
        self.calls.append(_Attention(layer, read, q, attended, sinks, up, self._selection))
        self._selection = None
        self._cut()
        return attended

    def select(self, layer: int, queries: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        self._selection = self._kept(queries), None if weights is None else self._kept(weights)

    def _kept(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor [T, ...] that nothing overwrites before the next attention call."""
        if x.shape[1:] not in self._selections:
            self._selections[x.shape[1:]] = x.new_empty(SIZES[-1], *x.shape[1:])
        return self._selections[x.shape[1:]][: len(x)].copy_(x)


class TokenGraphs:
    """Graphs by number of tokens, up to the size from which launching kernel by kernel is as fast.

    resolve: replaces the placeholders of tokens that only the device knows. query_shapes: as in ModelConfig. ranks:
    either all of them replay a graph or none does. input_rows: of the tensor with Tokens. received: the hidden states
    with which passes begin instead of the embedding, [at least the most tokens, stream size]; the caller fills it
    before each pass. None = the embedding.
    """

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        backend: AttentionBackend,
        resolve: Callable[[torch.Tensor], torch.Tensor],
        recorder: Recorder,
        block_size: int,
        most: int,
        query_shapes: tuple[tuple[int, int], ...],
        progress: Progress | None,
        ranks: Ranks,
        input_rows: int,
        received: torch.Tensor | None = None,
    ) -> None:
        self._model, self._cache, self._backend, self._resolve = model, cache, backend, resolve
        self._input_rows = input_rows
        self._recorder, self._block_size, self._device = recorder, block_size, cache.device
        self._ranks, self._received = ranks, received
        self._memory: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for shape in query_shapes:
            queries = torch.zeros(min(most, SIZES[-1]), *shape, dtype=model.dtype, device=self._device)
            self._memory[shape] = queries, backend.outputs(queries).zero_()
        self._selections: dict[torch.Size, torch.Tensor] = {}
        self._pieces: dict[int, _Pieces] = {}
        # The last measured number of tokens, and its seconds without graphs.
        self._eager: tuple[int, float] | None = None
        sizes = [size for size in SIZES if size <= most]
        for done, size in enumerate(sizes):
            if progress:
                progress("CUDA graphs of prompts", done + 1, len(sizes))
            if not self._capture_if_faster(size):
                break
        log.info("captured token graphs", extra={"event": "graphs", "sizes": list(self._pieces)})

    @property
    def sizes(self) -> list[int]:
        """The numbers of tokens that have graphs."""
        return list(self._pieces)

    def size_for(self, tokens: int) -> int | None:
        """Return the size of the graphs for a step of so many tokens; None when it is faster without graphs."""
        size = next((size for size in self._pieces if size >= tokens), None)
        return size if size and tokens >= self._pieces[size].fewest else None

    def forward(
        self, size: int, packed: torch.Tensor, written: Callable[[int], None] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """packed: [input rows, size] int64 in pinned memory. written: as Context has it.

        Returns hidden states [size, hidden] and the resolved token ids [size], valid until the next graph runs.
        """
        pieces = self._pieces[size]
        pieces.inputs.copy_(packed, non_blocking=True)
        for graph, call in zip(pieces.graphs, pieces.calls, strict=False):
            graph.replay()
            if written:
                written(call.layer)
            if call.selection is not None:
                cast(SelectingBackend, self._backend).select(call.layer, *call.selection)
            self._backend.attend(call.reads, call.queries, call.attended, call.sinks, call.up)
        pieces.graphs[-1].replay()
        return pieces.hidden, pieces.token_ids

    def _capture_if_faster(self, size: int) -> bool:
        groups = self._cache.num_groups
        packed = host_buffer((self._input_rows, size), torch.int64, self._device)
        packed[:2] = 0
        packed[2:] = -1
        inputs = packed.to(self._device, copy=True)
        blocks = np.zeros((1, groups, -(-size // (4 * self._block_size)) * 4), dtype=np.int32)
        self._backend.prepare(AttentionBatch([0, size], [size], blocks))
        tokens = Tokens(self._resolve(inputs[0]), inputs[1], inputs[2:])
        received = None if self._received is None else self._received[:size]
        eagerly = _seconds(lambda: self._model(Context(tokens, self._cache, self._backend, received=received)))
        pieces = self._pieces[size] = self._capture(inputs)
        replayed = _seconds(lambda: self.forward(size, packed))
        fewest = fewest_tokens(self._eager or (0, eagerly), (size, eagerly), replayed)
        self._eager = size, eagerly
        # Measurements differ between ranks, but all ranks must replay the same graphs. So the largest value counts.
        pieces.fewest = -self._ranks.least(-fewest)
        if pieces.fewest <= size:
            return True
        del self._pieces[size]
        return False

    def _capture(self, inputs: torch.Tensor) -> _Pieces:
        def run(cut: Callable[[], None]) -> tuple[_Recording, torch.Tensor]:
            received = None if self._received is None else self._received[: inputs.shape[1]]
            tokens = Tokens(self._resolve(inputs[0]), inputs[1], inputs[2:])
            context = _Recording(tokens, self._cache, self._backend, cut, self._memory, self._selections, received)
            return context, self._model(context)

        graphs, (context, hidden) = self._recorder.record_pieces(run)
        return _Pieces(1, inputs, graphs, context.calls, context.ids, hidden)


def fewest_tokens(smaller: tuple[int, float], size: tuple[int, float], replayed: float) -> int:
    """Return from how many tokens on the graphs of a size are faster than a step without graphs.

    smaller, size: tokens, and the seconds of a step with so many tokens without graphs. Between the two numbers of
    tokens, these seconds are taken to grow evenly. replayed: the seconds of the graphs, which compute `size` tokens
    however many are needed. The result is above these when the graphs are never faster.
    """
    (least, shortest), (most, longest) = smaller, size
    if replayed >= longest:
        return most + 1
    if replayed < shortest:
        return least + 1
    return least + 1 + int((most - least) * (replayed - shortest) / (longest - shortest))


def _seconds(run: Callable[[], object]) -> float:
    """Return the seconds that run and the work launched by it take: the best of three, after one to warm up."""
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])
