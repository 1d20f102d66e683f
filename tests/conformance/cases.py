"""Requests made from OpenAI's specification, valid ones and invalid ones."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode

from .local_baton import MODEL_NAME

# Of a hundred cases. Chat and responses have the largest schemas, and cases of them take the longest to make.
SHARES = {
    ("/chat/completions", "post"): 30,
    ("/completions", "post"): 40,
    ("/responses", "post"): 20,
    ("/models/{model}", "get"): 8,
    ("/models", "get"): 2,
}
MOST_TOKENS = 8
MOST_CHOICES = 8
# What bounds an answer, by endpoint.
LIMITS = {
    "/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/completions": ("max_tokens",),
    "/responses": ("max_output_tokens",),
}
# Refused as a whole by Baton: in every request, they would hide whatever else it holds.
REFUSED = {
    "/chat/completions": ("functions", "function_call", "audio"),
    "/completions": ("suffix",),
    "/responses": ("previous_response_id", "conversation", "prompt", "background"),
}
# Without these a request is about what is stored, which Baton has not.
NEEDED = {"/responses": {"model": MODEL_NAME, "input": "a"}}
SERVED_ITEMS = ("message", "function_call", "function_call_output")
TEXT_PARTS = ("input_text", "output_text")
SMALLEST_VOCABULARY = 256
STREAMED = 3  # one case in so many that fit asks for a stream
UNTOUCHED = 5  # one case in so many is sent as it was made, but for its length


def for_each_case(spec: dict[str, Any], count: int, number: int, test: Callable[[Case, str, str, str], None]) -> None:
    """Call `test(case, path, method, mode)` for so many cases; the same number makes the same cases.

    Half of the cases of an operation fit the specification, the others do not.
    """
    schema = schemathesis.openapi.from_dict(spec)
    for (path, method), share in SHARES.items():
        for mode in GenerationMode:
            _for_each(schema[path][method], mode, math.ceil(count * share / 200), number, test, path, method)


def _for_each(operation: Any, mode: GenerationMode, count: int, number: int, test: Any, path: str, method: str) -> None:
    made = 0

    @seed(number)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def run(case: Case) -> None:
        nonlocal made
        made += 1
        if made % UNTOUCHED:
            _fit(case, path)
            if mode.is_positive and isinstance(case.body, dict):
                case.body.update({**NEEDED.get(path, {}), **case.body})
                # Left to chance, one body in fifty would ask for it.
                if made % STREAMED == 0:
                    case.body["stream"] = True
                case.body.update({name: _usable(name, value) for name, value in case.body.items()})
        _bound(case.body, LIMITS.get(path, ()))
        test(case, path, method, mode.value)

    run()


def _bound(body: Any, limits: Sequence[str]) -> None:
    """Let a body ask for few tokens, so that none takes minutes."""
    if not isinstance(body, dict):
        return
    for name in limits:
        if body.get(name) is None or type(body[name]) is int:
            body[name] = min(max(body.get(name) or MOST_TOKENS, 1), MOST_TOKENS)
    if type(body.get("n")) is int:
        body["n"] = min(body["n"], MOST_CHOICES)


def _fit(case: Case, path: str) -> None:
    """Let a case be about this server: its model, and what it serves."""
    if "model" in case.path_parameters and isinstance(case.path_parameters["model"], str):
        case.path_parameters["model"] = MODEL_NAME
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = MODEL_NAME
    for name in REFUSED[path]:
        body.pop(name, None)
    if body.get("stream") is not True:
        body.pop("stream_options", None)


def _usable(name: str, value: Any) -> Any:
    """Return a value in place of one that fits the specification but no model, or no server that is strict."""
    match name, value:
        case _, float() if value.is_integer():  # an integer to JSON Schema, but to no server
            return int(value)
        case "prompt", list():
            return [_usable(name, item) for item in value] or "a"
        case "prompt", int():
            return value % SMALLEST_VOCABULARY
        case "prompt" | "stop", "":
            return "a"
        case "stop", list():
            return [_usable(name, item) for item in value]
        case "logit_bias", dict():
            return {str(token_id): max(min(bias, 100), -100) for token_id, bias in enumerate(value.values())}
        case "input", list():
            return [_usable_item(item) for item in value] or "a"
        case "tools", list():
            functions = (tool for tool in value if tool.get("type") == "function")
            return [{**tool, "name": f"f{number}"} for number, tool in enumerate(functions)]
        case "tool_choice", dict() if value.get("type") != "function":
            return "auto"
    return value


def _usable_item(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item of a response's input, or a message in place of one that takes more than text and functions."""
    text = item.get("output" if item.get("type") == "function_call_output" else "content", "")
    parts = [{}] if text is None else text if isinstance(text, list) else []
    if item.get("type", "message") in SERVED_ITEMS and all(part.get("type") in TEXT_PARTS for part in parts):
        return item
    return {"role": "user", "content": "a"}
