"""The runner for a GPU: decode steps are CUDA graphs, and each is launched before the last one's tokens are read."""

import logging
import struct

import msgspec
import numpy as np
import torch

from baton_kernels.decode_inputs import BLOCK, CHOICE, FIELDS, HEAT, POSITION, ROW, SEED, TOKEN, DecodeInputs
from baton_kernels.sampling import gumbel_argmax

from .attention.backend import AttentionBatch
from .attention.triton_paged import TritonPaged
from .config import EngineConfig
from .loading import Progress
from .model_config import ModelConfig
from .runner import PENDING_TOKEN, Choice, Launched, Runner
from .sampling import SamplingParams
from .sequence import Sequence, Step
from .transfer import to_device

log = logging.getLogger(__name__)


class _Flying(msgspec.Struct):
    """Sampled tokens on their way to the host."""

    tokens: torch.Tensor  # pinned
    arrived: torch.cuda.Event
    counts: list[int]  # new choices of each sequence of the step

    def wait(self) -> list[list[Choice]]:
        self.arrived.synchronize()
        tokens = iter(self.tokens.tolist())
        return [[Choice(next(tokens), None) for _ in range(count)] for count in self.counts]


class _DecodeGraph:
    """A whole decode step for one number of sequences: packed inputs in, sampled tokens out."""

    def __init__(self, inputs: DecodeInputs, graph: torch.cuda.CUDAGraph, tokens: torch.Tensor) -> None:
        self.inputs = inputs
        self.graph = graph
        self.tokens = tokens


class CudaRunner(Runner):
    """Sequences that need nothing but logits and their own parameters are decoded without the host in the loop."""

    depth = 1

    def __init__(self, config: EngineConfig, model: ModelConfig, progress: Progress | None = None) -> None:
        super().__init__(config, model, progress)
        rows = config.max_num_seqs
        # One row more than there are sequences: the padding of a graph works on that.
        self._spare_row = rows
        self._last_tokens = torch.zeros(rows + 1, dtype=torch.int64, device=self.device)
        width = -(-self.max_model_len // config.block_size)
        self._tables = torch.zeros(rows + 1, width, dtype=torch.int32, device=self.device)
        self._owners: list[tuple[Sequence, int] | None] = [None] * (rows + 1)
        self._graphs: dict[int, _DecodeGraph] = {}
        if isinstance(self._backend, TritonPaged) and not config.enforce_eager:
            self._capture(rows)
        self._sizes = sorted(self._graphs)

    @torch.inference_mode()
    def _capture(self, most: int) -> None:
        sizes = [size for size in (1, 2, 4, *range(8, 64, 8), *range(64, 1025, 16)) if size < most] + [most]
        pool = None
        for size in reversed(sizes):
            inputs = DecodeInputs(size, self.device)
            inputs.packed[ROW] = self._spare_row
            inputs.packed[BLOCK] = -1
            # Kernels are compiled and libraries set up before the capture, which would refuse that.
            for _ in range(2):
                self._decode(inputs)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                tokens = self._decode(inputs)
            pool = pool or graph.pool()
            self._graphs[size] = _DecodeGraph(inputs, graph, tokens)
        log.info("captured %d decode graphs", len(self._graphs), extra={"event": "graphs", "sizes": sizes})

    def _decode(self, inputs: DecodeInputs) -> torch.Tensor:
        assert isinstance(self._backend, TritonPaged)
        inputs.unpack(self._last_tokens, self._tables, self._block_size)
        self._backend.use_rows(self._tables, inputs.rows, inputs.lengths)
        batch = AttentionBatch([], [], [], inputs.slots)
        hidden = self._decoder.forward(inputs.token_ids, inputs.positions, batch)
        tokens = self._draw(
            self._decoder.logits(hidden), inputs.heats, inputs.seeds, inputs.next_positions, inputs.choices
        )
        self._last_tokens.index_copy_(0, inputs.rows, tokens)
        return tokens

    @staticmethod
    def _draw(
        logits: torch.Tensor, heats: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor
    ) -> torch.Tensor:
        everything = torch.full_like(heats, float("-inf"))
        parts = 64 if len(heats) <= 8 else 16
        return gumbel_argmax(logits, heats, everything, seeds, positions, choices, parts=parts)

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        needs_host = any(sequence.sampling.needs_host for sequence in step.sequences)
        if not needs_host and self._fits_graph(step):
            self.cache.copy(step.copies)
            return self._replay(step)
        for sequence, _, end in step:
            # Only the graphs write a block that is new into the row's table.
            if (end - 1) % self._block_size == 0:
                self._owners[sequence.row] = None
        if needs_host:
            return super().launch(step)
        self.cache.copy(step.copies)
        return self._run_eagerly(step)

    def _fits_graph(self, step: Step) -> bool:
        """Whether every sequence decodes one token, for one choice, and there is a graph for so many."""
        decodes = step.num_tokens == len(step.sequences) and all(step.samples)
        forks = any(s.sampling.n > 1 and not s.output_len for s in step.sequences)
        return decodes and not forks and bool(self._sizes) and len(step.sequences) <= self._sizes[-1]

    def _replay(self, step: Step) -> Launched:
        count = len(step.sequences)
        size = next(size for size in self._sizes if size >= count)
        graph = self._graphs[size]
        packed = torch.zeros(FIELDS, size, dtype=torch.int64)
        padding = size - count
        packed[ROW] = torch.tensor([s.row for s in step.sequences] + [self._spare_row] * padding)
        packed[POSITION] = torch.tensor([end - 1 for end in step.ends] + [0] * padding)
        page = self._block_size
        blocks = [s.blocks[(end - 1) // page] for s, _, end in step]
        packed[BLOCK] = torch.tensor(blocks + [-1] * padding)
        tokens = [s.tokens[end - 1] if end <= len(s.tokens) else PENDING_TOKEN for s, _, end in step]
        packed[TOKEN] = torch.tensor(tokens + [0] * padding)
        packed[CHOICE] = torch.tensor([s.choice for s in step.sequences] + [0] * padding)
        packed[SEED] = torch.tensor([_signed(s.sampling.seed) for s in step.sequences] + [0] * padding)
        packed[HEAT] = torch.tensor([_heat_bits(s.sampling) for s in step.sequences] + [0] * padding)
        self._upload_tables(step.sequences)
        graph.inputs.packed.copy_(packed.pin_memory(), non_blocking=True)
        graph.graph.replay()
        return self._fly(graph.tokens[:count], [1] * count)

    def _upload_tables(self, sequences: list[Sequence]) -> None:
        """Bring the block tables up to date of sequences that are new in their rows, or grew outside of the graphs."""
        stale = [s for s in sequences if self._owners[s.row] != (s, s.admissions)]
        if not stale:
            return
        width = max(len(s.blocks) for s in stale)
        tables = np.zeros((len(stale), width), dtype=np.int32)
        for table, sequence in zip(tables, stale, strict=True):
            table[: len(sequence.blocks)] = sequence.blocks
        rows = to_device([s.row for s in stale], self.device)
        self._tables[:, :width].index_copy_(0, rows, to_device(tables, self.device, torch.int32))
        for sequence in stale:
            self._owners[sequence.row] = (sequence, sequence.admissions)

    def _run_eagerly(self, step: Step) -> Launched:
        token_ids, positions, batch = self._inputs(step)
        pending = [
            (start, s.row) for (s, count, end), start in zip(step, batch.starts, strict=False) if end > len(s.tokens)
        ]
        if pending:
            where, sources = (to_device(x, self.device) for x in zip(*pending, strict=True))
            token_ids[where] = self._last_tokens[sources]
        self._backend.prepare(batch)
        hidden = self._decoder.forward(token_ids, positions, batch)
        counts: list[int] = []
        rows_of_logits: list[int] = []
        rows: list[int] = []
        seeds: list[int] = []
        heats: list[float] = []
        ends: list[int] = []
        choices: list[int] = []
        for index, (sequence, _, end) in enumerate(step):
            if not step.samples[index]:
                counts.append(0)
                continue
            group = range(sequence.sampling.n) if sequence.output_len == 0 else [sequence.choice]
            counts.append(len(group))
            for choice in group:
                rows_of_logits.append(batch.starts[index + 1] - 1)
                # Choices that are still to fork have no row yet; the host passes their tokens on.
                rows.append(sequence.row if len(group) == 1 else self._spare_row)
                seeds.append(_signed(sequence.sampling.seed))
                heats.append(0.0 if sequence.sampling.greedy else sequence.sampling.temperature)
                ends.append(end)
                choices.append(choice)
        if not rows:
            return self._fly(self._last_tokens[:0], counts)
        device = self.device
        logits = self._decoder.logits(hidden[to_device(rows_of_logits, device)])
        tokens = self._draw(
            logits,
            to_device(heats, device, torch.float32),
            to_device(seeds, device),
            to_device(ends, device),
            to_device(choices, device),
        )
        self._last_tokens.index_copy_(0, to_device(rows, device), tokens)
        return self._fly(tokens, counts)

    def _fly(self, tokens: torch.Tensor, counts: list[int]) -> _Flying:
        host = torch.empty(len(tokens), dtype=torch.int64, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return _Flying(host, arrived, counts)


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    return seed - (1 << 64 if seed >> 63 else 0)


def _heat_bits(sampling: SamplingParams) -> int:
    heat = 0.0 if sampling.greedy else sampling.temperature
    bits: int = struct.unpack("<i", struct.pack("<f", heat))[0]
    return bits
