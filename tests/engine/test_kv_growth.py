"""How long answers will be, how many blocks that takes, and that sequences wait instead of being preempted later."""

import random

import numpy as np
import pytest

from baton_common.cache_scope import CacheScope
from baton_engine.answer_lengths import AnswerLengths
from baton_engine.kv_growth import KvGrowth
from baton_engine.scheduler import Scheduler
from baton_engine.sequence import Sequence, State

from .harness import EndAtOnce, make_request
from .test_scheduler import make_allocator, make_scheduler

BLOCK = 4


def chance(lengths: AnswerLengths, tokens: int, more: int) -> float:
    return float(lengths.going_on(np.array([tokens]), np.array([more]))[0])


def test_without_answers_half_are_expected_to_end_within_1024_tokens() -> None:
    lengths = AnswerLengths()
    assert chance(lengths, 1, 1023) == pytest.approx(0.5, abs=0.01)
    assert chance(lengths, 5000, 0) == 1.0
    assert 0 < chance(lengths, 1, 1 << 20) < 0.01


@pytest.mark.parametrize("limit", [300, 1 << 30])
def test_chances_are_those_of_the_answers_that_ended(limit: int) -> None:
    """Answers that are cut off at a limit say nothing of what would have come later, but they did not end before."""
    rng, lengths = random.Random(1), AnswerLengths()
    natural = [max(round(rng.lognormvariate(5.5, 0.8)), 1) for _ in range(4000)]
    for length in natural:
        lengths.add(min(length, limit), ended=length < limit)
    for first, more in ((1, 50), (1, 250), (100, 100), (200, 90)):
        expected = sum(each > first + more for each in natural) / sum(each > first for each in natural)
        assert chance(lengths, first, more) == pytest.approx(expected, abs=0.08)


def test_old_answers_are_forgotten() -> None:
    lengths = AnswerLengths()
    for length in (2000, 10):
        for _ in range(4000):
            lengths.add(length, ended=True)
    assert chance(lengths, 1, 20) < 0.05


def make_sequence(
    id: int, prompt: int, output: int = 0, most: int = 40, stops: bool = False, tenant: bytes = b"", least: int = 0
) -> Sequence:
    sampling = {"eos_token_ids": [1] if stops else [], "min_tokens": least}
    request = make_request(id, [id + 2] * prompt, most, cache_scope=CacheScope(tenant), **sampling)
    sequence = Sequence(request, id, BLOCK, 1 << 20)
    for _ in range(output):
        sequence.append(3)
    return sequence


def test_growth_is_the_largest_at_any_time() -> None:
    rng = random.Random(2)
    for _ in range(20):
        facts = [(rng.randint(1, 300), rng.randint(0, 50), rng.randint(60, 400)) for _ in range(rng.randint(1, 30))]
        facts.append((5, *facts[0][1:]))
        sequences = [make_sequence(id, *each) for id, each in enumerate(facts)]
        # Each grows to its limit, and gives back what it had before then.
        most = 0
        for time in range(1, 400):
            left = [(most - output, prompt + output) for prompt, output, most in facts]
            most = max(most, sum(time if time <= more else -own for more, own in left))
        growth = KvGrowth(AnswerLengths(), sequences[1:], BLOCK)
        found = growth.most_with(sequences[0])
        assert 0.9 * most / BLOCK <= found <= most / BLOCK + 1
        growth.add(sequences[0])
        growth.remove(sequences[0])
        assert growth.most_with(sequences[0]) == found


def test_answers_that_may_end_are_counted_by_chance_and_others_in_full() -> None:
    lengths = AnswerLengths()
    for _ in range(2000):
        lengths.add(10, ended=True)

    def growth(**facts: object) -> int:
        first, *others = (make_sequence(id, 4, most=1000, **facts) for id in range(10))  # type: ignore[arg-type]
        return KvGrowth(lengths, others, BLOCK).most_with(first)

    assert growth() == 10 * 1000 / BLOCK
    assert growth(stops=True) <= 10 * 16 / BLOCK
    # Nothing is known of answers that long.
    assert 10 * 500 / BLOCK < growth(stops=True, least=500) < 10 * 900 / BLOCK


def run(scheduler: Scheduler, steps: int = 2000) -> None:
    """Let all sequences run to their limits."""
    for _ in range(steps):
        if not scheduler.has_work:
            return
        for sequence, _, draws in scheduler.schedule():
            if draws:
                sequence.append(3)
                if sequence.known == sequence.most_tokens:
                    scheduler.remove(sequence)
    raise AssertionError("some sequences never end")


@pytest.mark.parametrize("expects", [True, False])
def test_sequences_wait_for_the_blocks_into_which_others_grow(expects: bool) -> None:
    scheduler = make_scheduler(64, 20)
    if not expects:
        scheduler._admitted.lengths = EndAtOnce()
    for id in range(20):
        scheduler.add(make_sequence(id, 8, stops=not expects))
    run(scheduler)
    # 20 sequences of 48 tokens need 240 blocks.
    assert bool(scheduler.num_preemptions) != expects
    scheduler.check_integrity()


def make_crowd(tenants: tuple[bytes, ...]) -> Scheduler:
    """Return a scheduler whose next step has room for 150 sequences beside 250 that run. The blocks would not suffice
    if all answers had as many tokens as their limits allow."""
    scheduler = Scheduler(
        make_allocator(60_000, 2000), block_size=4, max_num_batched_tokens=2000, max_num_seqs=400, max_export_blocks=1
    )
    for _ in range(500):
        scheduler.learn(200, True)
    for id in range(400):
        scheduler.add(make_sequence(id, 8, most=1000, stops=True, tenant=tenants[id % len(tenants)]))
    for sequence, *_ in scheduler.schedule():
        sequence.append(3)
    assert len(scheduler.running) == 250
    return scheduler


def test_a_step_predicts_the_growth_of_each_sequence_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, going_on, predicted = make_crowd((b"",)), AnswerLengths.going_on, 0

    def counted(self: AnswerLengths, tokens: np.ndarray, more: np.ndarray) -> np.ndarray:
        nonlocal predicted
        predicted += np.size(tokens)
        return going_on(self, tokens, more)

    monkeypatch.setattr(AnswerLengths, "going_on", counted)
    scheduler.schedule()
    assert len(scheduler.running) == 400
    assert 0 < predicted <= 400


def test_a_step_counts_the_blocks_of_each_sequence_once_for_its_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, num_blocks, counts = make_crowd((b"a", b"b")), Sequence.num_blocks, 0

    def counted(self: Sequence) -> int:
        nonlocal counts
        counts += 1
        return num_blocks.__get__(self)  # type: ignore[no-any-return]

    monkeypatch.setattr(Sequence, "num_blocks", property(counted))
    scheduler.schedule()
    assert len(scheduler.running) == 400
    assert 0 < counts <= 400


def test_a_lone_sequence_never_waits_for_room_to_grow() -> None:
    scheduler = make_scheduler(64, 20)
    sequence = make_sequence(0, 8, most=100_000)
    scheduler.add(sequence)
    scheduler.schedule()
    assert sequence.state is State.RUNNING


def test_a_tenant_below_its_share_does_not_wait_for_another_to_end() -> None:
    scheduler = make_scheduler(64, 20)
    others = [make_sequence(id, 8, most=240, tenant=b"a") for id in range(2)]
    for sequence in others:
        scheduler.add(sequence)
    for _ in range(3):
        for sequence, _, draws in scheduler.schedule():
            if draws:
                sequence.append(3)
    assert [each.state for each in others] == [State.RUNNING, State.WAITING]
    own = make_sequence(7, 8, most=240, tenant=b"b")
    scheduler.add(own)
    scheduler.schedule()
    assert own.state is State.RUNNING
