"""Chooses the sequences of the next step: decodes first, then prefill chunks, under one token budget."""

import math
import time
from collections.abc import Callable

from .admitted import Admitted
from .block_allocator import BlockAllocator, NewBlock
from .sequence import Sequence, State
from .step import Step, new_rows
from .step_budget import StepBudget
from .step_sizes import StepSizes
from .step_times import prompt_work
from .waiting_queue import WaitingQueue

# In steps that also decode, the chunk of prompt tokens grows with the queue, so that _STEPS_TO_CATCH_UP steps compute
# all queued prompts. To bound the inter-token latency, it grows to at most _CHUNK_GROWTH times chunk_tokens. While
# others wait beside the longest prompt, it grows by as many tokens as these have, up to the whole longest prompt and
# _PROMPT_GROWTH times chunk_tokens, since all of them would wait for one more step. But the queue never takes more than
# _MOST_STEPS steps: a client that waits a second for its first token gains little from short gaps between tokens. The
# values were chosen with measured and simulated arrivals at 50 % to 100 % of what a device can serve. With smaller
# chunks prompts wait longer, with larger ones decodes do. The longest queued prompt does not count for _MOST_STEPS: no
# request waits behind it, since shorter prompts overtake it.
_STEPS_TO_CATCH_UP = 2
_CHUNK_GROWTH = 2
_PROMPT_GROWTH = 4
_MOST_STEPS = 24
# Chunks that grow for _MOST_STEPS have a limit too, so that many long prompts do not stall decodes.
_MOST_QUEUE_GROWTH = 8
# Shorter prompts overtake a longer one until about STRETCH times its own tokens have been admitted since it arrived. In
# pure order of arrival, each of them would wait until the whole long prompt is computed.
STRETCH = 8
# From some hundreds of tokens on, a device is busy, and twice as many tokens take about twice as long. So a step with
# this many tokens of prompts, all of which end in it, only gets as many tokens of a further prompt as cost little. More
# of them would only delay the first tokens.
_FULL_STEP_TOKENS = 512


class Scheduler:
    """The waiting and running sequences of a block pool, the most urgent first.

    A sequence gets the blocks for all its known tokens when it is admitted, so that only decodes need further ones. It
    waits while the admitted sequences are expected to grow into these blocks (KvGrowth). If no block is left for a
    decode, the least urgent running sequence is preempted: it loses its blocks and is recomputed later.

    Tenants take turns (WaitingQueue). A tenant that holds more than its share of the rows or blocks loses some to a
    waiting tenant below its share (Admitted).
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
        prefill_only: bool = False,
        reach: Callable[[Sequence, Callable[[], int]], int] = lambda sequence, cached: 0,
        stages: int = 1,
    ) -> None:
        """max_export_blocks: blocks that all exports may hold before further exports wait; a single one may hold more.

        chunk_tokens: the most work of prompts in a step, in tokens without context; 0 = as many as fit. With
        prefill_only it bounds every step. Otherwise it bounds steps that also decode, and grows while many tokens are
        queued. prefill_only: as in EngineConfig. reach: as Imports.reach. stages: as in Executor; each step decodes
        1 / stages of the sequences.
        """
        self.allocator = allocator
        self.pool = allocator.pool
        self._admitted = Admitted(allocator, max_num_seqs)
        self._queue = WaitingQueue(self._admitted.held)
        # The same lists under shorter names. Only the queue and Admitted change them.
        self.waiting = self._queue.sequences
        self.running, self.importing = self._admitted.running, self._admitted.importing
        self.num_preemptions = 0
        self._block_size = block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._max_export_blocks = max_export_blocks
        self.chunk_tokens = chunk_tokens
        # Chunks are bounded in time. Each token of context makes a prompt token take longer by this part.
        self.context_cost = 0.0
        self.step_cost = math.inf  # what a step costs beside its tokens, in prompt tokens; inf = unknown
        self.sizes = StepSizes()
        self._prefill_only = prefill_only
        self._reach = reach
        self._stages = stages
        self._growth = 1.0  # of the chunk, for the prompts that are queued now
        self._admitted_tokens = 0  # tokens of the prompts admitted since the start

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def learn(self, tokens: int, ended: bool) -> None:
        """Note how long an answer was. ended: by itself; False = at its limit."""
        self._admitted.lengths.add(tokens, ended)

    @property
    def step_tokens(self) -> int:
        """The most tokens of a step without decodes, if they have no context."""
        bounded = self._prefill_only and self.chunk_tokens
        return min(self.chunk_tokens, self._max_num_batched_tokens) if bounded else self._max_num_batched_tokens

    def add(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        # A sequence that has forked since it was last scheduled has one token more than num_tokens counts.
        sequence.num_tokens = max(sequence.num_tokens, sequence.known)
        if sequence.queue_place < 0:
            sequence.queue_place = self._admitted_tokens + STRETCH * sequence.known
        sequence.import_end = self._reach(sequence, lambda: self.allocator.cached_tokens(sequence))
        self._queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence in any state and free its blocks."""
        if sequence.state is State.WAITING:
            self._queue.remove(sequence)
        elif sequence.state in (State.RUNNING, State.IMPORTING):
            self._admitted.remove(sequence)
        self.allocator.free(sequence)
        sequence.state, sequence.computed = State.FINISHED, 0

    def export(self, sequence: Sequence) -> None:
        """Stop a sequence that has finished here. Its blocks stay until another pod has received their KV."""
        self._admitted.remove(sequence)
        sequence.state = State.EXPORTED

    def start(self, sequence: Sequence) -> None:
        """Give a sequence that has its blocks a row and let it run."""
        sequence.state = State.RUNNING
        sequence.num_tokens = max(sequence.num_tokens, sequence.known)
        sequence.began_at = sequence.began_at or time.monotonic()
        self._admitted.add(sequence)

    def split(self, sequence: Sequence, others: list[Sequence]) -> None:
        """Let the other choices of a request run beside the first one, or wait like it. They have just forked."""
        if sequence.state is State.RUNNING:
            self._admitted.split(sequence)
            for other in others:
                self.start(other)
        else:
            for other in others:
                self.add(other)

    def end_import(self, sequence: Sequence) -> None:
        """Note that all KV of a sequence has been imported. The caller still has to start it."""
        self._admitted.remove(sequence)
        sequence.computed, sequence.import_end = sequence.import_end, 0

    def schedule(self) -> Step:
        """Return the next step. The `computed` of its sequences already counts the step's tokens. Sequences that import
        KV are not part of it: they get their blocks here and move to `importing`."""
        self._make_room()
        self._admitted.begin_step(bool(self.waiting))
        decodes: list[Sequence] = []
        chunks: list[Sequence] = []
        copies: list[tuple[int, int]] = []
        new_blocks: list[NewBlock] = []
        running, size, budget = State.RUNNING, self._block_size, StepBudget(self._max_num_batched_tokens, self.sizes)
        # Each stage of a pipeline works on a different step, and a decoding sequence is in one step at a time.
        most_decodes = min(budget.tokens, -(-len(self.running) // self._stages))
        for sequence in self.running.copy():
            computed = sequence.computed
            # A chunk with only a prompt's last token is no decode, since all choices of the request are drawn after it.
            if sequence.num_tokens - computed > 1 or (sequence.splits and sequence.num_tokens == sequence.given_len):
                chunks.append(sequence)
            elif (
                sequence.state is running
                and len(decodes) < most_decodes
                and not sequence.ends_here
                and not (self._stages > 1 and sequence.pending)
                # A block can only be missing at a block's first token, and only be shared after a fork.
                and ((computed % size and sequence.shared is None) or self._grow(sequence, copies, new_blocks))
            ):
                sequence.computed = computed + 1
                sequence.num_tokens += 1
                decodes.append(sequence)
        step = Step.decode(decodes)
        step.plan.copies, step.plan.new_blocks = copies, new_blocks
        if self.chunk_tokens and (decodes or self._prefill_only):
            work = self.chunk_tokens if self._prefill_only else self._prompt_work(chunks)
            budget.limit_prompts(work, self.context_cost)
        for sequence in chunks:
            if sequence.state is running:
                self._admit(step, budget, sequence)
                if self._is_worth_joining(step, sequence, 1 + len(self.waiting)):
                    self._schedule_chunk(sequence, step, budget)
        self.admit_imports()
        self._admit(step, budget)
        if self._admitted.new_rows and step.sequences:
            step.plan.new_rows = new_rows(list(self._admitted.new_rows.values()))
            self._admitted.new_rows.clear()
        return step

    def admit_imports(self) -> None:
        """Give sequences that import KV their blocks, which can happen between steps as they take no part in one.

        They overtake more urgent prompts that wait for a step, but leave them the blocks and rows that these will need.
        """
        if not self._queue.imports:
            return
        rows, claimed = self._admitted.rows_left, 0
        for sequence in self._queue.in_turn():
            rows -= sequence.rows_needed
            if rows < 0:
                return
            if not sequence.imports:
                claimed += self.allocator.most_blocks(sequence.known)
            elif sequence.pending or not self._take_blocks(sequence, claimed):
                return
            else:
                self._queue.remove(sequence)
                self._admitted_tokens += sequence.known
                sequence.state = State.IMPORTING
                self._admitted.add(sequence)

    def work_left(self, sequence: Sequence) -> float:
        """Return the work of the tokens of a prompt that are not computed yet, in tokens without context."""
        return prompt_work(self.context_cost, sequence.computed, sequence.num_tokens - sequence.computed)

    def _prompt_work(self, chunks: list[Sequence]) -> float:
        """Return the work of prompts for a step that also decodes, in tokens without context. It never falls while
        prompts are queued."""
        enough = _MOST_STEPS * self.chunk_tokens * _MOST_QUEUE_GROWTH
        works = [self.work_left(sequence) for sequence in chunks]
        queued, longest = sum(works), max(works, default=0.0)
        half = self.context_cost / 2
        for sequence in self.waiting:
            if queued - longest >= enough:
                break
            if not sequence.imports:
                # The same as work_left, inlined because thousands of prompts may wait.
                tokens = sequence.num_tokens
                work = tokens + half * tokens * tokens
                queued += work
                if work > longest:
                    longest = work
        if not queued:
            self._growth = 1.0
        chunk, others = self.chunk_tokens, queued - longest
        least = chunk * _CHUNK_GROWTH
        most = max(least, min(least + others, longest, chunk * _PROMPT_GROWTH))
        soon = min(math.ceil(queued / _STEPS_TO_CATCH_UP), most)
        late = min(others // _MOST_STEPS, chunk * _MOST_QUEUE_GROWTH)
        self._growth = max(self._growth, soon / chunk, late / chunk)
        return self._growth * chunk

    def _grow(self, sequence: Sequence, copies: list[tuple[int, int]], new_blocks: list[NewBlock]) -> bool:
        """Give a decode the blocks that its next token needs. Return False if the decode itself was preempted."""
        while len(lacking := self.allocator.lacking(sequence)) > self.pool.num_available:
            victim = self._admitted.victim(sequence)
            self._preempt(victim)
            if victim is sequence:
                return False
        if lacking:
            copied, new = self.allocator.grow(sequence, lacking)
            copies += copied
            new_blocks += new
        return True

    def _schedule_chunk(self, sequence: Sequence, step: Step, budget: StepBudget) -> bool:
        """Let a step compute as many tokens of a prompt as fit. Return False if it computes none."""
        missing = sequence.num_tokens - sequence.computed
        count = budget.chunk(step, sequence.computed, missing)
        filling = count < missing and _is_full_of_prompts(step)
        if filling:
            count = min(budget.filling(step), missing)
        if sequence.exports and missing == count and not self._export_draws_fit(sequence, step):
            return False
        if count > 0 and self.allocator.windowed:
            end, new = self.allocator.extend(sequence, sequence.computed + count)
            step.plan.new_blocks += new
            # Blocks that the window has left behind may still be held by others that know the same prefix.
            count = min(count, end - sequence.computed)
        if count <= 0:
            return False
        draws = len(sequence.choices) if count == missing else 0
        budget.take(sequence.computed, count)
        sequence.computed += count
        if draws:
            sequence.num_tokens += 1
        step.put(sequence, count, draws)
        if filling:
            budget.close()
        return True

    def _export_draws_fit(self, sequence: Sequence, step: Step) -> bool:
        """Whether a step may sample the first tokens of one more export. The choices of exports take no rows, so they
        need a limit of their own."""
        draws = step.exported_choices
        return not draws or draws + len(sequence.choices) <= self._max_num_seqs

    def _admit(self, step: Step, budget: StepBudget, before: Sequence | None = None) -> None:
        """Start prompts that are more urgent than `before` while there is room in the step."""
        if not self.waiting:
            return
        rows = self._admitted.rows_left
        while self.waiting and budget.room(step, 0) > 0:
            sequence = self._queue.first()
            # A queued sequence that imports KV waits for blocks, which less urgent sequences must not take.
            if sequence.imports or (before is not None and sequence.order > before.order):
                return
            rows -= sequence.rows_needed
            if not self._is_worth_joining(step, sequence, len(self.waiting)):
                return
            if sequence.pending or rows < 0 or self._exports_are_full(sequence) or not self._take_blocks(sequence):
                return
            self._queue.remove(sequence)
            self._admitted_tokens += sequence.known
            self.start(sequence)
            # A sequence that has its blocks before a step has room for it only makes the next steps look at it.
            if not self._schedule_chunk(sequence, step, budget):
                return

    def _is_worth_joining(self, step: Step, sequence: Sequence, queued: int) -> bool:
        """Whether the sum of all waits is smaller if a prompt joins this step instead of the next one.

        If it joins, the prompts that end in this step wait for its tokens, as far as they make the step longer. But the
        `queued` prompts, this one included, wait for one step less.
        """
        if not self._prefill_only or not any(step.plan.draws):
            return True
        ending, tokens = sum(map(bool, step.plan.draws)), step.plan.num_tokens
        # A prompt that waits has not been looked up in the prefix cache yet.
        computed = sequence.computed or self.allocator.cached_tokens(sequence)
        work = prompt_work(self.context_cost, computed, sequence.num_tokens - computed)
        work = min(work, self.chunk_tokens or math.inf)
        longer = max(tokens + work - max(tokens, _FULL_STEP_TOKENS), 0)
        return ending * longer <= queued * self.step_cost

    def check_integrity(self) -> None:
        """Raise RuntimeError if a count of waiting or admitted sequences is wrong."""
        self._queue.check_integrity()
        self._admitted.check_integrity()

    @property
    def _tenants(self) -> int:
        """The number of tenants with admitted or waiting sequences."""
        return len(self._admitted.held.keys() | self._queue.by_tenant.keys())

    def _make_room(self) -> None:
        """Let the waiting sequence whose turn it is have rows and blocks that another tenant holds beyond its share.

        Without this, a tenant whose answers are long could keep all the others waiting until these end.
        """
        tenants = self._tenants
        if tenants < 2 or not self.waiting:
            return
        sequence = self._queue.first()
        if not sequence.pending:
            for victim in self._admitted.beyond_share(sequence, tenants):
                self._preempt(victim)

    def _exports_are_full(self, sequence: Sequence) -> bool:
        """Whether an export must wait until decode pods have received the KV of other exports."""
        held = self.allocator.export_blocks
        if not sequence.exports or not held:
            return False
        return held + self.allocator.most_blocks(sequence.known) > self._max_export_blocks

    def _take_blocks(self, sequence: Sequence, claimed: int = 0) -> bool:
        """Give a sequence the blocks that it needs to run; False if too few are left.

        claimed: blocks that more urgent sequences will need.
        """
        margin = self._admitted.margin_for(sequence, self._tenants)
        if not self.allocator.take(sequence, margin + claimed):
            return False
        sequence.computed = sequence.cached
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self.remove(sequence)
        self.add(sequence)


def _is_full_of_prompts(step: Step) -> bool:
    """Whether a step has enough tokens of prompts, all of which end in it."""
    plan = step.plan
    return plan.num_tokens - plan.decodes >= _FULL_STEP_TOKENS and all(plan.draws)
