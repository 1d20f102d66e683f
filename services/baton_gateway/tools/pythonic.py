"""Tool calls in Python, as Llama 4, Llama 3.2 and others write them: the whole text is [name(key=value, …), …]."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ..reading.json_text import read_json, write_json
from .arguments import properties_of, required_of, with_definitions
from .call_rules import CallRules, in_order, json_rule
from .tool_parser import LONGEST_HEAD, NAME, SPACE, ToolParser

_FUNCTION = re.compile(rf"\s*({NAME})\(")
_MAYBE_FUNCTION = re.compile(rf"\s*(?:{NAME})?")
_KEY = re.compile(rf"([a-zA-Z_][a-zA-Z0-9_]{{0,127}}){SPACE}=")
_MAYBE_KEY = re.compile(rf"(?:[a-zA-Z_][a-zA-Z0-9_]{{0,127}}{SPACE})?")
_NEXT = re.compile(r"[\"'()\[\]{},]")
_IN_STRING = {quote: re.compile(rf"{quote}|\\(?:.|\n|\Z)") for quote in "\"'"}
_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*+\"|'(?:[^'\\]|\\.)*+'", re.DOTALL)
_MOST_PYTHON_CHARS = 16_384  # beside the characters of strings; to parse them takes up to 30 ms
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicParser(ToolParser):
    markers: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")

    @staticmethod
    def writes(template: str) -> bool:
        return "<|python_start|>" in template or "[func_name1(params_name1=params_value1" in template

    @staticmethod
    def rules(calls: CallRules) -> str:
        return calls.listed(
            head="{}(".format, tail=")", opening="[", separator=", ", closing="]", arguments=argument_rules
        )

    def _at_start(self) -> bool:
        self._opening += self._take_space()
        marker = self.markers[0]
        if self._rest.startswith(marker):
            self._opening += self._take(len(marker))
        elif self._may_become(marker):
            return False
        return self._go(self._list)

    def _list(self) -> bool:
        self._opening += self._take_space()
        if not self._rest:
            return self._ended and self._reject(0)
        if self._rest[0] != "[":
            return self._reject(0)
        self._opening += self._take(1)
        return self._go(self._function)

    def _function(self) -> bool:
        if (head := _FUNCTION.match(self._rest)) is not None and head[1] in self._functions:
            self._begin_call(head[1], head.end())
            self._members = 0
            return self._go(self._argument)
        held = head is None and not self._ended and len(self._rest) < LONGEST_HEAD
        return not (held and _MAYBE_FUNCTION.fullmatch(self._rest)) and self._reject(0)

    def _argument(self) -> bool:
        """The state before an argument, or before the end of the call."""
        # White space is taken at once: a weak model may repeat it forever, and each scan of it would take longer.
        self._source.append(self._take_space())
        if self._rest.startswith(")"):
            self._source.append(self._take(1))
            self._put("}" if self._members else "{}")
            return self._end_call(self._after_call)
        if (key := _KEY.match(self._rest)) is None:
            if not self._ended and _MAYBE_KEY.fullmatch(self._rest):
                return False
            return self._break()
        self._source.append(self._take(key.end()))
        self._put(("{" if not self._members else ", ") + json.dumps(key[1]) + ": ")
        self._members += 1
        self._quote, self._open, self._scanned = "", 0, 0
        return self._go(self._value)

    def _value(self) -> bool:
        end = self._end_of_value()
        if end is None:
            return self._ended and self._break()
        value = as_json(self._rest[:end])
        if value is None:
            return self._break()
        self._put(value)
        self._source.append(self._take(end))
        if self._rest[0] == ",":
            self._source.append(self._take(1))
        return self._go(self._argument)

    def _end_of_value(self) -> int | None:
        """Return where the value ends: at a comma or bracket outside of strings and other brackets."""
        text = self._rest
        while (found := (_IN_STRING[self._quote] if self._quote else _NEXT).search(text, self._scanned)) is not None:
            char = found[0][0]
            if char == "\\":
                if len(found[0]) == 1:  # the escaped character is still to come
                    return None
            elif self._quote:
                self._quote = ""
            elif char in "\"'":
                self._quote = char
            elif char in "([{":
                self._open += 1
            elif self._open == 0:
                return found.start()
            elif char != ",":
                self._open -= 1
            self._scanned = found.end()
        self._scanned = len(text)
        return None

    def _after_call(self) -> bool:
        text = self._rest.lstrip()
        space = len(self._rest) - len(text)
        if text.startswith(","):
            self._opening = self._take(space + 1)
            return self._go(self._function)
        if text.startswith("]"):
            self._drop(space + 1)
            return self._go(self._after_list)
        if not text and not self._ended:
            return False
        if not text:
            self._drop(space)
            return False
        return self._go(self._after_none)

    def _after_list(self) -> bool:
        text, marker = self._rest.lstrip(), self.markers[1]
        if text.startswith(marker):
            self._drop(len(self._rest) - len(text) + len(marker))
        elif not self._ended and marker.startswith(text):
            return False
        elif not text:
            self._drop(len(self._rest))
        return self._go(self._after_none)

    def _after_none(self) -> bool:
        self._add_content(self._take(len(self._rest)))
        return False

    def _break(self) -> bool:
        self._source.append(self._take(len(self._rest) if self._ended else 0))
        return self._break_call()


def as_json(text: str) -> str | None:
    """Return a Python literal or a JSON text as JSON; None if it is neither."""
    try:
        return write_json(read_json(text))
    except (ValueError, RecursionError):
        pass
    if len(_STRING.sub("s", text)) > _MOST_PYTHON_CHARS:
        return None
    try:
        # The JSON of a literal is read again, so that read_json refuses and changes the same values as above.
        return write_json(read_json(json.dumps(_literal(ast.parse(text.strip(), mode="eval").body))))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """Return the value of an expression that consists of constants. Raises ValueError for any other."""
    match node:
        case ast.Constant(value) if value is None or isinstance(value, str | int | float):
            return value
        case ast.Name(name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if isinstance(value, int | float):
            return -value
        case ast.List(items) | ast.Tuple(items):
            return [_literal(item) for item in items]
        case ast.Dict(keys, values):
            return {str(_literal(key)): _literal(value) for key, value in zip(keys, values, strict=True) if key}
    raise ValueError("no constant")


def argument_rules(index: int, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield Lark for the arguments of a function: those that it requires, then the others."""
    arguments, required = properties_of(schema), required_of(schema)
    names = sorted((name for name in arguments if name.isidentifier()), key=lambda name: name not in required)
    schemas = (with_definitions(arguments[name], schema) for name in names)
    pairs = [f"{json.dumps(name + '=')} value{index}_{n}" for n, name in enumerate(names)]
    yield from (f"value{index}_{n}: {json_rule(argument)}" for n, argument in enumerate(schemas))
    yield f"arguments{index}: {in_order(pairs, sum(name in required for name in names), ', ')}"
