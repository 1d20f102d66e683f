"""n > 1: choices that share their prompt's blocks until they write into one."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from baton_engine.results import Choice
from baton_engine.sequence import FinishReason
from tests.models import reference_greedy

from .harness import Transcript, assert_idle, finish, generate, make_engine, make_prompt, make_request
from .ledger import make_ledger_engine


@pytest.mark.parametrize("length", [1, 15, 16, 17, 50])
def test_greedy_choices_are_all_the_reference(windowed: Path, length: int) -> None:
    prompt = make_prompt(length)
    engine = make_engine(windowed)
    transcript = generate(engine, [make_request(0, prompt, 40, n=4)])
    expected = reference_greedy(windowed, prompt, 40)
    assert transcript.tokens == {(0, choice): expected for choice in range(4)}
    assert_idle(engine)


@pytest.mark.parametrize("length", [16, 17, 18, 33])
def test_a_prompt_whose_last_token_is_a_step_of_its_own_gets_all_its_choices(llama: Path, length: int) -> None:
    prompt = make_prompt(length)
    engine = make_engine(llama, max_num_batched_tokens=16, block_size=4)
    transcript = generate(engine, [make_request(0, prompt, 8, n=3)])
    assert transcript.tokens == {(0, choice): reference_greedy(llama, prompt, 8) for choice in range(3)}
    assert_idle(engine)


def test_sampled_choices_differ_and_repeat(llama: Path) -> None:
    request = make_request(0, make_prompt(21), 30, n=4, temperature=1.0, seed=11)
    first, second = (generate(make_engine(llama), [request]).tokens for _ in range(2))
    assert len({tuple(tokens) for tokens in first.values()}) == 4
    assert first == second


def test_a_choice_does_not_depend_on_how_many_there_are(llama: Path) -> None:
    prompt = make_prompt(21)
    two, four = (
        generate(make_engine(llama), [make_request(0, prompt, 30, n=n, temperature=1.0, seed=11)]).tokens
        for n in (2, 4)
    )
    assert all(four[key] == tokens for key, tokens in two.items())


def test_choices_share_whole_blocks(llama: Path) -> None:
    engine = make_engine(llama)
    engine.add(make_request(0, make_prompt(40), 3, n=4))
    transcript = Transcript()
    for _ in range(2):
        transcript.take(engine.step().deltas)
    # All choices share two full blocks. Each has a copy of the third block, which was half full, for its own tokens.
    assert engine.pool.num_held == 2 + 4
    finish(engine, transcript)
    assert_idle(engine)


def test_choices_under_preemption_are_those_without(llama: Path) -> None:
    requests = [make_request(i, make_prompt(10 + i, seed=i), 30, n=3, temperature=0.9, seed=i) for i in range(3)]
    expected = generate(make_engine(llama, block_size=4), requests).tokens
    engine = make_engine(llama, block_size=4, num_blocks=22, max_model_len=64)
    assert generate(engine, requests).tokens == expected
    assert engine.load().preemptions > 0
    assert_idle(engine)


def test_a_pool_for_one_sequence_serves_all_choices(llama: Path) -> None:
    prompt = make_prompt(30)
    engine = make_engine(llama, block_size=4, num_blocks=16, max_model_len=64)
    transcript = generate(engine, [make_request(0, prompt, 34, n=3)])
    expected = reference_greedy(llama, prompt, 34)
    assert transcript.tokens == {(0, choice): expected for choice in range(3)}
    assert_idle(engine)


def test_a_copy_does_not_preempt_the_one_who_no_longer_shares(llama: Path) -> None:
    """Once the other choice has dropped its reference, the block can be written in place."""
    engine = make_engine(llama, block_size=16, num_blocks=2, max_model_len=32)
    transcript = generate(engine, [make_request(0, make_prompt(20), 8, n=2)])
    assert engine.load().preemptions == 1
    assert transcript.tokens[0, 0] == transcript.tokens[0, 1] == reference_greedy(llama, make_prompt(20), 8)


def test_each_choice_ends_by_itself(llama: Path) -> None:
    prompt = make_prompt(12)
    free = generate(make_engine(llama), [make_request(0, prompt, 30, n=3, temperature=1.0, seed=2)]).tokens
    others = {token for choice in (0, 2) for token in free[0, choice]}
    stop = next(token for token in free[0, 1][3:] if token not in others)
    engine = make_engine(llama)
    request = make_request(0, prompt, 30, n=3, temperature=1.0, seed=2, stop_token_ids=[stop])
    transcript = generate(engine, [request])
    assert transcript.reasons == {
        (0, 0): FinishReason.LENGTH,
        (0, 1): FinishReason.STOP,
        (0, 2): FinishReason.LENGTH,
    }
    assert transcript.tokens[0, 1] == free[0, 1][: free[0, 1].index(stop) + 1]
    [last] = [delta for delta in transcript.deltas if delta.finish_reason is FinishReason.STOP]
    assert last.stop_token_id == stop
    assert_idle(engine)


def test_the_end_token_ends_without_being_called_a_stop_token(llama: Path) -> None:
    prompt = make_prompt(12)
    expected = reference_greedy(llama, prompt, 30)
    end = next(token for index, token in enumerate(expected) if token not in expected[:index] and index > 3)
    transcript = generate(make_engine(llama), [make_request(0, prompt, 30, eos_token_ids=[end])])
    assert transcript.tokens[0, 0] == expected[: expected.index(end) + 1]
    assert transcript.reasons[0, 0] is FinishReason.STOP
    assert transcript.deltas[-1].stop_token_id is None


def test_one_choice_can_be_aborted(llama: Path) -> None:
    prompt = make_prompt(12)
    engine, transcript = make_engine(llama), Transcript()
    engine.add(make_request(0, prompt, 20, n=3))
    for _ in range(5):
        transcript.take(engine.step().deltas)
    engine.abort(0, choice=1)
    engine.check_integrity()
    finish(engine, transcript)
    expected = reference_greedy(llama, prompt, 20)
    assert transcript.tokens == {(0, 0): expected, (0, 1): expected[:5], (0, 2): expected}
    assert_idle(engine)


def test_choices_that_fork_on_another_pod_take_no_rows_here(tmp_path: Path) -> None:
    """A long prompt whose choices fill all rows of its decode pod does not block other prompts on the prefill pod."""
    engine = make_ledger_engine(
        tmp_path, block_size=4, num_blocks=64, max_num_batched_tokens=8, max_num_seqs=4, max_model_len=64
    )
    engine.add(make_request(0, [1] * 40, n=4, exports_from=0))
    engine.step()
    assert [sequence.request.id for sequence in engine.scheduler.running] == [0]
    engine.add(make_request(1, [0] * 4, n=4, exports_from=0))
    transcript = Transcript()
    for _ in range(2):
        transcript.take(engine.step().deltas)
    assert set(transcript.tokens) == {(1, choice) for choice in range(4)}
    finish(engine, transcript)
    assert len(transcript.tokens) == 8
    for id in range(2):
        engine.abort(id)
    assert_idle(engine)


def test_a_step_draws_no_more_first_tokens_for_exports_than_there_are_rows(tmp_path: Path) -> None:
    engine = make_ledger_engine(
        tmp_path, block_size=4, num_blocks=64, max_num_batched_tokens=64, max_num_seqs=6, max_model_len=64
    )
    lengths = [1, 5, 1, 8, 3, 1]  # a prompt of one token could be mistaken for a decode
    for id, length in enumerate(lengths):
        engine.add(make_request(id, [0] * length, n=1 + id % 4, exports_from=0))
    transcript = Transcript()
    while engine.has_work:
        deltas = engine.step().deltas
        assert 0 < len(deltas) <= 6
        transcript.take(deltas)
    assert len(transcript.tokens) == sum(1 + id % 4 for id in range(len(lengths)))
    for id in range(len(lengths)):
        engine.abort(id)
    assert_idle(engine)


class CountedWrites(list[int]):
    """A list that counts the changes of its members."""

    writes = 0

    def __setitem__(self, index: Any, value: Any) -> None:
        self.writes += 1
        super().__setitem__(index, value)


def work_of_forks(folder: Path, length: int, n: int) -> tuple[int, int]:
    """Return the bytes and the changes of references that a prompt's choices cost to fork, decode once and end."""
    size = 16
    engine = make_ledger_engine(
        folder, block_size=size, num_blocks=length // size + 2 * n + 1, max_num_batched_tokens=length,
        max_num_seqs=n, max_model_len=length + 8,
    )  # fmt: skip
    pool = engine.pool
    request = make_request(0, [token % 251 for token in range(length)], 4, n=n)
    engine.add(request)
    [sequence] = engine._sequences[0]
    step = engine.scheduler.schedule()
    assert step.plan.num_tokens == length
    engine.allocator.settle(sequence, length)
    pool.references = CountedWrites(pool.references)
    tracemalloc.start()
    engine._append(sequence, [Choice(7, None)] * n, [])
    assert len(engine.scheduler.schedule().sequences) == n
    for choice in range(n - 1):
        engine.abort(0, choice)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    engine.check_integrity()
    return most, pool.references.writes


def test_forks_share_their_prompt(tmp_path: Path) -> None:
    """The memory of a choice does not grow with the prompt, except by eight bytes per block of its table."""
    n, short, long = 64, 256, 32_768
    (few_bytes, few_writes), (many_bytes, many_writes) = (
        work_of_forks(tmp_path, length, n) for length in (short, long)
    )
    assert many_writes <= few_writes + 4 * n
    assert many_bytes - few_bytes < n * (long // 16) * 8 * 2
