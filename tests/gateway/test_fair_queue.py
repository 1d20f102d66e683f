"""The order of the fair queue: shares by weight, order within a tenant, priorities, and which request is dropped."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_gateway.concurrency.fair_queue import FairQueue

Item = tuple[str, int]


def test_a_tenant_waits_for_what_came_before_it_of_its_own() -> None:
    queue: FairQueue[Item] = FairQueue(100)
    for number in range(5):
        queue.push("a", ("a", number), cost=number + 1)
    assert [queue.pop() for _ in range(6)] == [*(("a", number) for number in range(5)), None]


def test_one_request_does_not_wait_for_the_thousand_of_another() -> None:
    queue: FairQueue[Item] = FairQueue(10_000)
    for number in range(1000):
        queue.push("flood", ("flood", number), cost=10)
    queue.pop()
    queue.push("calm", ("calm", 0), cost=10)
    assert ("calm", 0) in [queue.pop() for _ in range(2)]


def test_who_cannot_be_served_yet_is_passed_only_by_those_that_would_come_next() -> None:
    queue: FairQueue[Item] = FairQueue(100)
    queue.push("long", ("long", 0), cost=10)
    for number in range(5):
        queue.push("short", ("short", number), cost=4)
    queue.push("late", ("late", 0), cost=1, priority=1)
    passed = [queue.pop(lambda item: item[0] != "long") for _ in range(5)]
    # The fourth would begin at 12, after what takes until 10.
    assert passed == [("short", 0), ("short", 1), ("short", 2), None, None]
    assert [queue.pop() for _ in range(4)] == [("long", 0), ("short", 3), ("short", 4), ("late", 0)]


@given(
    weights=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)),
    costs=st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=20, max_size=60),
    seed=st.integers(0, 1000),
)
def test_tenants_that_always_wait_get_their_shares(
    weights: tuple[float, float], costs: list[tuple[float, float]], seed: int
) -> None:
    """As the paper proves: over any time their shares differ by no more than a largest request of each."""
    queue: FairQueue[tuple[int, float]] = FairQueue(1000)
    rng = random.Random(seed)
    lines = [[pair[tenant] for pair in costs] for tenant in range(2)]
    pushed = [0, 0]

    def push(tenant: int) -> None:
        if pushed[tenant] < len(lines[tenant]):
            cost = lines[tenant][pushed[tenant]]
            queue.push(str(tenant), (tenant, cost), cost, weights[tenant])
            pushed[tenant] += 1

    for tenant in (0, 1):
        for _ in range(rng.randint(3, 6)):
            push(tenant)
    served = [0.0, 0.0]
    waiting = list(pushed)
    bound = sum(max(lines[tenant]) / weights[tenant] for tenant in range(2))
    while min(waiting) > 0:
        item = queue.pop()
        assert item is not None
        tenant, cost = item
        waiting[tenant] -= 1
        served[tenant] += cost
        assert abs(served[0] / weights[0] - served[1] / weights[1]) <= bound * (1 + 1e-9)
        before = list(pushed)
        push(rng.randrange(2))
        waiting = [waiting[each] + pushed[each] - before[each] for each in range(2)]


def test_more_urgent_tenants_go_first() -> None:
    queue: FairQueue[Item] = FairQueue(100)
    queue.push("a", ("a", 0), 1, priority=5)
    queue.push("b", ("b", 0), 100, priority=-1)
    queue.push("a", ("a", 1), 1, priority=-1)
    assert [queue.pop() for _ in range(3)] == [("a", 1), ("b", 0), ("a", 0)]


def test_a_tenant_orders_its_own_requests() -> None:
    queue: FairQueue[Item] = FairQueue(100)
    for number, order in enumerate((0, 5, 0, -3, 5, -3)):
        queue.push("a", ("a", number), cost=1, order=order)
    assert [queue.pop() for _ in range(6)] == [("a", number) for number in (3, 5, 0, 2, 1, 4)]


@given(
    costs=st.lists(st.floats(1, 100), min_size=1, max_size=30),
    orders=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=30, max_size=30),
)
def test_a_tenants_order_gives_it_nothing_of_the_others(costs: list[float], orders: list[int]) -> None:
    """After every turn another tenant has had its half but for one request of each, whatever the first one asks for."""
    queue: FairQueue[tuple[str, float]] = FairQueue(1000)
    for number, cost in enumerate(costs):
        queue.push("greedy", ("greedy", cost), cost, order=orders[number])
        queue.push("calm", ("calm", cost), cost)
    served = Counter[str]()
    while len({tenant for tenant, waiting in queue._queues.items() if waiting.waiting}) == 2:
        popped = queue.pop()
        assert popped is not None
        served[popped[0]] += popped[1]  # type: ignore[assignment]
        assert served["greedy"] - served["calm"] <= 2 * max(costs) * (1 + 1e-9)


def test_a_tenants_order_pushes_out_none_of_another() -> None:
    queue: FairQueue[Item] = FairQueue(4)
    for number in range(2):
        queue.push("calm", ("calm", number), cost=1, order=7)
    for number in range(2):
        queue.push("pushy", ("pushy", number), cost=1, order=-5)
    assert queue.push("pushy", ("pushy", 2), cost=1, order=-(2**31)) == ("pushy", 1)
    assert queue.push("pushy", ("pushy", 3), cost=1, order=0) == ("pushy", 3)
    assert queue.ahead("pushy", 1, order=-(2**31)) == 3
    assert queue.ahead("pushy", 1) == 4


def test_when_it_is_full_the_longest_line_gives_way() -> None:
    queue: FairQueue[Item] = FairQueue(10)
    for number in range(9):
        assert queue.push("flood", ("flood", number), cost=1) is None
    assert queue.push("calm", ("calm", 0), cost=1) is None
    assert queue.push("calm", ("calm", 1), cost=1) == ("flood", 8)
    assert queue.push("flood", ("flood", 9), cost=1) == ("flood", 9)
    assert queue.push("late", ("late", 0), cost=1, priority=3) == ("late", 0)
    assert Counter(item[0] for item in iter(queue.pop, None)) == {"flood": 8, "calm": 2}


def test_when_it_is_full_many_cheap_requests_push_out_none_that_is_costly() -> None:
    queue: FairQueue[str] = FairQueue(10)
    for number in range(10):
        queue.push("many", f"m{number}", 1)
    assert queue.push("few", "costly", 1000) == "m9"
    assert queue.push("many", "m10", 1) == "m10"


def test_who_leaves_costs_the_tenant_nothing() -> None:
    queue: FairQueue[Item] = FairQueue(100)
    gone = ("a", 0)
    queue.push("a", gone, cost=1000)
    queue.push("a", ("a", 1), cost=1)
    queue.push("b", ("b", 0), cost=10)
    queue.push("b", ("b", 1), cost=10)
    assert queue.remove("a", gone)
    assert not queue.remove("a", gone)
    assert queue.pop() == ("a", 1)
    assert len(queue) == 2


def test_an_idle_tenant_saves_nothing_up() -> None:
    queue: FairQueue[Item] = FairQueue(1000)
    for number in range(100):
        queue.push("busy", ("busy", number), cost=1)
    for _ in range(50):
        queue.pop()
    for number in range(20):
        queue.push("back", ("back", number), cost=1)
    served = Counter(item[0] for item in (queue.pop() for _ in range(20)) if item)
    assert served["back"] == pytest.approx(10, abs=1)


def test_what_is_ahead() -> None:
    queue: FairQueue[Item] = FairQueue(100)
    for number in range(10):
        queue.push("flood", ("flood", number), cost=5)
    assert queue.ahead("calm", 5) == 5
    assert queue.ahead("flood", 5) == 50
    assert queue.ahead("calm", 5, priority=1) == 50


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.sampled_from(["push", "push", "pop", "remove"])))
)
def test_nothing_is_lost_and_nothing_comes_twice(moves: list[tuple[str, int, str]]) -> None:
    queue: FairQueue[Item] = FairQueue(5)
    waiting: dict[Item, int] = {}
    for number, (tenant, priority, move) in enumerate(moves):
        item = (tenant, number)
        if move == "push":
            waiting[item] = priority
            out = queue.push(tenant, item, cost=number % 4 + 1, priority=priority)
            if out is not None:
                del waiting[out]
        elif move == "pop":
            popped = queue.pop()
            assert (popped is None) == (not waiting)
            if popped is not None:
                assert waiting[popped] == min(waiting.values())
                del waiting[popped]
        elif waiting:
            one = next(iter(waiting))
            assert queue.remove(one[0], one, waiting.pop(one))
        assert len(queue) == len(waiting) <= 5
    assert sorted(iter(queue.pop, None)) == sorted(waiting)
