"""Arguments that models write in other formats than JSON, and the types that the function's schema gives them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..reading.json_text import read_json

# The time of one argument grows with the product of these three, and is at most 10 ms.
_MOST_REFERENCES = 8  # references that are followed one after the other
_MOST_STEPS = 16  # a reference to a deeper place is not followed
_MOST_ALTERNATIVES = 256  # an argument with more of them may have any type
_MOST_REFERENCE_CHARS = 256  # a longer reference is not followed
_PYTHON = {"True": True, "False": False, "None": None}


def properties_of(schema: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Return the schema of each argument of a function."""
    found = _followed(schema or {}, schema or {}).get("properties")
    if not isinstance(found, Mapping):
        return {}
    return {name: value if isinstance(value, Mapping) else {} for name, value in found.items()}


def required_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the arguments that a function requires."""
    found = _followed(schema, schema).get("required")
    return frozenset(name for name in found if isinstance(name, str)) if isinstance(found, list) else frozenset()


def with_definitions(argument: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of one argument, with the definitions of the function's schema if it refers to any."""
    if "$ref" not in json.dumps(argument):
        return dict(argument)
    return {**{key: schema[key] for key in ("$defs", "definitions") if key in schema}, **argument}


class ArgumentTypes:
    """The types of JSON that the arguments of one function may have.

    An argument's types are found only when it is read: this runs in the event loop, and a schema may have tens of
    thousands of arguments.
    """

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        self._schema = schema or {}
        self._properties = _followed(self._schema, self._schema).get("properties")
        self._types: dict[str, set[str]] = {}

    def of(self, name: str) -> set[str]:
        """Return the types that an argument may have; none = any."""
        if not isinstance(self._properties, Mapping) or name not in self._properties:
            return set()
        if name not in self._types:
            argument = self._properties[name]
            self._types[name] = _types(argument, self._schema) if isinstance(argument, Mapping) else set()
        return self._types[name]

    def is_text(self, name: str) -> bool:
        """Return whether an argument can only be a string, so that its value is the model's text."""
        return self.of(name) == {"string"}

    def read(self, name: str, text: str) -> str:
        """Return an argument as JSON. text: a string without quotes, or JSON."""
        types, stripped = self.of(name), text.strip()
        try:
            value = _PYTHON[stripped] if stripped in _PYTHON else read_json(stripped)
            if not types or _type_of(value) in types:
                return stripped if stripped not in _PYTHON else json.dumps(value)
        except (ValueError, RecursionError):
            pass
        return json.dumps(text, ensure_ascii=False)


def _types(argument: Mapping[str, Any], root: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names in a simple way; none = any."""
    found: set[str] = set()
    for schema in _alternatives(argument, root):
        given = schema.get("type")
        if isinstance(given, str | list):
            found |= {given} if isinstance(given, str) else {kind for kind in given if isinstance(kind, str)}
        elif isinstance(schema.get("enum"), list):
            found |= {_type_of(value) for value in schema["enum"]}
        elif "const" in schema:
            found.add(_type_of(schema["const"]))
        else:
            return set()
    return found | {"integer"} if "number" in found else found


def _alternatives(argument: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    schema = _followed(argument, root)
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list):
            for option in options if len(options) <= _MOST_ALTERNATIVES else ({},):
                yield _followed(option, root) if isinstance(option, Mapping) else {}
            return
    yield schema


def _followed(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that a schema refers to, if it does. root: the schema around it."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/") or len(reference) > _MOST_REFERENCE_CHARS:
            break
        target: Any = root
        steps = reference[2:].split("/")
        if len(steps) > _MOST_STEPS:
            break
        for step in steps:
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            break
        schema = target
    return schema


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"
