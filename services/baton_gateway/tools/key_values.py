"""Tool calls whose arguments are keys and values in tags. Strings have neither quotes nor escapes."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from .arguments import ArgumentTypes, properties_of, required_of, with_definitions
from .call_rules import CallRules, json_rule
from .marked import MarkedParser


class KeyValueParser(MarkedParser):
    """Reads such arguments and passes them on as JSON. Strings are passed on while they arrive."""

    key_begin: ClassVar[str]
    key_end: ClassVar[str]
    before_value: ClassVar[str]  # the text between key and value
    before_text: ClassVar[str | None] = None  # the same before a string that is not JSON; None = there is no difference
    value_end: ClassVar[str]
    call_end: ClassVar[str]
    # Whether a value stands on lines of its own, so that it does not include the line ends beside its tags.
    own_lines: ClassVar[bool] = False

    @classmethod
    def argument_rules(cls, calls: CallRules, index: int, schema: Mapping[str, Any]) -> Iterator[str]:
        """Yield Lark for the arguments of a function, in the order of the schema."""
        symbols: list[str] = []
        line, spell = "\n" if cls.own_lines else "", calls.lark.spell
        required, types = required_of(schema), ArgumentTypes(schema)
        for number, (name, argument) in enumerate(properties_of(schema).items()):
            rule = f"value{index}_{number}"
            is_text = types.is_text(name) and "const" not in argument
            before = cls.before_value if not is_text or cls.before_text is None else cls.before_text
            key, end = spell(cls.key_begin + name + before + line), spell(line + cls.value_end + "\n")
            until, control = calls.lark.cut(line + cls.value_end)
            if not is_text:
                yield f"{rule}: {json_rule(with_definitions(argument, schema))}"
            elif isinstance(options := argument.get("enum"), list):
                yield f"{rule}: " + " | ".join(spell(str(option)) for option in options)
            elif control:
                # A text of any characters ends where the control token comes.
                yield f"{rule}: /(?s:.*){_in_regex(until)}/"
                end = spell(control + "\n")
            else:
                yield f"{rule}[suffix={spell(line + cls.value_end)}]: /(?s:.*)/"
                end = spell("\n")
            symbols.append(f"({key} {rule} {end}){'' if name in required else '?'}")
        yield f"arguments{index}: " + (" ".join(symbols) or '""')

    def _go_keys(self, name: str, count: int) -> bool:
        """Go on to the arguments of a call, which begin after `count` characters of the rest."""
        self._begin_call(name, count)
        self._types = ArgumentTypes(self._functions[name])
        self._members = 0
        return self._go(self._key)

    def _key(self) -> bool:
        """The state before a key, or before the end of the call."""
        text = self._rest.lstrip()
        space = len(self._rest) - len(text)
        if text.startswith(self.call_end):
            self._source.append(self._take(space + len(self.call_end)))
            self._put("{}" if not self._members else "}")
            return self._end_call(self._after_call)
        if text.startswith(self.key_begin):
            end = text.find(self.key_end)
            if end < 0:
                return self._ended and self._break()
            self._name, self._is_text = self._read_key(text[len(self.key_begin) : end].strip())
            self._source.append(self._take(space + end + len(self.key_end)))
            self._put(("{" if not self._members else ", ") + json.dumps(self._name, ensure_ascii=False) + ": ")
            self._members += 1
            return self._go(self._before_value)
        if not self._ended and (self.call_end.startswith(text) or self.key_begin.startswith(text)):
            return False
        return self._break()

    def _read_key(self, key: str) -> tuple[str, bool]:
        """Return the name of an argument, and whether its value is a string without quotes.

        key: the text between `key_begin` and `key_end`.
        """
        return key, self._types.is_text(key)

    def _before_value(self) -> bool:
        if not self._rest:
            return self._ended and self._break()
        if self.own_lines and self._rest[0] == "\n":
            self._source.append(self._take(1))
        if not self._is_text:
            return self._go(self._json_value)
        self._put('"')
        return self._go(self._text_value)

    def _text_value(self) -> bool:
        end = self._rest.find(self.value_end)
        value = self._rest[: end if end >= 0 else len(self._rest) - self._held(self._rest, self.value_end)]
        value = self._without_line(value)
        self._source.append(self._take(len(value)))
        if value:
            self._put(json.dumps(value, ensure_ascii=False)[1:-1])
        if end < 0:
            return self._ended and self._break()
        self._put('"')
        return self._end_value()

    def _json_value(self) -> bool:
        end = self._rest.find(self.value_end)
        if end < 0:
            return self._ended and self._break()
        value = self._without_line(self._rest[:end])
        self._put(self._types.read(self._name, value))
        self._source.append(self._take(len(value)))
        return self._end_value()

    def _without_line(self, value: str) -> str:
        return value.removesuffix("\n") if self.own_lines else value

    def _end_value(self) -> bool:
        self._source.append(self._take(self._rest.find(self.value_end) + len(self.value_end)))
        return self._go(self._key)

    def _break(self) -> bool:
        """Give up a call, because no argument follows or the text ends."""
        self._source.append(self._take(len(self._rest) if self._ended else 0))
        return self._break_call()


def _in_regex(text: str) -> str:
    """Return a text as a part of a regular expression in Lark."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")
