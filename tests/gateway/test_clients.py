"""The official OpenAI client, unchanged."""

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest

from baton_proto import serving_pb2 as pb

from .fake_worker import failing, say
from .harness import Stack, pods, running

MESSAGES = [{"role": "user", "content": "hi"}]
WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
CALLS = '[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "weather", "arguments": {}}]'


async def test_async_chat(stack: Stack):
    stack.pod.script = say(stack.ids("lazy fox"))
    client = stack.client()
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == "lazy fox"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(stack.ids("lazy fox"))
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].logprob == -1.0
    assert answer.id == f"chatcmpl-{answer._request_id}"
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "lazy fox"
    assert chunks[-1].usage.completion_tokens == len(stack.ids("lazy fox"))


async def test_async_completions_and_models(stack: Stack):
    client = stack.client()
    answer = await client.completions.create(model="tiny", prompt=["hello", "world"], echo=True, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["hellohello", "worldworld"]
    stream = await client.completions.create(model="tiny", prompt="hello", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello"
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "baton"


async def test_sync_client(stack: Stack):
    def use() -> tuple[str, str, str]:
        client = stack.sync_client()
        whole = client.chat.completions.create(model="tiny", messages=MESSAGES)
        chunks = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        text = client.completions.create(model="tiny", prompt="hello").choices[0].text
        return whole.choices[0].message.content or "", streamed, text

    stack.pod.script = say(stack.ids("lazy fox"))
    assert await asyncio.to_thread(use) == ("lazy fox",) * 3


async def test_stream_helper(stack: Stack):
    stack.pod.script = say(stack.ids("lazy fox"))
    async with stack.client().chat.completions.stream(model="tiny", messages=MESSAGES, n=2) as stream:
        completion = await stream.get_final_completion()
    assert [choice.message.content for choice in completion.choices] == ["lazy fox", "lazy fox"]
    assert [choice.finish_reason for choice in completion.choices] == ["stop", "stop"]


async def test_strict_validation(stack: Stack):
    client = stack.client(_strict_response_validation=True)
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True)
    assert answer.object == "chat.completion"
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    assert {chunk.object async for chunk in stream} == {"chat.completion.chunk"}
    assert (await client.completions.create(model="tiny", prompt="hello", logprobs=1)).object == "text_completion"


async def test_responses(stack: Stack) -> None:
    stack.pod.script = say(stack.ids("lazy fox"))
    client = stack.client(_strict_response_validation=True)
    answer = await client.responses.create(model="tiny", input="hi")
    assert answer.output_text == "lazy fox"
    assert answer.id == f"resp_{answer._request_id}"
    stream = await client.responses.create(model="tiny", input="hi", stream=True)
    assert "".join([e.delta async for e in stream if e.type == "response.output_text.delta"]) == "lazy fox"
    async with client.responses.stream(model="tiny", input="hi") as helper:
        assert [e.type async for e in helper][-1] == "response.completed"
        assert (await helper.get_final_response()).output_text == "lazy fox"


class Place(pydantic.BaseModel):
    city: str


async def test_parsed_responses(stack: Stack) -> None:
    stack.pod.script = say(stack.ids('{"city": "Rome"}'))
    client = stack.client(_strict_response_validation=True)
    answer = await client.responses.parse(model="tiny", input="hi", text_format=Place)
    assert answer.output_parsed == Place(city="Rome")
    async with client.responses.stream(model="tiny", input="hi", text_format=Place) as stream:
        assert (await stream.get_final_response()).output_parsed == Place(city="Rome")
    schemas = [json.loads(job.submit.sampling.grammar.text) for job in stack.pod.jobs]
    assert schemas[0] == schemas[1]
    assert set(schemas[0]["properties"]) == {"city"}


async def test_output_given_back_as_input(stack: Stack) -> None:
    stack.pod.script = say(stack.ids(CALLS), step=5)
    client = stack.client(_strict_response_validation=True)
    turns: list[Any] = [{"role": "user", "content": "hi"}]
    asked: dict[str, Any] = {"model": "tiny", "tools": [WEATHER]}
    async with client.responses.stream(**asked, input=turns, tool_choice="required") as stream:
        answer = await stream.get_final_response()
    turns += answer.output
    turns += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in answer.output
        if item.type == "function_call"
    ]
    assert len(turns) == 5
    stack.pod.script = say(stack.ids("lazy fox"))
    answer = await client.responses.create(**asked, input=turns)
    assert answer.output_text == "lazy fox"
    assert stack.prompt(1).count("sunny") == 2
    turns += [*answer.output, {"role": "user", "content": "thanks"}]
    await client.responses.create(**asked, input=turns)
    assert "lazy fox" in stack.prompt(2)


@pytest.mark.parametrize(
    ("request_fields", "error"),
    [
        ({"model": "other"}, openai.NotFoundError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"max_completion_tokens": 10**6}, openai.BadRequestError),
    ],
)
async def test_errors(stack: Stack, request_fields, error):
    with pytest.raises(error) as raised:
        await stack.client().chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **request_fields})
    assert raised.value.param
    assert raised.value.request_id


async def test_an_error_in_a_stream_is_raised(stack: Stack):
    stack.pod.script = failing(pb.Failure.CODE_INTERNAL, after=stack.ids("hello"))
    stream = await stack.client().chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    seen = []

    async def read() -> None:
        async for chunk in stream:
            seen.append(chunk.choices[0].delta.content or "")  # noqa: PERF401 the error must not lose what came before

    with pytest.raises(openai.APIError) as raised:
        await read()
    assert "".join(seen) == "hello"
    assert raised.value.code == "internal_error"


async def test_a_retryable_failure_is_retried_by_the_client(stack: Stack):
    async def script(job):
        await (failing(pb.Failure.CODE_UNAVAILABLE) if len(stack.pod.jobs) < 2 else say(stack.ids("fox")))(job)

    stack.pod.script = script
    client = stack.client().with_options(max_retries=2)
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == "fox"
    assert len(stack.pod.jobs) == 2


@pytest.mark.processes
async def test_keys(model_folder, caplog):
    async with pods() as decodes, running(model_folder, decodes, api_keys=["sk-right", "sk-other"]) as stack:
        for key in ("sk-right", "sk-other"):
            assert (await stack.client().with_options(api_key=key).models.list()).data
        for key in ("sk-wrong", "sk-righ", "sk-right \u200b"):
            response = await stack.http.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()})
            assert response.status_code == 401
            assert "sk-" not in response.text
        with pytest.raises(openai.AuthenticationError) as raised:
            await stack.client().with_options(api_key="sk-wrong").models.list()
        assert raised.value.code == "invalid_api_key"
        assert raised.value.response.headers["www-authenticate"] == "Bearer"
        for method, path in [
            ("GET", "/v1/models"),
            ("GET", "/v1/models/tiny"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/responses"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
        ]:
            assert (await stack.http.request(method, path)).status_code == 401
            basic = {"authorization": "Basic sk-right"}
            assert (await stack.http.request(method, path, headers=basic)).status_code == 401
        for path in ("/health", "/live", "/ready"):
            assert (await stack.http.get(path)).status_code == 200
    assert "sk-" not in repr([vars(record) for record in caplog.records if record.name.startswith("baton")])
