"""Predicted costs and what follows from them, on plain state."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_gateway.routing.cost import CostModel
from baton_gateway.routing.demand import Demand
from baton_gateway.routing.kv_aware import TICK_S, KvAware
from baton_gateway.routing.pods import InFlight, Pod
from baton_gateway.routing.policies import Group, PodChoice
from baton_gateway.routing.prefix_index import PrefixIndex

BLOCK = 10
COSTS = CostModel(transfer_rate=1e6, handover_s=0.01, request_s=0.002, turnover_s=10, decode_delay=0.05)


class Fleet:
    """Pods of one revision with an index; each computes 1000 tokens a second and has 1000 blocks unless told."""

    def __init__(self, **options) -> None:
        self.index = PrefixIndex()
        self.decodes: list[Pod] = []
        self.prefills: list[Pod] = []
        self.policy = KvAware(self.index, COSTS, **options)

    def add(self, pods: list[Pod], cached: int, requests: int, tokens: int, **state) -> Pod:
        """cached: how many blocks of every prompt it has."""
        slot = len(self.decodes) + len(self.prefills)
        fields = {"block_size": BLOCK, "prefill_rate": 1000.0, "num_blocks": 1000, "token_bytes": 10, **state}
        load = {"requests": InFlight(reported=requests), "prefill_tokens": InFlight(reported=tokens)}
        pods.append(Pod(f"pod-{slot}", slot=slot, **load, **fields))
        self.index.gain(slot, range(cached))
        return pods[-1]

    def decode(self, cached: int = 0, requests: int = 0, tokens: int = 0, **state) -> Pod:
        return self.add(self.decodes, cached, requests, tokens, **state)

    def prefill(self, cached: int = 0, tokens: int = 0, **state) -> Pod:
        return self.add(self.prefills, cached, 0, tokens, **state)

    def choose(self, num_tokens: int, session: str = "") -> PodChoice:
        demand = Demand(num_tokens, keys=lambda size: range((num_tokens - 1) // size), session=session)
        return self.policy.choose(demand, [Group(self.decodes, self.prefills)])


def test_ttft_is_the_sum_of_its_parts():
    fleet = Fleet(local_prefill=False)
    fleet.decode(cached=5, requests=10)
    fleet.prefill(cached=2, tokens=300)
    choice = fleet.choose(100)
    # (300 + 80) / 1000, 50 tokens of 10 bytes at 1 MB/s, the hand-over itself and ten requests.
    assert choice.price == pytest.approx(0.38 + 0.0005 + 0.01 + 0.02)
    assert choice.num_cached == 20


def test_hand_overs_are_expected_to_take_what_they_have_taken():
    fleet = Fleet(local_prefill=False)
    decode = fleet.decode()
    fleet.prefill()
    decode.note_handovers(40, 9.0)
    # Too few tokens to say anything: they count with the next ones.
    assert fleet.choose(100).price == pytest.approx(0.1 + 0.001 + 0.01)
    decode.note_handovers(1000, 2.0)
    assert fleet.choose(100).price == pytest.approx(0.1 + 100 * 0.002)
    decode.note_handovers(2000, 2.0)
    assert fleet.choose(100).price == pytest.approx(0.1 + 100 * 0.0016)


def test_a_prompt_waits_for_blocks_of_a_full_pod():
    fleet = Fleet()
    fleet.decode(num_blocks=100, blocks_held=95)
    empty = fleet.decode(num_blocks=100, blocks_held=80, requests=50)
    assert fleet.choose(100).decode is empty


@pytest.mark.parametrize(("windows", "blocks"), [((0,), 7), ((0, 0, 0), 21), ((0, 32, 32), 13), ((512,), 7)])
def test_each_block_table_of_a_request_counts(windows, blocks):
    pod = Pod("pod", block_size=16, num_blocks=100, table_windows=windows)
    assert pod.blocks_for(100) == blocks
    pod.blocks_held = 100 - blocks
    assert COSTS.decode_wait(pod, 100) == 0
    pod.blocks_held += 1
    assert COSTS.decode_wait(pod, 100) > 0


def test_the_pod_with_the_prefix_is_worth_a_queue():
    fleet = Fleet(stay_margin=0, local_prefill=False)
    fleet.decode()
    idle, holder = fleet.prefill(), fleet.prefill(cached=50, tokens=490)
    assert fleet.choose(1000).prefills == [holder, idle]
    holder.prefill_tokens.report(600)
    assert fleet.choose(1000).prefills == [idle, holder]


@pytest.mark.parametrize(
    ("cached", "queued", "stays"), [(90, 500, True), (90, 600, True), (90, 1500, False), (70, 800, False)]
)
def test_it_stays_where_most_is_cached_within_the_margin(cached, queued, stays):
    fleet = Fleet(stay_margin=0.5, local_prefill=False)
    fleet.decode()
    # Alone it takes 0.5 s here, so that the margin is about 0.25 s.
    fleet.prefill(prefill_rate=2000.0)
    holder = fleet.prefill(cached=cached, tokens=queued)
    choice = fleet.choose(1000)
    assert (choice.prefills[0] is holder) == stays
    assert choice.reason == ("cached" if stays else "least_ttft")


def test_others_are_asked_when_the_pod_with_the_prefix_fails():
    fleet = Fleet(local_prefill=False)
    fleet.decode()
    near, far = fleet.prefill(tokens=1000), fleet.prefill(tokens=2000)
    holder = fleet.prefill(cached=100)
    assert fleet.choose(1000).prefills == [holder, near, far]


def test_a_decode_pod_prefills_what_is_not_worth_a_hand_over():
    fleet = Fleet()
    decode, prefill = fleet.decode(), fleet.prefill()
    choice = fleet.choose(5)
    assert (choice.prefills, choice.reason) == ([], "least_ttft")
    prefill.prefill_tokens.report(10_000)
    assert fleet.choose(2000).prefills == []
    # Now what decodes there would wait too long.
    prefill.prefill_tokens.report(4000)
    decode.requests.report(200)
    assert fleet.choose(2000).prefills == [prefill]


def test_where_a_queue_seldom_empties_a_place_in_it_costs_more():
    """Who comes while the pod is busy waits as well: for 1 / (1 - busy share) of the time, twice that here."""
    fleet = Fleet()
    decode, prefill = fleet.decode(requests=10), fleet.prefill(tokens=300)
    # 1.3 s behind a queue, or 1 s alone and half of one for ten decodes.
    assert fleet.choose(1000).prefills == [prefill]
    prefill.busy_share = 0.5
    choice = fleet.choose(1000)
    assert (choice.prefills, choice.price) == ([], pytest.approx(1.52))
    # Nothing is worth everything: a pod counts as busy for at most 90 % of the time.
    prefill.busy_share = 1.0
    decode.requests.report(200)
    choice = fleet.choose(1000)
    assert (choice.prefills, choice.price) == ([], pytest.approx(11.4))
    decode.requests.report(400)
    assert fleet.choose(1000).prefills == [prefill]


def test_a_prompt_does_not_queue_while_a_decode_pod_has_no_prompt_to_compute():
    fleet = Fleet()
    fleet.policy = KvAware(fleet.index, CostModel())
    decode = fleet.decode(requests=20, prefill_rate=50_000.0)
    prefill = fleet.prefill(prefill_rate=50_000.0, busy_share=0.5)
    assert fleet.choose(1024).prefills == [prefill]
    prefill.prefill_tokens.charge(2048)
    assert fleet.choose(1024).prefills == []
    # A decode pod that has a longer queue itself is not better.
    decode.prefill_tokens.charge(4096)
    assert fleet.choose(1024).prefills == [prefill]


def test_a_pod_is_as_busy_as_those_who_come_find_it():
    """One that is not the best is not asked: who comes need not go there."""
    fleet = Fleet()
    fleet.decode()
    best, other = fleet.prefill(), fleet.prefill(tokens=1000)
    for number in range(400):
        best.prefill_tokens.report(100 if number % 4 else 0)
        fleet.choose(50)
    assert best.busy_share == pytest.approx(0.75, abs=0.02)
    assert other.busy_share == 0


def test_longer_prompts_are_in_the_way_for_a_step():
    fleet = Fleet(local_prefill=False)
    fleet.decode()
    prefill = fleet.prefill(step_tokens=200)
    for tokens in (900, 500, 100):
        prefill.prefill_tokens.charge(tokens)
    pod_s = [COSTS.prefill(prefill, tokens) for tokens in (100, 300, 600, 1000)]
    assert pod_s == pytest.approx([0.1 + 0.2 + 0.1, 0.1 + 0.2 + 0.3, 0.6 + 0.2 + 0.6, 1.5 + 1.0])
    # Only 150 of all those tokens are still to be computed.
    prefill.prefill_tokens.report(1500)
    prefill.prefill_tokens.charged = 0
    prefill.prefill_tokens.report(150)
    assert COSTS.prefill(prefill, 100) == pytest.approx(0.15 + 0.1)
    # A pod that does not tell computes all first.
    prefill.step_tokens = 0
    prefill.prefill_tokens.report(1500)
    assert COSTS.prefill(prefill, 100) == pytest.approx(1.6)


@pytest.mark.parametrize("state", [{"local_prefill": False}, {"prefill_rate": 0.0}])
def test_no_local_prefill_where_it_is_not_allowed_or_cannot_be_predicted(state):
    fleet = Fleet(local_prefill=state.pop("local_prefill", True))
    fleet.decode(**state)
    prefill = fleet.prefill(tokens=10_000)
    assert fleet.choose(5).prefills == [prefill]


def test_without_prefill_pods_the_prefix_still_counts():
    fleet = Fleet()
    fleet.decode()
    holder = fleet.decode(cached=50, requests=20)
    choice = fleet.choose(1000)
    assert (choice.decode, choice.prefills, choice.num_cached) == (holder, [], 500)
    assert choice.reason == "no_prefill_pods"


def test_a_session_breaks_ties_always_in_the_same_way():
    def chosen(names: Sequence[str]) -> dict[str, str]:
        fleet = Fleet()
        for name in names:
            fleet.decode().address = name
        return {session: fleet.choose(10, session).decode.address for session in map(str, range(200))}

    names = [f"10.0.0.{number}:9000" for number in range(8)]
    before = chosen(names)
    assert set(before.values()) == set(names)
    assert chosen(names[::-1]) == before
    after = chosen(names[1:])
    assert all(after[session] == name for session, name in before.items() if name != names[0])


def test_any_text_may_name_a_session():
    fleet = Fleet()
    pods = [fleet.decode(), fleet.decode()]
    assert fleet.choose(10, "\ud800").decode in pods


def test_a_session_is_no_more_than_a_tie_breaker():
    fleet = Fleet()
    for _ in range(4):
        fleet.decode()
    first = fleet.choose(10, "mine").decode
    first.requests.report(5)
    assert fleet.choose(10, "mine").decode is not first


PODS = st.tuples(st.integers(0, 40), st.integers(0, 30), st.integers(0, 3000), st.sampled_from([0.0, 500.0, 20_000.0]))


@given(st.lists(PODS, min_size=1, max_size=5), st.lists(PODS, max_size=5), st.integers(1, 400))
def test_without_a_margin_no_pair_is_better(decodes, prefills, num_tokens):
    fleet = Fleet(stay_margin=0)
    for cached, requests, tokens, rate in decodes:
        fleet.decode(cached, requests, tokens, prefill_rate=rate)
    for cached, _, tokens, rate in prefills:
        fleet.prefill(cached, tokens, prefill_rate=rate)
    blocks = (num_tokens - 1) // BLOCK
    missing = {
        pod.slot: num_tokens - min(cached, blocks) * BLOCK
        for pod, (cached, *_) in zip(fleet.decodes + fleet.prefills, decodes + prefills, strict=True)
    }
    times = []
    for decode in fleet.decodes:
        left = missing[decode.slot]
        wait = COSTS.decode_wait(decode, left)
        local = COSTS.local_prefill(decode, left) if prefills else COSTS.prefill(decode, left)
        times += [] if local is None else [wait + local]
        times += [
            COSTS.prefill(prefill, missing[prefill.slot]) + COSTS.transfer(decode, left) + wait
            for prefill in fleet.prefills
        ]
    choice = fleet.choose(num_tokens)
    # Predictions within a tick are equal, once for the prefill pod and once for the pair.
    assert min(times) - 1e-9 <= choice.price <= min(times) + 2 * TICK_S
    if fleet.prefills:
        by = choice.prefills[0] if choice.prefills else choice.decode
        assert choice.num_cached == num_tokens - missing[by.slot]
