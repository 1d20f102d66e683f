"""The GPU's runner gives the tokens of the CPU's, whatever goes through graphs, pieces of graphs or neither."""

import random
from pathlib import Path
from typing import Any

import pytest

from baton_engine.sequence import Request
from tests.conftest import MakeModel

from .fake_cuda import pretend
from .harness import assert_idle, generate, make_engine, make_prompt, make_request

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.9, "top_k": 7, "seed": 1 << 63},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 0.7, "min_p": 0.1, "seed": 9},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 0},
    {"temperature": 0.0, "presence_penalty": 1.5, "min_tokens": 5, "eos_token_ids": [7, 9, 11]},
    {"temperature": 0.8, "logit_bias": {5: 3.0}, "bad_words": [[5, 5], [9]], "n": 3},
    {"temperature": 0.9, "top_p": 0.9, "n": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
]
SETTINGS: dict[str, dict[str, Any]] = {
    "few sequences": {"max_num_seqs": 3, "max_num_batched_tokens": 16},
    "many sequences": {"max_num_seqs": 16, "max_num_batched_tokens": 128, "block_size": 16},
    "eager": {"enforce_eager": True},
    "preempted": {"num_blocks": 40, "max_num_seqs": 16},
    "deterministic": {"deterministic": True},
}


def make_requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        make_request(
            id,
            make_prompt(rng.choice([1, 2, 5, 15, 16, 17, 30, 45, 100]), seed=seed),
            max_tokens=rng.randint(5, 25),
            **rng.choice(KINDS),
        )
        for id in range(40)
    ]


@pytest.mark.parametrize("family", ["bloom", "gemma2", "gemma3", "gpt2", "gpt_neox", "falcon", "granite", "olmo2"])
def test_same_tokens_of_other_families(tiny_model: MakeModel, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model(family, initializer_range=0.1)
    settings = {"max_num_seqs": 5, "max_num_batched_tokens": 32, "block_size": 4, "max_model_len": 160}
    expected = generate(make_engine(folder, **settings), make_requests(7))
    pretend(monkeypatch)
    assert generate(make_engine(folder, **settings), make_requests(7)).tokens == expected.tokens


@pytest.mark.parametrize("name", SETTINGS)
def test_same_tokens_as_on_the_cpu(llama: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_num_seqs": 5, "max_num_batched_tokens": 32, "block_size": 4, "max_model_len": 160}
    settings |= SETTINGS[name]
    seed = random.randrange(1000)
    print(f"seed {seed}")
    expected = generate(make_engine(llama, **{**settings, "deterministic": False}), make_requests(seed))
    pretend(monkeypatch)
    engine = make_engine(llama, **settings)
    got = generate(engine, make_requests(seed))
    assert got.tokens == expected.tokens
    assert got.reasons == expected.reasons
    assert_idle(engine)
    assert bool(engine.scheduler.num_preemptions) == (name == "preempted")
    twins = {(delta.id, delta.choice, delta.offset): delta for delta in expected.deltas}
    for delta in got.deltas:
        twin = twins[delta.id, delta.choice, delta.offset]
        assert [entry.logprob for entry in delta.logprobs] == pytest.approx(
            [entry.logprob for entry in twin.logprobs], abs=1e-4
        )
