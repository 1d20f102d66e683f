"""Request bodies of the API. Unknown fields are ignored; a known field with a wrong value is an error naming it.

Every optional field may also be null, which means the same as leaving it out.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..bounds import (
    MAX_CHOICES,
    MAX_EXTRA_VALUES,
    MAX_LOGPROBS,
    MAX_MESSAGE_FIELDS,
    MAX_MESSAGES,
    MAX_NESTING,
    MAX_PROMPT_RULES,
    MAX_SCHEMA_NESTING,
    MAX_SCHEMA_VALUES,
    MAX_TOOLS,
)
from ..errors import bad_request
from ..json_size import excess
from ..models.conversation import Role
from .fields import (
    AllowedTokens,
    BadWords,
    ChatContent,
    Choices,
    Documents,
    FunctionName,
    JsonSchema,
    JsonSchemaOrText,
    LogitBias,
    ModelName,
    NamedTool,
    Parameters,
    Prompts,
    ReasoningEffort,
    SchemaName,
    Stops,
    StopTokens,
    TemplateVariables,
    ThinkingBudget,
    TokenId,
    ToolChoice,
    User,
)


class RequestModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Message(RequestModel):
    """One message of a chat; fields not named here reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: Role
    content: ChatContent = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role not in ("assistant", "function"):
            raise ValueError(f"a message of role '{self.role}' needs content")
        if self.model_extra:
            self._check_extra(self.model_extra)
        return self

    @staticmethod
    def _check_extra(extra: dict[str, Any]) -> None:
        if len(extra) > MAX_MESSAGE_FIELDS:
            raise ValueError(f"a message may have at most {MAX_MESSAGE_FIELDS} fields beside role and content")
        for name, value in extra.items():
            if (too_much := excess(value, MAX_EXTRA_VALUES, MAX_NESTING)) is not None:
                raise ValueError(f"'{name[:64]}' {too_much}")


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class NamedSchema(RequestModel):
    name: SchemaName
    schema_: JsonSchema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(RequestModel):
    """A constraint on the output. Exactly one field must be set."""

    json_: JsonSchemaOrText | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class Function(RequestModel):
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class SamplingRequest(RequestModel):
    """The fields that all generation endpoints share."""

    model: ModelName
    stream: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    user: User | None = None

    top_k: Annotated[int, Field(ge=-1, lt=2**32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    stop_token_ids: StopTokens | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: AllowedTokens | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None

    structured_outputs: StructuredOutputs | None = None


class GenerationRequest(SamplingRequest):
    """The fields that chat completions and completions share."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**32)] | None = None

    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None

    response_format: ResponseFormat | None = None
    guided_json: JsonSchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise bad_request("'stream_options' needs 'stream' to be true.", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("'prompt_logprobs' cannot be streamed.", "prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            raise bad_request("'truncate_prompt_tokens' must be -1 or at least 1.", "truncate_prompt_tokens")
        return self

    @property
    def choices(self) -> int:
        return self.n or 1


class ChatTemplateRequest(RequestModel):
    """A conversation and how to render it as a prompt."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    documents: Documents | None = None
    reasoning_effort: ReasoningEffort | None = None

    @model_validator(mode="after")
    def _one_ending(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request(
                "'continue_final_message' and 'add_generation_prompt' exclude each other.", "continue_final_message"
            )
        return self


class ChatCompletionRequest(GenerationRequest, ChatTemplateRequest):
    """Body of POST /v1/chat/completions."""

    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**32)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: ThinkingBudget | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None

    @model_validator(mode="after")
    def _served(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request("'best_of' must equal 'n' in chat completions.", "best_of")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
        self._check_tools()
        for name in ("functions", "function_call", "audio"):
            if getattr(self, name) is not None:
                raise bad_request(f"'{name}' is not supported.", name)
        return self

    @property
    def called(self) -> str | None:
        """The name of the one function that must be called, if there is one."""
        return self.tool_choice.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def must_call(self) -> bool:
        """Whether the answer must consist of function calls."""
        return self.tool_choice == "required" or self.called is not None

    @property
    def may_call(self) -> bool:
        """Whether the model may choose to call functions."""
        return bool(self.tools) and self.tool_choice in (None, "auto")

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise bad_request("Two functions of 'tools' have the same name.", "tools")
        parameters = [tool.function.parameters for tool in self.tools or () if tool.function.parameters]
        if (too_much := excess(parameters, MAX_SCHEMA_VALUES, MAX_SCHEMA_NESTING + 1)) is not None:
            raise bad_request(f"The parameters of all functions in 'tools' together {too_much}.", "tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.name not in names:
            raise bad_request("'tool_choice' names a function that is not among 'tools'.", "tool_choice")
        if self.tool_choice == "required" and not names:
            raise bad_request("'tool_choice' needs 'tools'.", "tool_choice")


PROMPT_RULES = ("logit_bias", "stop_token_ids", "bad_words", "allowed_token_ids")


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _served(self) -> Self:
        if self.suffix:
            raise bad_request("'suffix' is not supported.", "suffix")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise bad_request("'best_of' must not be less than 'n'.", "best_of")
        if self.stream and self.selects:
            raise bad_request("The best of several choices cannot be streamed.", "best_of")
        self._check_products()
        return self

    @property
    def choices(self) -> int:
        return self.best_of or self.n or 1

    @property
    def selects(self) -> bool:
        """Whether some of the choices are left out of the answer."""
        return self.choices > (self.n or 1)

    def _check_products(self) -> None:
        """Refuse sampling rules that are too long when multiplied by the number of prompts."""
        prompts = len(self.prompt)
        rules = {name: len(getattr(self, name) or ()) for name in PROMPT_RULES}
        if prompts > 1 and prompts * sum(rules.values()) > MAX_PROMPT_RULES:
            param = max(rules, key=lambda name: rules[name])
            raise bad_request(f"'{param}' is too long for a request with {prompts} prompts.", param)


class TokenizeRequest(RequestModel):
    """Body of POST /tokenize: a prompt or messages."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    documents: Documents | None = None
    reasoning_effort: ReasoningEffort | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    """Body of POST /detokenize."""

    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
