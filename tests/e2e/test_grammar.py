"""Output that must follow a grammar, through gateway, prefill and decode pod, from a model with random weights."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from .conftest import LOOP
from .stack import Stack

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["name", "size", "count"],
    "additionalProperties": False,
}
_WORD = {"type": "string", "maxLength": 5}
SCHEMAS: list[dict[str, Any]] = [
    SCHEMA,
    {
        "type": "object",
        "properties": {"points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "maxItems": 3}},
        "required": ["points"],
        "additionalProperties": False,
        "$defs": {
            "point": {
                "type": "object",
                "properties": {axis: {"type": "integer", "minimum": -99, "maximum": 99} for axis in "xy"},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
    },
    {
        "type": "object",
        "properties": {"value": {"anyOf": [{"type": "boolean"}, {"type": "null"}, _WORD]}, "label": {"const": "é\n"}},
        "required": ["value", "label"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"day": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"}, "maybe": _WORD},
        "required": ["day"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "at": {
                "type": "object",
                "properties": {"in": _WORD},
                "required": ["in"],
                "additionalProperties": False,
            }
        },
        "required": ["at"],
        "additionalProperties": False,
        "maxProperties": 1,
    },
]


@pytest_asyncio.fixture(scope="module", loop_scope=LOOP)
async def stack(llama: Path) -> AsyncIterator[Stack]:
    stack = await Stack.start(llama)
    yield stack
    await stack.stop()


def named(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_every_answer_is_valid(stack: Stack, schema: dict[str, Any]) -> None:
    """As text and as a call, 40 of each schema."""
    tool: Any = {"type": "function", "function": {"name": "store", "parameters": schema}}
    ways: list[dict[str, Any]] = [
        {"response_format": named(schema)},
        {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "store"}}},
    ]

    async def ask(seed: int, n: int, way: dict[str, Any]) -> int:
        messages: Any = [{"role": "user", "content": f"Thing {seed}, and some words to compute."}]
        answer = await stack.client().chat.completions.create(
            model=stack.model, messages=messages, temperature=1, seed=seed, n=n, max_tokens=600, **way
        )
        for choice in answer.choices:
            text = choice.message.content
            if "tools" in way:
                assert choice.finish_reason == "tool_calls"
                [call] = choice.message.tool_calls or []
                assert call.type == "function"
                text = call.function.arguments
            else:
                assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(text or ""), schema)
        return len(answer.choices)

    asked = [ask(seed, n, way) for n, way in zip((4, 2, 2), ways, strict=True) for seed in range(5)]
    assert sum(await asyncio.gather(*asked)) == 40
    await stack.idle()


async def test_a_schema_that_cannot_be_served_is_refused(stack: Stack) -> None:
    for stream in (False, True):
        response = await stack.complete("hi", response_format=named({"type": "poem"}), stream=stream)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "response_format.json_schema.schema"
        assert "poem" in error["message"]
    await stack.idle()


async def test_a_call_is_made_where_one_is_required(stack: Stack) -> None:
    tool: Any = {"type": "function", "function": {"name": "store", "parameters": SCHEMA}}
    required: Any = "required"
    named: Any = {"type": "function", "function": {"name": "store"}}
    for choice in (required, named):
        asked: dict[str, Any] = {
            "model": stack.model,
            "messages": [{"role": "user", "content": "Store a thing."}],
            "tools": [tool],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "temperature": 1,
            "seed": 5,
            "max_tokens": 400,
        }
        answer = await stack.client().chat.completions.create(**asked)
        [call] = answer.choices[0].message.tool_calls or []
        assert answer.choices[0].finish_reason == "tool_calls"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        async with stack.client().chat.completions.stream(**asked) as stream:
            streamed = await stream.get_final_completion()
        [same] = streamed.choices[0].message.tool_calls or []
        assert (same.function.name, same.function.arguments) == ("store", call.function.arguments)
    await stack.idle()


async def test_an_answer_goes_on_when_its_decode_pod_is_killed(llama: Path) -> None:
    colors = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 100, "maxItems": 100}
    asked: dict[str, Any] = {
        "prompt": "Colors:",
        "temperature": 1,
        "seed": 3,
        "max_tokens": 1900,
        "structured_outputs": {"json": colors},
    }
    stack = await Stack.start(llama, "--decode", "2")
    try:
        whole = (await stack.complete(**asked)).json()["choices"][0]
        assert whole["finish_reason"] == "stop"
        text, reasons, killed = "", [], 0
        body = {"model": stack.model, "stream": True, **asked}
        async with stack.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                if len(text) > 100 and not killed:
                    for pod, process in zip(stack.pods("decode"), stack.processes("decode"), strict=True):
                        if (await pod.load()).running:
                            process.kill()
                            killed += 1
                            break  # the other pod may have taken the answer over already
        assert (killed, reasons) == (1, ["stop"])
        assert text == whole["text"]
        jsonschema.validate(json.loads(text), colors)
        assert await stack.metric("baton_gateway_resumed_streams_total") == 1
    finally:
        await stack.stop()
