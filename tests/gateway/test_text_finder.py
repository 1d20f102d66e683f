"""TextFinder finds what a plain list of alternatives would, the longest first, wherever its slices end."""

import re
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from baton_gateway.reading import text_finder
from baton_gateway.reading.text_finder import TextFinder

words = st.text("ab.", max_size=6)


@given(st.lists(words, max_size=8), st.text("ab.", max_size=40), st.integers(0, 5), st.integers(1, 4))
def test_the_same_places_as_of_alternatives(texts: list[str], text: str, start: int, slice_chars: int) -> None:
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    plain = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
    end = max(len(text) - 3, 0)
    with patch.object(text_finder, "_SLICE_CHARS", slice_chars):
        found = [match.span() for match in TextFinder(texts).find_all(text, start, end)]
    assert found == [match.span() for match in plain.finditer(text, start, end)]
