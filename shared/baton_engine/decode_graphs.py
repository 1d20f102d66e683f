"""Whole decode steps as CUDA graphs: from rows and positions to sampled tokens, by number of sequences."""

import logging
from functools import partial

import msgspec
import torch

from baton_kernels.decode_inputs import DecodeInputs
from baton_kernels.reference.decode_inputs import BLOCKS, POSITION, ROW
from baton_kernels.sampling import gumbel_argmax
from baton_kernels.thresholds import thresholds

from .attention.backend import GraphBackend
from .context import Context, Tokens
from .cuda_graph import Recorder
from .kv_cache import KvCache
from .loading import Progress
from .models.model import Model
from .row_table import DeviceRowTable
from .step_plan import StepPlan
from .transfer import host_buffer

log = logging.getLogger(__name__)


class _Graph(msgspec.Struct):
    inputs: DecodeInputs
    graph: torch.cuda.CUDAGraph
    tokens: torch.Tensor  # [size] int64, sampled


class Replayed(msgspec.Struct):
    """Device tensors of a step that was replayed, valid until the next graph runs.

    tokens: [sequences] int64, sampled. inputs: [sequences] int64, their input tokens. logits: [sequences, vocab].
    """

    tokens: torch.Tensor
    inputs: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """The graphs by number of sequences. They read sequences' values from the table and write sampled tokens to it."""

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        backend: GraphBackend,
        table: DeviceRowTable,
        block_size: int,
        vocab: int,
        device: torch.device,
    ) -> None:
        self._model, self._cache, self._backend = model, cache, backend
        self._block_size = block_size
        self._table = table
        self._device = device
        # All graphs share this tensor. If each had its own, they would take hundreds of megabytes.
        self._logits = torch.empty(table.spare, vocab, dtype=model.dtype, device=self._device)
        self._graphs: dict[int, _Graph] = {}

    def capture(self, recorder: Recorder, progress: Progress | None) -> None:
        table = self._table
        most = table.spare
        sizes = [size for size in (1, 2, 4, *range(8, 64, 8), *range(64, 1025, 16)) if size < most] + [most]
        # The largest graph is captured first, so that the smaller ones find room in its memory.
        for done, size in enumerate(reversed(sizes)):
            inputs = DecodeInputs(size, self._device, table.tables.shape[1])
            inputs.packed[ROW] = table.spare
            for _ in range(2):
                self._decode(inputs)
            torch.cuda.synchronize()
            graph, tokens = recorder.record(partial(self._decode, inputs))
            self._graphs[size] = _Graph(inputs, graph, tokens)
            if progress:
                progress("CUDA graphs of decodes", done + 1, len(sizes))
        self._graphs = dict(sorted(self._graphs.items()))
        log.info("captured %d decode graphs", len(sizes), extra={"event": "graphs", "sizes": sizes})

    def _decode(self, inputs: DecodeInputs) -> torch.Tensor:
        table = self._table
        inputs.unpack(table.columns, table.tables, self._block_size)
        self._backend.use_rows(table.tables, inputs.rows, inputs.lengths)
        tokens = Tokens(inputs.token_ids, inputs.positions, inputs.slots)
        hidden = self._model(Context(tokens, self._cache, self._backend))
        logits = self._model.logits(hidden, self._logits[: len(hidden)])
        least = thresholds(logits, inputs.temperatures, inputs.top_ks, inputs.top_ps, inputs.min_ps)
        sampled = gumbel_argmax(logits, inputs.temperatures, least, inputs.seeds, inputs.next_positions, inputs.choices)
        table.last_tokens.index_copy_(0, inputs.rows, sampled)
        return sampled

    def fits(self, plan: StepPlan) -> bool:
        """Whether each chunk decodes one token, for one choice, and there is a graph for this number of chunks."""
        return plan.decodes_only and len(plan.rows) <= len(self._logits) and bool(self._graphs)

    def replay(self, plan: StepPlan) -> Replayed:
        """Compute a plan for which `fits` holds and whose changes the table has applied."""
        count = len(plan.rows)
        size = next(size for size in self._graphs if size >= count)
        graph = self._graphs[size]
        host = host_buffer(graph.inputs.packed.shape, torch.int64, self._device)
        packed = host.numpy()
        rows, positions = packed[ROW, :count], packed[POSITION, :count]
        rows[:] = plan.rows
        positions[:] = plan.ends
        positions -= 1
        # The only block of a table that a decode can have changed.
        packed[BLOCKS:, :count] = self._table.blocks[rows, :, positions // self._block_size].T
        packed[ROW, count:] = self._table.spare
        packed[POSITION:, count:] = 0
        graph.inputs.packed.copy_(host, non_blocking=True)
        graph.graph.replay()
        return Replayed(graph.tokens[:count], graph.inputs.token_ids[:count], self._logits[:count])
