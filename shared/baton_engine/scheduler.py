"""Who computes what in the next step: decodes first, then prefill chunks, under one token budget."""

import time
from bisect import bisect_left, insort
from operator import attrgetter

from .block_allocator import BlockAllocator, NewBlock
from .sequence import Sequence, State
from .step import Step, new_rows

_ORDER = attrgetter("order")
# Beside decodes, prompts that are queued get so many steps if decodes wait at most so many times as long, and never
# more steps than _MOST_STEPS: who waits for a second gains little from short gaps between tokens. From arrivals,
# measured and simulated, at a half to all of what a device can carry: with smaller chunks prompts wait, and with larger
# ones decodes.
_STEPS_TO_CATCH_UP = 2
_MOST_PATIENCE = 2
_MOST_STEPS = 24
# Shorter prompts overtake a longer one until about so many times its tokens have been admitted since it came: in order
# of arrival alone, all of them would wait for the whole of it.
STRETCH = 8
# Tokens of prompts that end in a step and are worth one without a part of another that would only make them wait: from
# some hundreds on a device is busy, and twice as many take twice as long.
_WORTH_A_STEP = 512


class Scheduler:
    """Waiting and running sequences over a block pool, the most urgent first.

    Blocks for all known tokens are taken when a sequence is admitted, so that only decodes ever grow; when one cannot,
    the least urgent running sequence gives its blocks back and is computed anew later.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_export_blocks: int,
        chunk_tokens: int = 0,
    ) -> None:
        """max_export_blocks: what exports may hold together before the next ones wait; a lone one may hold more.

        chunk_tokens: prompt tokens of a step that also decodes, while few are queued; 0 = as many as fit in.
        """
        self.allocator = allocator
        self.pool = allocator.pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.importing: list[Sequence] = []
        self.imports_waiting = 0  # sequences in `waiting` that import KV
        self.num_preemptions = 0
        self._block_size = block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._max_export_blocks = max_export_blocks
        self.chunk_tokens = chunk_tokens
        self._burst_chunk = chunk_tokens  # for the prompts that are queued now
        self._admitted_tokens = 0  # of prompts, since the start
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._new_rows: dict[int, Sequence] = {}  # rows that no plan has told of yet

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        # One that has forked since it was scheduled last has a token more than the scheduler knows of.
        sequence.num_tokens = max(sequence.num_tokens, sequence.known)
        if sequence.due < 0:
            sequence.due = self._admitted_tokens + STRETCH * sequence.known
        insort(self.waiting, sequence, key=_ORDER)
        self.imports_waiting += sequence.request.imports_kv

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its state, and free its blocks."""
        if sequence.state is State.WAITING:
            self._leave_queue(sequence)
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
        sequence.num_tokens = max(sequence.num_tokens, sequence.known)
        sequence.row = self._free_rows.pop()
        sequence.began_at = sequence.began_at or time.monotonic()
        self._new_rows[sequence.row] = sequence
        insort(self.running, sequence, key=_ORDER)

    def end_import(self, sequence: Sequence) -> None:
        """Note that all KV of a sequence has been imported. It is still to be started."""
        self.importing.remove(sequence)
        sequence.computed = sequence.given_len

    def _stop(self, sequence: Sequence) -> None:
        _take_out(self.running, sequence)
        self._new_rows.pop(sequence.row, None)
        self._free_rows.append(sequence.row)
        sequence.row = -1

    def schedule(self) -> Step:
        """Return the next step, with `computed` of its sequences already advanced; sequences that import KV only get
        their blocks here and appear in `importing`."""
        decodes: list[Sequence] = []
        chunks: list[Sequence] = []
        copies: list[tuple[int, int]] = []
        new_blocks: list[NewBlock] = []
        running, budget, size = State.RUNNING, self._max_num_batched_tokens, self._block_size
        for sequence in self.running.copy():
            computed = sequence.computed
            # After a prompt's last token all choices of the request are drawn, which makes it no decode.
            if sequence.num_tokens - computed > 1 or (sequence.splits and sequence.num_tokens == sequence.given_len):
                chunks.append(sequence)
            elif (
                sequence.state is running
                and len(decodes) < budget
                and not sequence.ends_here
                # Only at the beginning of a block, or after a fork, can a block be missing or have other readers.
                and ((computed % size and sequence.shared is None) or self._grow(sequence, copies, new_blocks))
            ):
                sequence.computed = computed + 1
                sequence.num_tokens += 1
                decodes.append(sequence)
        step = Step.decode(decodes)
        step.plan.copies, step.plan.new_blocks = copies, new_blocks
        if decodes and self.chunk_tokens:
            budget = min(budget, len(decodes) + self._prompt_tokens(chunks))
        for sequence in chunks:
            if sequence.state is running:
                self._admit(step, budget, sequence)
                self._schedule_chunk(sequence, step, budget)
        self.admit_imports()
        self._admit(step, budget)
        if self._new_rows and step.sequences:
            step.plan.new_rows = new_rows(list(self._new_rows.values()))
            self._new_rows = {}
        return step

    def admit_imports(self) -> None:
        """Give sequences that import KV their blocks, which takes no place in a step and need not wait for one.

        They pass more urgent prompts that do, but leave them the blocks and rows that they will need.
        """
        rows, claimed = self._rows_left(), 0
        for sequence in self.waiting.copy() if self.imports_waiting else ():
            rows -= sequence.width
            if rows < 0:
                return
            if not sequence.request.imports_kv:
                claimed += self.allocator.most_blocks(sequence.known)
            elif sequence.pending or not self._take_blocks(sequence, claimed):
                return
            else:
                self._leave_queue(sequence)
                self._admitted_tokens += sequence.known
                sequence.state = State.IMPORTING
                self.importing.append(sequence)

    def _prompt_tokens(self, chunks: list[Sequence]) -> int:
        """Return how many prompt tokens to compute beside decodes; while prompts are queued it grows or stays."""
        enough = _MOST_STEPS * self._max_num_batched_tokens
        queued = sum(sequence.num_tokens - sequence.computed for sequence in chunks)
        for sequence in self.waiting:
            if queued >= enough:
                break
            if not sequence.request.imports_kv:
                queued += sequence.known
        if not queued:
            self._burst_chunk = self.chunk_tokens
        soon = min(-(-queued // _STEPS_TO_CATCH_UP), self.chunk_tokens * _MOST_PATIENCE)
        self._burst_chunk = max(self._burst_chunk, soon, queued // _MOST_STEPS)
        return self._burst_chunk

    def _grow(self, sequence: Sequence, copies: list[tuple[int, int]], new_blocks: list[NewBlock]) -> bool:
        """Give a decode the blocks that its next token needs; False when it is the one to be preempted."""
        while len(lacking := self.allocator.lacking(sequence)) > self.pool.num_available:
            # An export's blocks may be on their way already, so it keeps them; it needs no more.
            victim = next(other for other in reversed(self.running) if not other.exports)
            self._preempt(victim)
            if victim is sequence:
                return False
        if lacking:
            copied, new = self.allocator.grow(sequence, lacking)
            copies += copied
            new_blocks += new
        return True

    def _schedule_chunk(self, sequence: Sequence, step: Step, budget: int) -> None:
        missing, room = sequence.num_tokens - sequence.computed, budget - step.plan.num_tokens
        if sequence.exports and missing <= room and not self._draws_fit(sequence, step):
            return
        if 0 < missing <= room or (room > 0 and not _is_complete(step)):
            count = min(missing, room)
            if self.allocator.windowed:
                end, new = self.allocator.extend(sequence, sequence.computed + count)
                step.plan.new_blocks += new
                # Blocks that the window has left behind may still be held by others that know the same prefix.
                count = min(count, end - sequence.computed)
                if not count:
                    return
            draws = len(sequence.choices) if count == missing else 0
            sequence.computed += count
            if draws:
                sequence.num_tokens += 1
            step.put(sequence, count, draws)

    def _draws_fit(self, sequence: Sequence, step: Step) -> bool:
        """Whether a step may sample the first tokens of one more export. Their choices take no rows, so that rows do
        not bound them."""
        draws = step.exported_choices
        return not draws or draws + len(sequence.choices) <= self._max_num_seqs

    def _admit(self, step: Step, budget: int, before: Sequence | None = None) -> None:
        """Start prompts that are more urgent than `before` while there is room in the step."""
        if not self.waiting:
            return
        rows = self._rows_left()
        while self.waiting and step.plan.num_tokens < budget:
            sequence = self.waiting[0]
            # One that imports KV and is still here waits for blocks; what is less urgent must not take them.
            if sequence.request.imports_kv or (before is not None and sequence.order > before.order):
                return
            rows -= sequence.width
            if sequence.pending or rows < 0 or self._exports_too_much(sequence) or not self._take_blocks(sequence):
                return
            del self.waiting[0]
            self._admitted_tokens += sequence.known
            self.start(sequence)
            self._schedule_chunk(sequence, step, budget)

    def _leave_queue(self, sequence: Sequence) -> None:
        _take_out(self.waiting, sequence)
        self.imports_waiting -= sequence.request.imports_kv

    def _rows_left(self) -> int:
        return self._max_num_seqs - sum(sequence.width for sequence in (*self.running, *self.importing))

    def _exports_too_much(self, sequence: Sequence) -> bool:
        """Whether a sequence must wait because decode pods have yet to take what others left for them."""
        held = self.allocator.export_blocks
        if not sequence.exports or not held:
            return False
        return held + self.allocator.most_blocks(sequence.known) > self._max_export_blocks

    def _take_blocks(self, sequence: Sequence, claimed: int = 0) -> bool:
        """Give a sequence the blocks that it needs to run; False if too few are left.

        claimed: blocks that others will need before.
        """
        # Each running sequence may need blocks soon: admitting into that margin would only lead to preemption.
        margin = len(self.running) * self.allocator.num_groups + claimed
        if not self.allocator.take(sequence, margin):
            return False
        sequence.computed = sequence.cached
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._stop(sequence)
        self._free(sequence)
        self.add(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.allocator.free(sequence)
        sequence.computed = 0


def _is_complete(step: Step) -> bool:
    """Whether only prompts end in a step, and enough of them."""
    plan = step.plan
    return plan.num_tokens >= _WORTH_A_STEP and all(plan.draws) and plan.counts[0] > 1


def _take_out(queue: list[Sequence], sequence: Sequence) -> None:
    """Remove a sequence from a list in which each stands at the place of its order."""
    del queue[bisect_left(queue, sequence.order, key=_ORDER)]
