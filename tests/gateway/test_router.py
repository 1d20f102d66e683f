"""Routing decisions on plain state."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton_gateway.routing.breaker import FAILURES
from baton_gateway.routing.cost import CostModel
from baton_gateway.routing.demand import Demand
from baton_gateway.routing.kv_aware import KvAware
from baton_gateway.routing.pods import InFlight, Pod
from baton_gateway.routing.policies import LeastLoaded, Policy, Random, RoundRobin
from baton_gateway.routing.prefix_index import PrefixIndex
from baton_gateway.routing.router import Router

POLICIES = {
    "kv_aware": lambda: KvAware(PrefixIndex()),
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
    "random": lambda: Random(0),
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pod(address: str, requests: int = 0, tokens: int = 0, **state) -> Pod:
    return Pod(
        address,
        requests=InFlight(reported=requests),
        prefill_tokens=InFlight(reported=tokens),
        **{"reporting": True, "revision": "r1", "max_model_len": 1000, **state},
    )


def router(decodes: list[Pod], prefills: list[Pod] = (), policy: Policy | None = None, clock: Clock | None = None):
    return Router(decodes, prefills, policy or LeastLoaded(), clock or Clock())


def dispatched(to: Router, tokens: int = 10, **options) -> str:
    return to.dispatch(Demand(tokens), **options).decode.address


@pytest.fixture(params=POLICIES)
def policy(request) -> Policy:
    return POLICIES[request.param]()


def test_least_loaded_decode_pod():
    busy, idle = pod("busy", requests=5), pod("idle", requests=1)
    assert dispatched(router([busy, idle])) == "idle"


@pytest.mark.parametrize("name", ["kv_aware", "least_loaded", "round_robin"])
def test_a_burst_is_spread_before_any_report(name):
    decodes, prefills = [pod(name) for name in "abc"], [pod(name) for name in "pqr"]
    to = router(decodes, prefills, POLICIES[name]())
    for _ in range(30):
        to.dispatch(Demand(10))
    assert [decode.requests.charged for decode in decodes] == [10, 10, 10]
    assert [prefill.prefill_tokens.charged for prefill in prefills] == [100, 100, 100]


def test_reports_correct_the_charge_and_new_charges_count_at_once():
    seen, unseen = pod("seen"), pod("unseen")
    seen.requests.report(3)  # another gateway's requests
    to = router([seen, unseen])
    assert [dispatched(to) for _ in range(4)] == ["unseen"] * 3 + ["seen"]
    seen.requests.report(1)  # of ours only, the others are done
    assert dispatched(to) == "seen"


@pytest.mark.parametrize("name", ["kv_aware", "least_loaded"])
def test_fewest_queued_tokens_of_the_same_revision(name):
    long, short = pod("long", tokens=5000), pod("short", tokens=100)
    other = pod("other", revision="r2")
    route = router([pod("d")], [long, short, other], POLICIES[name]()).dispatch(Demand(10))
    assert route.prefills == [short, long]
    to = router([pod("d", revision="r3")], [long, short, other], POLICIES[name]())
    assert to.dispatch(Demand(10)).prefills == []


@pytest.mark.parametrize("state", [{"reporting": False}, {"connected": False}, {"draining": True}])
def test_only_live_pods_are_chosen(policy, state):
    down, up = pod("down", **state), pod("up", requests=1000)
    route = router([down, up], [pod("p", **state)], policy).dispatch(Demand(10))
    assert (route.decode, route.prefills) == (up, [])


def test_pods_to_avoid_are_chosen_when_there_is_no_other(policy):
    idle, busy = pod("idle"), pod("busy", requests=1000)
    to = router([idle, busy], policy=policy)
    assert dispatched(to, avoid=["idle"]) == "busy"
    assert dispatched(to, avoid=["idle", "busy"]) in ("idle", "busy")


def test_a_begun_request_stays_with_its_weights(policy):
    old, new = pod("old", fingerprint="a", requests=1000), pod("new", fingerprint="b")
    to = router([old, new], policy=policy)
    assert dispatched(to, fingerprint="a") == "old"
    assert to.dispatch(Demand(10), fingerprint="c") is None


def test_ready_needs_a_pair_of_one_revision():
    decode, prefill = pod("d"), pod("p", revision="r2")
    to = router([decode], [prefill])
    assert not to.ready
    prefill.revision = "r1"
    assert to.ready
    prefill.reporting = False
    assert not to.ready
    assert router([decode]).ready
    assert not router([]).ready


PODS = st.builds(
    pod,
    st.just("pod"),
    requests=st.integers(0, 50),
    tokens=st.integers(0, 10_000),
    reporting=st.booleans(),
    draining=st.booleans(),
    revision=st.sampled_from(["r1", "r2"]),
    fingerprint=st.sampled_from(["a", "b"]),
    max_model_len=st.sampled_from([100, 1000]),
    block_size=st.sampled_from([0, 4, 16]),
    prefill_rate=st.sampled_from([0.0, 1e3, 1e5]),
    num_blocks=st.integers(0, 100),
    blocks_held=st.integers(0, 100),
)


@given(
    st.lists(PODS, max_size=5),
    st.lists(PODS, max_size=5),
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 1000),
    st.sampled_from([None, "a"]),
    st.sampled_from(["", "session"]),
    st.data(),
)
def test_a_route_is_one_that_can_serve(decodes, prefills, name, most_tokens, fingerprint, session, data):
    for number, each in enumerate((*decodes, *prefills)):
        each.address = f"pod-{number}"
    clock = Clock()
    to = router(decodes, prefills, POLICIES[name](), clock)
    for each in prefills:
        for _ in range(data.draw(st.sampled_from([0, FAILURES]))):
            each.breaker.fail(clock())
    able = [
        each
        for each in decodes
        if each.live and each.max_model_len >= most_tokens and fingerprint in (None, each.fingerprint)
    ]
    demand = Demand(data.draw(st.integers(1, most_tokens)), most_tokens, session=session)
    route = to.dispatch(demand, fingerprint=fingerprint)
    assert (route is None) == (not able)
    if route is None:
        return
    assert any(route.decode is each for each in able)
    assert len({each.address for each in route.prefills}) == len(route.prefills) <= 3
    for each in route.prefills:
        assert each.live
        assert each.revision == route.decode.revision
        assert each.max_model_len >= most_tokens
        assert each.breaker.allows(clock())
    route.done()
    assert all(each.requests.charged == each.prefill_tokens.charged == 0 for each in (*decodes, *prefills))


EVENTS = st.sampled_from(["prefilled", "handed over", "p failed", "q failed", "decode failed", "done"])


# The last request is the trial of a breaker whose pause is not over, and fails.
@example("kv_aware", [(1, []), (1, ["q failed"]), (1, ["q failed"]), (1, ["q failed"]), (1, ["p failed", "q failed"])])
@given(st.sampled_from(sorted(POLICIES)), st.lists(st.tuples(st.integers(1, 1000), st.lists(EVENTS, max_size=6))))
def test_every_charge_is_given_back_once(name, requests):
    decodes, prefills = [pod("a"), pod("b")], [pod("p"), pod("q")]
    clock = Clock()
    to = router(decodes, prefills, POLICIES[name](), clock)
    routes = [(to.dispatch(Demand(tokens)), list(events)) for tokens, events in requests]
    while routes:
        for route, events in routes:
            clock.now += 0.3
            match events.pop(0) if events else "done":
                case "prefilled":
                    route.prefilled()
                case "handed over":
                    route.prefilled(disaggregated=True)
                case "decode failed":
                    route.decode_failed()
                case "done":
                    route.done()
                    events.clear()
                case failure:
                    route.handover_failed(failure[0])
            assert all(each.prefill_tokens.charged >= 0 for each in decodes + prefills)
        for route, events in routes:
            if not events:
                route.done()
        routes = [(route, events) for route, events in routes if events]
    assert [each.requests.charged for each in decodes + prefills] == [0, 0, 0, 0]
    assert [each.prefill_tokens.charged for each in decodes + prefills] == [0, 0, 0, 0]
    assert not any(each.breaker.trying for each in decodes + prefills)


def test_the_charge_moves_to_the_pod_that_has_the_order():
    decode, first, second = pod("d"), pod("first"), pod("second", tokens=1)
    route = router([decode], [first, second]).dispatch(Demand(10))
    tokens = [each.prefill_tokens for each in (first, second, decode)]
    assert [each.charged for each in tokens] == [10, 0, 0]
    route.handover_failed("first")
    assert [each.charged for each in tokens] == [0, 10, 0]
    route.handover_failed("second")
    assert [each.charged for each in tokens] == [0, 0, 10]
    route.prefilled()
    assert [each.charged for each in tokens] == [0, 0, 0]


def test_a_prefill_pod_that_fails_is_left_out_and_then_tried_by_one_request(policy):
    bad, good = pod("bad"), pod("good", tokens=100)
    clock = Clock()
    to = router([pod("d")], [bad, good], policy, clock)
    for _ in range(FAILURES):
        assert bad in to.dispatch(Demand(10)).prefills
        bad.breaker.fail(clock())
    assert to.dispatch(Demand(10)).prefills == [good]
    clock.now += 1.5
    good.prefill_tokens.report(10_000)
    routes = [to.dispatch(Demand(10)) for _ in range(20)]
    trying = [route for route in routes if route.prefilling is bad]
    assert len(trying) == 1
    trying[0].prefilled(disaggregated=True)
    assert not bad.breaker.failures


def test_a_request_that_has_tried_does_not_let_another_try(policy):
    clock = Clock()
    decode = pod("d")
    to = router([decode], policy=policy, clock=clock)
    long = None
    for _ in range(2):
        for _ in range(FAILURES):
            decode.breaker.fail(clock())
        clock.now += 60
        if long is None:
            long = to.dispatch(Demand(10))
            long.prefilled()
        else:
            to.dispatch(Demand(10))
    long.done()
    assert not decode.breaker.allows(clock())


def test_a_decode_pod_that_fails_is_left_out_unless_it_is_the_only_one(policy):
    bad, good = pod("bad"), pod("good", requests=100)
    to = router([bad, good], policy=policy)
    for _ in range(FAILURES):
        bad.breaker.fail(100.0)
    assert {dispatched(to) for _ in range(10)} == {"good"}
    good.draining = True
    assert dispatched(to) == "bad"


@pytest.mark.parametrize("rate", [150.0, 0.5])
def test_a_pod_that_was_slow_is_tried_again(rate):
    """Its rate was learned while something else held it up, or stopped it for a long time."""
    clock = Clock()
    slow, fast = pod("slow"), pod("fast")
    to = router([pod("d", requests=100)], [slow, fast], KvAware(PrefixIndex()), clock)
    slow.learned_rate, fast.learned_rate = rate, 9000.0
    chosen = []
    while "slow" not in chosen:
        route = to.dispatch(Demand(200))
        chosen.append(route.prefilling.address)
        clock.now += 200 / 9000
        route.prefilled(disaggregated=True)
        route.done()
        assert len(chosen) < 200
    assert len(chosen) > 100
    assert slow.learned_rate == pytest.approx(9000, rel=0.1)


def test_a_rate_is_learned_where_none_is_measured():
    clock = Clock()
    prefill = pod("p")
    route = router([pod("d")], [prefill], clock=clock).dispatch(Demand(1000))
    clock.now += 0.5
    route.prefilled(disaggregated=True)
    assert prefill.learned_rate == 2000
    assert CostModel().prefill(prefill, 1000) == 0.5
