"""Logprobs of prompts and of sampled tokens against transformers' own log-softmax."""

from pathlib import Path

import pytest
import torch

from baton_engine.sampling import TokenLogprobs
from tests.models import reference_model

from .harness import generate, make_engine, make_prompt, make_request


def reference_logprobs(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Return [tokens, vocab]: transformers' logprobs of the next token after each token."""
    with torch.inference_mode():
        return reference_model(folder)(torch.tensor([tokens])).logits[0].double().log_softmax(dim=-1)


def assert_equal(entries: list[TokenLogprobs], tokens: list[int], expected: torch.Tensor, count: int) -> None:
    for entry, token, row in zip(entries, tokens, expected, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert entry.rank == 1 + int((row > row[token]).sum())
        best = row.topk(count)
        assert entry.top_token_ids == best.indices.tolist()
        assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)


# 150 tokens need more rows of logits than are computed at once; a budget of 7 cuts the prompt into many chunks.
@pytest.mark.parametrize("budget", [7, 64, 1024])
@pytest.mark.parametrize("length", [2, 17, 150])
def test_prompt_logprobs(windowed: Path, length: int, budget: int) -> None:
    prompt = make_prompt(length)
    engine = make_engine(windowed, max_num_batched_tokens=budget)
    first = generate(engine, [make_request(0, prompt, 4, prompt_logprobs=3)]).first(0)
    assert first.prompt_logprobs is not None
    assert_equal(first.prompt_logprobs, prompt[1:], reference_logprobs(windowed, prompt)[:-1], 3)


def test_nothing_precedes_a_prompt_of_one_token(llama: Path) -> None:
    engine = make_engine(llama)
    assert generate(engine, [make_request(0, [5], 2, prompt_logprobs=3)]).first(0).prompt_logprobs == []
    assert generate(engine, [make_request(1, [5], 2)]).first(1).prompt_logprobs is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_models_own_whatever_the_sampling(llama: Path, temperature: float) -> None:
    prompt = make_prompt(30)
    request = make_request(
        0, prompt, 20, n=2, logprobs=4, temperature=temperature, presence_penalty=1.0, top_k=50, logit_bias={3: 5.0}
    )
    transcript = generate(make_engine(llama), [request])
    for choice in range(2):
        tokens = transcript.tokens[0, choice]
        entries = [entry for delta in transcript.deltas if delta.choice == choice for entry in delta.logprobs]
        expected = reference_logprobs(llama, prompt + tokens)[len(prompt) - 1 : -1]
        assert_equal(entries, tokens, expected, 4)


def test_only_those_who_ask_get_logprobs(llama: Path) -> None:
    requests = [make_request(id, make_prompt(12, seed=id), 5, logprobs=id or None) for id in range(3)]
    transcript = generate(make_engine(llama), requests)
    for delta in transcript.deltas:
        assert [len(entry.top_token_ids) for entry in delta.logprobs] == ([delta.id] if delta.id else [])
        assert delta.prompt_logprobs is None


def test_more_logprobs_than_tokens_are_all_of_them(llama: Path) -> None:
    transcript = generate(make_engine(llama), [make_request(0, make_prompt(12), 2, logprobs=1000)])
    assert len(transcript.deltas[0].logprobs[0].top_token_ids) == 512
