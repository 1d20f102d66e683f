"""A conversation with all that decides how it is written as a prompt."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as chat templates take them.

    variables: more variables for the template. tools: what the model may call. param: the request field that holds the
    messages, for errors. add_special_tokens: whether the tokenizer adds its own, besides those of the template.
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, Any]
    tools: list[dict[str, Any]] | None
    add_special_tokens: bool
    param: str

    @property
    def chars(self) -> int:
        """Characters of all its strings: about what it costs to write and to tokenize it."""
        return sum(map(len, strings([self.messages, self.variables, self.tools])))

    def path(self, index: int, field: str) -> str:
        """Return what an error about a message names; the messages of a response are made of other things."""
        return f"messages[{index}].{field}" if self.param == "messages" else self.param


def strings(value: object) -> Iterator[str]:
    """Return all strings in JSON, in no certain order. Nesting of any depth is allowed."""
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
