"""langchain-openai against a Baton that serves the demo model; its answers are those of the official client."""

import asyncio
from typing import Annotated, Any, Literal

import jsonschema
import langchain_openai
import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, Field, SecretStr

from tests.e2e.stack import Stack

from .conftest import LOOP

pytestmark = pytest.mark.asyncio(loop_scope=LOOP)
QUESTION = "What is Baton?"


class Store(BaseModel):
    """Store a thing."""

    name: Annotated[str, Field(max_length=8)]
    size: Literal["small", "large"]
    count: Annotated[int, Field(ge=1, le=9)]


def settings(demo: Stack, **options: Any) -> dict[str, Any]:
    given = {"model": demo.model, "base_url": f"{demo.url}/v1", "api_key": SecretStr(demo.api_key or "")}
    return {**given, "temperature": 0, "max_retries": 0, **options}


async def answer_of(demo: Stack) -> Any:
    """Return what the official client gets for the question."""
    messages: Any = [{"role": "user", "content": QUESTION}]
    return await demo.client().chat.completions.create(model=demo.model, messages=messages, temperature=0)


def usage_of(answer: Any) -> dict[str, int]:
    usage = answer.usage
    counts = {"input": usage.prompt_tokens, "output": usage.completion_tokens, "total": usage.total_tokens}
    return {f"{name}_tokens": count for name, count in counts.items()}


async def test_chat(demo: Stack) -> None:
    expected = await answer_of(demo)
    chat = langchain_openai.ChatOpenAI(**settings(demo))
    for answer in (await chat.ainvoke(QUESTION), await asyncio.to_thread(chat.invoke, QUESTION)):
        assert answer.content == expected.choices[0].message.content
        assert answer.response_metadata["finish_reason"] == "stop"
        assert answer.usage_metadata is not None
        assert usage_of(expected).items() <= answer.usage_metadata.items()


async def test_a_streamed_chat(demo: Stack) -> None:
    expected = await answer_of(demo)
    chat = langchain_openai.ChatOpenAI(**settings(demo, stream_usage=True))
    chunks = [chunk async for chunk in chat.astream(QUESTION)]
    # The gateway joins what comes faster than it can be sent, so a busy machine makes few chunks.
    assert len([chunk for chunk in chunks if chunk.content]) > 1
    whole = sum(chunks[1:], chunks[0])
    assert whole.content == expected.choices[0].message.content
    assert whole.response_metadata["finish_reason"] == "stop"
    assert whole.usage_metadata is not None
    assert usage_of(expected).items() <= whole.usage_metadata.items()


async def test_structured_output(demo: Stack) -> None:
    chat = langchain_openai.ChatOpenAI(**settings(demo, max_tokens=200))
    thing = await chat.with_structured_output(Store, method="json_schema").ainvoke("Store a thing.")
    assert isinstance(thing, Store)
    with_raw = chat.with_structured_output(Store, method="json_schema", include_raw=True)
    answer = await with_raw.ainvoke("Store a thing.")
    assert isinstance(answer, dict)
    assert answer["parsing_error"] is None
    assert answer["parsed"] == thing == Store.model_validate_json(answer["raw"].content)


@pytest.mark.parametrize("choice", ["Store", "required"])
async def test_tools(demo: Stack, choice: str) -> None:
    chat = langchain_openai.ChatOpenAI(**settings(demo, max_tokens=200))
    tools = chat.bind_tools([Store], tool_choice=choice, parallel_tool_calls=False)
    answer = await tools.ainvoke("Store a thing.")
    assert isinstance(answer, AIMessage)
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    assert not answer.invalid_tool_calls
    [call] = answer.tool_calls
    assert call["name"] == "Store"
    jsonschema.validate(call["args"], convert_to_openai_tool(Store)["function"]["parameters"])

    chunks = [chunk async for chunk in tools.astream("Store a thing.")]
    streamed = sum(chunks[1:], chunks[0])
    assert isinstance(streamed, AIMessageChunk)
    assert [(same["name"], same["args"]) for same in streamed.tool_calls] == [("Store", call["args"])]

    turns = [HumanMessage("Store a thing."), answer, ToolMessage("stored", tool_call_id=call["id"])]
    after = await chat.ainvoke(turns)
    assert after.usage_metadata is not None
    assert answer.usage_metadata is not None
    assert after.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]


async def test_completions(demo: Stack) -> None:
    prompts = ["Baton is", "A prefill pod"]
    expected = await demo.client().completions.create(model=demo.model, prompt=prompts, temperature=0, max_tokens=20)
    texts = [choice.text for choice in expected.choices]
    llm = langchain_openai.OpenAI(**settings(demo, max_tokens=20))
    answer = await llm.agenerate(prompts)
    assert [generation.text for [generation] in answer.generations] == texts
    assert answer.llm_output is not None
    assert expected.usage is not None
    assert answer.llm_output["token_usage"]["completion_tokens"] == expected.usage.completion_tokens == 40
    pieces = [piece async for piece in llm.astream(prompts[0])]
    assert len(pieces) > 1
    assert "".join(pieces) == texts[0]


async def test_errors(demo: Stack) -> None:
    chat = langchain_openai.ChatOpenAI
    with pytest.raises(openai.AuthenticationError):
        await chat(**settings(demo, api_key=SecretStr("sk-wrong"))).ainvoke(QUESTION)
    with pytest.raises(openai.NotFoundError):
        await chat(**settings(demo, model="nobody")).ainvoke(QUESTION)
    with pytest.raises(ContextOverflowError):
        await chat(**settings(demo)).ainvoke("Baton " * 10_000)
