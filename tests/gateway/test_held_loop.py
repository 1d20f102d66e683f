"""Requests that are meant to hold up everybody else: the gateway goes on answering while it deals with them."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from baton_gateway.tenancy.tenants import Tenant, TenantsFile

from .fake_worker import echo, say
from .harness import Stack, error_of, pods, running
from .loop_watch import not_held
from .tiny_models import byte_level_tokenizer, write_model


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def wide_stack(model_folder: Path, processes: None) -> AsyncIterator[Stack]:
    async with pods(max_model_len=2**17) as decodes, running(model_folder, decodes) as stack:
        stack.pod.script = echo
        yield stack


async def answered_beside(stack: Stack, path: str, body: dict[str, Any]) -> httpx.Response:
    """Send a request, and ask whether the gateway lives all the time until its answer; the loop must not be held."""
    content = json.dumps(body, separators=(",", ":")).encode()

    async def both() -> httpx.Response:
        request = asyncio.create_task(stack.http.post(path, content=content))
        while not request.done():
            assert (await stack.http.get("/live")).status_code == 200
            await asyncio.sleep(0.002)
        return await request

    return await not_held(both)


WORDS = [f"w{number}" for number in range(3000)]
USER = {"role": "user", "content": "hi"}


async def test_bad_words_of_many_prompts(wide_stack: Stack) -> None:
    body = {"model": "tiny", "prompt": ["hi"] * 256, "max_tokens": 1}
    response = await answered_beside(wide_stack, "/v1/completions", {**body, "bad_words": WORDS})
    assert (response.status_code, error_of(response)["param"]) == (400, "bad_words")
    response = await answered_beside(wide_stack, "/v1/completions", {**body, "bad_words": WORDS[:1000]})
    assert response.status_code == 200
    assert len(response.json()["choices"]) == 256


async def test_very_many_messages(wide_stack: Stack) -> None:
    body = {"model": "tiny", "messages": [USER] * 100_000, "max_tokens": 1}
    response = await answered_beside(wide_stack, "/v1/chat/completions", body)
    assert (response.status_code, error_of(response)["param"]) == (400, "messages")
    response = await answered_beside(wide_stack, "/v1/chat/completions", {**body, "messages": [USER] * 8192})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("count", [1_000_000, 1_900_000])
async def test_very_many_ids_to_text(wide_stack: Stack, count: int) -> None:
    response = await answered_beside(wide_stack, "/detokenize", {"tokens": [7] * count})
    if count > 1_200_000:
        assert (response.status_code, error_of(response)["param"]) == (400, "tokens")
    else:
        assert len(response.json()["prompt"]) == count


async def test_a_long_text_to_ids(wide_stack: Stack) -> None:
    text = "hello world " * 250_000
    response = await answered_beside(wide_stack, "/tokenize", {"prompt": text, "return_token_strs": True})
    found = response.json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert "".join(found["token_strs"][1:]) == text


async def test_functions_that_are_none(wide_stack: Stack) -> None:
    body = {"model": "tiny", "messages": [USER], "tools": [{}] * 40_000}
    response = await answered_beside(wide_stack, "/v1/chat/completions", body)
    assert (response.status_code, error_of(response)["param"]) == (400, "tools[0].type")


SELF = "#/properties" + "/b" * 120


def _nested_in(key: str, value: dict[str, Any]) -> dict[str, Any]:
    for _ in range(119):
        value = {key: value}
    return value


@pytest.mark.processes
@pytest.mark.parametrize(
    "properties",
    [
        {"a": {}, **{f"p{number}": {"$ref": "#/properties/p0"} for number in range(15_000)}},
        {"a": {"$ref": "#/" + "/" * 3_500_000}},
        {"a": {"anyOf": [{"$ref": SELF}] * 1024}, "b": _nested_in("b", {"type": "string", "$ref": SELF})},
    ],
    ids=["many", "a long reference", "many references that refer to themselves"],
)
async def test_calls_of_functions_with_large_schemas(model_folder: Path, properties: Any) -> None:
    call = "<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>"
    function = {"name": "f", "parameters": {"properties": properties}}
    body = {"model": "tiny", "messages": [USER], "tools": [{"type": "function", "function": function}]}
    async with pods() as decodes, running(model_folder, decodes, tool_call_parser="qwen3_coder") as stack:
        stack.pod.script = say(stack.ids(call * 4), step=8)
        response = await answered_beside(stack, "/v1/chat/completions", body)
    calls = response.json()["choices"][0]["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 7}] * 4


async def test_log_probabilities_of_a_long_prompt(wide_stack: Stack) -> None:
    body = {"model": "tiny", "prompt": [9] * 8000, "echo": True, "logprobs": 1, "max_tokens": 0, "n": 8}
    response = await answered_beside(wide_stack, "/v1/completions", body)
    assert [len(choice["logprobs"]["tokens"]) for choice in response.json()["choices"]] == [8000] * 8
    response = await answered_beside(wide_stack, "/v1/completions", {**body, "n": 128, "logprobs": 20})
    assert (response.status_code, error_of(response)["param"]) == (400, "logprobs")


async def test_log_probabilities_of_a_long_chat(wide_stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_gateway.requests.sampling.MAX_SCORED", 10_000)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 600}], "max_tokens": 1}
    response = await answered_beside(wide_stack, "/v1/chat/completions", {**body, "prompt_logprobs": 1})
    assert response.status_code == 200, response.text
    response = await answered_beside(wide_stack, "/v1/chat/completions", {**body, "prompt_logprobs": 20})
    assert (response.status_code, error_of(response)["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("n", {"n": 128, "prompt": ["a"] * 33}),
        ("best_of", {"n": 1, "best_of": 128, "prompt": ["a"] * 33}),
        ("logit_bias", {"logit_bias": {str(token): 1 for token in range(16_385)}}),
        ("allowed_token_ids", {"allowed_token_ids": [1] * 65_537}),
        ("allowed_token_ids", {"allowed_token_ids": [1] * 3000, "prompt": ["a"] * 256}),
        ("stop_token_ids", {"stop_token_ids": [1] * 1025}),
        ("bad_words", {"bad_words": ["a"] * 1025}),
        ("bad_words[0]", {"bad_words": ["a" * 257]}),
        ("user", {"user": "u" * 1025}),
        ("model", {"model": "m" * 1025}),
        ("guided_choice", {"guided_choice": ["a"] * 16_385}),
        ("guided_json", {"guided_json": {"enum": [1] * 32_769}}),
    ],
)
async def test_bounds(wide_stack: Stack, param: str, fields: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 1, **fields}
    response = await wide_stack.http.post("/v1/completions", json=body)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {"messages": [USER] * 8193}),
        ("messages[0].content", {"messages": [{"role": "user", "content": ["a"] * 1025}]}),
        ("messages[0]", {"messages": [{**USER, **{f"f{number}": 1 for number in range(33)}}]}),
        ("messages[0]", {"messages": [{**USER, "x": [1] * 4096}]}),
        ("messages[0]", {"messages": [{**USER, "x": _nested(33)}]}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"x": [1] * 4096}}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"x": _nested(33)}}),
        ("tools", {"tools": [{"type": "function", "function": {"name": f"f{number}"}} for number in range(513)]}),
        (
            "tools",
            {
                "tools": [
                    {"type": "function", "function": {"name": f"f{number}", "parameters": {"enum": [1] * 1000}}}
                    for number in range(33)
                ]
            },
        ),
    ],
)
async def test_bounds_of_a_chat(wide_stack: Stack, param: str, fields: dict[str, Any]) -> None:
    response = await wide_stack.http.post("/v1/chat/completions", json={"model": "tiny", "messages": [USER], **fields})
    assert (response.status_code, error_of(response)["param"]) == (400, param)


async def test_arguments_of_a_call(wide_stack: Stack) -> None:
    arguments = json.dumps({"a": [1] * 200_000})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = {"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [call]}], "max_tokens": 1}
    response = await answered_beside(wide_stack, "/v1/chat/completions", body)
    assert (response.status_code, error_of(response)["param"]) == (400, "messages")


async def test_equal_prompts_get_seeds_of_their_own(wide_stack: Stack) -> None:
    wide_stack.pod.jobs.clear()
    await wide_stack.complete(["hi"] * 3, max_tokens=1)
    assert len({job.submit.sampling.seed for job in wide_stack.pod.jobs}) == 3
    wide_stack.pod.jobs.clear()
    await wide_stack.complete(["hi"] * 3, max_tokens=1, seed=7)
    assert {job.submit.sampling.seed for job in wide_stack.pod.jobs} == {7}


@pytest.mark.processes
async def test_text_that_looks_like_thousands_of_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([f"<unused{number}>" for number in range(6000)])
    text = "<unused" * 30_000
    option = {"type": "object", "properties": {"a": {"enum": [text[:40_000]]}}}
    body: dict[str, Any] = {"model": "tiny", "messages": [{**USER, "content": text}], "max_tokens": 1}
    tools = [{"type": "function", "function": {"name": "f", "parameters": option}}]
    calls = {"messages": [USER], "tools": tools, "tool_choice": "required"}
    async with pods(max_model_len=2**20) as decodes:
        folder = write_model(tmp_path / "m", tokenizer)
        async with running(folder, decodes, tool_call_parser="gemma") as stack:
            response = await answered_beside(stack, "/v1/chat/completions", body)
            assert response.status_code == 200, response.text
            response = await answered_beside(stack, "/v1/chat/completions", body | calls)
            assert response.status_code == 200, response.text


async def test_metrics_of_many_tenants(wide_stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"tenant-{number}" for number in range(10_000)]
    requests, tenants = wide_stack.gateway.services.metrics._tenants._requests, wide_stack.gateway.services.tenants
    limits = Tenant(requests_per_minute=6, tokens_per_minute=9, max_streams=2, budget_tokens=10**6)
    monkeypatch.setattr(tenants, "_file", TenantsFile(tenants=dict.fromkeys(names, limits)))
    for name in names:
        requests.labels(name, "200").inc()
    try:
        response = await not_held(lambda: wide_stack.admin("/metrics"))
        assert 'tenant_requests_total{status="200",tenant="tenant-9999"} 1.0' in response.text
        assert 'tenant_limit{limit="max_streams",tenant="tenant-9999"} 2.0' in response.text
        assert response.text.count("baton_gateway_tenant_requests_in_flight gauge") == 1
    finally:
        requests.clear()
