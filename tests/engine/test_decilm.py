"""Llama-Nemotron: layers of one kind with different numbers of key-value heads, in one cache."""

from pathlib import Path

import pytest

from tests.conftest import MakeModel
from tests.models import is_greedy, reference_greedy

from .handover import Pair
from .harness import assert_idle, generate, make_engine, make_prompt, make_request
from .pools import MakeEngine
from .test_equality import SHAPES


@pytest.fixture(scope="module")
def nemotron(tiny_model: MakeModel) -> Path:
    family, overrides = SHAPES["nemotron-51b-biases"]
    return tiny_model(family, **overrides)


def test_through_a_pair_of_pods(nemotron: Path) -> None:
    pair = Pair(make_engine(nemotron, max_num_batched_tokens=24), make_engine(nemotron), seed=1)
    prompts = [make_prompt(length, seed=4) for length in (1, 17, 70)]
    for id, prompt in enumerate(prompts):
        pair.add(make_request(id, prompt, 24))
    transcript = pair.run()
    for id, prompt in enumerate(prompts):
        assert transcript.tokens[id, 0] == reference_greedy(nemotron, prompt, 24)


def test_cached_prompts(nemotron: Path) -> None:
    engine, prompt = make_engine(nemotron, block_size=4), make_prompt(40, seed=5)
    expected = reference_greedy(nemotron, prompt, 12)
    for id in range(2):
        assert generate(engine, [make_request(id, prompt, 12)]).tokens[id, 0] == expected
    assert engine.load().prefix_hits > 0
    assert_idle(engine)


@pytest.mark.soak
def test_between_pods_with_different_ranks(nemotron: Path, divided: MakeEngine) -> None:
    prompt = make_prompt(50, seed=3)
    for ranks in ((1, 2), (2, 1)):
        pair = Pair(*(divided(nemotron, count, max_num_batched_tokens=40) for count in ranks), seed=2)
        pair.add(make_request(0, prompt, 8))
        assert is_greedy(nemotron, prompt, pair.run().tokens[0, 0])
