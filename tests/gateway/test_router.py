"""Routing decisions on plain state."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_gateway.pods import Pod
from baton_gateway.router import Router


def pod(address: str, **state) -> Pod:
    return Pod(address, **{"reporting": True, "revision": "r1", **state})


def test_least_loaded_decode_pod():
    busy, idle = pod("busy", reported=5), pod("idle", reported=1)
    assert Router([busy, idle], []).dispatch(10).decode is idle


def test_a_burst_is_spread_before_any_report():
    decodes = [pod(name) for name in "abc"]
    router = Router(decodes, [])
    for _ in range(30):
        router.dispatch(10)
    assert [decode.charged for decode in decodes] == [10, 10, 10]


def test_reports_correct_the_charge_and_new_charges_count_at_once():
    seen, unseen = pod("seen"), pod("unseen")
    seen.report(3)  # another gateway's requests
    router = Router([seen, unseen], [])
    assert [router.dispatch(1).decode.address for _ in range(4)] == ["unseen"] * 3 + ["seen"]
    seen.report(1)  # of ours only, the others are done
    assert router.dispatch(1).decode is seen


def test_fewest_queued_tokens_of_the_same_revision():
    long, short = pod("long", reported=5000), pod("short", reported=100)
    other = pod("other", revision="r2")
    route = Router([pod("d")], [long, short, other]).dispatch(10)
    assert route.prefills == [short, long]
    assert Router([pod("d", revision="r3")], [long, short, other]).dispatch(10).prefills == []


@pytest.mark.parametrize("state", [{"reporting": False}, {"connected": False}, {"draining": True}])
def test_only_live_pods_are_chosen(state):
    down, up = pod("down", **state), pod("up", reported=1000)
    router = Router([down, up], [pod("p", **state)])
    route = router.dispatch(10)
    assert (route.decode, route.prefills) == (up, [])


def test_pods_to_avoid_are_chosen_when_there_is_no_other():
    idle, busy = pod("idle"), pod("busy", reported=1000)
    router = Router([idle, busy], [])
    assert router.dispatch(10, avoid=["idle"]).decode is busy
    assert router.dispatch(10, avoid=["idle", "busy"]).decode is idle


def test_a_begun_request_stays_with_its_weights():
    old, new = pod("old", fingerprint="a", reported=1000), pod("new", fingerprint="b")
    router = Router([old, new], [])
    assert router.dispatch(10).decode is new
    assert router.dispatch(10, fingerprint="a").decode is old
    assert router.dispatch(10, fingerprint="c") is None


def test_ready_needs_a_pair_of_one_revision():
    decode, prefill = pod("d"), pod("p", revision="r2")
    router = Router([decode], [prefill])
    assert not router.ready
    prefill.revision = "r1"
    assert router.ready
    prefill.reporting = False
    assert not router.ready
    assert Router([decode], []).ready
    assert not Router([], []).ready


@given(st.lists(st.tuples(st.integers(1, 1000), st.sampled_from(["prefilled", "done", "both", "twice"]))))
def test_every_charge_is_given_back_once(requests):
    decodes, prefills = [pod("a"), pod("b")], [pod("p"), pod("q")]
    router = Router(decodes, prefills)
    for tokens, ending in requests:
        route = router.dispatch(tokens)
        if ending != "done":
            route.prefilled()
        if ending == "twice":
            route.done()
        route.done()
    assert [p.charged for p in decodes + prefills] == [0, 0, 0, 0]
