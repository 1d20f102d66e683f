"""The fields of every endpoint's body, the JSON types that each takes, and valid bodies that use them."""

from typing import Any

BOOL, INT, FLOAT, STRING, ARRAY, OBJECT, NULL = "bool", "int", "float", "string", "array", "object", "null"
JSON_TYPES = (BOOL, INT, FLOAT, STRING, ARRAY, OBJECT, NULL)
NUMBER = (INT, FLOAT)

_GENERATION: dict[str, tuple[str, ...]] = {
    "n": (INT,),
    "best_of": (INT,),
    "stream": (BOOL,),
    "stream_options": (OBJECT,),
    "max_tokens": (INT,),
    "seed": (INT,),
    "stop": (STRING, ARRAY),
    "temperature": NUMBER,
    "top_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "logit_bias": (OBJECT,),
    "user": (STRING,),
    "top_k": (INT,),
    "min_p": NUMBER,
    "repetition_penalty": NUMBER,
    "ignore_eos": (BOOL,),
    "min_tokens": (INT,),
    "stop_token_ids": (ARRAY,),
    "include_stop_str_in_output": (BOOL,),
    "skip_special_tokens": (BOOL,),
    "bad_words": (ARRAY,),
    "allowed_token_ids": (ARRAY,),
    "prompt_logprobs": (INT,),
    "truncate_prompt_tokens": (INT,),
    "priority": (INT,),
    "return_token_ids": (BOOL,),
    "add_special_tokens": (BOOL,),
    "response_format": (OBJECT,),
    "structured_outputs": (OBJECT,),
    "guided_json": (OBJECT, BOOL, STRING),
    "guided_regex": (STRING,),
    "guided_choice": (ARRAY,),
    "guided_grammar": (STRING,),
}
_TEMPLATE: dict[str, tuple[str, ...]] = {
    "add_generation_prompt": (BOOL,),
    "continue_final_message": (BOOL,),
    "chat_template_kwargs": (OBJECT,),
    "documents": (ARRAY,),
    "reasoning_effort": (STRING,),
}

# Of these, those that /v1/responses has not, or has by another name.
_NO_RESPONSE = {
    *("add_special_tokens", "best_of", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "max_tokens"),
    *("n", "prompt_logprobs", "response_format", "return_token_ids", "truncate_prompt_tokens"),
}

# By path. No type means that the field is refused whatever it holds.
FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "/v1/chat/completions": {
        **_GENERATION,
        **_TEMPLATE,
        "model": (STRING,),
        "messages": (ARRAY,),
        "max_completion_tokens": (INT,),
        "logprobs": (BOOL,),
        "top_logprobs": (INT,),
        "tools": (ARRAY,),
        "tool_choice": (STRING, OBJECT),
        "parallel_tool_calls": (BOOL,),
        "thinking_token_budget": (INT,),
        "functions": (),
        "function_call": (),
        "audio": (),
    },
    "/v1/completions": {
        **_GENERATION,
        "model": (STRING,),
        "prompt": (STRING, ARRAY),
        "logprobs": (INT,),
        "echo": (BOOL,),
        "suffix": (STRING,),
    },
    "/v1/responses": {
        **{name: types for name, types in _GENERATION.items() if name not in _NO_RESPONSE},
        "model": (STRING,),
        "input": (STRING, ARRAY),
        "instructions": (STRING,),
        "max_output_tokens": (INT,),
        "top_logprobs": (INT,),
        "include": (ARRAY,),
        "text": (OBJECT,),
        "tools": (ARRAY,),
        "tool_choice": (STRING, OBJECT),
        "parallel_tool_calls": (BOOL,),
        "reasoning": (OBJECT,),
        "thinking_token_budget": (INT,),
        "truncation": (STRING,),
        "store": (BOOL,),
        "metadata": (OBJECT,),
        "safety_identifier": (STRING,),
        "prompt_cache_key": (STRING,),
        "chat_template_kwargs": (OBJECT,),
        "background": (BOOL,),
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
    },
    "/tokenize": {
        **_TEMPLATE,
        "model": (STRING,),
        "prompt": (STRING,),
        "messages": (ARRAY,),
        "tools": (ARRAY,),
        "add_special_tokens": (BOOL,),
        "return_token_strs": (BOOL,),
    },
    "/detokenize": {"model": (STRING,), "tokens": (ARRAY,)},
}
REQUIRED = {
    "/v1/chat/completions": {"model", "messages"},
    "/v1/completions": {"model", "prompt"},
    "/v1/responses": {"model", "input"},
    "/tokenize": set(),
    "/detokenize": {"tokens"},
}


def least_body(path: str) -> dict[str, Any]:
    """Return the shortest valid body."""
    user = [{"role": "user", "content": "hello"}]
    return {
        "/v1/chat/completions": {"model": "tiny", "messages": user, "max_tokens": 2},
        "/v1/completions": {"model": "tiny", "prompt": "hello", "max_tokens": 2},
        "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 2},
        "/tokenize": {"prompt": "hello"},
        "/detokenize": {"tokens": [1, 2]},
    }[path]


_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0}}, "required": ["a"]}
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA, "strict": True}}]
_MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}, "there"], "name": "me"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "7"},
]
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "c", "output": "7"},
]
_FLAT_TOOLS = [{"type": "function", "name": "f", "description": "d", "parameters": _SCHEMA, "strict": True}]
_SAMPLING = {
    "max_tokens": 2,
    "min_tokens": 1,
    "n": 2,
    "best_of": 2,
    "seed": 7,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": -1.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5, "7": -100},
    "stop": ["a", "bc"],
    "stop_token_ids": [3],
    "bad_words": ["bad", " worse"],
    "allowed_token_ids": [1, 2, 3],
    "user": "u",
    "priority": -3,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "truncate_prompt_tokens": 8,
}
_STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA, "strict": True}}
_CALL = {"type": "function", "function": {"name": "f"}}

# By path: bodies that are answered, from which others are made by changing one thing.
VALID: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"model": "tiny", "messages": _MESSAGES, **_SAMPLING, "logprobs": True, "top_logprobs": 2},
        {"model": "tiny", "messages": _MESSAGES, **_SAMPLING, **_STREAM, "logprobs": True},
        {"model": "tiny", "messages": _MESSAGES, "max_tokens": 2, "tools": _TOOLS, "tool_choice": _CALL},
        {
            "model": "tiny",
            "messages": _MESSAGES,
            "max_completion_tokens": 2,
            **_STREAM,
            "tools": _TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
        {"model": "tiny", "messages": _MESSAGES, "max_tokens": 2, "response_format": _FORMAT, "prompt_logprobs": 1},
        {
            "model": "tiny",
            "messages": _MESSAGES[:2],
            "max_tokens": 2,
            "structured_outputs": {"json": _SCHEMA},
            "chat_template_kwargs": {"enable_thinking": False},
            "documents": [{"title": "t", "text": "x"}],
            "reasoning_effort": "low",
            "add_generation_prompt": True,
            "add_special_tokens": True,
        },
        {"model": "tiny", "messages": _MESSAGES[:2], "max_tokens": 2, "continue_final_message": True},
    ],
    "/v1/completions": [
        {"model": "tiny", "prompt": "hello", **_SAMPLING, "logprobs": 2, "echo": True, "prompt_logprobs": 1},
        {"model": "tiny", "prompt": ["hello", "you"], **_SAMPLING, **_STREAM, "logprobs": 1, "echo": True},
        {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 0, "logprobs": 5, "echo": True},
        {"model": "tiny", "prompt": [[1, 2], [3]], "max_tokens": 2, "suffix": ""},
        {"model": "tiny", "prompt": "x", "max_tokens": 2, "guided_choice": ["a", "b"]},
        {"model": "tiny", "prompt": "x", "max_tokens": 2, "guided_json": '{"type": "object"}'},
        {"model": "tiny", "prompt": "x", "max_tokens": 2, "guided_regex": "[a-z]+"},
        {"model": "tiny", "prompt": "x", "max_tokens": 2, "structured_outputs": {"grammar": 'start: "a"'}},
        {"model": "tiny", "prompt": "x", "max_tokens": 2, "response_format": {"type": "json_object"}},
    ],
    "/v1/responses": [
        {
            "model": "tiny",
            "input": _ITEMS,
            "instructions": "be brief",
            "max_output_tokens": 2,
            "top_p": 0.9,
            "store": True,
            "reasoning": {"effort": "high", "summary": "auto"},
        },
        {
            "model": "tiny",
            "input": "hi",
            "max_output_tokens": 2,
            **{name: value for name, value in _SAMPLING.items() if name not in _NO_RESPONSE},
            "stream": True,
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"},
            "truncation": "auto",
            "safety_identifier": "u",
        },
        {"model": "tiny", "input": _ITEMS, "max_output_tokens": 2, "tools": _FLAT_TOOLS, "tool_choice": "required"},
        {
            "model": "tiny",
            "input": _ITEMS[:1],
            "max_output_tokens": 2,
            "text": {"format": {"type": "json_schema", "name": "s", "schema": _SCHEMA, "strict": True}},
        },
    ],
    "/tokenize": [
        {"model": "tiny", "prompt": "hello", "add_special_tokens": False, "return_token_strs": True},
        {"messages": _MESSAGES, "add_generation_prompt": True, "chat_template_kwargs": {"a": [1]}, "tools": _TOOLS},
        {"messages": _MESSAGES[:2], "continue_final_message": True},
    ],
    "/detokenize": [{"model": "tiny", "tokens": [1, 2, 3]}],
}
