"""Long contexts in predictions: what pods report of them, pods of older versions, and nonsense."""

import math
from typing import Any

import pytest

from baton_gateway.fleet.watcher import Watcher
from baton_gateway.routing.demand import Demand
from baton_gateway.routing.pods import InFlight, Pod
from baton_gateway.routing.policies import PodChoice
from baton_gateway.routing.prefix_index import PrefixIndex
from baton_gateway.routing.router import Route
from baton_proto import serving_pb2 as pb

from .test_kv_aware import COSTS, Fleet


def reported(**load: Any) -> Pod:
    """Return a pod that has sent a report."""
    pod = Pod("pod")

    async def no_channel() -> Any:
        raise NotImplementedError

    watcher = Watcher(pod, pb.ROLE_PREFILL, no_channel, PrefixIndex(), 1.0, lambda _: None)
    watcher._apply_report(pb.WorkerReport(load=pb.WorkerLoad(prefill_rate=1_000.0, queued_prefill_tokens=500, **load)))
    return pod


def test_a_prompt_takes_longer_the_more_tokens_are_before_it() -> None:
    pod = reported(prefill_times=pb.PrefillTimes(token_s=0.001, pair_s=1e-7), queued_prefill_work=620.4)
    assert pod.prompt_work(1_000) == 1_000 * (1 + 1e-4 * 500)
    assert pod.prompt_work(1_000, cached=100_000) == 1_000 * (1 + 1e-4 * 100_500)
    # Chunks of a prompt have its work together.
    assert pod.prompt_work(5_000) + pod.prompt_work(5_000, 5_000) == pod.prompt_work(10_000)
    assert pod.prefill_tokens.reported == 620
    assert COSTS.prefill(pod, 2_000, cached=10_000) == pytest.approx((620 + 2_000 * 2.1) / 1_000)


def test_a_pod_of_an_older_version_is_predicted_by_tokens() -> None:
    pod = reported()
    assert pod.prompt_work(1_000, cached=100_000) == 1_000
    assert pod.prefill_tokens.reported == 500
    assert COSTS.prefill(pod, 2_000, cached=10_000) == pytest.approx(2.5)


@pytest.mark.parametrize(
    "times",
    [
        {"token_s": math.nan},
        {"token_s": math.inf, "pair_s": 1e-9},
        {"token_s": -1.0},
        {"token_s": 5e-324},
        {"token_s": 0.001, "pair_s": math.nan},
        {"token_s": 0.001, "pair_s": -1.0},
        {"token_s": 0.001, "pair_s": 1e300},
    ],
)
def test_times_that_cannot_be_are_ignored(times: dict[str, float]) -> None:
    pod = reported(prefill_times=pb.PrefillTimes(**times))
    assert (pod.prefill_rate, pod.context_cost) == (1_000.0, 0.0)


@pytest.mark.parametrize("work", [math.nan, math.inf, -5.0, 1e300])
def test_work_that_cannot_be_is_ignored(work: float) -> None:
    assert reported(queued_prefill_work=work).prefill_tokens.reported == 500


def test_what_is_charged_for_a_prompt_is_released() -> None:
    """Also when the pod's report changes in between."""
    pod, decode = reported(prefill_times=pb.PrefillTimes(token_s=0.001, pair_s=1e-7)), Pod("decode")
    pod.prefill_tokens = InFlight()
    demand = Demand(10_000, keys=lambda size: range(0))
    route = Route(PodChoice(decode, [pod], "least_ttft", 4_000, 1.0), demand, lambda: 0.0)
    assert pod.prefill_tokens.charged == pod.prompt_work(6_000, 4_000) > 6_000
    pod.context_cost = 0.5
    route.prefilled(disaggregated=True)
    assert pod.prefill_tokens.charged == 0


def test_half_a_long_prompt_in_the_cache_is_less_than_half_of_the_work() -> None:
    fleet = Fleet(local_prefill=False, stay_margin=0.0)
    fleet.decode()
    pods = {"context_cost": 1e-3}
    # The 500 missing tokens are 875 of work after the 500 cached ones, and the whole prompt is 1,500.
    busy = fleet.prefill(cached=50, tokens=650, **pods)
    idle = fleet.prefill(**pods)
    assert fleet.choose(1_000).prefills[0] is idle
    busy.prefill_tokens.report(550)
    assert fleet.choose(1_000).prefills[0] is busy
    idle.context_cost = busy.context_cost = 0.0
    assert fleet.choose(1_000).prefills[0] is idle
