"""Tool calls of Gemma from version 4 on: <|tool_call>call:NAME{key:value,…}<tool_call|>.

Keys have no quotes, and strings stand between two markers <|"|> without any escaping. Other values are JSON, in which
objects look like the arguments.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..reading.json_depth import JsonDepth
from ..reading.json_text import write_json
from ..reading.text_reader import overlap
from .arguments import ArgumentTypes, properties_of, required_of, with_definitions
from .call_rules import CallRules, in_order, json_rule
from .marked import MarkedParser
from .tool_parser import NAME, SPACE, read_object

QUOTE = '<|"|>'
_HEAD = re.compile(rf"{SPACE}call:{SPACE}({NAME}){SPACE}")
_MAYBE_HEAD = re.compile(rf"{SPACE}(?:c|ca|cal|call|call:{SPACE}(?:{NAME})?{SPACE})?")
_KEY = re.compile(r"([{,]\s*)([a-zA-Z_][a-zA-Z0-9_.\-]*)(?=\s*:)")


class GemmaParser(MarkedParser):
    starts = ("<|tool_call>",)
    markers = ("<|tool_call>", "<tool_call|>", QUOTE)

    @staticmethod
    def writes(template: str) -> bool:
        return "<|tool_call>" in template and "<tool_call|>" in template

    @staticmethod
    def rules(calls: CallRules) -> str:
        def arguments(index: int, schema: Mapping[str, Any]) -> Iterator[str]:
            return _argument_rules(calls, index, schema)

        quote = calls.lark.spell(QUOTE)
        rules = calls.listed(head="<|tool_call>call:{}{{".format, tail="}<tool_call|>", arguments=arguments)
        text = f"{quote} TEXT {quote}" if calls.lark.token(QUOTE) is not None else f"{quote} quoted"
        values = (
            f'value: text | NUMBER | CONSTANT | "[" (value ("," value)*)? "]" | "{{" (pair ("," pair)*)? "}}"\n'
            f'pair: KEY ":" value\ntext: {text}\nquoted[suffix={json.dumps(QUOTE)}]: /(?s:.*)/\n'
            "TEXT: /(?s:.*)/\nKEY: /[a-zA-Z_][a-zA-Z0-9_]{0,63}/\nCONSTANT: /true|false|null/\n"
            r"NUMBER: /-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?/"
        )
        return f"{rules}\n{values}"

    def _opened(self) -> bool:
        text, brace = self._rest, self._rest.find("{")
        if brace < 0 and not self._ended and _MAYBE_HEAD.fullmatch(text):
            return False
        head = _HEAD.fullmatch(text, 0, brace) if brace >= 0 else None
        if head is None or head[1] not in self._functions:
            return self._reject(0)
        self._begin_call(head[1], brace)
        self._scan = _GemmaDepth()
        return self._go(self._object)

    def _object(self) -> bool:
        end = self._scan.advance(self._rest)
        if end is None:
            return self._ended and self._break(len(self._rest))
        arguments = read_arguments(self._rest[:end])
        if arguments is None:
            return self._break(end)
        self._source.append(self._take(end))
        self._put(write_json(arguments))
        return self._end_call(self._after_call)

    def _break(self, count: int) -> bool:
        self._source.append(self._take(count))
        return self._break_call()

    def _after_call(self) -> bool:
        dropped = self._drop_marker("<tool_call|>")
        return dropped is not None and self._go(self._between)


class _GemmaDepth:
    """Finds the end of the arguments, whose strings may hold brackets."""

    def __init__(self) -> None:
        self._depth = JsonDepth()
        self._read = 0
        self._in_string = False

    def advance(self, text: str) -> int | None:
        """Read the rest of a text. Return the position after the last closing bracket; None if it is missing."""
        while (at := text.find(QUOTE, self._read)) >= 0:
            end = None if self._in_string else self._depth.advance(text[:at], self._read)
            if end is not None:
                return end
            self._in_string = not self._in_string
            self._read = at + len(QUOTE)
        if self._in_string:
            return None
        # The last characters may be the beginning of a marker, which has no bracket.
        stop = max(len(text) - overlap(text, QUOTE), self._read)
        end = self._depth.advance(text[:stop], self._read)
        self._read = stop
        return end


def read_arguments(text: str) -> dict[str, Any] | None:
    """Parse the arguments in a text; return None if it is malformed."""
    pieces = text.split(QUOTE)
    if len(pieces) % 2 == 0:
        return None
    # Every second piece is a string. The others are JSON except that keys have no quotes.
    return read_object(
        "".join(json.dumps(piece) if number % 2 else _KEY.sub(r'\1"\2"', piece) for number, piece in enumerate(pieces))
    )


def _argument_rules(calls: CallRules, index: int, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield Lark for the arguments of a function: those that it requires, then the others."""
    arguments, required = properties_of(schema), required_of(schema)
    types = ArgumentTypes(schema)
    names = sorted(arguments, key=lambda name: name not in required)
    pairs = [f"{json.dumps(name + ':')} value{index}_{n}" for n, name in enumerate(names)]
    yield from (
        f"value{index}_{n}: {_value_rule(calls, name, arguments[name], schema, types)}" for n, name in enumerate(names)
    )
    yield f"arguments{index}: {in_order(pairs, sum(name in required for name in names), ',')}"


def _value_rule(
    calls: CallRules, name: str, argument: Mapping[str, Any], schema: Mapping[str, Any], types: ArgumentTypes
) -> str:
    options = argument.get("enum")
    if types.is_text(name) and isinstance(options, list) and options:
        return " | ".join(calls.lark.spell(f"{QUOTE}{option}{QUOTE}") for option in options)
    if types.is_text(name):
        return "text"
    if types.of(name) and types.of(name) <= {"integer", "number", "boolean", "null"}:
        return json_rule(with_definitions(argument, schema))
    return "value"
