"""The types of fields of requests, each with its checks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from ..bounds import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CHOICE_OPTIONS,
    MAX_DOCUMENTS,
    MAX_EXTRA_VALUES,
    MAX_LOGIT_BIASES,
    MAX_MODEL_CHARS,
    MAX_NESTING,
    MAX_PARTS,
    MAX_SCHEMA_NAME_CHARS,
    MAX_SCHEMA_NESTING,
    MAX_SCHEMA_VALUES,
    MAX_STOP_CHARS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TEMPLATE_VALUES,
    MAX_THINKING_TOKENS,
    MAX_USER_CHARS,
)
from ..json_size import excess

_TOKEN_ID = re.compile(r"[0-9]{1,10}")

Prompt = str | list[int]


@dataclass(frozen=True)
class NamedTool:
    """A tool choice that names the one function to call."""

    name: str


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _check_stops(stops: list[str]) -> list[str]:
    if any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters")
    return stops


def check_entries(value: Any, maximum: int) -> Any:
    """Raises ValueError for a mapping with more than `maximum` entries, before its entries are validated."""
    if isinstance(value, dict) and len(value) > maximum:
        raise ValueError(f"must have at most {maximum} entries")
    return value


def check_json(value: Any, max_values: int, max_levels: int = MAX_NESTING) -> Any:
    """Raises ValueError for JSON with more values or more levels of nesting."""
    if (too_much := excess(value, max_values, max_levels)) is not None:
        raise ValueError(too_much)
    return value


def _integer_keys(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    check_entries(value, MAX_LOGIT_BIASES)
    # Python's int() would take more than digits: "1_0", " 1", digits of other scripts.
    if not all(isinstance(key, int) or _TOKEN_ID.fullmatch(key) for key in value):
        raise ValueError("keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


def _split_prompts(value: Any) -> list[Prompt]:
    """Turn the four allowed forms of a prompt into a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of those, and not empty")
    kinds = set(map(type, value))
    if kinds == {int}:
        return [value]
    if kinds == {str} or (kinds == {list} and all(not item or _all_ids(item) for item in value)):
        return value
    raise ValueError("a list must hold strings only, token ids only, or lists of token ids only")


def _all_ids(values: list[Any]) -> bool:
    return set(map(type, values)) == {int}


def flatten_content(value: Any, kinds: Sequence[str]) -> str | None:
    """Join the text parts of a message with newlines. kinds: the allowed types of parts, the default type first."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    if len(value) > MAX_PARTS:
        raise ValueError(f"must have at most {MAX_PARTS} parts")
    texts = []
    for part in value:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        kind = part.get("type", kinds[0]) if isinstance(part, dict) else kinds[0]
        if kind not in kinds or not isinstance(text, str):
            raise ValueError(f"only parts of type {' or '.join(map(repr, kinds))} are served by this model")
        texts.append(text)
    return "\n".join(texts)


def _flatten_chat_content(value: Any) -> str | None:
    return flatten_content(value, ("text", "input_text"))


def _check_schema(value: Any) -> Any:
    if not isinstance(value, dict | bool):
        raise ValueError("must be a JSON schema")
    return check_json(value, MAX_SCHEMA_VALUES, MAX_SCHEMA_NESTING)


def _check_schema_or_text(value: Any) -> Any:
    return value if isinstance(value, str) else _check_schema(value)


def _read_tool_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("must be 'none', 'auto', 'required' or an object that names a function")
    return NamedTool(function["name"])


# With a plain union of types, pydantic would add the type that did not match to the path of an error.
JsonSchema = Annotated[dict[str, Any] | bool, PlainValidator(_check_schema)]
JsonSchemaOrText = Annotated[dict[str, Any] | bool | str, PlainValidator(_check_schema_or_text)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
TemplateVariables = Annotated[dict[str, Any], AfterValidator(lambda value: check_json(value, MAX_TEMPLATE_VALUES))]
Documents = Annotated[
    list[dict[str, Any]],
    Field(max_length=MAX_DOCUMENTS),
    AfterValidator(lambda value: check_json(value, MAX_EXTRA_VALUES)),
]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ThinkingBudget = Annotated[int, Field(ge=0, le=MAX_THINKING_TOKENS)]
Parameters = Annotated[
    dict[str, Any], AfterValidator(lambda value: check_json(value, MAX_SCHEMA_VALUES, MAX_SCHEMA_NESTING))
]
ModelName = Annotated[str, Field(max_length=MAX_MODEL_CHARS)]
User = Annotated[str, Field(max_length=MAX_USER_CHARS)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICE_OPTIONS, fail_fast=True)]
SchemaName = Annotated[str, Field(min_length=1, max_length=MAX_SCHEMA_NAME_CHARS)]
Stops = Annotated[
    list[str],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(_as_list),
    AfterValidator(_check_stops),
]
LogitBias = Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_integer_keys)]
StopTokens = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)]
BadWords = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]],
    Field(max_length=MAX_BAD_WORDS, fail_fast=True),
]
AllowedTokens = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS, fail_fast=True)]
ChatContent = Annotated[str | None, BeforeValidator(_flatten_chat_content)]
ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool, PlainValidator(_read_tool_choice)]
Prompts = Annotated[
    list[Prompt],
    PlainValidator(_split_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
