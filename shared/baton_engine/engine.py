"""The engine core, which turns requests into tokens one step at a time. Pods and the network are outside of it."""

import math
from collections.abc import Callable
from pathlib import Path

import torch

from baton_common.buckets import STEP_TOKENS_BUCKETS
from baton_common.extent import Extent
from baton_common.histogram import Histogram
from baton_kernels.not_finite import NOT_FINITE

from .block_allocator import BlockAllocator
from .block_pool import BlockPool
from .block_size import with_fitting_blocks
from .compiling import Compiling
from .config import EngineConfig
from .delta import Delta, Load, Reservation, delta_of
from .device import find_device
from .executor import Fence
from .executors import make_runner
from .exports import Export, Exports
from .grammars import Grammars
from .imports import Import, Imports, Write
from .integrity import check_integrity
from .kv_source import KvSource
from .loading import Progress
from .masks import Masks
from .pipeline import Pipeline
from .prefill_pods import PrefillPods
from .results import Choice
from .runners import read_model
from .sampling import TokenLogprobs
from .scheduler import Scheduler
from .sequence import FinishReason, Request, Sequence, State
from .step import Step
from .step_result import StepResult


class Engine:
    """One model on one device: scheduler, block pool and runner."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        model = read_model(config)
        device = find_device(config.device).type
        config = with_fitting_blocks(config.on(device), model)
        self.runner = make_runner(config, model, device, progress)
        self.model = model
        self.config = config
        self.max_model_len = self.runner.max_model_len
        layout = self.runner.cache.layout
        self.pool = BlockPool(self.runner.cache.num_blocks, config.enable_prefix_caching, len(layout.groups))
        self.allocator = BlockAllocator(self.pool, layout.groups, config.block_size, config.max_num_batched_tokens)
        self._prefill_pods = PrefillPods()
        self._imports = Imports(layout, [self._prefill_pods])
        self.scheduler = Scheduler(
            self.allocator,
            block_size=config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_export_blocks=int(self.pool.num_blocks * config.export_fraction),
            prefill_only=config.prefill_only,
            reach=self._imports.reach,
            stages=self.runner.stages,
        )
        self._arrivals = 0
        self._sequences: dict[int, list[Sequence]] = {}
        self._compiling = Compiling(Grammars(Path(config.model), model.vocab_size))
        self._masks = Masks(model.vocab_size)
        self._in_flight = Pipeline(self.runner.times, self.runner.stages)
        self._bound_chunks()
        self.scheduler.sizes = self.runner.times.sizes
        self._step_tokens = Histogram(STEP_TOKENS_BUCKETS)
        self._exports = Exports(layout, config.block_size)
        self._ended: list[Delta] = []  # the ends of imported sequences that no step has reported

    def fingerprint_facts(self) -> dict[str, object]:
        """Return the facts that two engines must share for one to decode on the other's KV."""
        facts = {**self.model.fingerprint_facts(), **self.runner.cache.facts}
        # Engines of earlier versions, which serve no quantized weights, do not have this field.
        return facts if self.runner.quantization == "none" else {**facts, "quantization": self.runner.quantization}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight or self._compiling)

    def request_error(self, request: Request) -> tuple[str, str] | None:
        """Return (field, message) when the request can never run here, else None."""
        return request.error(self.model.vocab_size, self.max_model_len, self.config.max_num_seqs)

    def add(self, request: Request) -> None:
        """Queue a request that `request_error` has passed. Its id must be new."""
        sequence = Sequence(request, self._arrivals, self.config.block_size, self.max_model_len, request.choice)
        self._arrivals += 1
        self._sequences[request.id] = [sequence]
        if request.sampling.grammar is None:
            self.scheduler.add(sequence)
        else:
            self._compiling.add(sequence, request.sampling.grammar)

    def abort(self, id: int, choice: int | None = None) -> None:
        """End a request, exported or not, or one choice of it, and free its blocks. Unknown ids are ignored."""
        sequences = self._sequences.get(id, [])
        for sequence in [s for s in sequences if choice is None or s.choice == choice]:
            self.scheduler.remove(sequence)
            sequences.remove(sequence)
        if not sequences:
            self._sequences.pop(id, None)
            self._imports.end(id)
            self._exports.end(id)

    def step(self, on_wait: Callable[[], None] | None = None) -> StepResult:
        """Start the next step and return the results that became known, possibly none.

        On a GPU the next step is started before the tokens of the last one are read, so results come one call late. If
        the end of the last step can be predicted, the next one is started shortly before it, so that requests that
        arrive until then are part of it. on_wait: called repeatedly while there is nothing to start or read. It may
        call every method of the engine except step.
        """
        while on_wait and self._in_flight.is_full(bool(self.scheduler.waiting)):
            on_wait()
        result = StepResult()
        if self._compiling:
            self._take_compiled(result.rejections)
        known_imports = len(self.scheduler.importing)
        step = self.scheduler.schedule()
        ordered = self._order_imports(known_imports)
        result.progress = bool(step.sequences or ordered or self._in_flight or self._compiling)
        if step.sequences:
            self._step_tokens.observe(step.plan.num_tokens)
            self._in_flight.put(step, self.runner.launch)
        if len(self._in_flight) > self.runner.depth or not step.sequences:
            if self._in_flight:
                self._draw_masked()
            while on_wait and self._in_flight and not self._in_flight.done():
                on_wait()
            self._collect(result)
        if self._in_flight:
            self._draw_masked()
        result.deltas += self._ended
        self._ended = []
        result.reservations = self._prefill_pods.take()
        return result

    def _draw_masked(self) -> None:
        """Launch the draws that grammars restrict: those of the oldest step, as all tokens before them are known now,
        and those of all steps in flight if no step depends on another.

        Usually the device still computes these steps while their masks are computed here.
        """
        for step, launched in self._in_flight.independent():
            if step.masked:
                launched.draw_masked(self._masks.compute(step.masked))
                step.masked = []

    def add_source(self, source: KvSource) -> None:
        """Add a source of KV, which is asked after all others."""
        self._imports.sources.append(source)

    def reserve(self) -> list[Reservation]:
        """Reserve blocks for requests that import KV, as `step` would, and return the orders for prefill pods."""
        known = len(self.scheduler.importing)
        self.scheduler.admit_imports()
        self._order_imports(known)
        return self._prefill_pods.take()

    def _collect(self, result: StepResult) -> None:
        """Wait for the oldest step and process its results."""
        if not self._in_flight:
            return
        step, results = self._in_flight.read()
        self._bound_chunks()
        for index, entries in results.prompt_logprobs.items():
            self._extend_prompt_logprobs(step, index, entries)
        finished, size, allocator = State.FINISHED, self.config.block_size, self.allocator
        for (sequence, count, end), choices in zip(step, results.choices, strict=True):
            if sequence.state is finished:
                continue
            if choices and choices[0].token == NOT_FINITE:
                # This comes before any KV of this step is cached. A decode pod does not use what was handed out early,
                # because it gets no first tokens.
                self.abort(sequence.request.id)
                result.broken.append(sequence.request.id)
                continue
            # Tokens after `end` belong to later steps, whose values may turn out not to be finite. `computed` is lower
            # for a sequence that was preempted and has lost its blocks.
            if min(end, sequence.computed) // size > sequence.settled:
                allocator.settle(sequence, end)
            if sequence.exports:
                result.exports += self._exports.hand_out(sequence, count, end, bool(choices), self.model.kv_layers)
            if choices:
                self._append(sequence, choices, result.deltas)
        self._exports.step_ended()

    def early_exports(self) -> list[Export]:
        """Return KV of exports in the oldest step in flight: the groups of layers of long prompts that no earlier call
        has returned. The device may still compute them; the fence of each Export marks their end."""
        if not self._in_flight:
            return []
        step, launched = self._in_flight.oldest
        return self._exports.hand_out_layers(step, *launched.layers_ready())

    def import_kv(self, id: int, generation: int, extent: Extent, values: torch.Tensor) -> bool | None:
        """Put KV from a source into a waiting request's blocks, in the current stream.

        values: bytes of the extent, as KvCache.gather writes them. Returns whether the request's KV is complete now.
        Returns None, and writes nothing, when the request does not wait for this extent, or no longer does.
        """

        def write(tables: list[list[int]], fence: Fence | None) -> None:
            if fence is not None:
                fence.wait()
            self.runner.cache.scatter(tables, extent, values)

        return self.import_by(id, generation, extent, write)

    def import_by(self, id: int, generation: int, extent: Extent, write: Write) -> bool | None:
        """As import_kv, but `write` puts the KV into the blocks of these tables, after the fence."""
        entry = self._imports.awaiting(id, generation, extent)
        if entry is None:
            return None
        write([table.blocks for table in entry.sequence.tables], entry.fence)
        entry.missing.remove(extent)
        self._start_import(entry)
        return not entry.missing

    def import_tokens(self, id: int, tokens: list[int]) -> None:
        """Note the first token of each choice, which a prefill pod has sampled and the client already has."""
        entry = self._imports.waiting.get(id)
        if entry is not None and entry.first_tokens is None:
            entry.first_tokens = tokens
            self._start_import(entry)

    def restart_import(self, id: int) -> None:
        """Order all missing KV of a request again. KV of the old order that arrives later is refused.

        Nothing happens when the request does not wait for KV or first tokens.
        """
        entry = self._imports.end(id)
        if entry is not None:
            self._order(entry.sequence, entry.first_tokens)

    def cancel_import(self, id: int) -> None:
        """Let this engine compute the KV that a source failed to bring. First tokens that did arrive are kept."""
        entry = self._imports.end(id)
        if entry is not None:
            self._compute(entry.sequence, entry.first_tokens)

    def _compute(self, sequence: Sequence, first_tokens: list[int] | None) -> None:
        """Queue an importing sequence anew, without a source."""
        id = sequence.request.id
        self.scheduler.remove(sequence)
        sequence.may_import = False
        # The other choices of a request that has forked continue unchanged.
        group = [sequence]
        if first_tokens is not None:
            self._fork(sequence, first_tokens)
            group = list(self._sequences[id])
        for choice in group:
            if choice.known > choice.given_len and (reason := choice.finish_reason()):
                self._end_imported(choice, reason)
            else:
                self.scheduler.add(choice)

    def load(self) -> Load:
        waiting = self.scheduler.waiting
        prefilling = [s for s in (*self.scheduler.running, *waiting) if not s.imports]
        return Load(
            running=len(self.scheduler.running),
            waiting=len(waiting) + len(self._compiling),
            blocks_held=self.pool.num_held,
            blocks_cached=self.pool.num_cached,
            queued_prefill_tokens=sum(s.known - s.computed for s in prefilling if s.computed + 1 < s.known),
            preemptions=self.scheduler.num_preemptions,
            prefix_queries=self.allocator.prefix_queries,
            prefix_hits=self.allocator.prefix_hits,
            blocks_pinned=self.allocator.export_blocks,
            step_tokens=self._step_tokens,
            prefill_rate=self.runner.times.prefill_rate,
            token_s=self.runner.times.token_s,
            pair_s=self.runner.times.pair_s,
            queued_prefill_work=sum(self.scheduler.work_left(s) for s in prefilling if s.computed + 1 < s.known),
            step_ratios=self.runner.times.ratios,
            compilations=self.runner.compilations,
        )

    def check_integrity(self) -> None:
        """Compare every counter with the objects that it counts. Raises RuntimeError on the first difference. Call this
        only while the engine is idle."""
        tables = {"import": self._imports.waiting.keys(), "export": self._exports.ids}
        check_integrity(self.allocator, self.scheduler, self._sequences, tables)

    def _bound_chunks(self) -> None:
        """Let the scheduler bound chunks by the present prediction of their time."""
        times = self.runner.times
        self.scheduler.context_cost, self.scheduler.step_cost = times.context_cost, times.step_cost
        self.scheduler.chunk_tokens = math.ceil(self.config.chunk_ms / 1e3 / times.token_s) if times.token_s else 0

    def _order_imports(self, known: int) -> bool:
        """Order the KV of the sequences that import, except the first `known`. Returns whether there are any."""
        sequences = self.scheduler.importing[known:]
        for sequence in sequences:
            self._order(sequence, None)
        return bool(sequences)

    def _order(self, sequence: Sequence, first_tokens: list[int] | None) -> None:
        if not self._imports.order(sequence, self.runner.fence(), first_tokens):
            self._compute(sequence, first_tokens)

    def _start_import(self, entry: Import) -> None:
        """Let a sequence run if its import is complete."""
        if not entry.complete:
            return
        sequence = entry.sequence
        self._imports.end(sequence.request.id)
        # The first step on this KV shows whether it is finite, and only then it enters the prefix cache.
        self.scheduler.end_import(sequence)
        if entry.first_tokens is None:
            self.scheduler.start(sequence)
            return
        self._fork(sequence, entry.first_tokens)
        for choice in list(self._sequences[sequence.request.id]):
            self.scheduler.start(choice)
            if (reason := choice.finish_reason()) in (FinishReason.STOP, FinishReason.LENGTH):
                self._end_imported(choice, reason)

    def _end_imported(self, sequence: Sequence, reason: FinishReason) -> None:
        """Finish a sequence that ends with its first token, which the client has. The client may not know the reason:
        a prefill pod of another version may judge the token differently."""
        self._ended.append(Delta(sequence.request.id, sequence.choice, sequence.output_len, [], [], reason))
        self._finish(sequence)

    def _fork(self, sequence: Sequence, tokens: list[int]) -> None:
        """Give each choice of a request its first token and its own sequence over shared blocks."""
        group = [sequence] + [sequence.fork(choice) for choice in range(1, len(tokens))]
        self.allocator.share(sequence, group[1:])
        for choice, token in zip(group, tokens, strict=True):
            choice.append(token)
        self._sequences[sequence.request.id] = group

    def _take_compiled(self, rejections: list[tuple[int, str, str]]) -> None:
        """Queue the requests whose grammar is compiled by now, and reject those whose grammar failed to compile."""
        for sequence, problem in self._compiling.take(idle=not (self.scheduler.has_work or self._in_flight)):
            grammar = sequence.sampling.grammar
            if not problem and self._masks.refuses(sequence):
                problem = "A grammar of this tenant has taken too long. Others of this kind are refused for a minute."
            if problem and grammar is not None:
                rejections.append((sequence.request.id, grammar.field, problem))
                self._finish(sequence)
            else:
                self.scheduler.add(sequence)

    def _extend_prompt_logprobs(self, step: Step, index: int, entries: list[TokenLogprobs]) -> None:
        """Add the logprobs of prompt tokens in a chunk to its sequence, except those that it already had before a
        preemption."""
        sequence, first = step.sequences[index], next(first for at, first in step.plan.prompt_logprobs if at == index)
        sequence.prompt_logprobs += entries[len(sequence.prompt_logprobs) + 1 - first :]

    def _append(self, sequence: Sequence, choices: list[Choice], deltas: list[Delta]) -> None:
        """Add the tokens sampled for a sequence, fork it at its first ones, and finish the choices that they end."""
        if sequence.known > sequence.given_len:
            sequence.append(choices[0].token)
            self._report(sequence, choices[0], deltas)
            return
        if sequence.exports:
            self._finish_export(sequence, choices, deltas)
            return
        self._fork(sequence, [choice.token for choice in choices])
        group = list(self._sequences[sequence.request.id])
        self.scheduler.split(sequence, group[1:])
        for member, choice in zip(group, choices, strict=True):
            self._report(member, choice, deltas)

    def _report(self, sequence: Sequence, choice: Choice, deltas: list[Delta]) -> None:
        """Report a sequence's newest token, and finish the sequence if the token ends it."""
        reason = sequence.finish_reason()
        deltas.append(delta_of(sequence, choice, reason))
        if reason:
            if reason is not FinishReason.ERROR and sequence.certain_tokens < sequence.output_len:
                self.scheduler.learn(sequence.output_len, reason is FinishReason.STOP)
            self._finish(sequence)

    def _finish_export(self, sequence: Sequence, choices: list[Choice], deltas: list[Delta]) -> None:
        """Finish an exporting request at its first tokens. Its blocks stay."""
        for index, choice in enumerate(choices):
            choice_sequence = sequence.fork(sequence.choice + index)
            choice_sequence.append(choice.token)
            choice_sequence.prompt_logprobs = sequence.prompt_logprobs
            deltas.append(delta_of(choice_sequence, choice, choice_sequence.finish_reason()))
        self.scheduler.export(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.abort(sequence.request.id, sequence.choice)
