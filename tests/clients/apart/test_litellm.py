"""litellm, as a library: its answers are those of the official client."""

import asyncio
import json
import os
from typing import Any

import jsonschema
import pytest

# Read when litellm is imported; it would fetch prices from the network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

from .conftest import KEY, KEY_OF_ONE_REQUEST, Baton

QUESTION: list[Any] = [{"role": "user", "content": "What is Baton?"}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def settings(baton: Baton, **options: Any) -> dict[str, Any]:
    given = {"model": f"openai/{baton.model}", "api_base": baton.url, "api_key": KEY, "temperature": 0}
    return {**given, "max_retries": 0, "num_retries": 0, **options}


def test_chat(baton: Baton) -> None:
    expected = baton.openai.chat.completions.create(model=baton.model, messages=QUESTION, temperature=0)
    whole = litellm.completion(**settings(baton), messages=QUESTION)
    also = asyncio.run(litellm.acompletion(**settings(baton), messages=QUESTION))
    assert expected.usage is not None
    for answer in (whole, also):
        assert answer.choices[0].message.content == expected.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
        assert answer.usage.completion_tokens == expected.usage.completion_tokens


def test_a_streamed_chat(baton: Baton) -> None:
    expected = baton.openai.chat.completions.create(model=baton.model, messages=QUESTION, temperature=0)
    asked = settings(baton, messages=QUESTION, stream=True, stream_options={"include_usage": True})

    async def read() -> list[Any]:
        return [chunk async for chunk in await litellm.acompletion(**asked)]

    assert expected.usage is not None
    for chunks in (list(litellm.completion(**asked)), asyncio.run(read())):
        pieces = [
            chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content
        ]
        assert len(pieces) > 1
        assert "".join(pieces) == expected.choices[0].message.content
        [usage] = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
        assert usage.completion_tokens == expected.usage.completion_tokens


def test_completions(baton: Baton) -> None:
    asked = {"prompt": "Baton is", "max_tokens": 12}
    expected = baton.openai.completions.create(model=baton.model, temperature=0, **asked)
    given = settings(baton, model=f"text-completion-openai/{baton.model}", **asked)
    answer = litellm.text_completion(**given)
    assert answer.choices[0].text == expected.choices[0].text
    assert answer.usage.completion_tokens == 12
    streamed = list(litellm.text_completion(**given, stream=True))
    assert "".join(chunk.choices[0].text or "" for chunk in streamed) == expected.choices[0].text


def test_tools(baton: Baton) -> None:
    tool = {"type": "function", "function": {"name": "store", "parameters": PARAMETERS}}
    named = {"type": "function", "function": {"name": "store"}}
    asked = settings(baton, messages=QUESTION, tools=[tool], tool_choice=named, max_tokens=200)
    choice = litellm.completion(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert call.function.name == "store"
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    [same] = streamed.choices[0].message.tool_calls
    assert (same.function.name, same.function.arguments) == ("store", call.function.arguments)


def test_structured_output(baton: Baton) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": PARAMETERS, "strict": True}}
    answer = litellm.completion(**settings(baton, messages=QUESTION, response_format=form, max_tokens=200))
    jsonschema.validate(json.loads(answer.choices[0].message.content), PARAMETERS)


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (litellm.AuthenticationError, {"api_key": "bt-0c-of-nobody"}),
        (litellm.NotFoundError, {"model": "openai/nobody"}),
        (litellm.BadRequestError, {"temperature": 9}),
        (litellm.ContextWindowExceededError, {"messages": [{"role": "user", "content": "Baton " * 10_000}]}),
        (litellm.ContextWindowExceededError, {"max_tokens": 10_000}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(baton: Baton, error: type[Exception], options: dict[str, Any], stream: bool) -> None:
    with pytest.raises(error) as raised:
        litellm.completion(**settings(baton, **{"messages": QUESTION, "stream": stream, **options}))
    # Its classes inherit from each other.
    assert type(raised.value) is error


def test_too_many_requests(baton: Baton) -> None:
    asked = settings(baton, messages=QUESTION, api_key=KEY_OF_ONE_REQUEST, max_tokens=1)
    litellm.completion(**asked)
    with pytest.raises(litellm.RateLimitError) as raised:
        litellm.completion(**asked)
    assert int(raised.value.litellm_response_headers["retry-after"]) > 0
