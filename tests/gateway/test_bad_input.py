"""Bad input gets a 4xx that names the parameter; never a 5xx, never a hang."""

import json
from typing import Any

import pytest
from starlette.requests import Request

from baton_gateway.errors import ApiError
from baton_gateway.web.body import BodyReader

from .harness import Stack, error_of

USER = [{"role": "user", "content": "hi"}]


def case(param: str | None, fields: dict[str, Any]) -> Any:
    return pytest.param(param, fields, id=f"{next(iter(fields))}={json.dumps(next(iter(fields.values())))[:30]}")


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def _tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


BOTH = [
    case("n", {"n": 0}),
    case("n", {"n": 129}),
    case("n", {"n": "two"}),
    case("n", {"n": True}),
    case("best_of", {"best_of": 0}),
    case("best_of", {"best_of": 2, "n": 3}),
    case("best_of", {"best_of": 2, "stream": True}),
    case("temperature", {"temperature": -0.1}),
    case("temperature", {"temperature": 2.1}),
    case("temperature", {"temperature": "hot"}),
    case("top_p", {"top_p": 1.01}),
    case("top_k", {"top_k": -2}),
    case("top_k", {"top_k": 1.5}),
    case("min_p", {"min_p": 2}),
    case("presence_penalty", {"presence_penalty": 3}),
    case("frequency_penalty", {"frequency_penalty": -3}),
    case("repetition_penalty", {"repetition_penalty": 0}),
    case("seed", {"seed": 2**63}),
    case("max_tokens", {"max_tokens": -1}),
    case("max_tokens", {"max_tokens": "many"}),
    case("min_tokens", {"min_tokens": 20, "max_tokens": 10}),
    case("stop", {"stop": 5}),
    case("stop", {"stop": ["x"] * 17}),
    case("stop", {"stop": [""]}),
    case("stop[1]", {"stop": ["a", 3]}),
    case("stop_token_ids[0]", {"stop_token_ids": [-1]}),
    case("stop_token_ids", {"stop_token_ids": [600]}),
    case("logit_bias", {"logit_bias": {"a": 1}}),
    case("logit_bias", {"logit_bias": {"1.5": 1}}),
    case("logit_bias", {"logit_bias": {"-1": 1}}),
    case("logit_bias", {"logit_bias": {"1_0": 1}}),
    case("logit_bias", {"logit_bias": {" 1": 1}}),
    case("logit_bias", {"logit_bias": {"\u0661": 1}}),
    case("logit_bias", {"logit_bias": {"600": 1}}),
    case("logit_bias[5000000000]", {"logit_bias": {"5000000000": 1}}),
    case("logit_bias", {"logit_bias": [1]}),
    case("allowed_token_ids", {"allowed_token_ids": []}),
    case("allowed_token_ids", {"allowed_token_ids": [10**6]}),
    case("bad_words[0]", {"bad_words": [""]}),
    case("prompt_logprobs", {"prompt_logprobs": -1}),
    case("prompt_logprobs", {"prompt_logprobs": 21}),
    case("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    case("stream", {"stream": "yes"}),
    case("stream_options", {"stream_options": {"include_usage": True}}),
    case("stream_options.include_usage", {"stream_options": {"include_usage": 1}, "stream": True}),
    case("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
    case("truncate_prompt_tokens", {"truncate_prompt_tokens": 100000}),
    case("response_format", {"response_format": "json"}),
    case("response_format", {"response_format": {"type": "structural_tag"}}),
    case("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    case(
        "response_format.json_schema.schema", {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}
    ),
    case(
        "response_format.json_schema.schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _nested(65)}}},
    ),
    case(
        "response_format.json_schema.schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": "x" * 70_000}}}},
    ),
    case(
        "structured_outputs.regex", {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "x"}}
    ),
    case("response_format.type", {"response_format": {"type": "poem"}}),
    case("structured_outputs", {"structured_outputs": {}}),
    case("structured_outputs", {"structured_outputs": {"regex": "x", "choice": ["a"]}}),
    case("structured_outputs.choice", {"structured_outputs": {"choice": []}}),
    case("structured_outputs.choice[0]", {"structured_outputs": {"choice": [1]}}),
    case("structured_outputs.regex", {"structured_outputs": {"regex": 5}}),
    case("structured_outputs.json", {"structured_outputs": {"json": "{"}}),
    case("structured_outputs.json", {"structured_outputs": {"json": 5}}),
    case("guided_json", {"guided_json": [1]}),
    case("structured_outputs.json", {"structured_outputs": {"json": "[1]"}}),
    case("structured_outputs.grammar", {"structured_outputs": {"grammar": "x" * 70_000}}),
    case("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "x"}}),
    case("guided_regex", {"guided_json": {}, "guided_regex": "x"}),
    case("priority", {"priority": 2**40}),
    case("model", {"model": None}),
    case("model", {"model": 7}),
]
CHAT = [
    case("best_of", {"best_of": 3}),
    case("messages", {"messages": []}),
    case("messages", {"messages": "hi"}),
    case("messages[0]", {"messages": ["hi"]}),
    case("messages[0].role", {"messages": [{"content": "hi"}]}),
    case("messages[1].role", {"messages": [*USER, {"role": "robot", "content": "hi"}]}),
    case("messages[0]", {"messages": [{"role": "user"}]}),
    case("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    case("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    case("top_logprobs", {"top_logprobs": 21, "logprobs": True}),
    case("top_logprobs", {"top_logprobs": 1}),
    case("logprobs", {"logprobs": 3}),
    case("max_tokens", {"max_tokens": 0}),
    case("max_completion_tokens", {"max_completion_tokens": 0}),
    case("tools", {"tools": [_tool("f"), _tool("f")]}),
    case("tools", {"tools": "f"}),
    case("tools[0].type", {"tools": [{"type": "custom", "function": {"name": "f"}}]}),
    case("tools[0].function.name", {"tools": [_tool("no spaces, please")]}),
    case("tools[0].function.parameters", {"tools": [_tool("f", parameters="x")]}),
    case("tools", {"tools": [_tool("f", parameters=_nested(65))], "tool_choice": "required"}),
    case("tool_choice", {"tool_choice": "required"}),
    case("tool_choice", {"tool_choice": "banana", "tools": [_tool("f")]}),
    case("tool_choice", {"tool_choice": {"type": "function"}, "tools": [_tool("f")]}),
    case("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [_tool("f")]}),
    case("parallel_tool_calls", {"parallel_tool_calls": "no"}),
    case("functions", {"functions": []}),
    case("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
    case("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
    case("chat_template_kwargs", {"chat_template_kwargs": 3}),
]
COMPLETIONS = [
    case("prompt", {"prompt": None}),
    case("prompt", {"prompt": []}),
    case("prompt", {"prompt": [[]]}),
    case("prompt", {"prompt": 5}),
    case("prompt", {"prompt": {"text": "x"}}),
    case("prompt", {"prompt": ["a", 1]}),
    case("prompt", {"prompt": [1, 600]}),
    case("prompt", {"prompt": [1, -1]}),
    case("prompt", {"prompt": [1, True]}),
    case("prompt", {"prompt": "", "add_special_tokens": False}),
    case("prompt", {"prompt": ["x"] * 257}),
    case("logprobs", {"logprobs": 21}),
    case("logprobs", {"logprobs": True}),
    case("suffix", {"suffix": "the end"}),
    case("max_tokens", {"max_tokens": 2**40}),
]
RESPONSES = [
    case("input", {"input": None}),
    case("input", {"input": []}),
    case("input", {"input": 5}),
    case("input[0]", {"input": ["hi"]}),
    case("input[1].content", {"input": [*USER, {"type": "reasoning", "summary": [], "content": "hm"}]}),
    case(
        "input[1].content[0].text", {"input": [*USER, {"type": "reasoning", "content": [{"type": "reasoning_text"}]}]}
    ),
    case("input[0].type", {"input": [{"type": "image_generation_call", "id": "ig_1"}]}),
    case("reasoning.effort", {"reasoning": {"effort": "utmost"}}),
    case("thinking_token_budget", {"thinking_token_budget": -1}),
    case("input[0].type", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    case("input[0].type", {"input": [{"type": 5}]}),
    case("input", {"input": [{"type": "reasoning", "content": []}]}),
    case("input", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 900}),
    case("input[0].role", {"input": [{"content": "hi"}]}),
    case("input[0].role", {"input": [{"role": "tool", "content": "hi"}]}),
    case("input[0].content", {"input": [{"role": "user"}]}),
    case("input[0].content", {"input": [{"role": "user", "content": None}]}),
    case("input[0].content", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
    case("input[0].content", {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}),
    case("input[0].call_id", {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}),
    case("input[0].arguments", {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": {}}]}),
    case("input[0].output", {"input": [{"type": "function_call_output", "call_id": "1", "output": 5}]}),
    case("instructions", {"instructions": ["be kind"]}),
    case("max_output_tokens", {"max_output_tokens": 0}),
    case("input", {"max_output_tokens": 100_000}),
    case("input", {"input": "hi " * 1000}),
    case("temperature", {"temperature": 2.1}),
    case("top_p", {"top_p": -1}),
    case("top_k", {"top_k": 1.5}),
    case("min_tokens", {"min_tokens": 20, "max_output_tokens": 10}),
    case("logit_bias", {"logit_bias": {"600": 1}}),
    case("top_logprobs", {"top_logprobs": 21}),
    case("include[0]", {"include": ["everything"]}),
    case("text.format.type", {"text": {"format": {"type": "poem"}}}),
    case("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "s"}}}),
    case("text.format.name", {"text": {"format": {"type": "json_schema", "schema": {}}}}),
    case("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "s", "schema": 5}}}),
    case("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "s", "schema": _nested(65)}}}),
    case(
        "structured_outputs.regex", {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "x"}}
    ),
    case("tools[0].type", {"tools": [{"type": "web_search"}]}),
    case("tools[0].name", {"tools": [{"type": "function"}]}),
    case("tools[0].name", {"tools": [_tool("f")]}),
    case("tools[0].parameters", {"tools": [{"type": "function", "name": "f", "parameters": "x"}]}),
    case("tools", {"tools": [{"type": "function", "name": "f"}] * 2}),
    case("tool_choice", {"tool_choice": "required"}),
    case("tool_choice", {"tool_choice": {"type": "function", "name": "g"}}),
    case("tool_choice", {"tool_choice": {"type": "function"}}),
    case("tool_choice", {"tool_choice": {"type": "file_search"}}),
    case("parallel_tool_calls", {"parallel_tool_calls": "no"}),
    case("stream", {"stream": "yes"}),
    case("stream_options", {"stream_options": {"include_obfuscation": False}}),
    case("truncation", {"truncation": "middle"}),
    case("store", {"store": "no"}),
    case("metadata.a", {"metadata": {"a": 1}}),
    case("metadata", {"metadata": {str(key): "" for key in range(17)}}),
    case("safety_identifier", {"safety_identifier": "x" * 65}),
    case("background", {"background": True}),
    case("previous_response_id", {"previous_response_id": "resp_1"}),
    case("conversation", {"conversation": {"id": "conv_1"}}),
    case("prompt", {"prompt": {"id": "pmpt_1"}}),
    case("model", {"model": None}),
]


def check(stack: Stack, response: Any, param: str) -> None:
    error = error_of(response)
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert not stack.pod.jobs


@pytest.mark.parametrize(("param", "fields"), BOTH + CHAT)
async def test_chat(stack: Stack, param: str, fields: dict[str, Any]):
    check(stack, await stack.chat(**fields), param)


@pytest.mark.parametrize(("param", "fields"), RESPONSES)
async def test_responses(stack: Stack, param: str, fields: dict[str, Any]):
    check(stack, await stack.respond(**{"input": "hi", **fields}), param)


@pytest.mark.parametrize(("param", "fields"), BOTH + COMPLETIONS)
async def test_completions(stack: Stack, param: str, fields: dict[str, Any]):
    check(stack, await stack.complete(**{"prompt": "hi", **fields}), param)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
async def test_numbers_that_are_none(stack: Stack, number: str):
    response = await stack.http.post(
        "/v1/completions", content=f'{{"model": "tiny", "prompt": "x", "repetition_penalty": {number}}}'
    )
    assert (response.status_code, error_of(response)["param"]) == (400, "repetition_penalty")


@pytest.mark.parametrize("missing", ["model", "prompt"])
async def test_missing_fields(stack: Stack, missing: str):
    body = {"model": "tiny", "prompt": "hi"}
    del body[missing]
    error = error_of(await stack.http.post("/v1/completions", json=body))
    assert (error["param"], error["code"]) == (missing, "missing_required_parameter")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b'[{"model": "tiny"}]',
        b'"text"',
        b"null",
        b"12",
        b'{"model": "tiny", "prompt": "\xff\xfe"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"model": "tiny", "prompt": NaN, "tokens": NaN}',
        b"\x00" * 100,
    ],
    ids=lambda body: repr(body[:24]),
)
async def test_bodies_that_are_no_request(stack: Stack, path: str, body: bytes):
    response = await stack.http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


async def test_content_type_does_not_matter(stack: Stack):
    body = json.dumps({"model": "tiny", "prompt": "hello"}).encode()
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/json; charset=utf-8"}):
        assert (await stack.http.post("/v1/completions", content=body, headers=headers)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_unknown_model(stack: Stack, path: str):
    body = {"model": "other", "prompt": "x", "messages": USER}
    response = await stack.http.post(path, json=body)
    error = error_of(response)
    assert response.status_code == 404
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "model_not_found", "model")
    missing = await stack.http.get("/v1/models/some/other")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/nowhere", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/v1/completions", 405),
    ],
)
async def test_framework_errors_have_the_same_form(stack: Stack, method: str, path: str, status: int):
    response = await stack.http.request(method, path)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"
    assert response.headers["x-request-id"]
    if status == 405:
        assert response.headers["allow"]


@pytest.mark.parametrize(("length", "status"), [(b"9" * 5000, 413), (b"101", 413), (b"\xb2", 400), (b"-1", 400)])
async def test_lengths_that_int_does_not_read(stack: Stack, length: bytes, status: int):
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "headers": [(b"content-length", length)]}
    with pytest.raises(ApiError) as caught:
        await BodyReader(100, 1, 9).read(Request(scope, receive), "a")
    assert caught.value.status == status


async def test_a_crash_has_the_same_form_and_logs_no_content(stack: Stack, monkeypatch, caplog):
    def crash(*args: Any) -> None:
        raise RuntimeError("the secret prompt")

    monkeypatch.setattr(stack.gateway.catalog, "find", crash)
    response = await stack.complete("the secret prompt")
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    record = next(record for record in caplog.records if record.message == "request crashed")
    assert record.exception_type == "RuntimeError"
    assert record.request_id == response.headers["x-request-id"]
    assert "secret" not in caplog.text
    assert "secret" not in repr([vars(record) for record in caplog.records if record.name.startswith("baton")])
    monkeypatch.undo()
    assert (await stack.complete()).status_code == 200


@pytest.mark.parametrize("given", ["abc-123_X.y", None, "bad id with spaces", "x" * 129, "ü", "a\tb"])
async def test_request_ids(stack: Stack, given: str | None):
    headers = {} if given is None else {"x-request-id": given.encode()}
    response = await stack.http.get("/v1/models", headers=headers)
    returned = response.headers["x-request-id"]
    assert (returned == given) == (given == "abc-123_X.y")
    assert len(returned) <= 128
    assert returned.isascii()
    assert int(response.headers["openai-processing-ms"]) >= 0
