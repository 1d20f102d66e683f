"""The sizes that the policy decides for sequences of load samples."""

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_controller.config_file import RoleSpec, ScalerSpec
from baton_controller.counters import Counters
from baton_controller.load import Load, load_of
from baton_controller.report import PodReport, Report
from baton_controller.scaling import Scaling, Sizes

INTERVAL_S = 15
SPEC = ScalerSpec(
    prefill=RoleSpec(deployment="p", min=1, max=8),
    decode=RoleSpec(deployment="d", min=1, max=8),
    ttft_slo_seconds=2.0,
    tpot_slo_seconds=0.05,
)
BOUNDS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, float("inf"))


def served(count: int = 100, ttft: float = 0.3, tpot: float = 0.02) -> Counters:
    """Return counters of `count` identical requests."""
    times = [{str(bound): float(count if value <= bound else 0) for bound in BOUNDS} for value in (ttft, tpot)]
    return Counters(float(count), 0.0, *times)


class Fleet:
    """Runs the policy repeatedly. New pods are live at once, unless `start` is False."""

    def __init__(self, prefill: int, decode: int) -> None:
        self.time = 0.0
        self.sizes = (prefill, decode)
        self.live = (prefill, decode)
        self.start = True
        self.why = ("", "")
        self._policy = Scaling()

    def observe(
        self,
        queue_s: Callable[[int], Sequence[float]] = lambda pods: [0.0] * pods,
        kv_use: float = 0.5,
        decoding: int = 10,
        waiting: float = 0,
        times: int = 1,
        hold: bool = False,
        counters: Counters | None = None,
    ) -> list[tuple[int, int]]:
        """Return the sizes after each of `times` equal samples."""
        seen = []
        for _ in range(times):
            prefill, decode = self.live
            queue = queue_s(prefill)
            load = Load(self.time, queue, [kv_use] * decode, [decoding] * decode, waiting, counters or served())
            sizes: Sizes = self._policy.decide(load, *self.sizes, SPEC, hold)
            self.sizes = (sizes.prefill.replicas, sizes.decode.replicas)
            self.why = (sizes.prefill.why, sizes.decode.why)
            if self.start:
                self.live = self.sizes
            self.time += INTERVAL_S
            seen.append(self.sizes)
        return seen


def all_at(seconds: float) -> Callable[[int], Sequence[float]]:
    return lambda pods: [seconds] * pods


def busy(pods_busy: int) -> Callable[[int], Sequence[float]]:
    """Return the queues when `pods_busy` pods compute a short prompt."""
    return lambda pods: [0.1] * min(pods_busy, pods) + [0.0] * max(pods - pods_busy, 0)


def test_a_load_that_fits_changes_nothing() -> None:
    assert set(Fleet(3, 3).observe(busy(2), kv_use=0.6, times=100)) == {(3, 3)}


def test_a_queue_gets_more_prefill_pods_within_two_looks() -> None:
    fleet = Fleet(2, 3)
    assert fleet.observe(all_at(3.0), times=2)[-1][0] == 4
    assert "p90 of the wait 3.00 s (limit 1.00)" in fleet.why[0]


def test_pods_that_start_are_not_asked_for_again() -> None:
    fleet = Fleet(2, 3)
    fleet.start = False
    assert {prefill for prefill, _ in fleet.observe(all_at(3.0), times=20)[1:]} == {4}


def test_a_backlog_that_is_nearly_gone_needs_no_more_pods() -> None:
    fleet = Fleet(4, 3)
    queues = iter([6.0, 4.5, 3.0, 1.5, 0.0])
    fleet.observe(all_at(0))
    fleet.live = (5, 3)  # a changed number of pods makes the policy ignore the earlier samples
    fleet.sizes = (5, 3)
    for _ in range(5):
        left = next(queues)
        fleet.observe(all_at(left))
    assert fleet.sizes[0] == 5


def test_requests_waiting_in_gateways_are_prefill_that_lacks() -> None:
    # 100 requests are served per interval, so 40 waiting requests wait six seconds.
    assert Fleet(2, 3).observe(busy(2), waiting=40, times=2)[-1][0] == 4


def test_but_not_when_decode_has_no_room_for_them() -> None:
    assert Fleet(4, 2).observe(busy(1), waiting=40, kv_use=0.98, times=2)[-1] == (4, 3)


def test_long_prompts_alone_are_no_reason() -> None:
    fleet = Fleet(2, 3)
    assert set(fleet.observe(busy(1), counters=served(ttft=7.0), times=10)) == {(2, 3)}


@pytest.mark.parametrize(("kv_use", "tpot"), [(0.95, 0.02), (0.5, 0.08)])
def test_decode_grows_with_kv_use_and_tpot(kv_use: float, tpot: float) -> None:
    fleet = Fleet(2, 2)
    [_, (prefill, decode)] = fleet.observe(busy(1), kv_use=kv_use, counters=served(tpot=tpot), times=2)
    assert (prefill, decode > 2) == (2, True)


def test_a_slow_model_that_decodes_one_request_a_pod_needs_no_more() -> None:
    assert set(Fleet(2, 2).observe(busy(1), decoding=1, counters=served(tpot=0.08), times=10)) == {(2, 2)}


def test_decode_grows_with_a_prefill_that_held_it_back() -> None:
    assert Fleet(2, 2).observe(all_at(3.0), kv_use=0.6, times=2)[-1] == (4, 4)


def test_down_goes_one_at_a_time_after_the_stabilisation_window() -> None:
    fleet = Fleet(4, 4)
    seen = fleet.observe(kv_use=0.05, decoding=1, times=60)
    changes = [i for i, (before, after) in enumerate(zip([(4, 4), *seen], seen, strict=False)) if before != after]
    assert seen[changes[0]] == (3, 3)
    assert changes[0] * INTERVAL_S >= 300
    assert all((later - earlier) * INTERVAL_S >= 30 for earlier, later in itertools.pairwise(changes))
    assert seen[-1] == (1, 1)
    assert len(changes) == 3


def test_a_load_between_two_sizes_moves_ever_less_often() -> None:
    """Four pods seem too many, but three are too few."""
    fleet = Fleet(4, 4)
    hours = []
    for _ in range(8):
        seen = [fleet.observe(busy(1) if fleet.live[0] > 3 else all_at(1.5), times=1)[0] for _ in range(240)]
        hours.append(sum(before != after for before, after in itertools.pairwise(seen)))
    assert hours[0] >= 3
    assert 2 * sum(hours[4:]) <= sum(hours[:4])


def test_a_burst_within_the_window_keeps_the_pods() -> None:
    fleet = Fleet(4, 4)
    for _ in range(10):
        assert set(fleet.observe(busy(4), kv_use=0.8, times=8)) == {(4, 4)}
        assert set(fleet.observe(kv_use=0.05, decoding=0, times=8)) == {(4, 4)}


def test_nothing_is_taken_away_while_a_canary_may_be_rolled_back() -> None:
    assert set(Fleet(4, 4).observe(kv_use=0.05, times=60, hold=True)) == {(4, 4)}


def test_nothing_is_taken_away_while_pods_are_down() -> None:
    fleet = Fleet(4, 4)
    fleet.start, fleet.live = False, (3, 3)
    assert set(fleet.observe(kv_use=0.05, times=60)) == {(4, 4)}


def test_without_live_pods_there_is_nothing_to_decide() -> None:
    fleet = Fleet(3, 3)
    fleet.start, fleet.live = False, (0, 0)
    assert set(fleet.observe(waiting=1000, times=60)) == {(3, 3)}


shares = st.floats(0, 1.2)
samples = st.tuples(
    st.lists(st.floats(0, 100), max_size=10), st.lists(shares, max_size=10), st.integers(0, 200), st.floats(0, 500)
)


@given(st.lists(samples, max_size=60), st.integers(1, 10), st.integers(1, 10), st.booleans())
def test_sizes_stay_within_their_bounds_whatever_is_seen(
    course: list[tuple[list[float], list[float], int, float]], prefill: int, decode: int, hold: bool
) -> None:
    policy = Scaling()
    for number, (queue_s, kv_use, decoding, waiting) in enumerate(course):
        counters = served(decoding, ttft=waiting / 10, tpot=sum(kv_use) / 10)
        load = Load(number * INTERVAL_S, queue_s, kv_use, [decoding] * len(kv_use), waiting, counters)
        sizes = policy.decide(load, prefill, decode, SPEC, hold)
        for before, size in ((prefill, sizes.prefill), (decode, sizes.decode)):
            assert 1 <= size.replicas <= 8
            assert size.replicas >= min(before, 8) - 1
            assert (size.replicas != before) == bool(size.why)
        prefill, decode = sizes.prefill.replicas, sizes.decode.replicas


def test_what_gateways_say_of_a_pod_is_put_together() -> None:
    def pod(address: str, role: str = "decode", **known: object) -> PodReport:
        return PodReport(model="m", role=role, address=address, live=True, blocks=100, **known)  # type: ignore[arg-type]

    one = [
        pod("a", requests=3, blocks_held=50),
        pod("b", draining=True),
        pod("p", "prefill", queued_prefill_tokens=100, prefill_tokens_per_s=1000.0),
        pod("c", revision="canary"),
        PodReport(model="m", role="prefill", address="lost"),
        PodReport(model="other", role="decode", address="x", live=True),
    ]
    two = [
        pod("a", requests=5, blocks_held=40),
        pod("b"),
        pod("p", "prefill", queued_prefill_tokens=300, prefill_tokens_per_s=1000.0),
    ]
    load = load_of("m", "", {"1": Report({}, {"m": 2.0}, one), "2": Report({}, {"m": 1.0}, two)}, Counters(), 7.0)
    assert (load.queue_s, load.kv_use, load.decoding, load.waiting) == ([0.3], [0.5], [5], 3.0)
