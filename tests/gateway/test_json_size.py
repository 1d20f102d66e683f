"""The counted contents of a JSON text are its real contents, however the text is written."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_gateway.json_size import JsonSize, excess, json_size, member_beyond

JSON = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a"\\[]{},:\u00e9\n\U0001f701'), max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Return containers, strings and values, keys included."""
    if isinstance(value, dict):
        keys, inner = len(value), list(value.values())
    elif isinstance(value, list):
        keys, inner = 0, value
    else:
        return 0, int(isinstance(value, str)), 1
    parts = [counted(each) for each in inner]
    return (
        1 + sum(part[0] for part in parts),
        keys + sum(part[1] for part in parts),
        1 + keys + sum(part[2] for part in parts),
    )


@given(value=JSON, ascii=st.booleans())
def test_it_counts(value: Any, ascii: bool) -> None:
    size = json_size(json.dumps(value, ensure_ascii=ascii).encode(), max_strings=10_000)
    containers, strings, values = counted(value)
    assert (size.containers, size.strings) == (containers, strings)
    # A container that is empty counts as if it held one.
    assert values <= size.values <= values + containers


@given(value=JSON)
def test_many_strings_are_enough_to_know(value: Any) -> None:
    strings = counted(value)[1]
    if strings:
        assert json_size(json.dumps(value).encode(), max_strings=strings - 1).strings == strings


@pytest.mark.parametrize(
    ("most", "member"),
    [
        (JsonSize(2, 100, 1000), "b"),
        (JsonSize(100, 5, 1000), 'c"d'),
        (JsonSize(100, 100, 8), "b"),
        (JsonSize(100, 100, 1000), None),
    ],
)
def test_the_member_that_is_too_much_is_named(most: JsonSize, member: str | None) -> None:
    text = json.dumps({"a": 1, "b": [{"x": "}\\"}, [], 2], 'c"d': {"b": "e"}}).encode()
    named = member_beyond(text, most)
    assert named == (member.replace('"', '\\"') if member else None)


def test_what_is_no_json_is_counted_too() -> None:
    for text in (b"", b'"', b"\\", b'{"a":' * 9, b"]]]", b'\\"\\\\"'):
        json_size(text, 10)
        member_beyond(text, JsonSize(0, 0, 1))


@given(value=JSON)
def test_excess(value: Any) -> None:
    _, _, values = counted(value)
    assert excess(value, max_values=values, max_levels=100) is None
    deep: Any = value
    for _ in range(5):
        deep = [deep]
    if isinstance(value, dict | list) and value:
        assert excess(deep, max_values=10_000, max_levels=4) == "must be nested at most 4 levels deep"
    assert excess([0] * 11, max_values=11, max_levels=3) == "must hold at most 11 values"


@pytest.mark.parametrize(
    "text", [b'\\"' * 500_000 + b"[" * 60_000, b'"' + b"\\" * 1_000_001, b'{"a":"' + b'\\"' * 500_000]
)
def test_text_that_is_no_json_is_scanned_in_linear_time(text: bytes) -> None:
    began = time.process_time()
    assert member_beyond(text, JsonSize(50_000, 100_000, 1_200_000)) is None
    assert time.process_time() - began < 5, "quadratic time would be hours"
