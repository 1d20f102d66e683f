"""Strategies for bodies of requests."""

import copy
import json
from typing import Any

from hypothesis import strategies as st

from .fields import ARRAY, BOOL, FIELDS, FLOAT, INT, JSON_TYPES, NULL, OBJECT, REQUIRED, STRING, VALID, least_body

PATHS = st.sampled_from(sorted(FIELDS))
_EDGES = [0, 1, 2, 7, 16, 20, 21, 128, 129, 511, 512, 513, 599, 600, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
_EDGES += [2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 10**400]
_INTS = st.sampled_from(_EDGES + [-edge for edge in _EDGES]) | st.integers()
_FLOATS = st.sampled_from([0.5, 1.0, -0.0, 1e-7, 5e-324, 1e-38, 1e-46, 1e38, 3.5e38, 1.7e308, -1.7e308]) | st.floats(
    allow_nan=False, allow_infinity=False
)
_TEXTS = st.sampled_from(
    [
        "",
        " ",
        "\x00",
        "a",
        "1",
        "-1",
        "None",
        "\ufeff",
        "\u2028",
        "𝔘",
        "e\u0301" * 9,
        "<|end|>",
        "{{ 7 * 7 }}",
        "x" * 2000,
    ]
    + ["[" * depth + "]" * depth for depth in (60, 100, 900, 920, 930, 940, 5000)]
) | st.text(max_size=12)
_SCALARS = st.none() | st.booleans() | _INTS | _FLOATS | _TEXTS
# Names that mean something somewhere tell more than others.
_NAMES = st.sampled_from(
    ["type", "text", "content", "role", "function", "name", "json", "schema", "arguments", "self", "messages", "1", ""]
) | st.text(max_size=4)
JSON = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3), max_leaves=6
)
OF_TYPE = {
    BOOL: st.booleans(),
    INT: _INTS,
    FLOAT: _FLOATS,
    STRING: _TEXTS,
    ARRAY: st.lists(JSON, max_size=3),
    OBJECT: st.dictionaries(_NAMES, JSON, max_size=3),
    NULL: st.none(),
}

# As JSON text, because Python's own numbers and strings cannot be all of these.
_ODD_VALUES = st.sampled_from(
    [
        *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 4301, "0." + "9" * 5000, "-0", "01", "+1", ".5"),
        *(r'"\ud800"', r'"\udfff\ud800"', r'"\u0000"', r'"\x"', '"\t"', "tru", "undefined", "'a'", "/* */1", "1,", ""),
    ]
)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


@st.composite
def raw(draw: st.DrawFn) -> tuple[str, bytes]:
    """What is no JSON, or JSON that few parsers agree on, in the place of a body or inside a valid one."""
    path = draw(PATHS)
    valid = encoded(draw(st.sampled_from(VALID[path])))
    kind = draw(st.sampled_from(["bytes", "text", "cut", "changed", "nested", "odd value", "twice", "encoding"]))
    match kind:
        case "bytes":
            return path, draw(st.binary(max_size=64))
        case "text":
            return path, encoded(draw(JSON))
        case "cut":
            return path, valid[: draw(st.integers(0, len(valid) - 1))]
        case "changed":
            at = draw(st.integers(0, len(valid) - 1))
            return path, valid[:at] + draw(st.binary(max_size=3)) + valid[at + draw(st.integers(0, 3)) :]
        case "nested":
            depth = draw(st.sampled_from([3, 60, 65, 190, 200, 255, 1000, 20_000]))
            opening, closing = draw(st.sampled_from([("[", "]"), ('{"a":', "}"), ('{"items":', "}"), ("[", "")]))
            inner = opening * depth + "1" + closing * depth
            return path, _with_value(path, draw(_name(path)), inner) if draw(st.booleans()) else inner.encode()
        case "odd value":
            return path, _with_value(path, draw(_name(path)), draw(_ODD_VALUES))
        case "twice":
            name = draw(_name(path))
            return path, valid[:-1] + f', "{name}": {json.dumps(draw(JSON))}}}'.encode()
    codec = draw(st.sampled_from(["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7"]))
    return path, valid.decode().encode(codec)


@st.composite
def wrong_types(draw: st.DrawFn) -> tuple[str, bytes, set[str]]:
    """A body that is valid but for some known fields whose values have the wrong JSON type; and those fields."""
    path = draw(PATHS)
    names = draw(st.lists(_name(path), min_size=1, max_size=3, unique=True))
    body = least_body(path)
    for name in names:
        allowed = set(FIELDS[path][name]) | (set() if name in REQUIRED[path] else {NULL})
        # JSON has one kind of number: only a float is no integer.
        allowed |= {INT} if FLOAT in allowed else set()
        body[name] = draw(OF_TYPE[draw(st.sampled_from([kind for kind in JSON_TYPES if kind not in allowed]))])
    return path, encoded(body), set(names)


@st.composite
def nearly_valid(draw: st.DrawFn) -> tuple[str, bytes]:
    """A valid body with one thing changed, anywhere in it: left out, another value, or one more member."""
    path = draw(PATHS)
    body = copy.deepcopy(draw(st.sampled_from(VALID[path])))
    if draw(st.booleans()):
        name = draw(_name(path))
        body[name] = draw(OF_TYPE[draw(st.sampled_from(FIELDS[path][name] or JSON_TYPES))])
        return path, encoded(body)
    parent: Any = body
    while True:
        key = draw(st.sampled_from(sorted(parent) if isinstance(parent, dict) else range(len(parent))))
        child = parent[key]
        if not isinstance(child, dict | list) or not child or draw(st.integers(0, 2)) == 0:
            break
        parent = child
    if draw(st.integers(0, 5)) == 0:
        del parent[key]
    else:
        parent[key] = draw(JSON)
    return path, encoded(body)


def _name(path: str) -> st.SearchStrategy[str]:
    return st.sampled_from(sorted(FIELDS[path]))


def _with_value(path: str, name: str, value: str) -> bytes:
    """Return the shortest valid body with a member whose value is this text."""
    rest = {key: old for key, old in least_body(path).items() if key != name}
    return f'{{"{name}": {value}, {json.dumps(rest)[1:]}'.encode() if rest else f'{{"{name}": {value}}}'.encode()
