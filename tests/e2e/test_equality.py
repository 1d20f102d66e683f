"""Greedy tokens through real processes are those of transformers, whatever way their KV has come."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.conftest import MakeModel
from tests.models import VOCAB_SIZE, reference_choices, reference_greedy

from .conftest import LOOP, StartWorker
from .decode_client import DecodeClient
from .pod import Pod
from .prompts import BLOCK_SIZE, make_prompt, mixed_prompts
from .stack import Stack
from .workers import Worker

NUM_TOKENS = 64
CHUNK = 48
# Together: 1, 2, 4 and 8 query heads per KV head; head sizes 16, 32, 64, 80 and 128; every rope; embeddings tied and
# not; biases on and off.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, 4 to 1, llama3": ("llama", {"rope": "llama3", "num_key_value_heads": 1}),
    "llama, 1 to 1, yarn, 80": ("llama", {"rope": "yarn", "num_key_value_heads": 4, "head_dim": 80}),
    "qwen2, 2 to 1": ("qwen2", {}),
    "qwen2, 4 to 1, yarn, 64, tied": (
        "qwen2",
        {
            "rope": "yarn",
            "hidden_size": 256,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "initializer_range": 0.18,
        },
    ),
    "qwen3, 2 to 1, 128": ("qwen3", {"head_dim": 128}),
    "glm4_moe, groups": ("glm4_moe", {"n_routed_experts": 12, "n_group": 3, "topk_group": 2, "use_qk_norm": True}),
    "llama, 8 to 1, linear, biases, tied": (
        "llama",
        {
            "rope": "linear",
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen": ("qwen", {}),
    "qwen3, 1 to 1, linear, biases, 32": (
        "qwen3",
        {"rope": "linear", "num_key_value_heads": 4, "head_dim": 32, "attention_bias": True},
    ),
    # So large that every block of keys is selected, as below.
    "minimax_m3, three planes": ("minimax_m3", {"index_topk_blocks": 75}),
    "dots3_note, two planes, latents of two sizes": ("dots3_note_text", {"index_topk": 600}),
    "glm5_next, states beside latents and two planes": ("glm5_next", {"index_topk": 600}),
    "bloom, tied, 3 layers": ("bloom", {"n_layer": 3, "seed": 2}),
    "gemma3, windows and not": ("gemma3", {"initializer_range": 0.1}),
    "gemma4, two sizes of heads, shared keys": ("gemma4_small", {"initializer_range": 0.1}),
    "mimo_v2_flash, values of another size": ("mimo_v2_flash", {}),
    "gpt_oss, windows and sinks": ("gpt_oss", {"seed": 1}),
    "deepseek_v3, latents, groups of experts": (
        "deepseek_v3",
        {"rope": "yarn of DeepSeek", "n_group": 2, "topk_group": 1},
    ),
    # So large that every token is selected: with a smaller number, rounding in batches may decide between two tokens
    # whose scores are nearly the same.
    "deepseek_v32, two planes of different sizes": ("deepseek_v32", {"index_topk": 600}),
    "deepseek_v4, windows, states and entries": ("deepseek_v4", {"index_topk": 600}),
    "granite 4, states alone": ("granitemoehybrid", {"layer_types": ["mamba", "mamba"], "seed": 1}),
    "qwen3_next, states": ("qwen3_next", {}),
    "mistral, window": ("mistral", {"sliding_window": 24, "head_dim": 64}),
}
# The engine's own tests compare every shape on one pod and on a pair; here each stack takes seconds to start.
AGGREGATED_SHAPES = int(os.environ.get("AGGREGATED_SHAPES") or 2)
DISAGGREGATED_SHAPES = int(os.environ.get("DISAGGREGATED_SHAPES") or 9)
WAYS = [(shape, "disaggregated") for shape in list(SHAPES)[-DISAGGREGATED_SHAPES:]]
WAYS += [(shape, "aggregated") for shape in list(SHAPES)[-AGGREGATED_SHAPES:]]
LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK, 2 * CHUNK + 5, 5 * CHUNK - 3]


def assert_reference(folder: Path, prompt: list[int], tokens: list[int], count: int = NUM_TOKENS) -> None:
    assert len(tokens) == count
    assert tokens == reference_choices(folder, prompt, tokens), f"{len(prompt)} prompt tokens"


@pytest.fixture(scope="module", params=WAYS, ids=", ".join)
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A shape of SHAPES, and whether prefill is apart from decode."""
    way: tuple[str, str] = request.param
    return way


@pytest.fixture(scope="module")
def folder(way: tuple[str, str], tiny_model: MakeModel) -> Path:
    family, overrides = SHAPES[way[0]]
    return tiny_model(family, **overrides)


@pytest_asyncio.fixture(scope="module", loop_scope=LOOP)
async def stack(way: tuple[str, str], folder: Path) -> AsyncIterator[Stack]:
    mode = ["--aggregated"] if way[1] == "aggregated" else []
    stack = await Stack.start(folder, "--max-num-batched-tokens", str(CHUNK), "--num-blocks", "512", *mode)
    assert len(stack.pods("prefill")) == 1 - len(mode)
    yield stack
    await stack.stop()


@pytest.mark.soak
async def test_one_prompt_at_a_time(stack: Stack, folder: Path) -> None:
    for length in LENGTHS:
        prompt = make_prompt(length, seed=1)
        [tokens] = await stack.tokens(prompt, NUM_TOKENS)
        assert_reference(folder, prompt, tokens)
    await stack.idle()


@pytest.mark.soak
async def test_many_at_once(stack: Stack, folder: Path) -> None:
    prompts = mixed_prompts(32, seed=2)
    answers = await asyncio.gather(*(stack.tokens(prompt, NUM_TOKENS) for prompt in prompts))
    for prompt, [tokens] in zip(prompts, answers, strict=True):
        assert_reference(folder, prompt, tokens)
    await stack.idle()


@pytest.mark.soak
async def test_four_choices(stack: Stack, folder: Path) -> None:
    for length in (BLOCK_SIZE, 2 * CHUNK + 5):
        prompt = make_prompt(length, seed=3)
        choices = await stack.tokens(prompt, NUM_TOKENS, n=4)
        assert len(choices) == 4
        for tokens in choices:
            assert_reference(folder, prompt, tokens)
    await stack.idle()


@pytest.mark.soak
async def test_who_prefills(stack: Stack, folder: Path) -> None:
    """Else the tests above might compare one mode with itself."""
    prefill, [decode] = stack.pods("prefill"), stack.pods("decode")
    for pod in prefill:
        assert (await pod.load()).prefix_queries > 0
    prompt = make_prompt(100, seed=4)
    async with DecodeClient(decode) as client:
        answer = await client.ask(prompt, prefill[0] if prefill else "")
    assert_reference(folder, prompt, answer.only)
    assert answer.prompt is not None
    assert answer.prompt.disaggregated == bool(prefill)


async def hits(pod: Pod) -> int:
    return (await pod.load()).prefix_hits


async def test_prefix_cached_on_prefill_only(
    llama: Path, prefill: Worker, decode: Worker, start_worker: StartWorker
) -> None:
    other = await start_worker("decode", max_num_batched_tokens=CHUNK)
    prompt = make_prompt(150, seed=10)
    before = await hits(prefill)
    async with DecodeClient(decode) as client, DecodeClient(other) as second_client:
        await client.ask(prompt, prefill)
        assert await hits(prefill) == before
        answer = await second_client.ask(prompt, prefill)
    assert_reference(llama, prompt, answer.only)
    assert await hits(prefill) - before == 144
    assert await hits(other) == 0
    assert answer.prompt is not None
    assert (answer.prompt.cached_tokens, answer.prompt.disaggregated) == (144, True)


async def test_prefix_cached_on_decode_only(llama: Path, prefill: Worker, decode: Worker) -> None:
    prompt = make_prompt(150, seed=11)
    before = await hits(prefill), await hits(decode)
    async with DecodeClient(decode) as client:
        local = await client.ask(prompt)
        answer = await client.ask(prompt, prefill)
    for each in (local, answer):
        assert_reference(llama, prompt, each.only)
    assert local.prompt is not None
    assert not local.prompt.disaggregated
    assert await hits(prefill) == before[0]
    assert await hits(decode) - before[1] == 144
    assert answer.prompt is not None
    assert (answer.prompt.cached_tokens, answer.prompt.disaggregated) == (0, True)


async def test_prefix_cached_on_both(llama: Path, prefill: Worker, decode: Worker) -> None:
    prompt = make_prompt(160, seed=12)
    async with DecodeClient(decode) as client:
        first = await client.ask(prompt, prefill)
        before = await hits(prefill), await hits(decode)
        second = await client.ask(prompt, prefill)
    for answer in (first, second):
        assert_reference(llama, prompt, answer.only)
    # The last token is always computed, so of ten full blocks nine are found.
    assert (await hits(prefill) - before[0], await hits(decode) - before[1]) == (144, 144)


@pytest.mark.parametrize(("on_decode", "on_prefill"), [(64, 32), (32, 64), (16, 128)])
async def test_prefix_cached_in_part(
    llama: Path, prefill: Worker, decode: Worker, start_worker: StartWorker, on_decode: int, on_prefill: int
) -> None:
    """Either pod knows a part of its own of the prompt; KV is asked for from where decode's ends."""
    prompt = make_prompt(150, seed=100 + on_decode)
    async with DecodeClient(decode) as client:
        await client.ask(prompt[: on_decode + 1], max_tokens=1)
        # A decode pod keeps what it got: to fill the cache of the prefill pod alone, another one has to ask.
        other = await start_worker("decode", max_num_batched_tokens=CHUNK)
        async with DecodeClient(other) as other_client:
            await other_client.ask(prompt[: on_prefill + 1], prefill, max_tokens=1)
        before = await hits(prefill), await hits(decode)
        answer = await client.ask(prompt, prefill)
    assert_reference(llama, prompt, answer.only)
    assert (await hits(prefill) - before[0], await hits(decode) - before[1]) == (on_prefill, on_decode)


async def test_answers_share_a_growing_prefix(llama: Path, prefill: Worker, decode: Worker) -> None:
    """A chat: each turn's prompt is the last one, its answer and something new."""
    prompt = make_prompt(20, seed=13)
    async with DecodeClient(decode) as client:
        for turn in range(4):
            answer = await client.ask(prompt, prefill, max_tokens=30)
            assert_reference(llama, prompt, answer.only, 30)
            prompt = prompt + answer.only + make_prompt(7, seed=14 + turn)


@pytest.mark.parametrize("n", [1, 3])
async def test_preemption(llama: Path, prefill: Worker, start_worker: StartWorker, n: int) -> None:
    """The pool holds the prompts, and not what any two of them grow to. Answers that may end at a stop token are
    expected to be short before any has ended, so that all prompts are admitted."""
    count = 200
    small = await start_worker("decode", num_blocks=24, max_model_len=24 * BLOCK_SIZE, max_num_batched_tokens=CHUNK)
    prompts = [make_prompt(30 + 5 * index, seed=20 + index) for index in range(6)]
    async with DecodeClient(small) as client:
        said = {token for prompt in prompts for token in reference_greedy(llama, prompt, count)}
        stop = min(set(range(VOCAB_SIZE)) - said)
        answers = [
            await client.submit(prompt, prefill, n=n, max_tokens=count, stop_token_ids=[stop]) for prompt in prompts
        ]
        for prompt, answer in zip(prompts, answers, strict=True):
            for tokens in (await answer.finished()).tokens.values():
                assert_reference(llama, prompt, tokens, count)
    assert (await small.idle()).preemptions > 0
    await prefill.idle()
