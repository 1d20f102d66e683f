"""Stop strings, against an oracle that looks at every character."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton_gateway.answers.stop import StopMatcher

letters = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Read one character after the other; the first stop string that is complete ends the text."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(pieces=st.lists(letters, max_size=8), stops=stops, include=st.booleans())
@example(pieces=["aab", "b"], stops=["abb", "bb"], include=False)
@settings(max_examples=500)
def test_like_reading_character_by_character(pieces, stops, include):
    matcher = StopMatcher(stops, include)
    shown, found = "", None
    for piece in pieces:
        text, found = matcher.push(piece)
        shown += text
        if found is not None:
            break
    else:
        shown += matcher.flush()
    assert (shown, found) == oracle("".join(pieces), stops, include)


@given(text=letters, stops=stops)
@settings(max_examples=300)
def test_holds_back_no_more_than_a_possible_beginning(text, stops):
    matcher = StopMatcher(stops, include=False)
    shown, found = matcher.push(text)
    if found is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        longer = text[len(shown) - 1 :]
        assert shown == "" or not any(stop.startswith(longer) and stop != longer for stop in stops)
