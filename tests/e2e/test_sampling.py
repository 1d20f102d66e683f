"""Sampled tokens and log probabilities do not depend on the pods and the batch that they come from."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_proto import serving_pb2 as pb
from tests.models import reference_model

from .decode_client import DecodeClient
from .prompts import make_prompt, mixed_prompts
from .stack import Stack
from .workers import Worker

SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 0.9,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "seed": 1234,
    "n": 2,
}


def reference_logprobs(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Return [positions, vocabulary]: how likely transformers finds each token after each beginning of `tokens`."""
    with torch.inference_mode():
        return reference_model(folder)(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)


@pytest.mark.parametrize("length", [1, 16, 150])
async def test_seeded_tokens_are_the_same_everywhere(decode: Worker, prefill: Worker, length: int) -> None:
    prompt = make_prompt(length, seed=400)
    async with DecodeClient(decode) as client:
        alone = await client.ask(prompt, **SAMPLING)
        handed_over = await client.ask(prompt, prefill, **SAMPLING)
        others = [
            await client.submit(other, prefill if index % 2 else "", **{**SAMPLING, "seed": index, "n": 1})
            for index, other in enumerate(mixed_prompts(30, seed=401))
        ]
        in_a_batch = [await client.submit(prompt, where, **SAMPLING) for where in (prefill, "")]
        for answer in (*others, *in_a_batch):
            await answer.finished()
        other_seed = await client.ask(prompt, **{**SAMPLING, "seed": 1235})
    for answer in (handed_over, *in_a_batch):
        assert answer.tokens == alone.tokens
    assert alone.tokens[0] != alone.tokens[1]
    assert other_seed.tokens != alone.tokens


async def test_seeded_tokens_survive_preemption(decode: Worker, prefill: Worker, start_worker: Any) -> None:
    small = await start_worker("decode", num_blocks=24, max_model_len=384, max_num_batched_tokens=48)
    prompts = [make_prompt(30 + 5 * index, seed=410 + index) for index in range(6)]
    async with DecodeClient(decode) as roomy, DecodeClient(small) as cramped:
        expected = [await roomy.submit(prompt, **SAMPLING) for prompt in prompts]
        answers = [await cramped.submit(prompt, prefill, **SAMPLING) for prompt in prompts]
        for answer, other in zip(answers, expected, strict=True):
            assert (await answer.finished()).tokens == (await other.finished()).tokens
    assert (await small.idle()).preemptions > 0


async def test_logprobs_are_the_model_s_own_everywhere(llama: Path, decode: Worker, prefill: Worker) -> None:
    """Also under sampling and penalties, which do not show in them."""
    prompt = make_prompt(150, seed=402)
    async with DecodeClient(decode) as client:
        local = await client.ask(prompt, **SAMPLING, logprobs=5)
        remote = await client.ask(prompt, prefill, **SAMPLING, logprobs=5)
    assert remote.tokens == local.tokens
    for choice, tokens in local.tokens.items():
        reference = reference_logprobs(llama, prompt + tokens)[len(prompt) - 1 : -1]
        assert len(local.logprobs[choice]) == len(tokens)
        for ours, theirs, token, row in zip(
            local.logprobs[choice], remote.logprobs[choice], tokens, reference, strict=True
        ):
            assert ours.token_id == theirs.token_id == token
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert list(ours.top_logprobs) == pytest.approx(list(theirs.top_logprobs), abs=1e-4)
            assert_logprobs(ours, row)


def assert_logprobs(entry: pb.TokenLogprobs, reference: torch.Tensor) -> None:
    assert entry.logprob == pytest.approx(reference[entry.token_id].item(), abs=1e-3)
    assert len(entry.top_logprobs) == 5
    assert list(entry.top_logprobs) == pytest.approx(reference.topk(5).values.tolist(), abs=1e-3)
    for token, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
        assert logprob == pytest.approx(reference[token].item(), abs=1e-3)
    assert entry.rank == pytest.approx(1 + (reference > reference[entry.token_id]).sum().item(), abs=1)


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
async def test_prompt_logprobs(llama: Path, decode: Worker, prefill: Worker, known: bool) -> None:
    """Known: both pods hold the prompt's KV already, and still every token is judged."""
    prompt = make_prompt(150, seed=403 + known)
    async with DecodeClient(decode) as client:
        if known:
            await client.ask(prompt, prefill, max_tokens=1)
        answers = [await client.ask(prompt, where, max_tokens=2, prompt_logprobs=5) for where in (prefill, "")]
    reference = reference_logprobs(llama, prompt)
    for answer, disaggregated in zip(answers, (True, False), strict=True):
        assert answer.prompt is not None
        assert answer.prompt.disaggregated == disaggregated
        first, *rest = answer.prompt.logprobs
        assert first == pb.TokenLogprobs()
        assert [entry.token_id for entry in rest] == prompt[1:]
        for entry, row in zip(rest, reference[:-1], strict=True):
            assert_logprobs(entry, row)
    await asyncio.gather(decode.idle(), prefill.idle())


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_scores_a_given_text(llama: Path, stack: Stack, max_tokens: int) -> None:
    prompt = make_prompt(300, seed=405 + max_tokens)
    fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    response = await stack.complete(prompt, **fields)
    assert response.status_code == 200, response.text
    scores = response.json()["choices"][0]["logprobs"]["token_logprobs"]
    assert scores[0] is None
    assert len(scores) == len(prompt) + max_tokens
    reference = reference_logprobs(llama, prompt)
    expected = [row[token].item() for row, token in zip(reference[:-1], prompt[1:], strict=True)]
    assert scores[1 : len(prompt)] == pytest.approx(expected, abs=1e-3)
    if max_tokens:
        assert scores[-1] == pytest.approx(reference[-1].max().item(), abs=1e-3)
    await stack.idle()
