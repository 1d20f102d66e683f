"""A conversation with everything that decides how it is rendered as a prompt."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the form that chat templates take.

    variables: more variables for the template. tools: functions that the model may call. param: the request field that
    holds the messages, for errors. add_special_tokens: whether the tokenizer adds its special tokens to the template's.
    documents: texts that the model is to use.
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, Any]
    tools: list[dict[str, Any]] | None
    add_special_tokens: bool
    param: str
    documents: list[dict[str, Any]] | None = None

    @property
    def chars(self) -> int:
        """The number of characters in all strings, which estimates the cost of rendering and tokenizing them."""
        return sum(map(len, strings([self.messages, self.variables, self.tools, self.documents])))

    def path(self, index: int, field: str) -> str:
        """Return the field that an error about a message names: `param` alone if it is not `messages`."""
        return f"messages[{index}].{field}" if self.param == "messages" else self.param


def strings(value: object) -> Iterator[str]:
    """Yield all strings in a JSON value, in no particular order. Nesting of any depth is allowed."""
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            rest += value
            rest += value.values()
        elif isinstance(value, Sequence):
            rest += value
