"""The sequences that have been admitted, their rows, and which of them are preempted for others."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from .answer_lengths import AnswerLengths
from .block_allocator import BlockAllocator
from .kv_growth import KvGrowth, most_growth
from .sequence import Sequence, State
from .waiting_queue import ORDER, remove_sorted

# A prediction of growth of an earlier step is made anew after so many uses, as sequences have grown since.
_GROWTH_USES = 16


class Admitted:
    """The sequences that have their blocks: those that run, each in a row, and those whose KV a source brings.

    running: the most urgent first. importing: in order of admission. new_rows: the running sequences whose rows are not
    in any plan's new_rows yet, by row. held: the rows of each tenant that has any sequences here, including the
    rows that are kept for choices which have not forked yet.

    Tenants have equal shares of the rows and blocks. A tenant may hold more while no tenant below its share waits.

    lengths: of the answers that have ended, from which the growth of the others is predicted.
    """

    def __init__(self, allocator: BlockAllocator, max_num_seqs: int) -> None:
        self.running: list[Sequence] = []
        self.importing: list[Sequence] = []
        self.new_rows: dict[int, Sequence] = {}
        self.held: Counter[bytes] = Counter()
        self.lengths = AnswerLengths()
        self._allocator = allocator
        self._max_num_seqs = max_num_seqs
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._growth: KvGrowth | None = None
        self._tenant_blocks: Counter[bytes] | None = None  # counted in this step
        self._growth_uses = 0
        self._growth_is_new = False  # whether the prediction was made for this step
        self._most_growth = 0  # tokens that all sequences could get when they were added
        self._predicted_growth = 0  # the same when the prediction was made

    @property
    def rows_left(self) -> int:
        return self._max_num_seqs - self.held.total()

    @property
    def margin(self) -> int:
        """Blocks that running sequences may need soon. To admit others into them would only lead to preemption."""
        return len(self.running) * self._allocator.num_groups

    def margin_for(self, sequence: Sequence, tenants: int) -> int:
        """Return the blocks that must stay available when a sequence is admitted, for the growth of all sequences.

        If too many were admitted, some of them would be preempted as all grow, and a preempted sequence is computed
        again. A tenant below its share need not wait for others to end. tenants: those with admitted or waiting
        sequences.
        """
        pool, blocks = self._allocator.pool, self._allocator.most_blocks(sequence.known)
        block_tokens = self._allocator.block_tokens
        most = self._most_growth + most_growth(sequence) * sequence.rows_needed
        if not (self.running or self.importing) or pool.num_available >= blocks + most / block_tokens:
            return self.margin
        if tenants > 1:
            if self._tenant_blocks is None:
                self._tenant_blocks = self._count_tenant_blocks()
            if self._tenant_blocks[sequence.tenant] + blocks <= pool.num_blocks / tenants:
                return self.margin
        # A prediction is for the times at which the sequences that it was made for hold the most. Once others may get
        # more tokens than those, it needs the times of all.
        is_old = self._growth_uses >= _GROWTH_USES and not self._growth_is_new
        if self._growth is None or is_old or self._most_growth > 2 * self._predicted_growth:
            self._growth = KvGrowth(self.lengths, (*self.running, *self.importing), block_tokens)
            self._growth_uses, self._growth_is_new, self._predicted_growth = 0, True, self._most_growth
        self._growth_uses += 1
        return max(self.margin, self._growth.most_with(sequence))

    def begin_step(self, waiting: bool) -> None:
        """Note that sequences have grown by a token. waiting: whether a prediction of their growth is of use."""
        self._growth_is_new, self._tenant_blocks = False, None
        if not waiting:
            self._growth = None

    def add(self, sequence: Sequence) -> None:
        """Add a sequence whose state says that it runs or imports."""
        if sequence.state is State.RUNNING:
            sequence.row = self._free_rows.pop()
            self.new_rows[sequence.row] = sequence
            insort(self.running, sequence, key=ORDER)
        else:
            self.importing.append(sequence)
        sequence.rows_held = sequence.rows_needed
        self.held[sequence.tenant] += sequence.rows_held
        sequence.may_grow = most_growth(sequence) * sequence.rows_held
        self._most_growth += sequence.may_grow
        if self._growth is not None:
            self._growth.add(sequence)
        if self._tenant_blocks is not None:
            self._tenant_blocks[sequence.tenant] += sequence.num_blocks

    def split(self, sequence: Sequence) -> None:
        """Give back the rows that were kept for the other choices of a running sequence. They have forked now, and the
        caller adds them."""
        self.held[sequence.tenant] -= sequence.rows_held - 1
        self._most_growth -= sequence.may_grow * (sequence.rows_held - 1) // sequence.rows_held
        sequence.may_grow //= sequence.rows_held
        sequence.rows_held = 1
        self._growth = None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence whose state has not changed since it was added."""
        if sequence.state is State.RUNNING:
            remove_sorted(self.running, sequence)
            self.new_rows.pop(sequence.row, None)
            self._free_rows.append(sequence.row)
            sequence.row = -1
        else:
            self.importing.remove(sequence)
        self._most_growth -= sequence.may_grow
        if self._growth is not None:
            self._growth.remove(sequence)
        if self._tenant_blocks is not None:
            self._tenant_blocks[sequence.tenant] -= sequence.num_blocks
        self.held[sequence.tenant] -= sequence.rows_held
        if not self.held[sequence.tenant]:
            del self.held[sequence.tenant]

    def victim(self, sequence: Sequence) -> Sequence:
        """Return the running sequence to preempt for a block of a decode: that decode or a less urgent one.

        It has the least urgent priority and, among those, belongs to the tenant with the most rows. An export is
        never preempted, as its KV may be in transfer already, and it needs no further blocks.
        """
        if len(self.held) < 2:
            return next(other for other in reversed(self.running) if not other.exports)
        others = reversed(self.running[bisect_left(self.running, sequence.order, key=ORDER) :])
        less_urgent = (other for other in others if not other.exports)
        return max(less_urgent, key=lambda other: (other.request.priority, self.held[other.tenant]))

    def beyond_share(self, sequence: Sequence, tenants: int) -> Iterator[Sequence]:
        """Yield running sequences to preempt for a waiting one, the least urgent first, until the waiting one fits.

        Their tenants are above their shares. There are none if the waiting one would bring its own tenant above its
        share. The caller preempts each before it takes the next. tenants: those with admitted or waiting sequences.
        """
        pool, rows, blocks = self._allocator.pool, sequence.rows_needed, self._allocator.most_blocks(sequence.known)
        rows_left = self.rows_left
        # What is scarce is shared: rows, or else blocks.
        rows_are_scarce = rows_left < rows

        def fits() -> bool:
            return rows_left >= rows if rows_are_scarce else pool.num_available >= blocks + self.margin

        if fits():
            return
        held, wanted, share = self.held.copy(), rows, self._max_num_seqs / tenants
        if not rows_are_scarce:
            held, wanted, share = self._count_tenant_blocks(), blocks, pool.num_blocks / tenants
        if held[sequence.tenant] + wanted > share:
            return
        for victim in [other for other in reversed(self.running) if not other.exports]:
            if held[victim.tenant] > share and victim.request.priority >= sequence.request.priority:
                held[victim.tenant] -= victim.rows_held if rows_are_scarce else victim.num_blocks
                rows_left += victim.rows_held
                yield victim
                if fits():
                    return

    def _count_tenant_blocks(self) -> Counter[bytes]:
        """Return the blocks that the sequences of each tenant hold."""
        blocks: Counter[bytes] = Counter()
        for each in (*self.running, *self.importing):
            blocks[each.tenant] += each.num_blocks
        return blocks

    def check_integrity(self) -> None:
        """Raise RuntimeError if the number of a tenant's rows is wrong."""
        rows: Counter[bytes] = Counter()
        for each in (*self.running, *self.importing):
            rows[each.tenant] += each.rows_needed
        if self.held != rows:
            raise RuntimeError("the numbers of rows by tenant are wrong")
        if self._most_growth != sum(each.may_grow for each in (*self.running, *self.importing)):
            raise RuntimeError("the number of tokens that sequences may get is wrong")
