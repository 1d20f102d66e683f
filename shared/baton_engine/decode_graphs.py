"""Whole decode steps as CUDA graphs: from rows and positions to sampled tokens, by number of sequences."""

import logging
from functools import partial

import msgspec
import torch

from baton_kernels.decode_inputs import DecodeInputs
from baton_kernels.reference.decode_inputs import BLOCKS, POSITION, ROW
from baton_kernels.sampling import best_of_shards, gumbel_argmax, gumbel_best
from baton_kernels.thresholds import thresholds

from .attention.backend import GraphBackend
from .context import Context, Tokens
from .cuda_graph import Recorder
from .kv_cache import KvCache
from .loading import Progress
from .models.model import Model
from .row_table import DeviceRowTable
from .shard import Ranks
from .step_plan import StepPlan
from .transfer import host_buffer

log = logging.getLogger(__name__)


class _Graph(msgspec.Struct):
    inputs: DecodeInputs
    graph: torch.cuda.CUDAGraph
    result: torch.Tensor  # what `_finish` has returned


class Replayed(msgspec.Struct):
    """Device tensors of a step that was replayed, valid until the next graph runs.

    result: [sequences] int64, the sampled tokens. inputs: [sequences] int64, their input tokens. logits: [sequences,
    vocab]; undefined if no sequence is special (DeviceRowTable).
    """

    result: torch.Tensor
    inputs: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """The graphs by number of sequences. They read sequences' values from the table and write sampled tokens to it.

    With several ranks, there are two graphs of each size. One gathers the logits of all tokens on each rank. The other
    is for steps whose draws only need the largest score: each rank finds the best of its own tokens, and only these are
    exchanged, 8 bytes per sequence and rank.
    """

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        backend: GraphBackend,
        table: DeviceRowTable,
        block_size: int,
        vocab: int,
        device: torch.device,
        ranks: Ranks,
        received: torch.Tensor | None,
        recent_tokens: int,
    ) -> None:
        """received: the hidden states with which a pass begins instead of the embedding, [at least the most sequences,
        stream size]; None = the embedding. recent_tokens: as in ModelConfig."""
        self._received, self._recent_tokens = received, recent_tokens
        self._model, self._cache, self._backend = model, cache, backend
        self._block_size = block_size
        self._table = table
        self._device, self._ranks = device, ranks
        # All graphs share this tensor. If each had its own, they would take hundreds of megabytes.
        self._logits = torch.empty(table.spare, vocab, dtype=model.head.dtype, device=self._device)
        # By whether logits are gathered.
        self._graphs: dict[bool, dict[int, _Graph]] = {True: {}, False: {}}

    def capture(self, recorder: Recorder, progress: Progress | None) -> None:
        table = self._table
        most = table.spare
        sizes = [size for size in (1, 2, 4, *range(8, 64, 8), *range(64, 1025, 16)) if size < most] + [most]
        # The largest graph is captured first, so that the smaller ones find room in its memory.
        ways = (True,) if self._ranks.count == 1 else (True, False)
        kinds = [(size, gathers) for size in reversed(sizes) for gathers in ways]
        for done, (size, gathers) in enumerate(kinds):
            inputs = DecodeInputs(size, self._device, table.tables.shape[1], self._recent_tokens)
            inputs.packed[ROW] = table.spare
            for _ in range(2):
                self._decode(inputs, gathers)
            torch.cuda.synchronize()
            graph, result = recorder.record(partial(self._decode, inputs, gathers))
            self._graphs[gathers][size] = _Graph(inputs, graph, result)
            if progress:
                progress("CUDA graphs of decodes", done + 1, len(kinds))
        self._graphs = {gathers: dict(sorted(graphs.items())) for gathers, graphs in self._graphs.items()}
        log.info("captured %d decode graphs", len(kinds), extra={"event": "graphs", "sizes": sizes})

    def _decode(self, inputs: DecodeInputs, gathers: bool) -> torch.Tensor:
        table = self._table
        inputs.unpack(table.columns, table.tables, self._block_size)
        self._backend.use_rows(table.tables, inputs.rows, inputs.lengths)
        tokens = Tokens(inputs.token_ids, inputs.positions, inputs.slots)
        received = None if self._received is None else self._received[: len(inputs.rows)]
        hidden = self._model(Context(tokens, self._cache, self._backend, received=received, decodes_only=True))
        return self._finish(inputs, hidden, gathers)

    def _finish(self, inputs: DecodeInputs, hidden: torch.Tensor, gathers: bool) -> torch.Tensor:
        """Return what a graph computes from the hidden states [size, hidden]: the sampled tokens, [size] int64."""
        table = self._table
        sampled = self._draw(hidden, inputs) if gathers else self._draw_apart(hidden, inputs)
        table.last_tokens.index_copy_(0, inputs.rows, sampled)
        return sampled

    def _draw(self, hidden: torch.Tensor, inputs: DecodeInputs) -> torch.Tensor:
        logits = self._model.logits(hidden, self._logits[: len(hidden)])
        least = thresholds(logits, inputs.temperatures, inputs.top_ks, inputs.top_ps, inputs.min_ps)
        return gumbel_argmax(logits, inputs.temperatures, least, inputs.seeds, inputs.next_positions, inputs.choices)

    def _draw_apart(self, hidden: torch.Tensor, inputs: DecodeInputs) -> torch.Tensor:
        """Draw the same tokens from the best of each rank's own."""
        head = self._model.head
        best = gumbel_best(
            head.own(hidden), head.first_token, inputs.temperatures, inputs.seeds, inputs.next_positions, inputs.choices
        )
        return best_of_shards(self._ranks.join(best))

    def fits(self, plan: StepPlan) -> bool:
        """Whether each chunk decodes one token, for one choice, and there is a graph for this number of chunks."""
        return plan.decodes_only and len(plan.rows) <= len(self._logits) and bool(self._graphs[True])

    def replay(self, plan: StepPlan) -> Replayed:
        """Compute a plan for which `fits` holds and whose changes the table has applied."""
        count = len(plan.rows)
        gathers = self._ranks.count == 1 or not self._table.gathered.isdisjoint(plan.rows)
        graph = next(graph for size, graph in self._graphs[gathers].items() if size >= count)
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
        return Replayed(graph.result[:count], graph.inputs.token_ids[:count], self._logits[:count])
