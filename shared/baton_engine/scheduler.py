"""Who computes what in the next step: decodes first, then prefill chunks, under one token budget."""

import heapq

from .block_pool import BlockPool
from .sequence import Sequence, State, Step


class Scheduler:
    """Waiting and running sequences over a block pool.

    Blocks for all known tokens are taken when a sequence is admitted, so that only decodes ever grow; when one cannot,
    the least urgent running sequence gives its blocks back and is computed anew later.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.pool = pool
        self.running: list[Sequence] = []
        self.importing: list[Sequence] = []
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._block_size = block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._waiting: list[tuple[tuple[int, int, int], Sequence]] = []

    @property
    def waiting(self) -> list[Sequence]:
        return [sequence for _, sequence in self._waiting]

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its state, and free its blocks."""
        if sequence.state is State.WAITING:
            self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]
            heapq.heapify(self._waiting)
        elif sequence.state is State.RUNNING:
            self._stop(sequence)
        elif sequence.state is State.IMPORTING:
            self.importing.remove(sequence)
        self._free(sequence)
        sequence.state = State.FINISHED

    def export(self, sequence: Sequence) -> None:
        """Take a sequence out that has finished here and whose blocks another pod is still to get."""
        self._stop(sequence)
        sequence.state = State.EXPORTED

    def start(self, sequence: Sequence) -> None:
        """Let a sequence run whose KV is in its blocks."""
        sequence.state = State.RUNNING
        sequence.row = self._free_rows.pop()
        sequence.admissions += 1
        self.running.append(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        sequence.row = -1

    def schedule(self) -> Step:
        """Return the next step, with `computed` of its sequences already advanced; sequences that import KV only get
        their blocks here and appear in `importing`."""
        step = Step()
        self.running.sort(key=lambda sequence: sequence.order)
        for sequence in list(self.running):
            if sequence.state is State.RUNNING and sequence.num_tokens - sequence.computed == 1:
                self._schedule_decode(sequence, step)
        for sequence in self.running:
            if sequence.num_tokens - sequence.computed > 1:
                self._schedule_chunk(sequence, step)
        self._admit(step)
        return step

    def _schedule_decode(self, sequence: Sequence, step: Step) -> None:
        if step.num_tokens >= self._max_num_batched_tokens or self._ends_here(sequence):
            return
        index = sequence.computed // self._block_size

        def needs_block() -> bool:
            return index == len(sequence.blocks) or self.pool.is_shared(sequence.blocks[index])

        while needs_block() and not self.pool.num_available:
            # An export's blocks may be on their way already, so it keeps them; it needs no more.
            victim = max((s for s in self.running if s.request.exports_from is None), key=lambda other: other.order)
            self._preempt(victim)
            if victim is sequence:
                return
        if index == len(sequence.blocks):
            sequence.blocks += self.pool.allocate(1)
        elif self.pool.is_shared(sequence.blocks[index]):
            [copy] = self.pool.allocate(1)
            step.copies.append((sequence.blocks[index], copy))
            self.pool.release([sequence.blocks[index]])
            sequence.blocks[index] = copy
        step.put(sequence, 1)

    def _ends_here(self, sequence: Sequence) -> bool:
        """Whether the step under way gives the sequence's last token, or one that must be known before it goes on."""
        return sequence.is_complete or (sequence.pending > 0 and sequence.num_tokens >= self._max_model_len)

    def _schedule_chunk(self, sequence: Sequence, step: Step) -> None:
        count = min(sequence.num_tokens - sequence.computed, self._max_num_batched_tokens - step.num_tokens)
        if count > 0:
            step.put(sequence, count)

    def _admit(self, step: Step) -> None:
        while self._waiting and step.num_tokens < self._max_num_batched_tokens:
            sequence = self._waiting[0][1]
            width = sequence.sampling.n if sequence.output_len == 0 else 1
            if sequence.pending:
                return
            if self._num_seqs() + width > self._max_num_seqs or not self._take_blocks(sequence):
                return
            heapq.heappop(self._waiting)
            if sequence.request.imports_kv:
                sequence.state = State.IMPORTING
                self.importing.append(sequence)
            else:
                self.start(sequence)
                self._schedule_chunk(sequence, step)

    def _num_seqs(self) -> int:
        return sum(s.sampling.n if s.output_len == 0 else 1 for s in (*self.running, *self.importing))

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Give a sequence the blocks for all its tokens, known prefixes from the cache; False if too few are left."""
        known = len(sequence.tokens)
        cached: list[int] = []
        # Prompt logprobs need the logits of every prompt token, so none may be skipped.
        reads_cache = sequence.sampling.prompt_logprobs is None or sequence.request.imports_kv or sequence.output_len
        if self.pool.enable_prefix_caching and reads_cache:
            # The last token is always computed: its logits choose the next one.
            cached = self.pool.match(sequence.hashes((known - 1) // self._block_size))
        self.pool.hold(cached)
        missing = sequence.blocks_for(known) - len(cached)
        # Each running sequence may need a block soon: admitting into that margin would only lead to preemption.
        if missing + len(self.running) > self.pool.num_available and (
            self.running or missing > self.pool.num_available
        ):
            self.pool.release(cached)
            return False
        self.prefix_queries += known
        self.prefix_hits += len(cached) * self._block_size
        sequence.blocks = cached + self.pool.allocate(missing)
        sequence.computed = sequence.cached = len(cached) * self._block_size
        sequence.remembered = len(cached)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._stop(sequence)
        self._free(sequence)
        self.add(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.remembered = 0
