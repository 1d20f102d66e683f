"""Body of POST /v1/responses, with the same rules as the other bodies of the API."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, ValidationError, model_validator
from typing_extensions import TypedDict

from ..bounds import (
    MAX_CALL_NAME_CHARS,
    MAX_IDENTIFIER_CHARS,
    MAX_INCLUDES,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
    MAX_PARTS,
    MAX_TOOLS,
)
from ..errors import bad_request, from_validation
from .bodies import RequestModel, SamplingRequest
from .fields import (
    FunctionName,
    JsonSchema,
    NamedTool,
    Parameters,
    ReasoningEffort,
    SchemaName,
    TemplateVariables,
    ThinkingBudget,
    User,
    check_entries,
    flatten_content,
)


def _flatten(value: Any) -> str:
    text = flatten_content(value, ("input_text", "output_text"))
    if text is None:
        raise ValueError("must be a string or a list of text parts")
    return text


Text = Annotated[str, BeforeValidator(_flatten)]
CallName = Annotated[str, Field(min_length=1, max_length=MAX_CALL_NAME_CHARS)]


class InputMessage(RequestModel):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text


class FunctionCall(RequestModel):
    """A tool call of the model in an earlier turn. arguments: JSON."""

    type: Literal["function_call"]
    call_id: CallName
    name: CallName
    arguments: str


class FunctionCallOutput(RequestModel):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: CallName
    output: Text


class ReasoningText(TypedDict):  # a request may have very many, and an instance of a model is three objects
    type: Literal["reasoning_text"]
    text: str


class ReasoningInput(RequestModel):
    """The thoughts of the model in an earlier turn. A summary is ignored, since the model did not write it."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None

    @property
    def text(self) -> str:
        return "\n".join(part["text"] for part in self.content or ())


InputItem = InputMessage | FunctionCall | FunctionCallOutput | ReasoningInput
ITEMS: dict[str, type[InputItem]] = {
    "message": InputMessage,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": ReasoningInput,
}


def _read_input(value: Any) -> list[InputItem]:
    if isinstance(value, str):
        return [InputMessage(role="user", content=value)]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of items, and not empty")
    if len(value) > MAX_MESSAGES:
        raise ValueError(f"must have at most {MAX_MESSAGES} items")
    return [_read_item(item, index) for index, item in enumerate(value)]


def _read_item(value: Any, index: int) -> InputItem:
    """Validate one item by its type. With a union, pydantic would add the type's name to the path of an error."""
    if not isinstance(value, dict):
        raise bad_request(f"Invalid value for 'input[{index}]': must be an object.", f"input[{index}]")
    kind = value.get("type", "message")
    if not isinstance(kind, str) or kind not in ITEMS:
        served = ", ".join(ITEMS)
        raise bad_request(f"'input[{index}].type' must be one of {served}.", f"input[{index}].type")
    try:
        return ITEMS[kind].model_validate(value)
    except ValidationError as error:
        raise from_validation(error, ("input", index)) from None


def _read_tool_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return value
    name = value.get("name") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(name, str):
        raise ValueError("must be 'none', 'auto', 'required' or an object that names a function")
    return NamedTool(name)


class TextFormat(RequestModel):
    """The format of the text of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    description: str | None = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for name, value in (("name", self.name), ("schema", self.schema_)):
            if self.type == "json_schema" and value is None:
                raise bad_request(f"'text.format' of type json_schema needs '{name}'.", f"text.format.{name}")
        return self


class TextOptions(RequestModel):
    format: TextFormat | None = None


class ReasoningOptions(RequestModel):
    """How much the model is to think. Summaries of thoughts are not made, so their options have no effect."""

    effort: ReasoningEffort | None = None


class FunctionTool(RequestModel):
    """A function that the model may call. `type` comes first, so that the error for another type of tool names it."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class ResponseStreamOptions(RequestModel):
    include_obfuscation: bool | None = None


Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponseRequest(SamplingRequest):
    """Body of POST /v1/responses."""

    input: Annotated[list[InputItem], PlainValidator(_read_input, json_schema_input_type=str | list[InputItem])]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**32)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[Includable], Field(max_length=MAX_INCLUDES, fail_fast=True)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: (
        Annotated[Literal["none", "auto", "required"] | NamedTool, PlainValidator(_read_tool_choice)] | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: ThinkingBudget | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARS)],
                Annotated[str, Field(max_length=MAX_METADATA_VALUE_CHARS)],
            ],
            BeforeValidator(lambda value: check_entries(value, MAX_METADATA)),
        ]
        | None
    ) = None
    safety_identifier: Annotated[str, Field(max_length=MAX_IDENTIFIER_CHARS)] | None = None
    prompt_cache_key: User | None = None
    chat_template_kwargs: TemplateVariables | None = None

    background: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None

    @property
    def logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    @model_validator(mode="after")
    def _served(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise bad_request("'stream_options' needs 'stream' to be true.", "stream_options")
        if self.background:
            raise bad_request("'background' is not supported: answers are not stored.", "background")
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise bad_request(
                    f"'{name}' is not supported: answers are not stored. Send all items in 'input'.", name
                )
        if self.prompt is not None:
            raise bad_request("'prompt' is not supported.", "prompt")
        return self
