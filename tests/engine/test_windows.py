"""Layers with a sliding window have block tables of their own, and give back the blocks that no later query sees."""

import random
from pathlib import Path

import pytest

from baton_engine.config import ConfigError
from tests.conftest import MakeModel
from tests.models import reference_choices, reference_greedy

from .handover import Pair
from .harness import Transcript, assert_idle, generate, make_engine, make_prompt, make_request


@pytest.fixture(scope="session")
def mistral(tiny_model: MakeModel) -> Path:
    """A model all of whose layers have a window."""
    return tiny_model("mistral", sliding_window=21)


@pytest.fixture(scope="session")
def lfm2(tiny_model: MakeModel) -> Path:
    """A model some of whose layers have convolutions, whose inputs are in the cache."""
    return tiny_model("lfm2", conv_L_cache=6)


def test_gemma_3_holds_few_blocks_of_a_long_prompt(tiny_model: MakeModel) -> None:
    """At 32k tokens the window layers hold a small part of what the layer holds that sees all tokens."""
    length, window, step, size = 32 << 10, 512, 1024, 16
    types = ["sliding_attention"] * 5 + ["full_attention"]
    folder = tiny_model(
        "gemma3", num_hidden_layers=6, layer_types=types, sliding_window=window, hidden_size=16, intermediate_size=16,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8, max_position_embeddings=length + 64,
    )  # fmt: skip
    most = length // size + 4 + 5 * ((window + 2 * step) // size + 1)
    with pytest.raises(ConfigError, match=f"raise --num-blocks to {most} or"):
        make_engine(folder, num_blocks=most - 1, max_num_batched_tokens=step, block_size=size)
    engine = make_engine(folder, num_blocks=most, max_num_batched_tokens=step, block_size=size)
    assert len(engine.runner.cache.layout.groups) == 6
    engine.add(make_request(0, make_prompt(length), 20))
    transcript, held = Transcript(), []
    while engine.has_work:
        transcript.take(engine.step().deltas)
        held.append(engine.pool.num_held)
    assert max(held) <= most
    # While tokens are drawn, each window layer has the window and the block that is being filled.
    assert held[-2] <= length // size + 2 + 5 * (window // size + 2)
    assert held[-2] < 6 * length // size / 4
    assert_idle(engine)


@pytest.mark.parametrize("caching", [True, False])
def test_a_pool_smaller_than_a_sequence_serves_it_when_all_layers_have_a_window(mistral: Path, caching: bool) -> None:
    prompt = make_prompt(150)
    engine = make_engine(
        mistral,
        block_size=4,
        num_blocks=20,
        max_num_batched_tokens=24,
        max_model_len=400,
        enable_prefix_caching=caching,
    )
    transcript = generate(engine, [make_request(0, prompt, 250)])
    assert transcript.tokens[0, 0] == reference_greedy(mistral, prompt, 250)
    assert_idle(engine)


@pytest.mark.parametrize("ahead", [16, 64, 200])
@pytest.mark.parametrize("name", ["windowed", "mistral", "lfm2"])
def test_a_known_prefix_is_found_while_the_cache_has_its_window(
    name: str, ahead: int, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    engine = make_engine(folder, block_size=4, num_blocks=400, max_num_batched_tokens=32)
    common = make_prompt(ahead)
    generate(engine, [make_request(0, common + make_prompt(90, seed=1))])
    prompt = common + make_prompt(30, seed=2)
    transcript = generate(engine, [make_request(1, prompt, 20)])
    assert transcript.first(1).cached_tokens == ahead
    assert transcript.tokens[1, 0] == reference_greedy(folder, prompt, 20)
    assert_idle(engine)


@pytest.mark.parametrize("name", ["windowed", "mistral", "lfm2"])
def test_prefixes_come_and_go_without_a_wrong_token(name: str, request: pytest.FixtureRequest) -> None:
    """In a small pool blocks of some groups are evicted before those of others."""
    folder: Path = request.getfixturevalue(name)
    rng = random.Random(3)
    engine = make_engine(folder, block_size=4, num_blocks=110, max_num_batched_tokens=24, max_model_len=160)
    texts = [make_prompt(140, seed=seed) for seed in range(3)]
    hits = []
    for turn in range(6):
        requests = [
            make_request(
                turn * 4 + at, rng.choice(texts)[: rng.randint(5, 140)], rng.randint(1, 18), n=rng.choice([1, 2])
            )
            for at in range(4)
        ]
        transcript = generate(engine, requests)
        for each in requests:
            for choice in range(each.sampling.n):
                tokens = transcript.tokens[each.id, choice]
                assert tokens == reference_choices(folder, each.prompt, tokens)
            hits.append(transcript.first(each.id).cached_tokens)
        assert_idle(engine)
    assert sum(bool(hit) for hit in hits) >= 6
    assert engine.pool.num_cached > 0


@pytest.mark.parametrize(("name", "window"), [("windowed", 13), ("mistral", 21), ("lfm2", 6)])
@pytest.mark.parametrize("length", [9, 60, 130])
def test_only_what_is_still_seen_is_handed_over(
    name: str, window: int, length: int, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    pair = Pair(make_engine(folder, max_num_batched_tokens=24, block_size=4), make_engine(folder, block_size=16), 5)
    prompt = make_prompt(length)
    pair.add(make_request(0, prompt, 30))
    pair.step_decode()
    while not pair.first_tokens:
        pair.step_prefill()
    layout = pair.decode.runner.cache.layout
    seen = sum(min(length, (layer_window or length + 1) - 1) for layer_window in layout.windows)
    assert sum(len(piece.values) for piece in pair.pieces) == seen * layout.layer_bytes
    # The decode engine has no blocks for the rest.
    blocks = -(-length // 16)
    assert pair.decode.pool.num_held == sum(blocks - group.first_seen(length) // 16 for group in layout.groups)
    tokens = pair.run().tokens[0, 0]
    assert tokens == reference_greedy(folder, prompt, 30)
    for engine in (pair.prefill, pair.decode):
        assert_idle(engine)


def test_an_imported_block_that_lacks_its_first_tokens_is_not_found_again(mistral: Path) -> None:
    """A later prompt would read those tokens, because its queries come earlier than those of the imported request."""
    pair = Pair(make_engine(mistral, block_size=4), make_engine(mistral, block_size=16), 5)
    for plane in pair.decode.runner.cache.planes:
        plane.fill_(float("nan"))
    prompt = make_prompt(25)
    pair.add(make_request(0, prompt, 3))
    assert pair.run().tokens[0, 0] == reference_greedy(mistral, prompt, 3)
    prompt = prompt[:20] + make_prompt(5, seed=9)
    transcript = generate(pair.decode, [make_request(1, prompt, 8)])
    assert transcript.first(1).cached_tokens == 0
    assert transcript.tokens[1, 0] == reference_greedy(mistral, prompt, 8)
