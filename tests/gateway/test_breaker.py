"""The breaker as plain state with a made-up clock."""

from hypothesis import given
from hypothesis import strategies as st

from baton_gateway.routing.breaker import FAILURES, FIRST_PAUSE_S, LAST_PAUSE_S, Breaker


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES):
        assert breaker.allows(now)
        breaker.fail(now)
    return breaker


def test_failures_one_after_another_open_it():
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.fail(0.0)
        breaker.succeed()
    assert breaker.allows(0.0)
    assert not opened().allows(0.0)


def test_one_request_tries_it_after_the_pause():
    breaker = opened()
    assert not breaker.allows(FIRST_PAUSE_S * 0.9)
    assert breaker.allows(FIRST_PAUSE_S)
    assert (breaker.state(0.0), breaker.state(FIRST_PAUSE_S)) == ("open", "half_open")
    assert breaker.admit()
    assert not breaker.allows(FIRST_PAUSE_S)
    assert breaker.state(FIRST_PAUSE_S) == "half_open"
    breaker.release()
    assert breaker.allows(FIRST_PAUSE_S)
    breaker.admit()
    breaker.succeed()
    assert breaker.allows(FIRST_PAUSE_S)
    assert not breaker.admit()
    assert breaker.state(FIRST_PAUSE_S) == "closed"


def test_each_failed_try_doubles_the_pause_up_to_the_last():
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(8):
        pauses.append(breaker.open_until - now)
        now = breaker.open_until
        breaker.admit()
        breaker.fail(now)
    assert pauses == [min(FIRST_PAUSE_S * 2**i, LAST_PAUSE_S) for i in range(8)]


def test_failures_of_what_was_under_way_do_not_prolong_it():
    breaker = opened()
    for _ in range(100):
        breaker.fail(0.5)
    assert breaker.open_until == FIRST_PAUSE_S


@given(st.lists(st.tuples(st.sampled_from(["fail", "succeed", "admit", "release"]), st.floats(0, 20))))
def test_it_is_never_open_for_good(events):
    breaker, now = Breaker(), 0.0
    for event, later in events:
        now += later
        match event:
            case "fail":
                breaker.fail(now)
            case "succeed":
                breaker.succeed()
            case "admit":
                breaker.admit()
            case "release":
                breaker.release()
    breaker.release()
    assert breaker.allows(now + LAST_PAUSE_S)
