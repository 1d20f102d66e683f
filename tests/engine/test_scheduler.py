"""Scheduler, block pool and engine core together, over random requests, aborts and hand-overs."""

import math
import os
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton_common.cache_scope import CacheScope
from baton_common.kv_layout import LayerGroup
from baton_engine.block_allocator import BlockAllocator
from baton_engine.block_pool import BlockPool
from baton_engine.delta import Reservation
from baton_engine.exports import Export
from baton_engine.prefill_pods import PrefillPods
from baton_engine.scheduler import Scheduler
from baton_engine.sequence import Sequence, State
from baton_engine.step import Step
from baton_engine.step_sizes import StepSizes

from .harness import Transcript, assert_idle, finish, make_request
from .host_tier import HostTier
from .ledger import LedgerRunner, expected_output, fold, make_ledger_engine

EXAMPLES = int(os.environ.get("SCHEDULER_EXAMPLES") or 50)
BLOCK_SIZE, NUM_BLOCKS, BUDGET, MAX_SEQS, CONTEXT = 4, 14, 6, 8, 48

# Few tokens and few lengths, so that many prompts begin alike.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=30)


class EngineMachine(RuleBasedStateMachine):
    """Checks the invariants of every step over random requests, aborts and hand-overs."""

    depth = 0
    num_blocks = NUM_BLOCKS
    windows: tuple[int | None, ...] = ()
    stages = 1

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.engine = make_ledger_engine(
            Path(self.folder.name),
            self.depth,
            self.windows,
            self.stages,
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            max_num_batched_tokens=BUDGET,
            max_num_seqs=MAX_SEQS,
            max_model_len=CONTEXT,
        )
        self.prompts: dict[int, list[int]] = {}
        self.reservations: dict[int, Reservation] = {}
        self.known: dict[int, list[int]] = {}  # prompt, and the output that another engine has generated
        cache = cast(LedgerRunner, self.engine.runner).cache
        self.tier = HostTier(self.engine, cache.read)
        self.layout = cache.layout
        self.exported: dict[int, dict[tuple[int, int], int]] = {}  # the block of each token in each layer
        self.transcript = Transcript()

    def teardown(self) -> None:
        """When no more requests arrive, all requests end and nothing is left."""
        for id in list(self.reservations):
            self.engine.cancel_import(id)
        for _ in range(500 * self.stages):  # with several stages, each step decodes a part of the sequences
            for id in [sequence.request.id for sequence in self.engine.scheduler.importing]:
                self.engine.cancel_import(id)
            for id in list(self.exported):
                self.engine.abort(id)
            if not self.engine.has_work and not self.exported:
                break
            self.step()
        assert_idle(self.engine)
        for (id, choice), tokens in self.transcript.tokens.items():
            assert tokens == expected_output(self.prompts[id], choice, len(tokens))
        self.folder.cleanup()

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 18),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(-1, 1),
        kind=st.sampled_from(["plain", "plain", "plain", "import", "export"]),
        begun=st.sampled_from([0, 0, 0, 1, 5]),
        choice=st.integers(0, 2),
        tenant=st.sampled_from([b"", b"", b"one", b"two"]),
    )
    def add(
        self, prompt: list[int], max_tokens: int, n: int, priority: int, kind: str, begun: int, choice: int,
        tenant: bytes,
    ) -> None:  # fmt: skip
        id = len(self.prompts)
        begun, choice = (min(begun, max_tokens - 1), choice) if n == 1 else (0, 0)
        output = expected_output(prompt, choice, begun)
        self.prompts[id] = prompt
        self.known[id] = prompt + output
        exports_from = 0 if kind == "export" else None
        request = make_request(
            id, prompt, max_tokens, n=n, priority=priority, imports_kv=kind == "import", exports_from=exports_from,
            output=output, choice=choice, cache_scope=CacheScope(tenant),
        )  # fmt: skip
        assert self.engine.request_error(request) is None
        self.transcript.expect(request)
        self.engine.add(request)
        if kind == "export":
            self.exported[id] = {}

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        id = data.draw(st.integers(0, len(self.prompts) - 1))
        self.engine.abort(id)
        self.exported.pop(id, None)
        self.reservations.pop(id, None)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(list(self.reservations)))
        self.engine.cancel_import(id)
        del self.reservations[id]

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """Order the KV of a request again, in any state of the old order."""
        id = data.draw(st.sampled_from(list(self.reservations)))
        old = self.reservations[id].generation
        self.engine.restart_import(id)
        self.reserve()
        assert self.reservations[id].generation != old

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), part=st.sampled_from(["last token", "first tokens", "all"]))
    def deliver(self, data: st.DataObject, part: str) -> None:
        """Deliver KV, first tokens or both for a request with reserved blocks."""
        id = data.draw(st.sampled_from(list(self.reservations)))
        reservation, known = self.reservations[id], self.known[id]
        last = reservation.first_token + reservation.num_tokens
        first = {"last token": last - 1, "first tokens": last, "all": reservation.first_token}[part]
        for position in range(first, last):
            values = torch.tensor([fold(known[: position + 1])])
            for extent in self.layout.still_seen(self.layout.extent(position, 1), len(known)):
                self.engine.import_kv(id, reservation.generation, extent, values)
        if part != "last token" and id in self.engine._imports.waiting:
            self.start(id)
        if id not in self.engine._imports.waiting:
            del self.reservations[id]

    def start(self, id: int) -> None:
        """Import the first tokens, which the other engine has sampled and the client already has."""
        [sequence] = self.engine._sequences[id]
        begun = sequence.given_len - sequence.prompt_len
        firsts = []
        for choice in range(sequence.choice, sequence.choice + sequence.sampling.n):
            tokens = expected_output(self.prompts[id], choice, begun + 1)
            if len(self.transcript.tokens.get((id, choice), [])) <= begun:
                self.transcript.tokens[id, choice] = tokens
            firsts.append(tokens[-1])
        self.engine.import_tokens(id, firsts)

    @precondition(lambda self: self.tier.orders)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """Let the tier give up an order."""
        self.engine.cancel_import(data.draw(st.sampled_from(list(self.tier.orders))))

    @precondition(lambda self: self.engine.pool.num_cached)
    @rule(max_tokens=st.integers(1, 18), data=st.data())
    def ask_again(self, max_tokens: int, data: st.DataObject) -> None:
        """Ask with an earlier prompt after the pool has evicted the blocks that nobody holds."""
        pool = self.engine.pool
        pool.release(pool.allocate(pool.num_available))
        self.add(data.draw(st.sampled_from(list(self.prompts.values()))), max_tokens, 1, 0, "plain", 0, 0, b"")

    @rule()
    def reserve(self) -> None:
        """Reserve blocks while a step is in flight."""
        for reservation in self.engine.reserve():
            self.reservations[reservation.id] = reservation

    @rule(brings=st.booleans())
    def step(self, brings: bool = False) -> None:
        """Step the engine after the tier has brought what is ordered, or before."""
        for id in list(self.tier.orders) if brings else ():
            self.tier.bring(id)
        running = list(self.engine.scheduler.running)
        decodes = [
            s for s in running
            if s.num_tokens - s.computed == 1 and not s.ends_here and not (s.splits and s.num_tokens == s.given_len)
            and not (self.stages > 1 and s.pending)
        ]  # fmt: skip
        steps: list[Step] = []
        preempted: list[Sequence] = []
        schedule, preempt = self.engine.scheduler.schedule, self.engine.scheduler._preempt

        def observed_preempt(sequence: Sequence) -> None:
            preempted.append(sequence)
            preempt(sequence)

        def observed() -> Step:
            step = schedule()
            steps.append(step)
            # Those preempted for another tenant are gone before the step's decodes are chosen.
            still = [s for s in decodes if s not in preempted]
            self.check_step(step, still, min(BUDGET, -(-(len(running) - len(preempted)) // self.stages)))
            assert all(victim in preempted for victim in running if victim.state is State.WAITING)
            for victim in preempted:
                for other in running:
                    kept = other.state is State.RUNNING and other.request.exports_from is None
                    if other not in preempted and kept and other.tenant == victim.tenant:
                        assert other.order < victim.order, "a more urgent sequence of the tenant was preempted"
            return step

        self.engine.scheduler._preempt = observed_preempt  # type: ignore[method-assign]
        self.engine.scheduler.schedule = observed  # type: ignore[method-assign]
        result = self.engine.step()
        self.engine.scheduler.schedule = schedule  # type: ignore[method-assign]
        self.engine.scheduler._preempt = preempt  # type: ignore[method-assign]
        if not running and self.engine.scheduler.waiting:
            assert steps[0].sequences or self.engine.pool.num_held or result.progress, "nothing runs, all wait"
        for reservation in result.reservations:
            self.reservations[reservation.id] = reservation
        for export in result.exports:
            self.check_export(export)
        self.transcript.take(result.deltas)

    def check_step(self, step: Step, decodes: list[Sequence], enough: int) -> None:
        """enough: the least number of decodes of a step that leaves one out."""
        assert step.plan.num_tokens <= BUDGET
        assert all(count >= 1 for count in step.plan.counts)
        assert len({id(sequence) for sequence in step.sequences}) == len(step.sequences)
        scheduled = {id(sequence) for sequence in step.sequences}
        left_out = [s for s in decodes if s.state is State.RUNNING and id(s) not in scheduled]
        # Only a budget spent on more urgent decodes may leave one out, or a share of a pipeline's steps.
        assert not left_out or step.plan.counts[:enough] == [1] * enough
        width = sum(s.sampling.n if s.output_len == 0 and not s.exports else 1 for s in self.engine.scheduler.running)
        assert width <= MAX_SEQS
        written: set[int] = set()
        for sequence, count, _ in step:
            assert sequence.computed <= sequence.num_tokens
            assert all(len(table.blocks) * BLOCK_SIZE >= sequence.computed for table in sequence.tables)
            blocks = {
                table.blocks[position // BLOCK_SIZE]
                for table in sequence.tables
                for position in range(sequence.computed - count, sequence.computed)
            }
            assert len(sequence.tables) == len(self.layout.groups)
            assert not any(self.engine.pool.is_shared(block) for block in blocks), "a shared block is written"
            assert not blocks & self.engine.pool._hash_of.keys(), "a block known to the prefix cache is written"
            assert not blocks & written, "two sequences write one block"
            written |= blocks

    def check_export(self, export: Export) -> None:
        seen, known = self.exported[export.id], self.known[export.id]
        runner, tokens = cast(LedgerRunner, self.engine.runner), export.extent.tokens
        for run in self.layout.runs(export.extent.layers):
            [layer], window = [run.first_layer] * run.num_layers, self.layout.groups[run.group]
            before = [position for at, position in seen if at == layer]
            # What no later query sees is left out.
            assert tokens.start == (max(before) + 1 if before else window.first_seen(len(known))), "a gap, or twice"
            for position in range(tokens.start, tokens.stop):
                block = export.tables[run.group][position // BLOCK_SIZE]
                assert (block, position % BLOCK_SIZE) not in runner.writing(), "what is still computed is handed out"
                seen[layer, position] = block
                value = self.engine.runner.cache.data[0, 0, block, position % BLOCK_SIZE, 0, 0]
                assert value == fold(known[: position + 1])

    @invariant()
    def exported_blocks_stay(self) -> None:
        for id, blocks in self.exported.items():
            for (layer, position), block in blocks.items():
                [sequence] = self.engine._sequences[id]
                [run] = self.layout.runs(slice(layer, layer + 1))
                assert sequence.tables[run.group].blocks[position // BLOCK_SIZE] == block

    @invariant()
    def windows_hold_no_more_than_they_may(self) -> None:
        for sequences in self.engine._sequences.values():
            for sequence in sequences:
                most = [group.most_blocks(CONTEXT, BLOCK_SIZE, BUDGET) for group in self.layout.groups]
                # Those of a known prefix come on top, until the window has left them.
                known = -(-sequence.cached // BLOCK_SIZE)
                for table, bound, group in zip(sequence.tables, most, self.layout.groups, strict=False):
                    assert group.window is None or len(table.held) <= bound + known

    @invariant()
    def counts_agree(self) -> None:
        self.engine.check_integrity()
        load = self.engine.load()
        assert load.blocks_held + self.engine.pool.num_available == self.num_blocks
        assert load.running == len(self.engine.scheduler.running)


class AheadMachine(EngineMachine):
    """The same checks, with each step launched before the previous one's tokens are read."""

    depth = 1


class PipelineMachine(EngineMachine):
    """The same checks with three steps in flight, none of which knows what another one draws."""

    depth, stages = 2, 3


class WindowMachine(EngineMachine):
    """The same with layers that see all tokens beside layers with a window."""

    num_blocks = 40
    windows = (5, None, 5)


class WindowAheadMachine(WindowMachine):
    depth = 1


class AllWindowsMachine(AheadMachine):
    """Layers of two windows, and none that sees all tokens."""

    num_blocks = 26
    windows = (9, 4)


TestEngine = EngineMachine.TestCase
TestEngineAhead = AheadMachine.TestCase
TestPipeline = PipelineMachine.TestCase
TestWindows = WindowMachine.TestCase
TestWindowsAhead = WindowAheadMachine.TestCase
TestAllWindows = AllWindowsMachine.TestCase
for case in (TestEngine, TestEngineAhead, TestPipeline, TestWindows, TestWindowsAhead, TestAllWindows):
    case.settings = settings(max_examples=EXAMPLES, stateful_step_count=60, deadline=None)
    case.pytestmark = [pytest.mark.soak]
del case  # pytest would run it once more, as a test of that name


def make_allocator(num_blocks: int, step_tokens: int) -> BlockAllocator:
    return BlockAllocator(BlockPool(num_blocks), (LayerGroup(None, (0,)),), 4, step_tokens)


def make_scheduler(num_blocks: int, max_num_seqs: int) -> Scheduler:
    return Scheduler(
        make_allocator(num_blocks, 8),
        block_size=4,
        max_num_batched_tokens=8,
        max_num_seqs=max_num_seqs,
        max_export_blocks=32,
        reach=PrefillPods().reach,
    )


@pytest.fixture
def scheduler() -> Scheduler:
    return make_scheduler(64, 4)


def computed(step: Step) -> list[tuple[Sequence, int]]:
    return [(sequence, count) for sequence, count, _ in step]


def read(sequence: Sequence, token: int) -> None:
    """Do what the engine does when a sampled token arrives."""
    sequence.append(token)


def add(scheduler: Scheduler, arrival: int, length: int, *, tenant: bytes = b"", **fields: Any) -> Sequence:
    request = make_request(arrival, [arrival] * length, 8, cache_scope=CacheScope(tenant), **fields)
    sequence = Sequence(request, arrival, 4, 64)
    scheduler.add(sequence)
    return sequence


def test_decodes_come_before_chunks_and_chunks_before_newcomers(scheduler: Scheduler) -> None:
    decoding, prefilling = add(scheduler, 0, 3), add(scheduler, 1, 30)
    step = scheduler.schedule()
    assert computed(step) == [(decoding, 3), (prefilling, 5)]
    read(decoding, 9)
    newcomer = add(scheduler, 2, 40)
    assert computed(scheduler.schedule()) == [(decoding, 1), (prefilling, 7)]
    assert newcomer.state is State.WAITING


@pytest.mark.parametrize(("length", "priority"), [(5, 0), (40, -1)])
def test_shorter_and_more_urgent_newcomers_come_before_the_rest_of_a_prompt(
    scheduler: Scheduler, length: int, priority: int
) -> None:
    prefilling = add(scheduler, 0, 30)
    assert computed(scheduler.schedule()) == [(prefilling, 8)]
    newcomer = add(scheduler, 1, length, priority=priority)
    counts = [(newcomer, min(length, 8)), (prefilling, 8 - length)]
    assert computed(scheduler.schedule()) == [pair for pair in counts if pair[1] > 0]


def test_shorter_prompts_do_not_overtake_for_ever() -> None:
    """They overtake only until eight times the longer prompt's tokens have been admitted since it arrived."""
    scheduler = Scheduler(
        make_allocator(900, 10), block_size=4, max_num_batched_tokens=10, max_num_seqs=200, max_export_blocks=32
    )
    long = add(scheduler, 0, 60)
    overtaking = 0
    for arrival in range(1, 60):
        short = add(scheduler, arrival, 10)
        scheduler.schedule()
        if long.computed:
            break
        assert short.computed == 10
        scheduler.remove(short)
        overtaking += 1
    assert overtaking == (8 * 60 - 8 * 10) // 10


def test_a_part_of_a_prompt_does_not_make_those_wait_that_end_in_a_step() -> None:
    scheduler = Scheduler(
        make_allocator(2000, 1000), block_size=4, max_num_batched_tokens=1000, max_num_seqs=20, max_export_blocks=32
    )
    long = add(scheduler, 0, 3000)
    assert computed(scheduler.schedule()) == [(long, 1000)]
    # These tokens are too few for a step of their own.
    short = add(scheduler, 1, 300)
    assert computed(scheduler.schedule()) == [(short, 300), (long, 700)]
    scheduler.remove(short)
    shorts = [add(scheduler, arrival, 300) for arrival in (2, 3)]
    assert computed(scheduler.schedule()) == [(shorts[0], 300), (shorts[1], 300)]
    for short in shorts:
        scheduler.remove(short)
    other = add(scheduler, 4, 700)
    assert computed(scheduler.schedule()) == [(other, 700)]
    scheduler.remove(other)
    assert computed(scheduler.schedule()) == [(long, 1000)]
    # The last 300 tokens of the long prompt end in this step too, so they join it.
    other = add(scheduler, 5, 600)
    assert computed(scheduler.schedule()) == [(other, 600), (long, 300)]


def test_sequences_are_not_admitted_long_before_a_step_has_room_for_them() -> None:
    scheduler = Scheduler(
        make_allocator(2000, 1000), block_size=4, max_num_batched_tokens=1000, max_num_seqs=20, max_export_blocks=32
    )
    sequences = [add(scheduler, arrival, 300) for arrival in range(20)]
    assert computed(scheduler.schedule()) == [(sequence, 300) for sequence in sequences[:3]]
    # The next one will begin the next step, and the others wait for it.
    assert scheduler.running == sequences[:4]
    step = scheduler.schedule()
    assert computed(step)[-2:] == [(sequence, 300) for sequence in sequences[4:6]]
    assert scheduler.running == sequences[:7]


def test_chunks_fill_the_budget_and_the_last_one_is_what_is_left(scheduler: Scheduler) -> None:
    sequence = add(scheduler, 0, 19)
    assert [scheduler.schedule().plan.counts for _ in range(3)] == [[8], [8], [3]]
    assert sequence.computed == 19


def small_chunks() -> Scheduler:
    return Scheduler(
        make_allocator(900, 100),
        block_size=4,
        max_num_batched_tokens=100,
        max_num_seqs=20,
        max_export_blocks=32,
        chunk_tokens=10,
    )


def test_beside_decodes_prompts_are_computed_in_small_chunks_unless_many_wait() -> None:
    scheduler = small_chunks()
    decoding = add(scheduler, 0, 3)
    prompt = add(scheduler, 1, 110)
    # Nothing decodes yet, so the chunk delays no decode.
    assert computed(scheduler.schedule()) == [(decoding, 3), (prompt, 97)]
    read(decoding, 9)
    late = add(scheduler, 2, 21)
    # 13 + 21 are queued, which is twice 17; the shorter prompt goes first.
    assert computed(scheduler.schedule()) == [(decoding, 1), (late, 17)]
    read(decoding, 9)
    # The chunk does not shrink before all prompts are computed.
    assert computed(scheduler.schedule()) == [(decoding, 1), (late, 4), (prompt, 13)]


@pytest.mark.parametrize(
    ("lengths", "chunk"),
    [
        # Half of what is queued, up to twice 10.
        ([15], 10),
        ([30], 15),
        ([120], 20),
        # As many more tokens as wait beside the longest prompt, up to the whole of it and 4 times 10.
        ([120, 13], 33),
        ([30, 13], 22),
        ([120] * 12, 55),
        ([120] * 5, 40),
        ([35] * 3, 35),
        ([16] * 5, 20),
        # As many as it takes to compute all prompts but one in 24 steps, up to 8 times 10.
        ([120] * 13, 60),
        ([120] * 40, 80),
    ],
)
def test_the_more_prompts_wait_the_larger_are_chunks_within_the_budget(lengths: list[int], chunk: int) -> None:
    scheduler = small_chunks()
    add(scheduler, 0, 3)
    scheduler.schedule()
    read(scheduler.running[0], 9)
    for arrival, length in enumerate(lengths, 1):
        add(scheduler, arrival, length)
    assert sum(scheduler.schedule().plan.counts) == 1 + chunk


@pytest.mark.parametrize(
    ("lengths", "chunks"),
    [
        # The first prompt would wait for a part of the second one.
        ([600, 900], [600]),
        ([600, 350], [350, 600]),
        # So few tokens do not keep a device busy.
        ([300, 900], [300, 700]),
    ],
)
def test_a_part_of_a_prompt_delays_no_prompt_that_ends_beside_decodes(lengths: list[int], chunks: list[int]) -> None:
    scheduler = Scheduler(
        make_allocator(9000, 2000), block_size=4, max_num_batched_tokens=2000, max_num_seqs=20, max_export_blocks=32,
        chunk_tokens=1000,
    )  # fmt: skip
    add(scheduler, 0, 3)
    scheduler.schedule()
    read(scheduler.running[0], 9)
    for arrival, length in enumerate(lengths, 1):
        add(scheduler, arrival, length)
    assert scheduler.schedule().plan.counts == [1, *chunks]


def test_after_a_burst_of_prompts_chunks_are_small_again() -> None:
    scheduler = small_chunks()
    decoding = add(scheduler, 0, 3)
    counts = []
    for length in (0, 40, 0, 0, 15, 0):
        if length:
            add(scheduler, len(counts), length)
        counts.append(scheduler.schedule().plan.counts)
        for sequence in scheduler.running:
            if sequence.pending:
                read(sequence, 9)
    assert decoding.output_len == 6
    assert counts == [[3], [1, 20], [1, 20], [1, 1], [1, 1, 10], [1, 1, 5]]


def prefill_pod(step_cost: float) -> Scheduler:
    """A scheduler whose steps have chunks of at most 4,000 tokens, and take as long as `step_cost` more."""
    scheduler = Scheduler(
        make_allocator(9000, 8000), block_size=4, max_num_batched_tokens=8000, max_num_seqs=20, max_export_blocks=32,
        chunk_tokens=4000, prefill_only=True,
    )  # fmt: skip
    scheduler.step_cost = step_cost
    return scheduler


def test_a_prefill_pod_bounds_its_steps_without_decodes_too() -> None:
    scheduler = prefill_pod(math.inf)
    assert scheduler.step_tokens == 4000
    prompt = add(scheduler, 0, 9000)
    steps = [computed(scheduler.schedule()) for _ in range(3)]
    assert steps == [[(prompt, 3968)], [(prompt, 3968)], [(prompt, 1064)]]


@pytest.mark.parametrize(
    ("cost", "lengths", "step"),
    [
        # The first would wait for 700 more tokens, and the second wait for a step less, which takes as long as 600.
        (600, [700, 700], [700]),
        (700, [700, 700], [700, 700]),
        # Two are queued behind the first one, and each of them waits for a step less.
        (400, [700, 800, 900], [700, 800]),
        (399, [700, 800, 900], [700]),
        # Up to 512 tokens take as long as a few.
        (0, [100, 200, 212, 300], [100, 200, 212]),
        (287, [200, 600], [200]),
        (288, [200, 600], [200, 600]),
        # A chunk of a long prompt delays a short one as other tokens do.
        (3887, [400, 6000], [400]),
        (3888, [400, 6000], [400, 3568]),
    ],
)
def test_prompts_share_a_step_of_a_prefill_pod_if_that_shortens_their_waits(
    cost: float, lengths: list[int], step: list[int]
) -> None:
    scheduler = prefill_pod(cost)
    for arrival, length in enumerate(lengths):
        add(scheduler, arrival, length)
    assert scheduler.schedule().plan.counts == step


def filling_steps() -> Scheduler:
    """A scheduler for a device that computes up to 768 tokens about as fast as 640, and beside decodes at most 700."""
    scheduler = Scheduler(
        make_allocator(9000, 8000), block_size=4, max_num_batched_tokens=8000, max_num_seqs=20, max_export_blocks=32,
        chunk_tokens=700,
    )  # fmt: skip
    scheduler.sizes = StepSizes({512: 5.0, 640: 10.0, 768: 10.1, 896: 20.0})
    decode = add(scheduler, 0, 3)
    scheduler.schedule()
    read(decode, 9)
    return scheduler


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([600, 600], [600, 167]),
        ([600, 600, 600], [600, 167]),  # a part of one further prompt only
        ([520, 100], [100, 520]),  # whole prompts
        ([800, 900], [800, 95]),  # as many as the device computes in the same time
        ([720, 740], [720]),  # 47 more tokens are too few
        ([500, 600], [500, 200]),  # the step is not full yet
    ],
)
def test_a_full_step_gets_tokens_of_a_further_prompt_where_they_cost_little(
    lengths: list[int], counts: list[int]
) -> None:
    scheduler = filling_steps()
    for arrival, length in enumerate(lengths, 1):
        add(scheduler, arrival, length)
    assert scheduler.schedule().plan.counts == [1, *counts]


def test_a_part_of_a_further_prompt_is_computed_once() -> None:
    scheduler = filling_steps()
    first, second = add(scheduler, 1, 600), add(scheduler, 2, 700)
    assert computed(scheduler.schedule())[1:] == [(first, 600), (second, 167)]
    read(scheduler.running[0], 9)
    read(first, 9)
    assert computed(scheduler.schedule())[2:] == [(second, 533)]


def test_a_prompt_whose_beginning_is_cached_joins_a_step_for_the_rest_of_it() -> None:
    scheduler = prefill_pod(100)
    known = add(scheduler, 7, 3000)
    scheduler.schedule()
    scheduler.allocator.settle(known, known.computed)
    scheduler.remove(known)
    first = add(scheduler, 8, 600)
    again = Sequence(make_request(9, [7] * 3010, 8), 9, 4, 64)
    scheduler.add(again)
    assert computed(scheduler.schedule()) == [(first, 600), (again, 10)]


def test_a_newcomer_overtakes_the_rest_of_a_prompt_without_waiting_for_its_tokens() -> None:
    scheduler = prefill_pod(10)
    long = add(scheduler, 0, 7936)
    assert computed(scheduler.schedule()) == [(long, 3968)]
    short = add(scheduler, 1, 12)
    assert computed(scheduler.schedule()) == [(short, 12)]
    scheduler.remove(short)
    assert computed(scheduler.schedule()) == [(long, 3968)]


def test_imports_do_not_wait_for_a_place_in_a_step(scheduler: Scheduler) -> None:
    add(scheduler, 0, 32)
    add(scheduler, 1, 32)
    first, second = (add(scheduler, number, 40, imports_kv=True) for number in (2, 3))
    scheduler.schedule()
    assert scheduler.importing == [first, second]
    third = add(scheduler, 4, 48, imports_kv=True)
    # There are four rows, and the last one is kept for the second prompt.
    scheduler.admit_imports()
    assert scheduler.importing == [first, second]
    scheduler.remove(first)
    scheduler.admit_imports()
    assert scheduler.importing == [second, third]


def test_imports_leave_more_urgent_prompts_the_blocks_that_they_need() -> None:
    scheduler = make_scheduler(20, 8)
    running, waiting = add(scheduler, 0, 32, priority=-2), add(scheduler, 1, 16, priority=-1)
    scheduler.schedule()
    # 8 of 20 blocks are held, 4 are kept for the waiting prompt, and one for each running sequence.
    large = add(scheduler, 2, 32, imports_kv=True)
    small = add(scheduler, 3, 24, priority=1, imports_kv=True)
    scheduler.admit_imports()
    assert (scheduler.running, scheduler.waiting, scheduler.importing) == ([running], [waiting, large, small], [])
    scheduler.remove(large)
    scheduler.admit_imports()
    assert (scheduler.waiting, scheduler.importing) == ([waiting], [small])
    # A request that arrived earlier gets its blocks first.
    scheduler.remove(small)
    last = add(scheduler, 4, 40, imports_kv=True)
    scheduler.remove(running)
    scheduler.schedule()
    assert (scheduler.running, scheduler.importing) == ([waiting], [last])


def test_choices_count_as_sequences_before_they_exist(scheduler: Scheduler) -> None:
    add(scheduler, 0, 1, n=3)
    late = add(scheduler, 1, 1, n=2)
    later = add(scheduler, 2, 1)
    assert scheduler.schedule().plan.counts == [1]
    # The later request needs fewer rows, but must not overtake: a stream of such requests would do so forever.
    assert (late.state, later.state) == (State.WAITING, State.WAITING)


def test_a_known_prefix_is_held_and_not_computed(scheduler: Scheduler) -> None:
    first = add(scheduler, 0, 8)
    scheduler.schedule()
    for block, digest in zip(first.tables[0].blocks, first.hashes(0, 2), strict=True):
        scheduler.pool.remember(block, digest)
    request = make_request(1, [0] * 8, 8)
    second = Sequence(request, 1, 4, 64)
    scheduler.add(second)
    scheduler.schedule()
    assert second.tables[0].blocks[0] == first.tables[0].blocks[0]
    assert second.tables[0].blocks[1] != first.tables[0].blocks[1]
    assert (scheduler.allocator.prefix_hits, scheduler.allocator.prefix_queries) == (4, 16)


def run(scheduler: Scheduler) -> None:
    """Schedule a step, and read a token for each sequence that draws one."""
    step = scheduler.schedule()
    for sequence, draws in zip(step.sequences, step.plan.draws, strict=True):
        if draws:
            read(sequence, 9)


def test_a_tenant_with_few_rows_is_before_one_with_many(scheduler: Scheduler) -> None:
    many = [add(scheduler, arrival, 1, tenant=b"many") for arrival in range(4)]
    run(scheduler)
    wide = add(scheduler, 4, 1, tenant=b"wide", n=3)
    waiting = [add(scheduler, arrival, 1, tenant=b"many") for arrival in range(5, 8)]
    few = [add(scheduler, arrival, 1, tenant=b"few", priority=priority) for arrival, priority in ((8, 0), (9, 1))]
    assert [sequence.state for sequence in many] == [State.RUNNING] * 4
    run(scheduler)
    # One of three tenants may have one of four rows: the last of the many sequences has made room.
    assert (many[3].state, few[0].state) == (State.WAITING, State.RUNNING)
    for sequence in many[:3]:
        scheduler.remove(sequence)
    run(scheduler)
    # Two rows are fewer than three. Of two tenants that would have three, the one goes first that has waited longer.
    assert [sequence.state for sequence in (many[3], *waiting)] == [State.RUNNING] * 2 + [State.WAITING] * 2
    assert wide.state is State.WAITING
    assert few[1].state is State.WAITING, "a less urgent request waits for all that are more urgent"


@pytest.mark.parametrize("imports_kv", [False, True])
def test_a_tenant_beyond_its_share_makes_room_for_one_below_it(scheduler: Scheduler, imports_kv: bool) -> None:
    many = [add(scheduler, arrival, 1, tenant=b"many") for arrival in range(4)]
    run(scheduler)
    few = [add(scheduler, arrival, 5, tenant=b"few", imports_kv=imports_kv) for arrival in range(4, 7)]
    for _ in range(3):
        run(scheduler)
    begun = State.IMPORTING if imports_kv else State.RUNNING
    assert [sequence.state for sequence in many] == [State.RUNNING] * 2 + [State.WAITING] * 2
    assert [sequence.state for sequence in few] == [begun] * 2 + [State.WAITING]
    assert scheduler.num_preemptions == 2


def test_rows_kept_for_choices_count_in_a_tenants_share(scheduler: Scheduler) -> None:
    """Otherwise a long prompt of many choices keeps all rows from other tenants until it has been computed."""
    wide = add(scheduler, 0, 40, tenant=b"wide", n=4)
    run(scheduler)
    few = [add(scheduler, arrival, 1, tenant=b"few") for arrival in (1, 2)]
    run(scheduler)
    assert [sequence.state for sequence in (wide, *few)] == [State.WAITING, State.RUNNING, State.RUNNING]
    for sequence in few:
        scheduler.remove(sequence)
    while wide.known == wide.prompt_len:
        run(scheduler)
    others = [wide.fork(choice) for choice in range(1, 4)]
    scheduler.allocator.share(wide, others)
    scheduler.split(wide, others)
    scheduler.check_integrity()
    assert scheduler.running == [wide, *others]


def test_a_share_of_blocks_is_kept_too() -> None:
    scheduler = make_scheduler(16, 8)
    large = [add(scheduler, arrival, 24, tenant=b"large") for arrival in range(2)]
    for _ in range(6):
        run(scheduler)
    small = add(scheduler, 2, 8, tenant=b"small")
    run(scheduler)
    assert [sequence.state for sequence in (*large, small)] == [State.RUNNING, State.WAITING, State.RUNNING]


def test_more_urgent_sequences_make_no_room(scheduler: Scheduler) -> None:
    many = [add(scheduler, arrival, 1, tenant=b"many", priority=-1) for arrival in range(4)]
    run(scheduler)
    few = add(scheduler, 4, 1, tenant=b"few")
    run(scheduler)
    assert [sequence.state for sequence in (*many, few)] == [State.RUNNING] * 4 + [State.WAITING]


def test_a_missing_block_costs_the_tenant_with_the_most_rows() -> None:
    scheduler = make_scheduler(5, 4)
    many = [add(scheduler, arrival, 1, tenant=b"many") for arrival in range(2)]
    # The least urgent of the three.
    few = add(scheduler, 2, 4, tenant=b"few")
    while not scheduler.num_preemptions:
        run(scheduler)
    assert [sequence.state for sequence in (*many, few)] == [State.RUNNING, State.WAITING, State.RUNNING]


def test_many_requests_all_end(tmp_path: Path) -> None:
    engine = make_ledger_engine(
        tmp_path, block_size=4, num_blocks=40, max_num_batched_tokens=16, max_num_seqs=8, max_model_len=80
    )
    for id in range(60):
        engine.add(make_request(id, [id % 2] * (1 + id % 37), 1 + id % 29, n=1 + id % 3, priority=id % 4))
    transcript = Transcript()
    finish(engine, transcript)
    assert len(transcript.reasons) == sum(1 + id % 3 for id in range(60))
    assert engine.load().preemptions > 0
    for (id, choice), tokens in transcript.tokens.items():
        assert tokens == expected_output([id % 2] * (1 + id % 37), choice, 1 + id % 29)
    assert_idle(engine)
