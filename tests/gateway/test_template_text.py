"""Text keeps the origin of every character through what templates do to it."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_gateway.models.template_text import TemplateText, concat

OWN, GIVEN = "ab \nÉ", "12\t."  # nothing is in both, so each character tells its origin

pieces = st.lists(st.text(OWN, max_size=4).map(TemplateText.written) | st.text(GIVEN, max_size=4), max_size=6)
texts = pieces.map(concat)
OPERATIONS: dict[str, Callable[[str, str], str]] = {
    "strip": lambda text, _: text.strip(),
    "lstrip": lambda text, _: text.lstrip(" \t1"),
    "rstrip": lambda text, _: text.rstrip("b."),
    "slice": lambda text, _: text[1:-1],
    "step": lambda text, _: text[::-2],
    "index": lambda text, _: text[-1] if text else text,
    "add": lambda text, other: text + other,
    "added": lambda text, other: other + text,
    "join": lambda text, other: text.join([other, text, other]),
    "replace": lambda text, other: text.replace("a", other),
    "replace once": lambda text, other: text.replace("1", other, 1),
    "upper": lambda text, _: text.upper(),
    "lower": lambda text, _: text.lower(),
    "capitalize": lambda text, _: text.capitalize(),
    "str": lambda text, _: str(text),
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(texts, texts | st.text(GIVEN, max_size=3))
def test_like_str_with_the_origin(name: str, text: TemplateText, other: str) -> None:
    result = OPERATIONS[name](text, other)
    assert isinstance(result, TemplateText)
    plain_other = other.plain if isinstance(other, TemplateText) else other
    assert result == OPERATIONS[name](text.plain, plain_other)
    assert type(result.plain) is str
    assert result.own == bytes(char.lower() in OWN.lower() for char in result)


@pytest.mark.parametrize(
    "operation",
    [
        lambda text: "x".join([text, text]),
        lambda text: text.title(),
        lambda text: text.split("1")[0],
        lambda text: f"<{text}>",
        lambda text: "%s%s" % (text, text),  # noqa: UP031
        lambda text: text * 2,
        lambda text: type(text)("ab"),
    ],
)
def test_what_is_lost_counts_as_the_requests(operation: Callable[[str], str]) -> None:
    result = operation(concat([TemplateText.written("ab"), "1"]))
    assert not isinstance(result, TemplateText) or not any(result.own)


def test_letters_that_grow_lose_their_origin() -> None:
    assert not any(TemplateText.written("straße").upper().own)
