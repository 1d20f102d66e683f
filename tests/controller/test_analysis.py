"""The decisions about a canary, for any sequence of request counts."""

import dataclasses
import itertools
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_controller import evidence
from baton_controller.analysis import CanaryState, Decision, decide, set_by_hand
from baton_controller.config_file import CanarySpec
from baton_controller.counters import NOTHING, Counters, Reading, Readings, arrived, quantile

SPEC = CanarySpec(revision="canary", steps=(5, 25, 50, 100), interval_seconds=60, min_requests=50)
BOUNDS = (0.01, 0.1, 0.5, 1.0, 5.0, float("inf"))


@dataclass
class Gateway:
    """Counts requests as a gateway does. A restart resets the counters."""

    started: float = 1.0
    requests: dict[str, list[tuple[bool, float]]] = field(default_factory=dict)

    def serve(self, revision: str, ok: int, error: int, seconds: float) -> None:
        self.requests.setdefault(revision, []).extend([(True, seconds)] * ok + [(False, seconds)] * error)

    def restart(self, tells: bool) -> None:
        self.started += tells
        self.requests = {}

    def reading(self) -> Reading:
        return Reading(self.started, {name: counters(requests) for name, requests in self.requests.items()})


def counters(requests: list[tuple[bool, float]]) -> Counters:
    times = [seconds for ok, seconds in requests if ok]
    buckets = {str(bound): float(sum(time <= bound for time in times)) for bound in BOUNDS}
    ok = len(times)
    return Counters(float(ok), float(len(requests) - ok), buckets, buckets)


@dataclass(frozen=True)
class Window:
    """The requests of each revision at one gateway between two readings. restarts: the gateway that restarts first."""

    gateway: int
    stable: int
    canary: int
    errors: int  # of the canary's requests
    slow: bool  # the canary's requests
    seconds: int
    restarts: int | None


def windows(**fixed: st.SearchStrategy) -> st.SearchStrategy[list[Window]]:
    parts = {
        "gateway": st.integers(0, 2),
        "stable": st.integers(0, 200),
        "canary": st.integers(0, 200),
        "errors": st.integers(0, 200),
        "slow": st.booleans(),
        "seconds": st.sampled_from([15, 30, 60, 90]),
        "restarts": st.none() | st.integers(0, 2),
    }
    return st.lists(st.builds(Window, **{**parts, **fixed}), min_size=1, max_size=15)


def replay(
    course: list[Window], reloaded: bool = False, tells: bool = True, forgets_at: int | None = None
) -> list[Decision]:
    """Return the decision at the start, then after each window.

    reloaded: the state is saved and loaded between. forgets_at: the window during which the controller restarts, so
    that it has no earlier reading to compare with.
    """
    gateways = [Gateway() for _ in range(3)]
    now = 1000.0
    state: CanaryState | None = None
    before: Readings = {}
    decisions = []
    for number, window in enumerate([None, *course]):
        if window is not None:
            now += window.seconds
            if window.restarts is not None:
                gateways[window.restarts].restart(tells)
            errors = min(window.errors, window.canary)
            gateway = gateways[window.gateway]
            gateway.serve("canary", window.canary - errors, errors, 2.0 if window.slow else 0.3)
            gateway.serve("stable", window.stable, 0, 0.3)
        readings = {str(i): gateway.reading() for i, gateway in enumerate(gateways)}
        if number == forgets_at:
            before = {}
        came = (arrived(before, readings, name) for name in ("canary", "stable"))
        decision = decide(state, SPEC, now, *came)
        state, before = decision.state, readings
        if reloaded:
            state = msgspec.json.decode(msgspec.json.encode(state), type=CanaryState)
        decisions.append(decision)
    return decisions


def served(ok: int, error: int = 0, seconds: float = 0.3) -> Counters:
    return counters([(True, seconds)] * ok + [(False, seconds)] * error)


def weights(decisions: list[Decision]) -> list[int]:
    return [decision.state.weight for decision in decisions]


many = st.integers(60, 200)


@given(
    windows(stable=many, canary=many, errors=st.just(0), slow=st.just(True), seconds=st.just(60), restarts=st.none())
)
def test_a_slow_one_is_rolled_back_within_two_intervals(course: list[Window]) -> None:
    decisions = replay(course)
    assert weights(decisions[:2]) in ([5], [5, 0])
    assert [decision.reason for decision in decisions[1:]] == ["CanaryRolledBack"] + [None] * (len(course) - 1)
    assert "TTFT p95 is" in decisions[1].why
    assert "identical revisions differ so much in fewer than 1 of 1,000,000 comparisons" in decisions[1].why
    assert set(weights(decisions[1:])) == {0}


@given(windows(stable=many, canary=many, errors=st.integers(5, 60), slow=st.just(False), seconds=st.just(60)))
def test_a_failing_one_never_advances_whatever_restarts(course: list[Window]) -> None:
    assert max(weights(replay(course))) == 5


@given(windows(stable=many, canary=many, errors=st.integers(45, 60), slow=st.just(False), seconds=st.just(60)))
def test_one_that_fails_often_is_rolled_back_within_two_intervals(course: list[Window]) -> None:
    assert replay(course)[min(2, len(course))].state.rolled_back or len(course) == 1


@given(windows(canary=st.integers(0, 3), errors=st.just(0), slow=st.booleans()))
def test_with_too_few_requests_it_waits(course: list[Window]) -> None:
    decisions = replay(course)
    assert set(weights(decisions)) == {5}
    assert [decision.reason for decision in decisions].count("CanaryWaiting") <= 1


@settings(max_examples=300)
@given(windows())
def test_weights_move_along_the_steps_or_to_nothing(course: list[Window]) -> None:
    decisions = replay(course)
    path = weights(decisions)
    ladder = [0, *SPEC.steps]
    for before, after in itertools.pairwise(path):
        assert after in (before, 0) or ladder.index(after) == ladder.index(before) + 1
        assert before or not after
    for decision in decisions:
        assert (decision.reason is None) == (not decision.why)


def test_what_may_be_chance_is_compared_again_with_more_requests() -> None:
    """Two failures in fifty are beyond the limit but may be chance. Ten times as many of both cannot be chance."""
    decisions = replay([Window(0, 50, 50, 2, False, 60, None)] * 20)
    last = next(number for number, decision in enumerate(decisions) if decision.state.rolled_back)
    assert last > 2
    assert set(weights(decisions[:last])) == {5}
    assert {decision.reason for decision in decisions[1:last]} == {"CanaryWaiting"}
    assert "this may be chance: 4.00% of 50 requests failed, on stable 0.00% of 50" in decisions[1].why
    good = replay([Window(0, 50, 50, 2, False, 60, None), Window(0, 200, 200, 0, False, 60, None)])
    assert (good[-1].reason, good[-1].state.weight) == ("CanaryAdvanced", 25)


def test_one_that_fails_outright_is_stopped_before_the_interval_is_over() -> None:
    state = replay([])[0].state
    decision = decide(state, SPEC, state.since + 1, served(0, 10), NOTHING)
    assert (decision.reason, decision.state.weight) == ("CanaryRolledBack", 0)
    assert "canary fails outright: 10 requests, 100.00% failed" in decision.why


def test_an_outage_of_both_is_no_fault_of_the_canary() -> None:
    state = replay([])[0].state
    assert decide(state, SPEC, state.since + 1, served(0, 10), served(0, 190)).reason is None


def test_at_all_of_the_traffic_a_late_outright_failure_is_still_seen() -> None:
    state = replay([Window(0, 80, 80, 0, False, 60, None)] * 3)[-1].state
    assert state.weight == 100
    state = decide(state, SPEC, state.since + 60, served(10_000), NOTHING).state
    assert decide(state, SPEC, state.since + 1, served(0, 20), NOTHING).reason == "CanaryRolledBack"


def test_the_last_step_below_all_traffic_is_compared_with_ever_more_certainty() -> None:
    """Each comparison of an identical canary can raise a false alarm, so later ones need stronger evidence."""
    spec = msgspec.structs.replace(SPEC, steps=(50,))
    state = decide(None, spec, 0, NOTHING, NOTHING).state
    for number in range(1, 6):
        state = decide(state, spec, 60 * number, served(50), served(50)).state
        assert (state.weight, state.comparisons, state.undecided) == (50, number, 0)
    assert sum(evidence.level(1, number) for number in range(1, 10_000)) < evidence.FALSE_ALARM_RATE / 6
    assert decide(state, spec, 60 * 6, served(50, 0, 3.0), served(50)).reason == "CanaryRolledBack"


def test_a_state_of_an_earlier_version_keeps_its_weight_and_counts_anew() -> None:
    start = {"g": {"started": 1.0, "revisions": {"canary": {"ok": 7.0, "ttft": {"1.0": 7.0}}}}}
    old = {
        "revision": "canary",
        "generation": "0",
        "weight": 25,
        "step": 2,
        "since": 10.0,
        "verdict": "",
        "start": start,
    }
    state = msgspec.json.decode(msgspec.json.encode(old), type=CanaryState)
    assert decide(state, SPEC, 1000, served(49), served(49)).reason == "CanaryWaiting"
    assert decide(state, SPEC, 1000, served(50), served(50)).state.weight == 50


@settings(max_examples=300)
@given(windows(), st.booleans())
def test_a_saved_state_says_all_there_is_to_know(course: list[Window], tells: bool) -> None:
    assert replay(course, reloaded=True, tells=tells) == replay(course, tells=tells)


@given(windows(), st.data())
def test_a_restart_of_the_controller_leaves_out_what_came_meanwhile(course: list[Window], data: st.DataObject) -> None:
    at = data.draw(st.integers(1, len(course)))
    nothing = dataclasses.replace(course[at - 1], stable=0, canary=0)
    assert replay(course, forgets_at=at) == replay([*course[: at - 1], nothing, *course[at:]])


@settings(max_examples=300)
@given(windows(slow=st.just(False), restarts=st.none(), gateway=st.just(0)))
def test_each_verdict_follows_from_the_requests_since_the_last(course: list[Window]) -> None:
    decisions = replay(course)
    stable = canary = errors = seconds = 0
    due = 1
    for window, before, decision in zip(course, decisions[:-1], decisions[1:], strict=True):
        stable, canary, seconds = stable + window.stable, canary + window.canary, seconds + window.seconds
        errors += min(window.errors, window.canary)
        if decision.state.rolled_back:
            # In these sequences only errors differ, never latency.
            assert before.state.rolled_back or errors / canary > SPEC.max_error_rate_increase
            continue
        judged = seconds >= due * SPEC.interval_seconds and min(stable, canary) >= due * SPEC.min_requests
        if judged and errors / canary <= SPEC.max_error_rate_increase:
            assert decision.state.weight > before.state.weight or before.state.weight == 100
            stable = canary = errors = seconds = 0
            due = 1
        else:
            assert decision.state.weight == before.state.weight
            due += judged
            if before.state.weight == 100 and seconds >= SPEC.interval_seconds and not judged:
                stable = canary = errors = seconds = 0
                due = 1


def test_a_good_one_is_promoted_step_by_step() -> None:
    course = [Window(i % 3, 80, 80, 0, False, 60, None) for i in range(5)]
    decisions = replay(course)
    assert weights(decisions) == [5, 25, 50, 100, 100, 100]
    reasons = [decision.reason for decision in decisions]
    assert reasons == ["CanaryAdvanced", "CanaryAdvanced", "CanaryAdvanced", "CanaryPromoted", None, None]
    assert decisions[1].state.step == 2
    assert "80 requests, 0.00% failed" in decisions[1].why


def test_too_few_requests_are_said_once_and_add_up() -> None:
    decisions = replay([Window(0, 100, 20, 0, False, 60, None)] * 3)
    assert [decision.reason for decision in decisions[1:]] == ["CanaryWaiting", None, "CanaryAdvanced"]


def test_a_gateway_seen_first_in_the_interval_counts_from_then() -> None:
    late = Gateway()
    late.serve("canary", 0, 1000, 0.3)  # of whatever canary there was before
    first = {"late": late.reading()}
    assert arrived({}, first, "canary").requests == 0
    late.serve("canary", 100, 0, 0.3)
    second = {"late": late.reading()}
    assert (arrived(first, second, "canary").ok, arrived(first, second, "canary").error) == (100, 0)
    late.restart(tells=True)
    late.serve("canary", 7, 0, 0.3)
    assert arrived(second, {"late": late.reading()}, "canary").requests == 7


def test_rolled_back_until_the_canary_is_another() -> None:
    state = replay([Window(0, 100, 100, 100, False, 60, None)])[-1].state
    for change in ({"steps": (10, 100)}, {"min_requests": 1}):
        assert decide(state, msgspec.structs.replace(SPEC, **change), 9999, NOTHING, NOTHING).state == state
    for change in ({"generation": 2}, {"revision": "canary-2"}):
        decision = decide(state, msgspec.structs.replace(SPEC, **change), 9999, NOTHING, NOTHING)
        assert (decision.reason, decision.state.weight, decision.state.rolled_back) == ("CanaryAdvanced", 5, False)


def test_a_weight_set_by_hand_is_kept() -> None:
    state = replay([])[0].state
    stopped = set_by_hand(state, SPEC, 0, 2000)
    assert (stopped.weight, stopped.rolled_back) == (0, True)
    moved = set_by_hand(state, SPEC, 30, 2000)
    assert (moved.weight, moved.step, moved.since, moved.rolled_back) == (30, 2, 2000, False)


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ([0, 0, 0, 0], 0.95, None),
        ([10, 10, 10, 10], 0.5, 0.5),
        ([0, 10, 10, 10], 0.5, 1.5),
        ([0, 50, 100, 100], 0.95, 2 + 2 * 0.9),
        ([0, 0, 0, 10], 0.95, 4.0),
    ],
)
def test_quantiles_are_linear_within_a_bucket(counts: list[float], share: float, value: float | None) -> None:
    buckets = dict(zip(("1.0", "2.0", "4.0", "+Inf"), map(float, counts), strict=True))
    assert quantile(buckets, share) == (None if value is None else pytest.approx(value))
