"""Whole forward passes of steps with prompts as CUDA graphs, by number of tokens.

With the pieces in token_graphs.py the host launches each layer's attention, which takes longer than the device needs
for a step of some hundreds of tokens. Here attention is part of the graph, and reads its data from fixed memory.
"""

from functools import partial

import msgspec
import torch

from baton_kernels.prefill_attention import prefill_tiles

from .attention.backend import GRAPH_CHUNKS, GRAPH_KEYS
from .attention.triton_paged import TritonPaged
from .context import Context, Tokens
from .cuda_graph import Recorder
from .kv_cache import KvCache
from .loading import Progress
from .models.model import Model
from .row_table import DeviceRowTable
from .step_plan import StepPlan
from .transfer import host_buffer

# The time of a step depends on the size of its graph, so sizes are close together. Graphs of more tokens would take
# more memory than is set aside for them.
SIZES = (16, 32, 48, 64, 96, 128, *range(192, 2048, 64), *range(2048, 4097, 128))


class _Facts(msgspec.Struct):
    """The sequences' data for attention, as views of one int32 tensor, so that one copy fills all of them.

    C = GRAPH_CHUNKS. Chunk C has no tokens, and unused tiles belong to it. decode_rows, decode_lengths: [most decodes],
    rows of the table, and tokens; 0 tokens = no decode. chunk_rows, lengths: [C + 1]. starts: [C + 2]. tile_chunks,
    tile_starts: [tiles].
    """

    packed: torch.Tensor
    decode_rows: torch.Tensor
    decode_lengths: torch.Tensor
    chunk_rows: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    tile_chunks: torch.Tensor
    tile_starts: torch.Tensor

    @classmethod
    def of(cls, packed: torch.Tensor, decodes: int, tiles: int) -> "_Facts":
        sizes = _sizes(decodes, tiles)
        views = packed.split_with_sizes([_aligned(size) for size in sizes])
        return cls(packed, *(view[:size] for view, size in zip(views, sizes, strict=True)))


class _Graph(msgspec.Struct):
    inputs: torch.Tensor  # [input rows, size]: Tokens
    decodes: int  # at most
    facts: _Facts
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor
    token_ids: torch.Tensor  # [size], resolved


class PromptGraphs:
    """The graphs by number of tokens, for chunks of several tokens each, alone or after decodes.

    table: holds the block tables of all sequences, and resolves tokens that only the device knows. most: tokens of the
    largest graph of chunks alone. most_mixed: of chunks after decodes. hidden_size: elements of a token's result.
    input_rows: of the tensor with Tokens.
    received: as in TokenGraphs.
    """

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        backend: TritonPaged,
        table: DeviceRowTable,
        recorder: Recorder,
        most: int,
        most_mixed: int,
        hidden_size: int,
        input_rows: int,
        progress: Progress | None,
        received: torch.Tensor | None = None,
    ) -> None:
        self._model, self._cache, self._backend, self._table = model, cache, backend, table
        self._received, self._input_rows = received, input_rows
        # Keyed by whether a step has decodes: graphs without decodes save the launch of their kernel in each layer.
        self._graphs: dict[bool, dict[int, _Graph]] = {False: {}, True: {}}
        # The largest graph is captured first, so that the smaller ones find room in its memory.
        mosts = {False: most, True: most_mixed}
        kinds = [(size, mixed) for size in reversed(SIZES) for mixed in self._graphs if size <= mosts[mixed]]
        # All graphs share this tensor. If each had its own, they would take hundreds of megabytes.
        rows = max((size for size, _ in kinds), default=0)
        self._hidden = torch.empty(rows, hidden_size, dtype=model.dtype, device=cache.device)
        for done, (size, mixed) in enumerate(kinds):
            self._graphs[mixed][size] = self._capture(recorder, size, min(size, table.spare) if mixed else 0)
            if progress:
                progress("CUDA graphs of steps with prompts", done + 1, len(kinds))

    def size_for(self, plan: StepPlan) -> int | None:
        """Return the size of the graph for a plan; None = there is none."""
        decodes = plan.decodes
        chunks = plan.ends[decodes:]
        if not chunks or len(chunks) > GRAPH_CHUNKS or max(chunks) > GRAPH_KEYS:
            return None
        return min((size for size in self._graphs[decodes > 0] if size >= plan.num_tokens), default=None)

    def forward(
        self, size: int, packed: torch.Tensor, plan: StepPlan, starts: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a plan for which `size_for` has returned `size`. The table must have applied the plan's changes.

        packed: [input rows, size] int64 in pinned memory. starts: as in AttentionBatch. Returns hidden states
        [size, hidden] and the resolved token ids [size], valid until the next graph runs.
        """
        decodes = plan.decodes
        graph = self._graphs[decodes > 0][size]
        graph.inputs.copy_(packed, non_blocking=True)
        graph.facts.packed.copy_(self._pack(graph, decodes, plan, starts[decodes:]), non_blocking=True)
        graph.graph.replay()
        return graph.hidden, graph.token_ids

    def _pack(self, graph: _Graph, decodes: int, plan: StepPlan, starts: list[int]) -> torch.Tensor:
        """Return a plan's facts in pinned memory. starts: of its chunks."""
        packed = host_buffer(graph.facts.packed.shape, torch.int32, self._cache.device)
        facts = _Facts.of(packed, graph.decodes, len(graph.facts.tile_starts))
        _fill(facts.decode_rows, plan.rows[:decodes], self._table.spare)
        _fill(facts.decode_lengths, plan.ends[:decodes], 0)
        _fill(facts.chunk_rows, plan.rows[decodes:], self._table.spare)
        _fill(facts.lengths, plan.ends[decodes:], 0)
        _fill(facts.starts, starts, starts[-1])
        chunks, rows = prefill_tiles(starts, self._backend.queries_per_tile)
        _fill(facts.tile_chunks, chunks, GRAPH_CHUNKS)
        _fill(facts.tile_starts, rows, starts[-1])
        return packed

    def _capture(self, recorder: Recorder, size: int, decodes: int) -> _Graph:
        device = self._cache.device
        inputs = torch.zeros(self._input_rows, size, dtype=torch.int64, device=device)
        inputs[2:] = -1
        tiles = size // self._backend.queries_per_tile + GRAPH_CHUNKS
        packed = torch.zeros(sum(map(_aligned, _sizes(decodes, tiles))), dtype=torch.int32, device=device)
        facts = _Facts.of(packed, decodes, tiles)
        facts.tile_chunks.fill_(GRAPH_CHUNKS)
        run = partial(self._run, inputs, facts)
        # Nothing can be compiled during a capture.
        run()
        torch.cuda.synchronize()
        graph, (hidden, token_ids) = recorder.record(run)
        return _Graph(inputs, decodes, facts, graph, hidden, token_ids)

    def _run(self, inputs: torch.Tensor, facts: _Facts) -> tuple[torch.Tensor, torch.Tensor]:
        tables, tiles = self._table.tables, (facts.tile_chunks, facts.tile_starts)
        received = None if self._received is None else self._received[: inputs.shape[1]]
        tokens = Tokens(self._table.resolve(inputs[0]), inputs[1], inputs[2:])
        self._backend.use_rows(tables, facts.decode_rows, facts.decode_lengths)
        self._backend.add_chunks(tables.index_select(0, facts.chunk_rows), facts.lengths, facts.starts, tiles)
        hidden = self._model(Context(tokens, self._cache, self._backend, received=received))
        return self._hidden[: len(hidden)].copy_(hidden), tokens.ids


def _sizes(decodes: int, tiles: int) -> tuple[int, ...]:
    """Return the sizes of _Facts' views."""
    return decodes, decodes, GRAPH_CHUNKS + 1, GRAPH_CHUNKS + 1, GRAPH_CHUNKS + 2, tiles, tiles


def _aligned(elements: int) -> int:
    """Return the elements up to the next multiple of 16 bytes.

    Triton compiles a kernel again for pointers of another alignment.
    """
    return -(-elements // 4) * 4


def _fill(row: torch.Tensor, values: list[int], rest: int) -> None:
    array = row.numpy()
    array[: len(values)] = values
    array[len(values) :] = rest
