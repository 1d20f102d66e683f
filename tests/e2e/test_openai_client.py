"""The official client against a Baton that serves the demo model."""

import statistics
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from .conftest import LOOP
from .stack import Stack

API_KEY = "sk-of-the-tests"
QUESTION: list[Any] = [{"role": "user", "content": "What is Baton?"}]


@pytest_asyncio.fixture(scope="module", loop_scope=LOOP)
async def demo() -> AsyncIterator[Stack]:
    stack = await Stack.start(None, "--num-blocks", "1024", api_key=API_KEY)
    yield stack
    await stack.stop()


async def test_it_says_what_baton_is(demo: Stack) -> None:
    answer = await demo.client().chat.completions.create(model=demo.model, messages=QUESTION, temperature=0)
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    text = choice.message.content
    assert text
    assert "Baton" in text
    assert text.strip().endswith(".")
    assert len(text.split()) > 4
    assert choice.message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_a_streamed_chat_is_the_same(demo: Stack) -> None:
    client = demo.client()
    whole = await client.chat.completions.create(model=demo.model, messages=QUESTION, temperature=0)
    stream = await client.chat.completions.create(
        model=demo.model, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    text, reasons, usage, ids = "", [], None, set()
    async for chunk in stream:
        ids.add(chunk.id)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert reasons == ["stop"]
    assert len(ids) == 1
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_several_choices(demo: Stack) -> None:
    asked: dict[str, Any] = {"model": demo.model, "messages": QUESTION, "n": 3, "temperature": 2, "max_tokens": 60}
    answers = [await demo.client().chat.completions.create(**asked, seed=seed) for seed in (1, 1, 2)]
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert [choice.index for choice in answers[0].choices] == [0, 1, 2]
    assert len(set(texts[0])) > 1
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


async def test_stop(demo: Stack) -> None:
    client = demo.client()
    whole = (await client.chat.completions.create(model=demo.model, messages=QUESTION, temperature=0)).choices[0]
    text = whole.message.content or ""
    word = text.split()[3]
    answer = await client.chat.completions.create(model=demo.model, messages=QUESTION, temperature=0, stop=[word])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == text[: text.index(word)]


async def test_chat_logprobs(demo: Stack) -> None:
    answer = await demo.client().chat.completions.create(
        model=demo.model, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3, max_tokens=5
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token


async def test_completions(demo: Stack) -> None:
    client = demo.client()
    asked: dict[str, Any] = {"model": demo.model, "prompt": ["Baton is", "The"], "max_tokens": 8, "temperature": 0}
    answer = await client.completions.create(**asked, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens or [])
    texts = ["", ""]
    async for chunk in await client.completions.create(**asked, stream=True):
        for part in chunk.choices:
            texts[part.index] += part.text
    assert texts == [choice.text for choice in answer.choices]
    assert all(texts)


def test_the_sync_client(demo: Stack) -> None:
    with demo.sync_client() as client:
        whole = client.chat.completions.create(model=demo.model, messages=QUESTION, temperature=0)
        with client.chat.completions.create(model=demo.model, messages=QUESTION, temperature=0, stream=True) as stream:
            text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
        assert text == whole.choices[0].message.content
        completion = client.completions.create(model=demo.model, prompt="Baton is", max_tokens=4)
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 4
        assert [model.id for model in client.models.list()] == [demo.model]
        assert client.models.retrieve(demo.model).id == demo.model


async def test_leaving_a_stream_frees_everything(demo: Stack) -> None:
    stream = await demo.client().chat.completions.create(
        model=demo.model, messages=QUESTION, stream=True, max_tokens=4_000, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    await demo.idle()


@pytest.mark.parametrize(
    ("error", "fields", "param"),
    [
        (openai.NotFoundError, {"model": "nobody"}, "model"),
        (openai.BadRequestError, {"messages": []}, "messages"),
        (openai.BadRequestError, {"temperature": 9}, "temperature"),
        (openai.BadRequestError, {"max_tokens": 10**6}, "messages"),
        (openai.BadRequestError, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ],
)
async def test_errors(demo: Stack, error: type[openai.APIStatusError], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(error) as caught:
        await demo.client().chat.completions.create(**{"model": demo.model, "messages": QUESTION, **fields})
    assert caught.value.param == param
    assert caught.value.request_id


@pytest.mark.parametrize("key", ["sk-wrong", API_KEY + "x"])
async def test_without_a_right_key(demo: Stack, key: str) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        await demo.client(api_key=key).chat.completions.create(model=demo.model, messages=QUESTION)
    assert caught.value.code == "invalid_api_key"
    assert key not in caught.value.message


async def test_nothing_is_left(demo: Stack) -> None:
    await demo.idle()


async def test_the_best_of_several_completions(demo: Stack) -> None:
    """Those with the highest mean log probability of a token, of the same that are answered when all are asked for."""
    ask: dict[str, Any] = {
        "model": demo.model,
        "prompt": ["Baton is", "A prefill pod"],
        "seed": 5,
        "temperature": 2,
        "max_tokens": 12,
    }
    everything = await demo.client().completions.create(**ask, n=5, logprobs=0)
    best = await demo.client().completions.create(**ask, n=2, best_of=5)
    expected = []
    for first in (0, 5):
        means = {}
        for choice in everything.choices[first : first + 5]:
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs
            means[choice.text] = statistics.mean(choice.logprobs.token_logprobs)
        assert len(set(means.values())) == 5
        expected += sorted(means, key=lambda text: means[text], reverse=True)[:2]
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    # What was generated has to be paid for.
    assert best.usage == everything.usage
