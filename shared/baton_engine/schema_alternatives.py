"""Counts the alternatives that arise where a JSON schema demands that several lists of alternatives match at once.

The parser compares all alternatives of one place in the text with each other, when it compiles a grammar and in every
mask, so their number costs quadratic time. A schema of 64 KB cannot list so many that this matters. But the library
replaces two lists that must match at once by all pairs of their members.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

# With this many alternatives in one place, a mask takes 0.1 s.
MOST_COMBINED = 4_000
_MOST_STEPS = 50_000  # the library refuses schemas for which it takes more
_APPLICATORS = frozenset({"const", "enum", "allOf", "anyOf", "oneOf", "$ref"})
_ANNOTATIONS = frozenset(
    {"$anchor", "$defs", "definitions", "$schema", "$id", "id", "$comment", "title", "description", "default"}
    | {"readOnly", "writeOnly", "examples", "contentMediaType", "contentEncoding"}
)
_COMPOUND = ("array", "object")


class _Reference(NamedTuple):
    """A reference alone. The library follows it only where something else has to match, too."""

    target: str


class _Alternatives(NamedTuple):
    options: list["_Shape"]


class _Parts(NamedTuple):
    """An object or an array. rest: the shape of all parts that are not named."""

    kind: str
    named: Mapping[str, "_Shape"]
    rest: "_Shape"


# "value" is any string, number, boolean or null: the library joins all of them in one expression. None matches
# everything, and "nothing" matches nothing.
_Shape = _Reference | _Alternatives | _Parts | Literal["value", "nothing"] | None


class _Ended(Exception):
    """The library refuses the schema at this point, or the counts are too large already."""


class Combinations:
    """Combines the parts of one schema as the library does. Texts and numbers are ignored, and so are the patterns in
    `patternProperties`: any of them counts as if it matched every name."""

    def __init__(self, schema: Any) -> None:
        """Raises RecursionError when the schema is nested too deeply."""
        self.count = 0
        self._steps = 0
        self._shapes: dict[str, _Shape] = {}
        self._waiting: list[str] = []  # references that have been found and not been followed
        self._following: set[str] = set()
        nodes = list(_nodes(schema))
        self._anchored = [node for node in nodes if "$anchor" in node or "$dynamicAnchor" in node]
        self._roots = [schema, *(node for node in nodes[1:] if isinstance(node.get("$id", node.get("id")), str))]
        try:
            self._shape(schema)
            while self._waiting:
                self._follow(self._waiting.pop())
        except _Ended:
            pass

    def _shape(self, schema: Any) -> _Shape:
        if not isinstance(schema, dict):
            return "nothing" if schema is False else None
        result: _Shape = None
        fields: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _APPLICATORS:
                if fields:
                    result = self._meet(result, self._typed(fields, schema.get("type")))
                    fields = {}
                result = self._apply(result, key, value)
            elif key not in _ANNOTATIONS:
                fields[key] = value
        return self._meet(result, self._typed(fields, schema.get("type"))) if fields else result

    def _apply(self, result: _Shape, key: str, value: Any) -> _Shape:
        if key == "$ref":
            if result is None:
                self._waiting.append(str(value))
                return _Reference(str(value))
            return self._meet(result, self._follow(str(value)))
        if key == "const":
            return self._meet(result, _constant(value))
        values = value if isinstance(value, list) else []
        if key == "allOf":
            for each in values:
                result = self._meet(result, self._shape(each))
            return result
        shapes = map(_constant if key == "enum" else self._shape, values)
        return self._meet(result, _any_of(shapes, joined=key != "oneOf"))

    def _typed(self, fields: dict[str, Any], types: Any) -> _Shape:
        """Return the shape of keywords that say something about values of one type each."""
        kinds = [types] if isinstance(types, str) else types if isinstance(types, list) else ["value", *_COMPOUND]
        options: list[_Shape] = ["value"] if any(kind not in _COMPOUND for kind in kinds) else []
        if "array" in kinds:
            prefix, rest = fields.get("prefixItems"), fields.get("items")
            if isinstance(rest, list):
                prefix, rest = rest, fields.get("additionalItems")
            items = prefix if isinstance(prefix, list) else []
            named = {str(index): self._shape(item) for index, item in enumerate(items)}
            options.append(_Parts("array", named, self._shape(rest)))
        if "object" in kinds:
            named = {name: self._shape(each) for name, each in _members(fields.get("properties"))}
            rest = self._shape(fields.get("additionalProperties"))
            patterns = [self._shape(each) for _, each in _members(fields.get("patternProperties"))]
            if patterns:
                rest = _any_of([*patterns, rest] if rest is not None else patterns)
                named = {name: self._meet(each, rest) for name, each in named.items()}
            options.append(_Parts("object", named, rest))
        return _any_of(options)

    def _meet(self, one: _Shape, other: _Shape) -> _Shape:
        """Return the shape of what matches both."""
        self._steps += 1
        if self._steps > _MOST_STEPS or self.count > MOST_COMBINED:
            raise _Ended
        if one is None or other is None:
            return other if one is None else one
        if one == "nothing" or other == "nothing":
            return "nothing"
        if isinstance(one, _Reference):
            return self._meet(self._follow(one.target), other)
        if isinstance(other, _Reference):
            return self._meet(one, self._follow(other.target))
        if isinstance(one, _Alternatives):
            return _any_of([self._option(option, other) for option in one.options])
        if isinstance(other, _Alternatives):
            return _any_of([self._option(option, one) for option in other.options])
        if isinstance(one, _Parts) and isinstance(other, _Parts) and one.kind == other.kind:
            names = one.named.keys() | other.named.keys()
            named = {
                name: self._meet(one.named.get(name, one.rest), other.named.get(name, other.rest)) for name in names
            }
            return _Parts(one.kind, named, self._meet(one.rest, other.rest))
        return "value" if one == "value" and other == "value" else "nothing"

    def _option(self, option: _Shape, other: _Shape) -> _Shape:
        shape = self._meet(option, other)
        self.count += len(shape.options) if isinstance(shape, _Alternatives) else 1
        return shape

    def _follow(self, target: str) -> _Shape:
        if target not in self._shapes:
            if target in self._following:
                raise _Ended  # a circle
            self._following.add(target)
            self._shapes[target] = _any_of(map(self._shape, self._find(target)))
        return self._shapes[target]

    def _find(self, target: str) -> Iterator[Any]:
        """Yield each schema that a reference may mean. Which one it is may depend on the `$id` around it."""
        fragment = unquote(target.partition("#")[2])
        if fragment and not fragment.startswith("/"):
            names = ("$anchor", "$dynamicAnchor")
            yield from (node for node in self._anchored if fragment in (node.get(name) for name in names))
            return
        for found in self._roots:
            for step in fragment.split("/")[1:]:
                key = step.replace("~1", "/").replace("~0", "~")
                if isinstance(found, list) and key[:9].isdecimal() and int(key[:9]) < len(found):
                    found = found[int(key[:9])]
                elif isinstance(found, dict) and key in found:
                    found = found[key]
                else:
                    break
            else:
                yield found


def _any_of(shapes: Iterable[_Shape], joined: bool = True) -> _Shape:
    """Return the shape of what matches one of several. joined: one that matches everything replaces the others."""
    options: list[_Shape] = []
    for shape in shapes:
        options += shape.options if isinstance(shape, _Alternatives) else [shape] if shape != "nothing" else []
    if joined and None in options:
        return None
    others: list[_Shape] = [option for option in options if option != "value"]
    options = ["value", *others] if len(others) < len(options) else others
    return _Alternatives(options) if len(options) > 1 else options[0] if options else "nothing"


def _constant(value: Any) -> _Shape:
    if isinstance(value, list):
        return _Parts("array", {str(index): _constant(each) for index, each in enumerate(value)}, None)
    if isinstance(value, dict):
        return _Parts("object", {name: _constant(each) for name, each in value.items()}, None)
    return "value"


def _members(value: Any) -> Iterable[tuple[str, Any]]:
    return value.items() if isinstance(value, dict) else ()


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    level = [schema]
    while level:
        yield from (node for node in level if isinstance(node, dict))
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
