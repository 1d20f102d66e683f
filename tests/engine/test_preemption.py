"""Preempted sequences, which lose their blocks and are recomputed, and the order in which sequences are scheduled."""

from pathlib import Path

import pytest

from baton_engine.sequence import State
from tests.models import reference_choices

from .harness import Transcript, assert_idle, finish, generate, make_engine, make_prompt, make_request


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_give_the_same_tokens(windowed: Path, caching: bool) -> None:
    engine = make_engine(windowed, block_size=4, num_blocks=32, max_model_len=64, enable_prefix_caching=caching)
    prompts = [make_prompt(9 + i, seed=i) for i in range(8)]
    transcript = generate(engine, [make_request(i, prompt, 40) for i, prompt in enumerate(prompts)])
    assert engine.load().preemptions > 3
    for id, prompt in enumerate(prompts):
        tokens = transcript.tokens[id, 0]
        assert len(tokens) == 40
        assert tokens == reference_choices(windowed, prompt, tokens)
    assert_idle(engine)


def test_sampled_tokens_survive_preemption(llama: Path) -> None:
    requests = [make_request(i, make_prompt(9, seed=i), 40, temperature=1.0, seed=i) for i in range(6)]
    roomy = make_engine(llama, block_size=4)
    expected = generate(roomy, requests).tokens
    assert roomy.load().preemptions == 0
    narrow = make_engine(llama, block_size=4, num_blocks=24, max_model_len=64)
    assert generate(narrow, requests).tokens == expected
    assert narrow.load().preemptions > 0


def test_prompt_logprobs_survive_preemption(llama: Path) -> None:
    """The second prompt is computed in chunks while the first request grows into its blocks."""
    settings = {"block_size": 4, "max_model_len": 100, "max_num_batched_tokens": 3}
    prompt = make_prompt(60, seed=1)
    alone = generate(make_engine(llama, **settings), [make_request(1, prompt, 4, prompt_logprobs=2)]).first(1)
    engine = make_engine(llama, num_blocks=25, **settings)
    engine.add(make_request(0, make_prompt(6), 90))
    transcript = Transcript()
    for _ in range(8):
        transcript.take(engine.step().deltas)
    engine.add(make_request(1, prompt, 4, prompt_logprobs=2))
    finish(engine, transcript)
    assert engine.load().preemptions > 0
    crowded = transcript.first(1)
    assert alone.prompt_logprobs is not None
    assert crowded.prompt_logprobs is not None
    assert [e.token_id for e in crowded.prompt_logprobs] == prompt[1:]
    assert [e.logprob for e in crowded.prompt_logprobs] == pytest.approx(
        [e.logprob for e in alone.prompt_logprobs], abs=1e-4
    )


def test_the_least_urgent_is_preempted(llama: Path) -> None:
    engine = make_engine(llama, block_size=4, num_blocks=16, max_model_len=64)
    # All others run in order of arrival, but the second is the most urgent and the first the least urgent.
    for id, priority in enumerate((5, -1, 0)):
        engine.add(make_request(id, make_prompt(14, seed=id), 30, priority=priority))
    transcript = Transcript()
    while not engine.load().preemptions:
        transcript.take(engine.step().deltas)
    assert [sequence.request.id for sequence in engine.scheduler.waiting] == [0]
    assert [sequence.request.id for sequence in engine.scheduler.running] == [1, 2]
    finish(engine, transcript)
    assert list(transcript.reasons) == [(1, 0), (2, 0), (0, 0)]


def test_a_more_urgent_request_is_admitted_first(llama: Path) -> None:
    engine = make_engine(llama, max_num_seqs=1)
    for id, priority in enumerate((0, 3, 0, -2, 3)):
        engine.add(make_request(id, make_prompt(20, seed=id), 4, priority=priority))
    transcript = Transcript()
    finish(engine, transcript)
    assert [id for id, _ in transcript.reasons] == [3, 0, 2, 1, 4]


def test_requests_beyond_the_pool_wait(llama: Path) -> None:
    engine = make_engine(llama, num_blocks=8, max_model_len=128)
    for id in range(4):
        engine.add(make_request(id, make_prompt(60, seed=id), 3))
    transcript = Transcript()
    transcript.take(engine.step().deltas)
    assert engine.load().running == 1
    assert engine.load().waiting == 3
    assert engine.load().queued_prefill_tokens == 180
    assert all(sequence.state is State.WAITING and not sequence.tables for sequence in engine.scheduler.waiting)
    finish(engine, transcript)
    assert engine.load().preemptions == 0
    assert_idle(engine)


def test_a_request_that_can_never_run_is_refused(llama: Path) -> None:
    engine = make_engine(llama, max_model_len=64, max_num_seqs=4)
    cases = [
        (make_request(0, []), "prompt", "at least one"),
        (make_request(0, [512]), "prompt", "vocabulary of 512"),
        (make_request(0, [-1]), "prompt", "vocabulary of 512"),
        (make_request(0, make_prompt(60), 5), "prompt", "context of 64"),
        (make_request(0, [1], n=5), "n", "at most 4"),
        (make_request(0, [1], max_tokens=0), "max_tokens", "at least 1"),
        (make_request(0, [1], 5, min_tokens=6), "min_tokens", "max_tokens"),
        (make_request(0, [1], temperature=-0.1), "temperature", "negative"),
        (make_request(0, [1], temperature=float("inf")), "temperature", "finite"),
        (make_request(0, [1], top_k=-1), "top_k", "negative"),
        (make_request(0, [1], top_p=0.0), "top_p", "above 0"),
        (make_request(0, [1], min_p=1.5), "min_p", "between 0 and 1"),
        (make_request(0, [1], repetition_penalty=0.0), "repetition_penalty", "above 0"),
        (make_request(0, [1], n=0), "n", "at least 1"),
        (make_request(0, [1], logit_bias={512: 1.0}), "logit_bias", "512"),
        (make_request(0, [1], allowed_token_ids=[3, 600]), "allowed_token_ids", "600"),
        (make_request(0, [1], bad_words=[[4, 700]]), "bad_words", "700"),
        (make_request(0, [1], bad_words=[[]]), "bad_words", "at least one token"),
    ]
    for request, field, words in cases:
        error = engine.request_error(request)
        assert error is not None, field
        assert error[0] == field
        assert words in error[1]
