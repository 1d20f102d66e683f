"""/v1/responses by the official client: answers fit its types, and are those of a chat with the same content."""

import asyncio
import json
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from .stack import Stack

QUESTION = "A question, and some words to compute."
GREEDY: dict[str, Any] = {"temperature": 0}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}


class Trip(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    place: str = pydantic.Field(max_length=8)
    size: int = pydantic.Field(ge=1, le=9)


def strict(stack: Stack) -> openai.AsyncOpenAI:
    return stack.client(_strict_response_validation=True)


async def chat_text(stack: Stack, messages: Any, max_tokens: int, **fields: Any) -> str:
    answer = await strict(stack).chat.completions.create(
        model=stack.model, messages=messages, max_tokens=max_tokens, **GREEDY, **fields
    )
    return answer.choices[0].message.content or ""


async def test_the_text_is_that_of_a_chat(stack: Stack) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": QUESTION}]
    text = await chat_text(stack, messages, 24, extra_body={"ignore_eos": True})
    asked: dict[str, Any] = {
        "model": stack.model,
        "input": QUESTION,
        "instructions": "Be short.",
        "max_output_tokens": 24,
        "extra_body": {"ignore_eos": True},
        **GREEDY,
    }
    client = strict(stack)
    answer = await client.responses.create(**asked)
    assert text
    assert answer.output_text == text
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 24
    assert answer.usage.total_tokens == answer.usage.input_tokens + 24
    stream = await client.responses.create(**asked, stream=True)
    events = [event async for event in stream]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == text
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 24
    assert (await client.responses.create(**{**asked, "instructions": "Be long."})).output_text != text
    await stack.idle()


async def test_the_sync_client(stack: Stack) -> None:
    # In a thread, as gRPC's channels need the session's loop to go on running.
    await asyncio.to_thread(ask_with_sync_client, stack)


def ask_with_sync_client(stack: Stack) -> None:
    asked: dict[str, Any] = {"model": stack.model, "input": QUESTION, "extra_body": {"seed": 7, "stop": ["e"]}}
    with stack.sync_client(_strict_response_validation=True) as client:
        whole = client.responses.create(**asked)
        assert whole.status == "completed"
        with client.responses.create(**asked, stream=True) as events:
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == whole.output_text
        with client.responses.stream(**asked) as stream:
            assert stream.get_final_response().output_text == text


async def test_logprobs_are_those_of_a_chat(stack: Stack) -> None:
    chat = await strict(stack).chat.completions.create(
        model=stack.model,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=5,
        logprobs=True,
        top_logprobs=2,
        **GREEDY,
    )
    answer = await strict(stack).responses.create(
        model=stack.model,
        input=QUESTION,
        max_output_tokens=5,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        **GREEDY,
    )
    assert chat.choices[0].logprobs is not None
    [message] = answer.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    expected = [entry.model_dump() for entry in chat.choices[0].logprobs.content or []]
    assert [entry.token for entry in part.logprobs] == [entry["token"] for entry in expected]
    for entry, chat_entry in zip(part.logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(chat_entry["logprob"], abs=1e-4)
        assert [top.token for top in entry.top_logprobs] == [top["token"] for top in chat_entry["top_logprobs"]]
    await stack.idle()


@pytest.mark.parametrize("seed", range(3))
async def test_json_schema(stack: Stack, seed: int) -> None:
    asked: dict[str, Any] = {
        "model": stack.model,
        "input": QUESTION,
        "temperature": 1,
        "max_output_tokens": 400,
        "extra_body": {"seed": seed},
    }
    format: Any = {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}
    answer = await strict(stack).responses.create(**asked, text={"format": format})
    assert answer.status == "completed"
    jsonschema.validate(json.loads(answer.output_text), SCHEMA)
    parsed = await strict(stack).responses.parse(**asked, text_format=Trip)
    assert isinstance(parsed.output_parsed, Trip)
    async with strict(stack).responses.stream(**asked, text_format=Trip) as stream:
        assert (await stream.get_final_response()).output_parsed == parsed.output_parsed
    await stack.idle()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=["required", "named"])
async def test_calls_and_what_they_gave_back(stack: Stack, choice: Any) -> None:
    client, user = strict(stack), {"role": "user", "content": QUESTION}
    asked: dict[str, Any] = {"model": stack.model, "tools": [TOOL], "max_output_tokens": 400, **GREEDY}
    calling: dict[str, Any] = {"input": [user], "tool_choice": choice, "parallel_tool_calls": False}
    answer = await client.responses.create(**asked, **calling)
    [call] = answer.output
    assert call.type == "function_call"
    assert (call.name, call.status, answer.status) == ("weather", "completed", "completed")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    async with client.responses.stream(**asked, **calling) as stream:
        pieces = [event.delta async for event in stream if event.type == "response.function_call_arguments.delta"]
        [same] = (await stream.get_final_response()).output
    assert same.type == "function_call"
    assert same.arguments == call.arguments == "".join(pieces)
    assert len(pieces) > 1

    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    asked["max_output_tokens"] = 16
    told = await client.responses.create(**asked, input=[user, *answer.output, output], tool_choice="none")
    function = {"name": call.name, "arguments": call.arguments}
    messages = [
        user,
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "Sunny."},
    ]
    assert told.output_text == await chat_text(stack, messages, 16, tools=[CHAT_TOOL], tool_choice="none")
    assert told.output_text != (await client.responses.create(**asked, input=[user], tool_choice="none")).output_text
    await stack.idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "fields", "param"),
    [
        (openai.NotFoundError, {"model": "nobody"}, "model"),
        (openai.BadRequestError, {"input": []}, "input"),
        (openai.BadRequestError, {"temperature": 9}, "temperature"),
        (openai.BadRequestError, {"max_output_tokens": 10**6}, "input"),
        (openai.BadRequestError, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (openai.BadRequestError, {"background": True}, "background"),
        (openai.BadRequestError, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (
            openai.BadRequestError,
            {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "poem"}}}},
            "text.format.schema",
        ),
    ],
)
async def test_errors(
    stack: Stack, stream: bool, error: type[openai.APIStatusError], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(error) as caught:
        await strict(stack).responses.create(**{"model": stack.model, "input": QUESTION, "stream": stream, **fields})
    assert caught.value.param == param
    assert caught.value.request_id
    assert isinstance(caught.value.body, dict)
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    await stack.idle()


async def test_leaving_a_stream_frees_everything(stack: Stack) -> None:
    stream = await strict(stack).responses.create(
        model=stack.model, input=QUESTION, stream=True, max_output_tokens=1500, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    await stack.idle()
