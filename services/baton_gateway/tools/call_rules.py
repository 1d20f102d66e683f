"""The grammars of tool calls, as far as all formats share them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..bounds import MAX_RULES_CHARS
from ..errors import ApiError, bad_request
from ..reading.lark import LarkSpelling

_SPACE = r"[ \t\r\n]{1,32}"  # as in all grammars of the engine: a weak model may repeat white space forever

# Makes the Lark rules of a function's arguments from the function's number and schema. One of them is `arguments<n>`.
# They are made one by one, because together they can be much longer than the schema.
ArgumentRules = Callable[[int, Mapping[str, Any]], Iterable[str]]


@dataclass(frozen=True, slots=True)
class CallRules:
    """The functions of which at least one must be called, and how texts are spelled in Lark.

    functions: the JSON schema of the arguments of each function, which are an object. parallel: whether there may be
    more than one call.
    """

    functions: Mapping[str, Mapping[str, Any]]
    parallel: bool
    lark: LarkSpelling

    def listed(
        self,
        *,
        head: Callable[[str], str],
        tail: str,
        opening: str = "",
        separator: str = "",
        closing: str = "",
        arguments: ArgumentRules | None = None,
    ) -> str:
        """Return Lark for calls that are each `head(name)`, the arguments and `tail`.

        opening, separator, closing: the texts before, between and after the calls. arguments: the rules of a
        function's arguments; None = they are JSON.
        Raises ApiError when the rules are longer than pods accept.
        """
        spell, make = self.lark.spell, arguments or json_arguments
        more = f"({spell(separator)} call)*" if separator else "call*"
        start = f"start: {spell(opening)} call {more if self.parallel else ''} {spell(closing)}"
        rules = [start, "call: " + " | ".join(f"call{index}" for index in range(len(self.functions)))]
        size = 0
        for index, (name, schema) in enumerate(self.functions.items()):
            rules.append(f"call{index}: {spell(head(name))} arguments{index} {spell(tail)}")
            for rule in make(index, schema):
                rules.append(rule)
                size += len(rule)
                if size > MAX_RULES_CHARS:
                    raise _too_long()
        return "\n".join(rules)


def json_arguments(index: int, schema: Mapping[str, Any]) -> list[str]:
    return [f"arguments{index}: {json_rule(schema)}"]


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return a symbol that matches JSON of this schema."""
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _SPACE}})


def _too_long() -> ApiError:
    return bad_request(f"The grammar of 'tools' has more than {MAX_RULES_CHARS} characters.", "tools")


def in_order(symbols: Sequence[str], required: int, separator: str) -> str:
    """Return Lark for the first `required` symbols and any of the others, in their order, with separators between.

    Raises ApiError when it is longer than pods accept.
    """
    if not required and len(symbols) ** 2 > 2 * MAX_RULES_CHARS:
        raise _too_long()  # each symbol is repeated for all those before it
    between = json.dumps(separator)
    further = [f"({between} {symbol})?" for symbol in symbols[required:]]
    if required:
        return f" {between} ".join(symbols[:required]) + " " + " ".join(further)
    # Any of them may be the first, which no separator precedes.
    return " | ".join([*(" ".join([symbol, *further[n + 1 :]]) for n, symbol in enumerate(symbols)), '""'])
