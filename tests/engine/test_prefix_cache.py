"""The prefix cache saves computation and changes no token."""

from pathlib import Path

import pytest

from tests.models import reference_choices, reference_greedy

from .harness import assert_idle, generate, make_engine, make_prompt, make_request


@pytest.mark.parametrize(
    ("length", "cached"),
    # The last token is always computed, so the last block is computed even if all blocks are full.
    [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (70, 64)],
)
def test_a_prompt_seen_before_is_cached_up_to_its_last_token(windowed: Path, length: int, cached: int) -> None:
    prompt = make_prompt(length)
    engine = make_engine(windowed, max_num_batched_tokens=24)
    expected = reference_greedy(windowed, prompt, 20)
    for id, hit in enumerate((0, cached)):
        transcript = generate(engine, [make_request(id, prompt, 20)])
        assert transcript.tokens[id, 0] == expected
        assert transcript.first(id).cached_tokens == hit
    assert engine.load().prefix_hits == cached
    assert engine.load().prefix_queries == 2 * length
    assert_idle(engine)


def test_a_shared_beginning_is_cached_and_the_rest_computed(llama: Path) -> None:
    common, engine = make_prompt(40), make_engine(llama)
    generate(engine, [make_request(0, common + make_prompt(30, seed=1))])
    prompt = common + make_prompt(30, seed=2)
    transcript = generate(engine, [make_request(1, prompt, 20)])
    assert transcript.first(1).cached_tokens == 32
    assert transcript.tokens[1, 0] == reference_greedy(llama, prompt, 20)


def test_an_answer_is_cached_for_the_next_turn(llama: Path) -> None:
    engine, prompt = make_engine(llama), make_prompt(20)
    answer = generate(engine, [make_request(0, prompt, 30)]).tokens[0, 0]
    turn = prompt + answer + make_prompt(5, seed=1)
    transcript = generate(engine, [make_request(1, turn, 20)])
    # 49 of the 50 tokens were computed (the last was only sampled): three blocks.
    assert transcript.first(1).cached_tokens == 48
    assert transcript.tokens[1, 0] == reference_greedy(llama, turn, 20)


def test_equal_blocks_behind_different_beginnings_are_not_the_same(llama: Path) -> None:
    engine, tail = make_engine(llama), make_prompt(32)
    generate(engine, [make_request(0, make_prompt(16, seed=1) + tail)])
    prompt = make_prompt(16, seed=2) + tail
    transcript = generate(engine, [make_request(1, prompt, 20)])
    assert transcript.first(1).cached_tokens == 0
    assert transcript.tokens[1, 0] == reference_greedy(llama, prompt, 20)


def test_the_cache_can_be_off(llama: Path) -> None:
    engine, prompt = make_engine(llama, enable_prefix_caching=False), make_prompt(70)
    for id in range(2):
        transcript = generate(engine, [make_request(id, prompt, 20)])
        assert transcript.first(id).cached_tokens == 0
        assert transcript.tokens[id, 0] == reference_greedy(llama, prompt, 20)
    assert engine.pool.num_cached == 0


def test_eviction_in_a_small_pool_changes_no_token(llama: Path) -> None:
    """Twelve prompts over four beginnings, through a pool that holds three of them: hits and evictions both happen."""
    engine = make_engine(llama, num_blocks=12, max_model_len=96, max_num_batched_tokens=40)
    evicted = 0
    for id in range(12):
        prompt = make_prompt(40, seed=id // 2 % 4) + make_prompt(9, seed=100 + id)
        tokens = generate(engine, [make_request(id, prompt, 12)]).tokens[id, 0]
        assert tokens == reference_choices(llama, prompt, tokens)
        assert_idle(engine)
        _, lost = engine.pool.changes.take(1000)
        evicted += len(lost)
    assert 0 < engine.load().prefix_hits < 12 * 32
    assert evicted, "no block was given out twice"


def test_prompt_logprobs_are_computed_in_full_beside_a_warm_cache(llama: Path) -> None:
    engine, prompt = make_engine(llama), make_prompt(40)
    generate(engine, [make_request(0, prompt)])
    first = generate(engine, [make_request(1, prompt, prompt_logprobs=0)]).first(1)
    assert first.cached_tokens == 0
    assert first.prompt_logprobs is not None
    assert [entry.token_id for entry in first.prompt_logprobs] == prompt[1:]
