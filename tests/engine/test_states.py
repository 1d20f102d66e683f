"""Layers with a recurrent state, which lies in the paged cache: it is found again, copied, handed over and divided."""

import random
from pathlib import Path

import pytest

from tests.conftest import MakeModel
from tests.models import is_greedy, reference_choices, reference_greedy

from .handover import Pair
from .harness import assert_idle, generate, make_engine, make_prompt, make_request
from .pools import MakeEngine

BLOCK = 16  # the least multiple of 4 that has room for a state


@pytest.fixture(scope="session")
def qwen(tiny_model: MakeModel) -> Path:
    return tiny_model("qwen3_5_text")


def test_blocks_are_as_large_as_states_need(qwen: Path) -> None:
    engine = make_engine(qwen, block_size=4)
    assert engine.config.block_size == BLOCK
    assert make_engine(qwen, block_size=24).config.block_size == 24
    layout = engine.runner.cache.layout
    assert layout.state_layers == (0, 2)
    assert [group.layers for group in layout.groups] == [(1, 3), (0, 2)]


@pytest.mark.parametrize("ahead", [15, 16, 40, 64, 200])
def test_a_known_prefix_is_found_with_the_state_at_its_end(qwen: Path, ahead: int) -> None:
    engine = make_engine(qwen, block_size=4, num_blocks=100, max_num_batched_tokens=40)
    common = make_prompt(ahead)
    generate(engine, [make_request(0, common + make_prompt(90, seed=1))])
    prompt = common + make_prompt(30, seed=2)
    transcript = generate(engine, [make_request(1, prompt, 20)])
    assert transcript.first(1).cached_tokens == ahead // BLOCK * BLOCK
    assert transcript.tokens[1, 0] == reference_greedy(qwen, prompt, 20)
    assert_idle(engine)


@pytest.mark.parametrize("step_tokens", [7, 24, 100])
def test_prefixes_come_and_go_without_a_wrong_token(qwen: Path, step_tokens: int) -> None:
    """In a small pool states are evicted before keys or after them, and choices share their last block."""
    rng = random.Random(step_tokens)
    engine = make_engine(qwen, block_size=4, num_blocks=26, max_num_batched_tokens=step_tokens, max_model_len=160)
    texts = [make_prompt(140, seed=seed) for seed in range(3)]
    hits = []
    for turn in range(6):
        requests = [
            make_request(
                turn * 4 + at, rng.choice(texts)[: rng.randint(5, 140)], rng.randint(1, 18), n=rng.choice([1, 2, 3])
            )
            for at in range(4)
        ]
        transcript = generate(engine, requests)
        for each in requests:
            for choice in range(each.sampling.n):
                tokens = transcript.tokens[each.id, choice]
                assert tokens == reference_choices(qwen, each.prompt, tokens)
            hits.append(transcript.first(each.id).cached_tokens)
        assert_idle(engine)
    assert sum(map(bool, hits)) >= 6
    assert engine.pool.num_cached > 0


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_give_the_same_tokens(qwen: Path, caching: bool) -> None:
    engine = make_engine(qwen, block_size=4, num_blocks=16, max_model_len=64, enable_prefix_caching=caching)
    prompts = [make_prompt(9 + i, seed=i) for i in range(8)]
    transcript = generate(engine, [make_request(i, prompt, 40) for i, prompt in enumerate(prompts)])
    assert engine.load().preemptions > 0
    for id, prompt in enumerate(prompts):
        assert transcript.tokens[id, 0] == reference_greedy(qwen, prompt, 40)
    assert_idle(engine)


@pytest.mark.parametrize(("prefill_block", "decode_block"), [(16, 16), (16, 64), (64, 16), (48, 20)])
def test_a_state_is_handed_over_in_pieces(qwen: Path, prefill_block: int, decode_block: int) -> None:
    prefill = make_engine(qwen, max_num_batched_tokens=24, block_size=prefill_block, num_blocks=4096 // prefill_block)
    decode = make_engine(qwen, block_size=decode_block, num_blocks=4096 // decode_block)
    pair, common = Pair(prefill, decode, seed=prefill_block), make_prompt(75)
    generate(decode, [make_request(100, common)])
    prompts = [*(make_prompt(length, seed=3) for length in (1, 2, 15, 16, 17, 64, 130)), common + make_prompt(40)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 20, n=1 + id % 2))
    transcript = pair.run()
    for id, prompt in enumerate(prompts):
        for choice in range(1 + id % 2):
            tokens = transcript.tokens[id, choice]
            assert len(tokens) == 20
            assert tokens == reference_choices(qwen, prompt, tokens)
    assert pair.reservations[len(prompts) - 1].first_token == 75 // decode.config.block_size * decode.config.block_size
    assert pair.prefill.pool.num_held == pair.decode.pool.num_held == 0


def test_only_the_last_state_is_handed_over(qwen: Path) -> None:
    pair = Pair(make_engine(qwen, max_num_batched_tokens=24, block_size=16), make_engine(qwen, block_size=16), 5)
    length = 70
    pair.add(make_request(0, make_prompt(length), 30))
    pair.step_decode()
    while not pair.first_tokens:
        pair.step_prefill()
    layout = pair.decode.runner.cache.layout
    rows = len(layout.state_layers) * layout.state_rows
    assert sum(len(piece.values) for piece in pair.pieces) == (2 * length + rows) * layout.layer_bytes
    assert pair.decode.pool.num_held == 5 + 1  # of the layers with attention, and the block with the state
    assert len(pair.run().tokens[0, 0]) == 30


@pytest.mark.parametrize(
    ("family", "ranks"),
    [("kimi_linear", (1, 1)), ("kimi_linear", (1, 2)), ("kimi_linear", (2, 1)), ("jamba", (2, 1)),
     ("falcon_mamba", (1, 2)), ("recurrent_gemma", (1, 1)), ("zamba2", (1, 2)), ("zamba2", (4, 2))],
)  # fmt: skip
def test_states_of_other_kinds_are_found_again_and_handed_over(
    tiny_model: MakeModel, divided: MakeEngine, family: str, ranks: tuple[int, int]
) -> None:
    """Kimi Linear has states beside latents, Jamba has those of Mamba 1 beside keys, RecurrentGemma has windows beside
    states, and FalconMamba has states alone. In Zamba2 a group of states has the places of two key-value heads."""
    folder, common = tiny_model(family), make_prompt(130)
    sizes = [divided(folder, count, block_size=4, max_num_batched_tokens=50) for count in ranks]
    block = sizes[0].config.block_size
    assert 16 < block == sizes[1].config.block_size < 130
    pair = Pair(*sizes, seed=2)
    generate(pair.decode, [make_request(100, common)])
    prompts = [make_prompt(1, seed=3), make_prompt(block + 1, seed=3), common + make_prompt(40, seed=4)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 8))
    transcript = pair.run()
    for id, prompt in enumerate(prompts):
        assert len(transcript.tokens[id, 0]) == 8
        assert is_greedy(folder, prompt, transcript.tokens[id, 0])
    assert pair.reservations[2].first_token == 130 // block * block


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 4)])
def test_states_of_unequal_ranks(tiny_model: MakeModel, divided: MakeEngine, ranks: tuple[int, int]) -> None:
    folder = tiny_model("qwen3_next", num_key_value_heads=4, linear_num_key_heads=4)
    pair = Pair(*(divided(folder, count, max_num_batched_tokens=40) for count in ranks), seed=2)
    prompts = [make_prompt(length, seed=3) for length in (1, 17, 50)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 8))
    transcript = pair.run()
    for id, prompt in enumerate(prompts):
        assert len(transcript.tokens[id, 0]) == 8
        assert is_greedy(folder, prompt, transcript.tokens[id, 0])
