"""What becomes of a canary, for any course of its requests."""

import itertools
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_controller.analysis import CanaryState, Decision, look, set_by_hand
from baton_controller.config_file import CanarySpec
from baton_controller.counters import Counters, Reading, quantile

SPEC = CanarySpec(revision="canary", steps=(5, 25, 50, 100), interval_seconds=60, min_requests=50)
BOUNDS = (0.01, 0.1, 0.5, 1.0, 5.0, float("inf"))


@dataclass
class Gateway:
    """Counts requests as a gateway does; a restart forgets all."""

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
    """What comes between two looks: of each revision, to one of the gateways; and which of them restarts first."""

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


def replay(course: list[Window], reloaded: bool = False, tells: bool = True) -> list[Decision]:
    """Return the decision at the start, then after each window. reloaded: the state is saved and loaded between."""
    gateways = [Gateway() for _ in range(3)]
    now = 1000.0
    state: CanaryState | None = None
    decisions = []
    for window in [None, *course]:
        if window is not None:
            now += window.seconds
            if window.restarts is not None:
                gateways[window.restarts].restart(tells)
            errors = min(window.errors, window.canary)
            gateway = gateways[window.gateway]
            gateway.serve("canary", window.canary - errors, errors, 2.0 if window.slow else 0.3)
            gateway.serve("stable", window.stable, 0, 0.3)
        decision = look(state, SPEC, now, {str(i): gateway.reading() for i, gateway in enumerate(gateways)})
        state = decision.state
        if reloaded:
            state = msgspec.json.decode(msgspec.json.encode(state), type=CanaryState)
        decisions.append(decision)
    return decisions


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
    assert "TTFT p95" in decisions[1].why
    assert set(weights(decisions[1:])) == {0}


@given(windows(stable=many, canary=many, errors=st.integers(5, 60), slow=st.just(False), seconds=st.just(60)))
def test_a_failing_one_is_never_promoted_whatever_restarts(course: list[Window]) -> None:
    decisions = replay(course)
    assert max(weights(decisions)) == 5
    assert decisions[min(2, len(course))].state.rolled_back or len(course) == 1


@given(windows(canary=st.integers(0, 3), slow=st.booleans()))
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


@settings(max_examples=300)
@given(windows(), st.booleans())
def test_a_restart_of_the_controller_changes_nothing(course: list[Window], tells: bool) -> None:
    assert replay(course, reloaded=True, tells=tells) == replay(course, tells=tells)


@settings(max_examples=300)
@given(windows(slow=st.just(False), restarts=st.none(), gateway=st.just(0)))
def test_each_verdict_follows_from_the_requests_since_the_last(course: list[Window]) -> None:
    decisions = replay(course)
    stable = canary = errors = seconds = 0
    for window, before, decision in zip(course, decisions[:-1], decisions[1:], strict=True):
        stable, canary, seconds = stable + window.stable, canary + window.canary, seconds + window.seconds
        errors += min(window.errors, window.canary)
        judged = seconds >= SPEC.interval_seconds and min(stable, canary) >= SPEC.min_requests
        if before.state.rolled_back or not judged:
            assert decision.state.weight == before.state.weight
        elif errors / canary > SPEC.max_error_rate_increase:
            assert decision.reason == "CanaryRolledBack"
        else:
            assert decision.state.weight > before.state.weight or before.state.weight == 100
        if judged:
            stable = canary = errors = seconds = 0


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
    begun = look(None, SPEC, 0, {}).state
    late = Gateway()
    late.serve("canary", 0, 1000, 0.3)  # of whatever canary there was before
    late.serve("stable", 1000, 0, 0.3)
    seen = look(begun, SPEC, 30, {"late": late.reading()}).state
    late.serve("canary", 100, 0, 0.3)
    late.serve("stable", 100, 0, 0.3)
    decision = look(seen, SPEC, 60, {"late": late.reading()})
    assert (decision.reason, decision.state.weight) == ("CanaryAdvanced", 25)
    assert "100 requests, 0.00% failed" in decision.why


def test_rolled_back_until_the_canary_is_another() -> None:
    state = replay([Window(0, 100, 100, 100, False, 60, None)])[-1].state
    for change in ({"steps": (10, 100)}, {"min_requests": 1}):
        assert look(state, msgspec.structs.replace(SPEC, **change), 9999, {}).state == state
    for change in ({"generation": 2}, {"revision": "canary-2"}):
        decision = look(state, msgspec.structs.replace(SPEC, **change), 9999, {})
        assert (decision.reason, decision.state.weight, decision.state.rolled_back) == ("CanaryAdvanced", 5, False)


def test_a_weight_set_by_hand_is_kept() -> None:
    state = replay([])[0].state
    stopped = set_by_hand(state, SPEC, 0, 2000, {})
    assert (stopped.weight, stopped.rolled_back) == (0, True)
    moved = set_by_hand(state, SPEC, 30, 2000, {})
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
