"""Whole forward passes over short prompts as CUDA graphs, by number of tokens.

The pieces in token_graphs.py leave the launch of each layer's attention to the host, which takes longer than the device
needs for a short prompt. Here attention is part of the graph and reads the sequences' facts from fixed memory.
"""

import math
from collections.abc import Callable, Iterable

import msgspec
import torch

from baton_kernels.prefill_attention import prefill_tiles

from .attention.backend import AttentionBatch
from .attention.triton_paged import TritonPaged
from .context import Context, Tokens
from .cuda_graph import Recorder
from .kv_cache import KvCache
from .models.model import Model
from .transfer import host_buffer

# A step with more sequences, or with a longer one, goes through the pieces.
_MOST_SEQUENCES = 8
_LONGEST = 4096


class _Facts(msgspec.Struct):
    """What attention reads of the sequences, as views of one int32 tensor, so that one copy fills all of them.

    S = _MOST_SEQUENCES. Sequence S has no tokens; the tiles that a step does not need belong to it. tables: [S + 1,
    groups of layers, most blocks]. lengths: [S + 1]. starts: [S + 2]. tile_sequences, tile_rows: [tiles].
    """

    packed: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    tile_sequences: torch.Tensor
    tile_rows: torch.Tensor

    @classmethod
    def of(cls, packed: torch.Tensor, groups: int, blocks: int, tiles: int) -> "_Facts":
        views, start = [], 0
        for shape in _shapes(groups, blocks, tiles):
            view = packed[start : start + math.prod(shape)]
            views.append(view.view(shape))
            start += _aligned(len(view))
        return cls(packed, *views)


class _Graph(msgspec.Struct):
    inputs: torch.Tensor  # [2 + groups, size]: Tokens
    facts: _Facts
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor
    token_ids: torch.Tensor  # [size], resolved


class PromptGraphs:
    """The graphs by number of tokens, for steps of chunks with several tokens each.

    resolve: replaces the placeholders of tokens that only the device knows. received: as in TokenGraphs.
    """

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        backend: TritonPaged,
        resolve: Callable[[torch.Tensor], torch.Tensor],
        recorder: Recorder,
        block_size: int,
        sizes: Iterable[int],
        received: torch.Tensor | None = None,
    ) -> None:
        self._model, self._cache, self._backend, self._resolve = model, cache, backend, resolve
        self._received = received
        self._groups, self._block_size = len(cache.layout.groups), block_size
        self._blocks = _LONGEST // block_size
        self._graphs = {size: self._capture(recorder, size) for size in sizes}

    def fits(self, size: int, batch: AttentionBatch) -> bool:
        """Whether there is a graph of this size for these sequences."""
        sequences = len(batch.lengths)
        return (
            size in self._graphs
            and sequences <= _MOST_SEQUENCES
            and max(batch.lengths) <= self._blocks * self._block_size
            # Sequences with one token come first. The kernel for decodes serves them better.
            and batch.starts[1] > 1
        )

    def forward(self, size: int, packed: torch.Tensor, batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a batch that `fits`. packed: [2 + groups of layers, size] int64 in pinned memory.

        Returns hidden states [size, hidden] and the resolved token ids [size], valid until the next graph runs.
        """
        graph = self._graphs[size]
        graph.inputs.copy_(packed, non_blocking=True)
        graph.facts.packed.copy_(self._pack(size, batch), non_blocking=True)
        graph.graph.replay()
        return graph.hidden, graph.token_ids

    def _pack(self, size: int, batch: AttentionBatch) -> torch.Tensor:
        """Return the facts of a batch in pinned memory."""
        tiles = self._tiles(size)
        packed = host_buffer((_elements(self._groups, self._blocks, tiles),), torch.int32, self._cache.device)
        facts = _Facts.of(packed, self._groups, self._blocks, tiles)
        sequences, width = len(batch.lengths), min(batch.tables.shape[2], self._blocks)
        facts.tables.numpy()[:sequences, :, :width] = batch.tables[:, :, :width]
        _fill(facts.lengths, batch.lengths, 0)
        _fill(facts.starts, batch.starts, batch.starts[-1])
        tile_sequences, tile_rows = prefill_tiles(batch.starts, self._backend.queries_per_tile)
        _fill(facts.tile_sequences, tile_sequences, _MOST_SEQUENCES)
        _fill(facts.tile_rows, tile_rows, batch.starts[-1])
        return packed

    def _tiles(self, size: int) -> int:
        """Return the most tiles of queries that a step of this size can have."""
        return size // self._backend.queries_per_tile + _MOST_SEQUENCES

    def _capture(self, recorder: Recorder, size: int) -> _Graph:
        device, tiles = self._cache.device, self._tiles(size)
        inputs = torch.zeros(2 + self._groups, size, dtype=torch.int64, device=device)
        inputs[2:] = -1
        packed = torch.zeros(_elements(self._groups, self._blocks, tiles), dtype=torch.int32, device=device)
        facts = _Facts.of(packed, self._groups, self._blocks, tiles)
        facts.tile_sequences.fill_(_MOST_SEQUENCES)

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            received = None if self._received is None else self._received[:size].clone()
            tokens = Tokens(self._resolve(inputs[0]), inputs[1], inputs[2:])
            self._backend.use_chunks(facts.tables, facts.lengths, facts.starts, (facts.tile_sequences, facts.tile_rows))
            return self._model(Context(tokens, self._cache, self._backend, received=received)), tokens.ids

        # A capture allows no compilation.
        run()
        torch.cuda.synchronize()
        graph, (hidden, token_ids) = recorder.record(run)
        return _Graph(inputs, facts, graph, hidden, token_ids)


def _shapes(groups: int, blocks: int, tiles: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of _Facts' views."""
    sequences = _MOST_SEQUENCES + 1
    return (sequences, groups, blocks), (sequences,), (sequences + 1,), (tiles,), (tiles,)


def _elements(groups: int, blocks: int, tiles: int) -> int:
    """Return the number of elements of _Facts' tensor."""
    return sum(_aligned(math.prod(shape)) for shape in _shapes(groups, blocks, tiles))


def _aligned(elements: int) -> int:
    """Return the elements up to the next multiple of 16 bytes.

    Triton compiles a kernel again for pointers of another alignment.
    """
    return -(-elements // 4) * 4


def _fill(row: torch.Tensor, values: list[int], rest: int) -> None:
    array = row.numpy()
    array[: len(values)] = values
    array[len(values) :] = rest
