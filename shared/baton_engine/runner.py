"""Runs the model over a step: token ids in, sampled tokens and logprobs out."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from baton_common.cores import available_cores

from .attention.backend import AttentionBatch, StepLimits
from .attention.select import backend_class, select_backend
from .config import ConfigError, EngineConfig
from .context import Context, Tokens
from .device import choose_dtype, find_device
from .executor import Done, Fence, LaunchedHere
from .halves import Halves
from .host_draws import draw_tokens, prompt_logprobs
from .kv_cache import KvCache
from .kv_calibration import calibration_prompts, largest_kv
from .kv_dtype import check_fp8_kv, choose_kv_dtype
from .kv_scales import KvScales, join_heads, scales_for
from .largest_steps import forward_steps, sampling_steps
from .load_plan import build_of, planned_ranges
from .loading import Progress, Weights, check_tokenizer, dtype_name, weights_bytes
from .memory import (
    Budget,
    KvShape,
    check_num_blocks,
    check_weights,
    choose_num_blocks,
    gib,
    log_memory,
    measure,
    memory_of,
    shared_by,
    unmeasured,
)
from .model_config import ModelConfig
from .ops import TORCH, Ops
from .quantization.registry import read_quantization
from .results import Results, mark_broken
from .row_table import RowTable
from .shard import ALONE, Ranks, head_part
from .stage import WHOLE, Stage
from .step_plan import StepPlan
from .step_times import StepTimes
from .step_without_draws import StepWithoutDraws
from .stored_scales import StoredScales, scales_of_checkpoint, scales_of_file
from .threads import Threads, choose_threads
from .transfer import to_device

log = logging.getLogger(__name__)


class Runner:
    """The model, its KV cache and its attention backend on one device."""

    depth = 0  # number of steps that may be in flight when another one is launched
    stages = 1
    threads: Threads | None = None  # those that compute; None on a GPU

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        progress: Progress | None = None,
        ranks: Ranks = ALONE,
        stage: Stage = WHOLE,
    ) -> None:
        """model: the whole model. ranks: those that divide each layer; this runner has the part of one of them.

        stage: which of the layers it computes.
        """
        self.times = StepTimes()  # without measurements; a CPU's steps are not predicted
        device = find_device(config.device)
        dtype = choose_dtype(config.dtype, model.dtype, device)
        if device.type == "cpu":
            self.threads = choose_threads(config, model.layer_weights, available_cores(), os.environ)
            torch.set_num_threads(self.threads.count)
            log.info("threads: %s", self.threads)
        self._ranks, self._stage = ranks, stage
        whole, model = model, model.part(ranks)
        self.model = model
        self.device = device
        self.dtype = dtype  # of activations, and of weights that are not quantized
        self.max_model_len = config.max_model_len or model.default_model_len
        if self.max_model_len > model.max_position_embeddings:
            raise ConfigError(
                f"--max-model-len {self.max_model_len} is more than the {model.max_position_embeddings} positions "
                "that the model was made for"
            )
        folder = Path(config.model)
        check_tokenizer(folder, model.known_tokens)
        self._config = config
        self._block_size = config.block_size
        layout = model.kv_layout(dtype_name(choose_kv_dtype(config.kv_cache_dtype, model, dtype)))
        layers = stage.layers(model.kv_layers, layout.stage_starts)
        self.cache = KvCache(layout, config.block_size, device, self._ops, dtype, layers)
        if self.cache.scales is not None:
            check_fp8_kv(device)
        self._table = self._make_table()
        self._shape = KvShape(
            self.cache.block_bytes, config.block_size, self.max_model_len, layout.groups, config.max_num_batched_tokens
        )
        check_num_blocks(config.num_blocks, self._shape)
        processes = ranks.count * stage.count
        self._memory = shared_by(memory_of(device), processes)
        self._share = int(self._memory.total() * (config.gpu_memory_utilization if self._memory.measured else 1))
        backend = select_backend(
            config.attention_backend, model, device, config.deterministic, dtype, self.cache.planes[0].dtype,
            config.block_size,
        )  # fmt: skip
        keys = max(config.max_num_batched_tokens, self.max_model_len)
        limits = StepLimits(config.max_num_seqs, keys, config.deterministic)
        make_backend = partial(backend_class(backend, model), self.cache, model.num_heads, model.attention, limits)
        self._backend = make_backend()
        unused = frozenset({"lm_head.weight"}) if model.tie_word_embeddings else frozenset[str]()
        quantization = read_quantization(folder, config.quantization)
        self.quantization = quantization.name
        self._weights_bytes = weights_bytes(folder, quantization.sizes(dtype, device), unused) // processes
        stored = quantization.describe(dtype, self._ops.keeps_codes)
        log.info("weights: %s", stored, extra={"event": "weights", "quantization": quantization.name})
        check_weights(self._weights_bytes, self._memory, self._share, stored)
        with (
            Weights(folder, dtype, device, progress) as weights,
            self._explain_out_of_memory("the weights", self._weights_bytes),
        ):
            # The other ranks do not take the biases that only the first one adds.
            weights.whole = ranks.rank == 0 and stage.count == 1
            build = build_of(whole, self.max_model_len, quantization.policy, ranks, config.expert_parallel, stage)
            scales = self.cache.scales
            stored_scales = None if scales is None else self._stored_scales(weights)
            weights.expect([*planned_ranges(build, weights), *(stored_scales.ranges if stored_scales else [])])
            self._model = build(weights, self._ops)
            if scales is not None:
                self._scale_kv(scales, stored_scales, whole.num_kv_heads)
        self._halves: Halves | None = None
        if ranks.count > 1 and not config.deterministic:
            self._halves = Halves(self._model, self.cache, (self._backend, make_backend()), ranks)

    def _stored_scales(self, weights: Weights) -> StoredScales | None:
        file, layers = self._config.kv_scales, self.model.kv_layers
        if file is not None:
            return scales_of_file(Path(file), layers)
        return scales_of_checkpoint(Path(self._config.model), weights, layers)

    def _scale_kv(self, scales: KvScales, stored: StoredScales | None, heads: int) -> None:
        """Set the scales of the cache, measured if none are stored, and log what FP8 gives.

        heads: of the whole model. Raises ConfigError when there can be no scales.
        """
        if stored is not None:
            found, how = stored.read(heads), stored.where
        else:
            prompts = calibration_prompts(Path(self._config.model), self.model.vocab_size, self.max_model_len)
            how = f"measured on {sum(map(len, prompts))} tokens"
            size = sum(map(len, prompts)) * self.model.kv_layout(dtype_name(self.dtype)).token_bytes
            with self._explain_out_of_memory("the KV on which scales are measured", size):
                largest = largest_kv(
                    self._model, self.model, type(self._backend), prompts, self.device, self._ops, self._stage
                )
            own = join_heads([scales_for(each) for each in largest], heads, self._ranks)
            every = torch.zeros(self.model.kv_layers, 2, heads)
            every[self.cache.layers.start : self.cache.layers.stop] = torch.stack(own).cpu()
            found = list(self._stage.join(every))
        for layer, each in enumerate(found):
            scales.set(layer, each, head_part(heads, self._ranks))
        more = self.dtype.itemsize / self.cache.planes[0].itemsize
        log.info(
            "KV cache: FP8 (e4m3), %.0f times as many tokens as in %s; scales of heads: %s (%s)",
            more, dtype_name(self.dtype), how, scales.digest,
            extra={"event": "kv_scales", "measured": stored is None, "digest": scales.digest},
        )  # fmt: skip

    def start(self) -> None:
        """Set aside all the memory that steps need, and give the rest to the KV cache. Call this once, before `launch`.

        Raises ConfigError when the rest is too little for one sequence of the longest length.
        """
        budget = self._budget()
        num_blocks = choose_num_blocks(budget, self._shape, self._config, self._memory.measured)
        num_blocks = self._ranks.least(num_blocks)
        with self._explain_out_of_memory("the KV cache", num_blocks * self._shape.block_bytes):
            self.cache.allocate(num_blocks)
        log_memory(budget, self._shape, num_blocks)
        before = self._memory.held()
        with self._explain_out_of_memory("CUDA graphs", budget.graphs):
            self._record_graphs(budget)
        taken = self._memory.held() - before
        if budget.graphs:
            level = logging.WARNING if taken > budget.graphs else logging.INFO
            log.log(level, "CUDA graphs took %s GiB, %s were set aside for them", gib(taken), gib(budget.graphs))

    def _make_table(self) -> RowTable:
        return RowTable(self._config.max_num_seqs, self.max_model_len, self._block_size, self._num_groups)

    @property
    def _num_groups(self) -> int:
        return self.cache.num_groups

    @property
    def _input_rows(self) -> int:
        """The rows of a step's inputs: token ids, positions and slots, as Tokens has them."""
        return 2 + self._num_groups * self.model.recent_tokens

    @property
    def _ops(self) -> Ops:
        return TORCH

    @property
    def _graphs_bytes(self) -> int:
        """The bytes that `_record_graphs` will allocate."""
        return 0

    def _record_graphs(self, budget: Budget) -> None:
        """Record CUDA graphs, which hold the final address of the KV cache. A CPU has none."""

    def _budget(self) -> Budget:
        if not self._memory.measured:
            return unmeasured(self._memory, self._weights_bytes)
        # One block is enough, as the sequences of the largest steps share it.
        self.cache.allocate(1)
        config, lengths = self._config, self.model.attention_lengths(self.max_model_len)
        few = forward_steps(config, lengths, self._num_groups)
        many = sampling_steps(config, self.max_model_len, self._num_groups)
        run = self._run_all
        graphs, pairs = self._graphs_bytes, config.set_aside_bytes
        budget = measure(self._memory, self._share, graphs, lambda: run(few), lambda: run(many), pairs)
        self.cache.allocate(0)
        return budget

    @contextmanager
    def _explain_out_of_memory(self, what: str, size: int) -> Iterator[None]:
        """Raise ConfigError if an allocation fails because another process has taken memory that was free before."""
        try:
            yield
        except torch.OutOfMemoryError:
            name, free = self._memory.name, self._memory.free()
            raise ConfigError(
                f"{what} of {gib(size)} GiB found too little memory on {name}: {gib(free)} GiB are free. Does another "
                "process use it, too?"
            ) from None

    def _run_all(self, steps: list[StepPlan]) -> None:
        with self._explain_too_large():
            for plan in steps:
                launched = self.launch(plan)
                if plan.masked:
                    words = -(-self.model.vocab_size // 32)
                    launched.draw_masked(np.full((len(plan.masked), words), -1, dtype=np.int32))
                launched.wait()
        self._table.forget()

    @contextmanager
    def _explain_too_large(self) -> Iterator[None]:
        """Raise ConfigError if a step needs more memory than the weights leave free."""
        try:
            yield
        except torch.OutOfMemoryError:
            config, memory = self._config, self._memory
            raise ConfigError(
                f"a step of {config.max_num_batched_tokens} tokens and {config.max_num_seqs} sequences needs more than "
                f"the {gib(memory.free())} GiB that are free on {memory.name} beside the weights: lower "
                "--max-num-batched-tokens or --max-num-seqs"
            ) from None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedHere:
        """Compute a step. If some of its draws wait for masks, all of them happen in `draw_masked`."""
        self.cache.copy(plan.copies)
        self._table.take(plan)
        packed = np.empty((self._input_rows, plan.num_tokens), dtype=np.int64)
        batch = self._pack(plan, packed)
        inputs = to_device(packed, self.device)
        hidden = self._pass(Tokens(inputs[0], inputs[1], inputs[2:]), batch)
        return self._finish(plan, batch, hidden)

    def learn(self, drawn: list[tuple[int, int]]) -> None:
        """Take rows and the tokens that another stage has drawn for them. This runner draws tokens itself."""

    def _finish(self, plan: StepPlan, batch: AttentionBatch, hidden: torch.Tensor) -> LaunchedHere:
        """Draw the tokens of a plan. hidden: [T, hidden] of the batch's tokens."""
        results = Results([], prompt_logprobs(plan, self._table, self._model, batch, hidden))
        last = [end - 1 for end, draws in zip(batch.starts[1:], plan.draws, strict=True) if draws]
        logits = self._model.logits(hidden[last]) if last else hidden[:0]

        def draw(masks: np.ndarray | None) -> Results:
            results.choices = draw_tokens(plan, self._table, logits, masks)
            if plan.has_prompts:
                mark_broken(results.choices, batch.starts, row_sums(hidden).tolist())
            return results

        return StepWithoutDraws(draw) if plan.masked else Done(draw(None))

    def _pass(
        self, tokens: Tokens, batch: AttentionBatch, written: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Return the hidden states of a step. written: as Context has it."""
        received = self._received(tokens)
        if self._halves is not None and self._halves.fit(tokens):
            return self._halves.forward(tokens, batch, written, received)
        self._backend.prepare(batch)
        only = batch.decodes == len(batch.lengths)
        return self._model(Context(tokens, self.cache, self._backend, written, received, decodes_only=only))

    def _received(self, tokens: Tokens) -> torch.Tensor | None:
        """Return the hidden states that the previous stage has computed for a step; None = there is none."""
        if self._stage.is_first:
            return None
        shape = len(tokens.positions), self.model.stream_size
        received = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._stage.receive(received)
        return received

    @property
    def compilations(self) -> int:
        """The kernels compiled since `begin_service`. A CPU compiles none."""
        return 0

    def begin_service(self) -> None:
        """As in Executor."""

    def fence(self) -> Fence | None:
        """Return a fence behind the steps launched so far, for work in other streams; None on a CPU."""
        return None

    def close(self) -> None:
        """Free the objects that keep connections to other ranks open. Nothing can be launched afterwards."""

    def _pack(self, plan: StepPlan, out: np.ndarray) -> AttentionBatch:
        """Fill out with token ids, positions and slots, as Tokens has them.

        out: [_input_rows, at least the step's tokens] int64. A token that is sampled but not read yet is -1 - its row.
        """
        starts = [0]
        size, table, groups = self._block_size, self._table, self._num_groups
        recent = self.model.recent_tokens
        for row, count, end in zip(plan.rows, plan.counts, plan.ends, strict=True):
            first, start = end - count, starts[-1]
            stop = start + count
            known, blocks = table[row].tokens(first, end), table.blocks[row]
            out[0, start : start + len(known)] = known
            out[0, start + len(known) : stop] = -1 - row
            if count == 1:
                out[1, start] = first
                out[2 : 2 + groups, start] = blocks[:, first // size] * size + first % size
            else:
                out[1, start:stop] = np.arange(first, end)
                out[2 : 2 + groups, start:stop] = _slots(blocks, first, end, size)
            for lag in range(1, recent):
                rows = out[2 + lag * groups : 2 + (lag + 1) * groups, start:stop]
                none = min(max(lag - first, 0), count)  # the first tokens have no token so far before them
                rows[:, :none] = -1
                rows[:, none:] = _slots(blocks, first + none - lag, end - lag, size)
            starts.append(stop)
        # The tables of each group begin where 16 bytes do, as those of the row table.
        width = -(-max(plan.ends) // (4 * size)) * 4
        return AttentionBatch(starts, plan.ends, table.blocks[plan.rows, :, :width])


def _slots(blocks: np.ndarray, first: int, end: int, block_size: int) -> np.ndarray:
    """Return the slots of the tokens [first, end) of a sequence, [groups of layers, tokens] int64.

    blocks: [groups of layers, blocks], its block tables.
    """
    chunk = blocks[:, first // block_size : -(-end // block_size)].astype(np.int64)
    slots = (chunk[:, :, None] * block_size + np.arange(block_size)).reshape(len(chunk), -1)
    return slots[:, first % block_size : first % block_size + end - first]


def row_sums(hidden: torch.Tensor) -> torch.Tensor:
    """Return [T] float32: a number for each token that is finite only if its whole hidden state [T, hidden] is."""
    return hidden.sum(dim=-1, dtype=torch.float32)
