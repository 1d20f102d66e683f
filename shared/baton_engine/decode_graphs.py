"""Whole decode steps as CUDA graphs: from packed inputs to sampled tokens, by number of sequences.

What a graph needs of a sequence beyond its newest token is kept by row: its block table on the device, and on the host
what its parameters say about the draw. Both are brought up to date when a sequence is new in its row; each graph adds
the block of the token it computes to the table.
"""

import logging
from functools import partial

import msgspec
import numpy as np
import torch

from baton_kernels.decode_inputs import DecodeInputs
from baton_kernels.reference.decode_inputs import BLOCK, FIELDS, POSITION, ROW, STATIC_FIELDS, TOKEN
from baton_kernels.sampling import gumbel_argmax
from baton_kernels.thresholds import thresholds

from .attention.triton_paged import TritonPaged
from .block_pool import SharedBlocks
from .context import Context, Tokens
from .cuda_graph import Recorder
from .kv_cache import KvCache
from .loading import Progress
from .models.model import Model
from .sampling import SamplingParams
from .sequence import Sequence, Step
from .transfer import host_buffer, to_device

log = logging.getLogger(__name__)


class _Graph(msgspec.Struct):
    inputs: DecodeInputs
    graph: torch.cuda.CUDAGraph
    tokens: torch.Tensor  # [size] int64, sampled


class Replayed(msgspec.Struct):
    """Device tensors of a step that was replayed, valid until the next graph runs.

    tokens: [sequences] int64, sampled. inputs: [sequences] int64, what they follow. logits: [sequences, vocab].
    """

    tokens: torch.Tensor
    inputs: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """last_tokens: [rows] int64, the token sampled last for each row; the graphs read and write it. The last row is
    nobody's: graphs are padded with that."""

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        backend: TritonPaged,
        last_tokens: torch.Tensor,
        block_size: int,
        max_model_len: int,
        vocab: int,
    ) -> None:
        self._model, self._cache, self._backend = model, cache, backend
        self._block_size = block_size
        self._last_tokens = last_tokens
        self._device = last_tokens.device
        rows = len(last_tokens)
        self._spare_row = rows - 1
        self._tables = torch.zeros(rows, -(-max_model_len // block_size), dtype=torch.int32, device=self._device)
        self._static = np.zeros((FIELDS, rows), dtype=np.int64)[STATIC_FIELDS]
        self._owners: list[tuple[Sequence, int] | None] = [None] * rows
        # One for all graphs: each with its own would take hundreds of megabytes.
        self._logits = torch.empty(rows - 1, vocab, dtype=model.dtype, device=self._device)
        self._graphs: dict[int, _Graph] = {}

    def capture(self, recorder: Recorder, progress: Progress | None) -> None:
        most = self._spare_row
        sizes = [size for size in (1, 2, 4, *range(8, 64, 8), *range(64, 1025, 16)) if size < most] + [most]
        # From the largest on: the smaller ones find room in the memory of that.
        for done, size in enumerate(reversed(sizes)):
            inputs = DecodeInputs(size, self._device)
            inputs.packed[ROW] = self._spare_row
            inputs.packed[BLOCK] = -1
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
        inputs.unpack(self._last_tokens, self._tables, self._block_size)
        self._backend.use_rows(self._tables, inputs.rows, inputs.lengths)
        tokens = Tokens(inputs.token_ids, inputs.positions, inputs.slots)
        hidden = self._model(Context(tokens, self._cache, self._backend))
        logits = self._model.logits(hidden, self._logits[: len(hidden)])
        least = thresholds(logits, inputs.heats, inputs.top_ks, inputs.top_ps, inputs.min_ps)
        sampled = gumbel_argmax(logits, inputs.heats, least, inputs.seeds, inputs.next_positions, inputs.choices)
        self._last_tokens.index_copy_(0, inputs.rows, sampled)
        return sampled

    def fits(self, step: Step) -> bool:
        """Whether every sequence decodes one token, for one choice, and there is a graph for so many."""
        return (
            step.num_tokens == len(step.sequences) <= len(self._logits)
            and bool(self._graphs)
            and all(step.samples)
            and not any(s.about_to_split for s in step.sequences)
        )

    def replay(self, step: Step) -> Replayed:
        sequences, ends, page = step.sequences, step.ends, self._block_size
        count = len(sequences)
        size = next(size for size in self._graphs if size >= count)
        graph = self._graphs[size]
        self._refresh(sequences)
        host = host_buffer((FIELDS, size), torch.int64, self._device)
        packed = host.numpy()
        packed[:, count:] = 0
        packed[ROW, count:] = self._spare_row
        packed[BLOCK, count:] = -1
        packed = packed[:, :count]
        rows = [s.row for s in sequences]
        packed[ROW] = rows
        packed[POSITION] = ends
        packed[POSITION] -= 1
        packed[BLOCK] = [s.blocks[(end - 1) // page] for s, end in zip(sequences, ends, strict=True)]
        packed[TOKEN] = [
            s.tokens(end - 1, end)[0] if end <= s.known else -1 for s, end in zip(sequences, ends, strict=True)
        ]
        packed[STATIC_FIELDS] = self._static[:, rows]
        graph.inputs.packed.copy_(host, non_blocking=True)
        graph.graph.replay()
        return Replayed(graph.tokens[:count], graph.inputs.token_ids[:count], self._logits[:count])

    def forget_new_blocks(self, step: Step) -> None:
        """Note that a step runs outside of the graphs, which alone write a block that is new into its row's table."""
        for sequence, _, end in step:
            if (end - 1) % self._block_size == 0:
                self._owners[sequence.row] = None

    def _refresh(self, sequences: list[Sequence]) -> None:
        """Bring up to date what is known of sequences that are new in their rows, or grew outside of the graphs."""
        stale = [s for s in sequences if self._owners[s.row] != (s, s.admissions)]
        if not stale:
            return
        width = max(len(s.blocks) for s in stale)
        tables = np.zeros((len(stale), width), dtype=np.int32)
        common: dict[SharedBlocks, np.ndarray] = {}
        for table, sequence in zip(tables, stale, strict=True):
            blocks, first = sequence.blocks, 0
            if sequence.shared is not None and sequence.shared in common:
                first = sequence.shared.count
                table[:first] = common[sequence.shared][:first]
            elif sequence.shared is not None:
                common[sequence.shared] = table
            table[first : len(blocks)] = blocks[first:]
            self._static[:, sequence.row] = _static(sequence.sampling, sequence.choice)
            self._owners[sequence.row] = (sequence, sequence.admissions)
        rows = to_device([s.row for s in stale], self._device)
        self._tables[:, :width].index_copy_(0, rows, to_device(tables, self._device, torch.int32))


def _static(sampling: SamplingParams, choice: int) -> list[int]:
    """Return what STATIC_FIELDS hold of a choice."""
    bits = np.array([sampling.heat, sampling.top_p, sampling.min_p], dtype=np.float32).view(np.int32)
    return [choice, sampling.seed_bits, min(sampling.top_k, 1 << 62), *map(int, bits)]
