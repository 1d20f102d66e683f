"""The runner for a GPU. It replays CUDA graphs where they are faster, and launches each step before the host has read
the tokens of the previous one."""

import logging
import math
import time
from collections.abc import Callable

import numpy as np
import torch

from baton_common.cores import available_cores
from baton_kernels.unmeasured_products import watching

from .attention.backend import AttentionBatch, GraphBackend
from .attention.triton_paged import TritonPaged
from .compilation import Compilations, compiling_ahead
from .config import EngineConfig
from .context import Tokens
from .cuda_graph import Recorder
from .decode_graphs import DecodeGraphs
from .device_sampler import DeviceSampler, Drawn
from .draw_groups import RowDraw
from .executor import Fence, LaunchedHere
from .host_draws import FLOAT_ROWS
from .layer_marks import LayerMarks
from .loading import Progress
from .logprobs import logprob_columns
from .measured_steps import measured_steps, sized_steps
from .memory import GRAPHS_BYTES, Budget
from .model_config import ModelConfig
from .ops import Ops
from .product_tuning import tune_products
from .prompt_graphs import SIZES, PromptGraphs
from .row_table import DeviceRowTable
from .runner import Runner, row_sums
from .shard import ALONE, Ranks
from .stage import WHOLE, Stage
from .step_in_flight import PromptLogprobs, StepInFlight
from .step_plan import StepPlan
from .step_sizes import StepSizes
from .step_times import StepWork
from .token_graphs import TokenGraphs
from .transfer import host_buffer, to_device, to_host
from .triton_ops import DETERMINISTIC, TRITON
from .warm_up import warm_up_steps

log = logging.getLogger(__name__)

# The least bytes of an exported prompt's KV in a group of layers. A group is one transfer between GPUs, and small ones
# are slow.
_GROUP_BYTES = 64 << 20
_MOST_GROUPS = 8
# The host launches the copies of a group while the device computes the group's last layers. The launches take about as
# long as two layers of a short prompt, and the copies wait on the device for these layers.
_AHEAD = 2
# Of the memory set aside for CUDA graphs: how much the steps with prompts may use.
_SHARE_OF_PROMPTS = 0.75


class CudaRunner(Runner):
    """Launches a step before the host has read the tokens of the previous one. Draws that a grammar restricts wait for
    their masks, and only the next step waits for those draws."""

    depth = 1
    _table: DeviceRowTable

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        progress: Progress | None = None,
        ranks: Ranks = ALONE,
        stage: Stage = WHOLE,
    ) -> None:
        super().__init__(config, model, progress, ranks, stage)
        self._progress = progress
        self._compilations = Compilations()
        self._sampler = DeviceSampler(self._table, model.vocab_size, self.device)
        self._decode_graphs: DecodeGraphs | None = None
        self._token_graphs: TokenGraphs | None = None
        self._prompt_graphs: PromptGraphs | None = None
        self._recorder: Recorder | None = None
        # Graphs read the hidden states that the previous stage has sent at this fixed address.
        rows = max(config.max_num_seqs, min(config.max_num_batched_tokens, SIZES[-1]))
        self._graph_input = None
        if not stage.is_first:
            self._graph_input = torch.zeros(rows, model.stream_size, dtype=self.dtype, device=self.device)
        # Decode graphs cut long sequences into parts that depend on the batch, which --deterministic rules out.
        if isinstance(self._backend, GraphBackend) and not config.enforce_eager and not config.deterministic:
            self._decode_graphs = self._make_decode_graphs(self._backend)

    def _make_decode_graphs(self, backend: GraphBackend) -> DecodeGraphs:
        return DecodeGraphs(
            self._model, self.cache, backend, self._table, self._block_size, self.model.vocab_size, self.device,
            self._ranks, self._graph_input, self.model.recent_tokens,
        )  # fmt: skip

    def start(self) -> None:
        lengths = self.model.attention_lengths(self.max_model_len)
        steps = warm_up_steps(self._config, lengths, self._num_groups)
        with watching() as unmeasured:
            self._compile(steps)
        # Either all ranks compile again or none does, because steps contain collective operations.
        if not self._ranks.least(int(not unmeasured)):
            tune_products(unmeasured.values())
            self._compile(steps)
        super().start()
        # A kernel is also loaded at its first launch, which waits for an idle device.
        self._sampler.warm_up(self._model.head.dtype)
        self._run_all(steps)
        self._load_logits_kernels()
        self._measure_times()

    @torch.inference_mode()
    def _load_logits_kernels(self) -> None:
        """Compute logits of each number of rows.

        cuBLAS has a different kernel for every sixteen rows. It loads a kernel at its first use, which waits for an
        idle device.
        """
        if not self._stage.is_last:
            return
        hidden = torch.zeros(self._config.max_num_seqs, self.model.hidden_size, dtype=self.dtype, device=self.device)
        for rows in range(1, len(hidden) + 1):
            self._model.logits(hidden[:rows])

    def _measure_times(self) -> None:
        """Measure what steps take, with different numbers of tokens, sequences and tokens of context."""
        facts = self._config, self.max_model_len, self._num_groups, self.cache.num_blocks
        samples = [(StepWork.of(plan), self._seconds(plan)) for plan in measured_steps(*facts)]
        self.times.begin(samples[1::2])
        self.times.sizes = StepSizes({plan.num_tokens: self._seconds(plan) for plan in sized_steps(*facts)})
        self._forget_rows()
        log.info(
            "prefill: %.0f tokens/s, 1/%.0f more for each token of context",
            self.times.prefill_rate, 1 / self.times.context_cost if self.times.context_cost else math.inf,
            extra={"event": "prefill_rate", "rate": self.times.prefill_rate, "context_cost": self.times.context_cost},
        )  # fmt: skip

    def _seconds(self, plan: StepPlan) -> float:
        started = time.perf_counter()
        self.launch(plan).wait()
        return time.perf_counter() - started

    def _compile(self, steps: list[StepPlan]) -> None:
        """Compile the kernels of all steps in threads. Most of them would take a second each."""
        started = time.perf_counter()
        self.cache.allocate(1)
        with self._explain_too_large(), compiling_ahead(available_cores()):
            self._sampler.warm_up(self._model.head.dtype)
            self.cache.warm_up()
            for plan in steps:
                self.launch(plan)
            torch.cuda.synchronize()
        self._forget_rows()
        self.cache.allocate(0)
        log.info("compiled kernels in %.1f s", time.perf_counter() - started, extra={"event": "compiled"})

    def _forget_rows(self) -> None:
        # The rows of the largest steps have very long prompts, which would otherwise stay in the host's memory.
        self._table.forget()
        self._sampler.forget()

    @property
    def compilations(self) -> int:
        return self._compilations.count

    def begin_service(self) -> None:
        self._compilations.begin()

    def close(self) -> None:
        # Before NCCL closes a connection, it waits until all graphs with its operations are destroyed.
        if self._recorder is not None:
            self._recorder.release()

    def _make_table(self) -> DeviceRowTable:
        rows, groups = self._config.max_num_seqs, self._num_groups
        return DeviceRowTable(rows, self.max_model_len, self._block_size, groups, self.device)

    @property
    def _ops(self) -> Ops:
        return DETERMINISTIC if self._config.deterministic else TRITON

    @property
    def _graphs_bytes(self) -> int:
        return 0 if self._config.enforce_eager else GRAPHS_BYTES

    @torch.inference_mode()
    def _record_graphs(self, budget: Budget) -> None:
        if self._config.enforce_eager:
            return
        recorder, config = Recorder(), self._config
        self._recorder = recorder
        if self._decode_graphs:
            self._decode_graphs.capture(recorder, self._progress)
        most = min(config.max_num_batched_tokens, self.max_model_len)
        self._token_graphs = TokenGraphs(
            self._model, self.cache, self._backend, self._table.resolve, recorder, self._block_size, most,
            self.model.query_shapes, self._progress, self._ranks, self._input_rows, self._graph_input,
        )  # fmt: skip
        if isinstance(self._backend, TritonPaged):
            # Steps with decodes launch more kernels than the steps that were timed, while the host also sends tokens.
            most_mixed = 0 if config.deterministic else config.max_num_batched_tokens
            # The largest graph keeps the temporary memory of a step with `most_mixed` tokens.
            if budget.forward:
                fitting = _SHARE_OF_PROMPTS * budget.graphs / budget.forward * config.max_num_batched_tokens
                most_mixed = min(most_mixed, int(fitting))
            size = self.model.hidden_size if self._stage.is_last else self.model.stream_size
            self._prompt_graphs = PromptGraphs(
                self._model, self.cache, self._backend, self._table, recorder, max(self._token_graphs.sizes, default=0),
                most_mixed, size, self._input_rows, self._progress, self._graph_input,
            )  # fmt: skip

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedHere:
        self.cache.copy(plan.copies)
        self._table.take(plan)
        if self._decode_graphs and self._decode_graphs.fits(plan):
            return self._replay(self._decode_graphs, plan)
        return self._run(plan)

    def fence(self) -> Fence:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _receive(self, tokens: int) -> None:
        """Copy the hidden states from the previous stage to the memory that a graph of this size reads."""
        if self._graph_input is not None:
            self._stage.receive(self._graph_input[:tokens])

    def _replay(self, graphs: DecodeGraphs, plan: StepPlan) -> LaunchedHere:
        self._receive(len(plan.rows))
        done = graphs.replay(plan)
        launched = StepInFlight(done.result, plan.draws)
        special = self._table.special
        if not special.isdisjoint(plan.rows):
            draws = [
                RowDraw(row, end, self._table[row].choice, index, index, row)
                for index, (row, end) in enumerate(zip(plan.rows, plan.ends, strict=True))
                if row in special
            ]
            self._draw(launched, plan, draws, done.logits, done.inputs, done.result)
        return launched.send()

    def _run(self, plan: StepPlan) -> LaunchedHere:
        """Compute a step of any kind."""
        self._table.upload_blocks(plan)
        count = plan.num_tokens
        marks = self._marks(plan)
        whole = self._prompt_graphs.size_for(plan) if self._prompt_graphs and not marks else None
        size = whole or (self._token_graphs.size_for(count) if self._token_graphs else None)
        host = host_buffer((self._input_rows, size or count), torch.int64, self.device)
        packed = host.numpy()
        packed[:2, count:] = 0
        packed[2:, count:] = -1
        batch = self._pack(plan, packed)
        if self._prompt_graphs and whole:
            self._receive(count)
            hidden, ids = self._prompt_graphs.forward(whole, host, plan, batch.starts)
        else:
            hidden, ids = self._forward(size, host, batch, marks.written if marks else None)
        return self._draw_all(plan, batch, hidden, ids, marks)

    def _draw_all(
        self, plan: StepPlan, batch: AttentionBatch, hidden: torch.Tensor, ids: torch.Tensor, marks: LayerMarks | None
    ) -> LaunchedHere:
        """Launch the draws of a plan. hidden, ids: of at least the step's tokens."""
        count = plan.num_tokens
        tokens = torch.empty(sum(plan.draws), dtype=torch.int64, device=self.device)
        launched = StepInFlight(tokens, plan.draws)
        launched.layers = marks
        if plan.has_prompts:
            launched.starts, launched.sums = batch.starts, to_host(row_sums(hidden[:count]))
        launched.prompt_logprobs = [
            self._prompt_logprobs(plan, chunk, first, batch.starts[chunk], hidden)
            for chunk, first in plan.prompt_logprobs
        ]
        draws: list[RowDraw] = []
        last: list[int] = []
        for chunk, (row, end, number) in enumerate(zip(plan.rows, plan.ends, plan.draws, strict=True)):
            if not number:
                continue
            # The first choice continues in this row. The others get rows of their own when they fork.
            for choice in range(number):
                target = self._table.spare if choice else row
                first_choice = self._table[row].choice
                draws.append(RowDraw(row, end, first_choice + choice, len(last), len(draws), target))
            last.append(batch.starts[chunk + 1] - 1)
        if draws:
            which = to_device(last, self.device)
            self._draw(launched, plan, draws, self._model.logits(hidden[which]), ids[which], tokens)
        return launched.send()

    def _forward(
        self, size: int | None, packed: torch.Tensor, batch: AttentionBatch, written: Callable[[int], None] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states and resolved token ids, from graphs where there are some of this size.

        packed: as TokenGraphs.forward has it. written: as Context has it.
        """
        if self._token_graphs and size:
            self._backend.prepare(batch)
            self._receive(batch.starts[-1])
            return self._token_graphs.forward(size, packed, written)
        inputs = packed.to(self.device, non_blocking=True)
        ids = inputs[0]
        if packed[0].min() < 0:
            ids = self._table.resolve(ids)
        return self._pass(Tokens(ids, inputs[1], inputs[2:]), batch, written), ids

    def _draw(
        self,
        launched: StepInFlight,
        plan: StepPlan,
        draws: list[RowDraw],
        logits: torch.Tensor,
        inputs: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        """Launch the draws that wait for no mask, and leave the others to `Launched.draw_masked`."""
        draw = self._sampler.draw
        masks = {plan.rows[chunk]: mask for mask, chunk in enumerate(plan.masked)}
        now = [each for each in draws if each.row not in masks] if masks else draws
        if now:
            launched.add(draw(logits, inputs, tokens, now))
        if not masks:
            return
        late = [each for each in draws if each.row in masks]
        for each in late:
            each.mask = masks[each.row]

        def draw_late(bits: np.ndarray) -> Drawn:
            return draw(logits, inputs, tokens, late, to_device(bits, self.device, torch.int32))

        launched.draw_late = draw_late

    def _prompt_logprobs(
        self, plan: StepPlan, chunk: int, first: int, start: int, hidden: torch.Tensor
    ) -> PromptLogprobs:
        """Launch the logprobs of a chunk's prompt tokens from index `first` on.

        start: where the chunk's hidden states begin.
        """
        row, begin, end = self._table[plan.rows[chunk]], plan.ends[chunk] - plan.counts[chunk], plan.ends[chunk]
        tokens = row.prompt[first : end + 1]
        most = min(row.sampling.prompt_logprobs or 0, self.model.vocab_size)
        parts = []
        # The logits at one position give the logprob of the token at the next position.
        at = start + first - 1 - begin
        for done in range(0, len(tokens), FLOAT_ROWS):
            part = tokens[done : done + FLOAT_ROWS]
            logits = self._model.logits(hidden[at + done : at + done + len(part)])
            parts.append(to_host(logprob_columns(logits, to_device(part, self.device), most)))
        return PromptLogprobs(chunk, tokens, most, parts)

    def _marks(self, plan: StepPlan) -> LayerMarks | None:
        """Return marks for a step with an exported prompt so long that handing over its first layers early pays off."""
        # No stage knows how far the others are.
        longest = max(plan.exported, default=0) if self._stage.count == 1 else 0
        groups = min(longest * self.cache.layout.token_bytes // _GROUP_BYTES, _MOST_GROUPS, self.model.kv_layers)
        return LayerMarks(self.model.kv_layers, groups, _AHEAD) if groups else None
