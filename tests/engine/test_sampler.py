"""The sampler against a naive one in float64, its distribution, and the inputs on which a draw may depend."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_engine.sampler import Draw, _edit, _filter, sample, token_logprobs
from baton_engine.sampling import SamplingParams
from baton_kernels.reference.philox import gumbel_noise

from .sampler_reference import distribution, edited, softmax

VOCAB_SIZE = 40
PROMPT = [3, 4, 5, 5, 30]
OUTPUT = [7, 8, 7, 9, 4]

EDITS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "presence": {"presence_penalty": 0.7},
    "negative presence": {"presence_penalty": -1.5},
    "frequency": {"frequency_penalty": 1.1},
    "repetition": {"repetition_penalty": 1.4},
    "repetition below one": {"repetition_penalty": 0.6},
    "all penalties": {"presence_penalty": 0.3, "frequency_penalty": -0.4, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {0: 100.0, 7: -2.5, 39: 1.0}},
    "bias and repetition": {"logit_bias": {7: 9.0, 3: -9.0}, "repetition_penalty": 2.0},
    "allowed": {"allowed_token_ids": [2, 7, 39]},
    "a bad word of one token": {"bad_words": [[7]]},
    "a bad word about to be completed": {"bad_words": [[9, 4, 11]]},
    "a bad word of the whole output": {"bad_words": [[*OUTPUT, 12]]},
    "a bad word longer than the output": {"bad_words": [[30, *OUTPUT, 13], [1] * 9]},
    "a bad word of which another token came last": {"bad_words": [[4, 9, 11], [9, 4]]},
    "too early to end": {"min_tokens": 6, "eos_token_ids": [1], "stop_token_ids": [7, 20, 999]},
    "no longer too early to end": {"min_tokens": 5, "eos_token_ids": [1], "stop_token_ids": [7, 20]},
    "everything": {
        "allowed_token_ids": list(range(1, 30)),
        "bad_words": [[4, 2], [6]],
        "min_tokens": 9,
        "eos_token_ids": [1],
        "logit_bias": {9: 3.0},
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.3,
    },
}

FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": {"top_k": 5},
    "top_k beyond the vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.7},
    "a top_p below the best token": {"top_p": 1e-6},
    "min_p": {"min_p": 0.1},
    "a min_p of one": {"min_p": 1.0},
    "top_k and top_p": {"top_k": 12, "top_p": 0.8},
    "all": {"min_p": 0.02, "top_k": 12, "top_p": 0.9},
}


def random_logits(rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def make_draw(
    row: int = 0, choice: int = 0, prompt: list[int] = PROMPT, output: list[int] = OUTPUT, **fields: Any
) -> Draw:
    return Draw(SamplingParams(**fields), list(prompt), list(output), row, choice)


@pytest.mark.parametrize("name", EDITS)
def test_edits(name: str) -> None:
    fields = EDITS[name]
    logits = random_logits(20)
    for row in logits:
        got = row.clone()
        _edit(got, make_draw(**fields))
        expected = edited(row.numpy(), SamplingParams(**fields), PROMPT, OUTPUT)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", EDITS)
def test_the_greedy_token_is_the_best_after_edits(name: str) -> None:
    logits = random_logits(20, seed=1)
    before = logits.clone()
    got = sample(logits, [make_draw(row, **EDITS[name]) for row in range(20)])
    assert got == [int(edited(row.numpy(), SamplingParams(**EDITS[name]), PROMPT, OUTPUT).argmax()) for row in logits]
    assert torch.equal(logits, before), "logprobs are of the model's own logits, which must stay as they are"


def test_a_bad_word_may_begin_the_output() -> None:
    scores = random_logits(1)[0]
    _edit(scores, make_draw(output=[], bad_words=[[5, 6], [8]]))
    assert torch.isinf(scores).nonzero().flatten().tolist() == [8]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("name", FILTERS)
def test_filters(name: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, **FILTERS[name])
    logits = random_logits(20, seed=2)
    got = _filter(logits, [params] * 20).softmax(dim=-1).numpy()
    for row, probabilities in zip(logits, got, strict=True):
        expected = distribution(row.double().numpy(), params)
        assert ((expected > 0) == (probabilities > 0)).all()
        np.testing.assert_allclose(probabilities, expected, rtol=1e-4, atol=1e-6)


def test_equal_logits_stay_together() -> None:
    logits = torch.tensor([[1.0, 0.0, 1.0, 1.0, 3.0]])
    kept = torch.isfinite(_filter(logits, [SamplingParams(temperature=1.0, top_k=2)]))[0]
    assert kept.tolist() == [True, False, True, True, True]


def test_the_best_of_one_is_the_best() -> None:
    logits = random_logits(20, seed=2)
    draws = [make_draw(row, temperature=2.5, top_k=1, seed=row) for row in range(20)]
    assert sample(logits, draws) == logits.argmax(dim=-1).tolist()


@settings(max_examples=60, deadline=None)
@given(
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_a_row_is_filtered_as_if_it_were_alone(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    others = [SamplingParams(temperature=0.5 + 0.1 * i, **fields) for i, fields in enumerate(FILTERS.values())]
    logits = random_logits(len(others) + 1, seed)
    assert torch.equal(_filter(logits, [params, *others])[:1], _filter(logits[:1], [params]))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 8},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.05, "presence_penalty": 1.0, "logit_bias": {3: 2.0}},
    ],
)
def test_draws_follow_the_filtered_distribution(fields: dict[str, Any]) -> None:
    """Chi-squared over 20,000 seeds."""
    count = 20_000
    logits = random_logits(1, seed=3)
    params = SamplingParams(**fields)
    tokens = sample(logits, [make_draw(seed=seed, **fields) for seed in range(count)])
    expected = distribution(edited(logits[0].numpy(), params, PROMPT, OUTPUT), params) * count
    counts = np.bincount(tokens, minlength=VOCAB_SIZE)
    assert (counts[expected == 0] == 0).all()
    common = expected >= 5
    rest = expected[~common].sum(), counts[~common].sum()
    statistic = ((counts[common] - expected[common]) ** 2 / expected[common]).sum()
    statistic += (rest[1] - rest[0]) ** 2 / rest[0] if rest[0] else 0
    freedom = int(common.sum()) - (0 if rest[0] else 1)
    # Five standard deviations above the mean of the distribution.
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_positions_and_choices_draw_anew() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    by_choice = sample(logits, [make_draw(choice=choice, temperature=1.0) for choice in range(200)])
    by_position = sample(logits, [make_draw(output=[1] * length, temperature=1.0) for length in range(200)])
    for tokens in (by_choice, by_position):
        assert len(set(tokens)) == VOCAB_SIZE
    assert by_choice != by_position


def mixed_draws() -> list[Draw]:
    """32 draws of all kinds over 32 rows."""
    edits, filters = list(EDITS.values()), list(FILTERS.values())
    return [
        make_draw(
            row,
            choice=row % 3,
            output=OUTPUT * (1 + row % 2),
            temperature=[0.0, 0.6, 1.0, 1.7][row % 4],
            seed=row * 77,
            **edits[row % len(edits)],
            **filters[row % len(filters)],
        )
        for row in range(32)
    ]


def test_a_token_is_the_same_alone_and_in_a_batch_in_any_order() -> None:
    logits, draws = random_logits(32, seed=4, vocab_size=1003), mixed_draws()
    together = sample(logits, draws)
    for row, draw in enumerate(draws):
        alone = Draw(draw.params, draw.prompt, draw.output, 0, draw.choice)
        assert sample(logits[row : row + 1], [alone]) == [together[row]]
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0)).tolist()
    moved = [
        Draw(draws[old].params, draws[old].prompt, draws[old].output, new, draws[old].choice)
        for new, old in enumerate(order)
    ]
    assert sample(logits[order], moved) == [together[old] for old in order]
    assert sample(logits, draws[::-1]) == together[::-1]


def test_several_draws_may_share_a_row() -> None:
    logits = random_logits(2, seed=5)
    draws = [make_draw(row, choice, temperature=1.0, seed=9) for row in (0, 1) for choice in range(4)]
    got = sample(logits, draws)
    assert got[:4] == sample(logits[:1], draws[:4])
    assert len(set(got)) > 1


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_all_64_bits_of_a_seed_count(seed: int) -> None:
    logits = torch.zeros(1, 1000)
    [got] = sample(logits, [make_draw(seed=seed, temperature=1.0)])
    signed = torch.tensor([seed], dtype=torch.uint64).view(torch.int64)
    noise = gumbel_noise(signed, torch.tensor([len(PROMPT) + len(OUTPUT)]), torch.tensor([0]), 1000)
    assert got == int(noise.argmax())
    others = [make_draw(seed=seed ^ (1 << bit), temperature=1.0) for bit in range(64)]
    assert sum(token == got for token in sample(logits, others)) < 4


@pytest.mark.parametrize("count", [0, 1, 5, VOCAB_SIZE, VOCAB_SIZE + 10])
def test_logprobs_and_ranks(count: int) -> None:
    logits = random_logits(6, seed=6)
    chosen = [0, 5, 39, int(logits[3].argmax()), int(logits[4].argmin()), 7]
    entries = token_logprobs(logits, chosen, [count] * 6)
    for row, token, entry in zip(logits, chosen, entries, strict=True):
        expected = np.log(softmax(row.double().numpy()))
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(expected[token], abs=1e-5)
        assert entry.rank == 1 + sum(expected > expected[token])
        best = np.argsort(-expected)[:count]
        assert entry.top_token_ids == best.tolist()
        assert entry.top_logprobs == pytest.approx(expected[best].tolist(), abs=1e-5)
    assert (entries[3].rank, entries[4].rank) == (1, VOCAB_SIZE)


def test_each_row_gets_as_many_alternatives_as_it_asked_for() -> None:
    entries = token_logprobs(random_logits(3), [1, 2, 3], [0, 4, 2])
    assert [len(entry.top_token_ids) for entry in entries] == [0, 4, 2]
    assert [len(entry.top_logprobs) for entry in entries] == [0, 4, 2]
    assert token_logprobs(random_logits(0), [], []) == []
