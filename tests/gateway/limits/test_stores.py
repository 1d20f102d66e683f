"""Both stores of limits against one model, which remembers everything and computes with fractions."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from baton_gateway.tenancy.limits.memory import MemoryLimits
from baton_gateway.tenancy.limits.redis_store import RedisLimits
from baton_gateway.tenancy.limits.store import EVER, LEASE_S, Decision, LimitStore, TenantLimits

from .conftest import RedisServer

names = itertools.count()
START = 1_700_000_000_000_000


class Model:
    """One tenant, by the book: a bucket that leaks all the time."""

    def __init__(self, limits: TenantLimits) -> None:
        self.limits = limits
        self.held = {"requests": Fraction(0), "tokens": Fraction(0)}
        self.open: dict[str, int] = {}  # streams
        self.used = 0

    def advance(self, us: int) -> None:
        for name, rate in self._rates().items():
            self.held[name] = max(self.held[name] - Fraction(max(us, 0) * rate, 60_000_000), Fraction(0))

    def reserve(self, id: str, tokens: int, streams: int) -> str | None:
        limits, rates = self.limits, self._rates()
        if id in self.open:
            return None
        if rates["tokens"] and tokens > rates["tokens"]:
            return "too_large"
        if limits.max_streams and streams > limits.max_streams:
            return "too_many"
        if limits.budget is not None and self.used + tokens > limits.budget:
            return "budget"
        if limits.max_streams and sum(self.open.values()) + streams > limits.max_streams:
            return "streams"
        for name, cost in (("requests", 1), ("tokens", tokens)):
            if rates[name] and self.held[name] + cost > rates[name]:
                return name
        for name, cost in (("requests", 1), ("tokens", tokens)):
            self.held[name] += cost if rates[name] else 0
        self.used += tokens
        self.open[id] = streams
        return None

    def settle(self, id: str, unused: int) -> None:
        if self.open.pop(id, None) is not None:
            self.held["tokens"] = max(self.held["tokens"] - unused, Fraction(0))
            self.used = max(self.used - unused, 0)

    def remaining(self, name: str) -> int:
        return max(int(self._rates()[name] - self.held[name]), 0)

    def _rates(self) -> dict[str, int]:
        return {"requests": self.limits.requests_per_minute, "tokens": self.limits.tokens_per_minute}


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> int:
        return self.now


limits_of = st.builds(
    TenantLimits,
    requests_per_minute=st.sampled_from([0, 1, 3, 7, 60]),
    tokens_per_minute=st.sampled_from([0, 10, 97, 1_000, 99_999_999]),
    max_streams=st.sampled_from([0, 0, 2, 9]),
    budget=st.sampled_from([None, None, 300]),
    period=st.sampled_from(["2026-11", EVER]),
)
moves_of = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(0, 120), st.sampled_from([1, 1, 2, 3, 8, 10])),
        # Once more, as after an answer that was lost.
        st.tuples(st.just("repeat"), st.integers(0, 30)),
        st.tuples(st.just("settle"), st.integers(0, 30), st.integers(-5, 120)),
        # In microseconds; backwards, too. Not so far that streams would end.
        st.tuples(st.just("wait"), st.sampled_from([1, 999, 1_000_000, 7_654_321, -3_000_000, -1])),
    ),
    max_size=40,
)


def assert_as_the_model(model: Model, refused: str | None, got: Decision) -> None:
    assert got.refused == refused
    for name, standing in (("requests", got.requests), ("tokens", got.tokens)):
        limit = model._rates()[name]
        assert (standing is None) == (limit == 0)
        if standing is not None:
            assert (standing.limit, standing.remaining) == (limit, model.remaining(name))
            assert standing.reset_s == pytest.approx(float(model.held[name] * 60 / limit), abs=1e-6)


async def compare(
    store: LimitStore, limits: TenantLimits, moves: list[Any], wait: Callable[[int], Awaitable[None]]
) -> None:
    model, tenant = Model(limits), f"tenant-{next(names)}"
    ids: list[str] = []
    made: list[tuple[str, int, int]] = []
    since = 0  # the last time that the store looked at its clock
    for move in moves:
        if move[0] != "wait":
            model.advance(since)
            since = 0
        match move:
            case ("reserve", tokens, streams):
                ids.append(f"r{len(ids)}")
                made.append((ids[-1], tokens, streams))
                refused = model.reserve(*made[-1])
                assert_as_the_model(model, refused, await store.reserve(tenant, limits, *made[-1]))
            case ("repeat", which) if made:
                again = made[which % len(made)]
                refused = model.reserve(*again)
                assert_as_the_model(model, refused, await store.reserve(tenant, limits, *again))
            case ("settle", which, unused):
                id = ids[which % len(ids)] if ids else "none"
                model.settle(id, unused)
                await store.settle(tenant, limits, id, unused)
            case ("wait", us):
                await wait(us)
                since += us


@settings(max_examples=300, deadline=None)
@given(limits=limits_of, moves=moves_of)
def test_memory(limits: TenantLimits, moves: list[Any]) -> None:
    clock = Clock()

    async def wait(us: int) -> None:
        clock.now += us

    asyncio.run(compare(MemoryLimits(clock), limits, moves, wait))


@settings(max_examples=150, deadline=None)
@given(limits=limits_of, moves=moves_of)
def test_redis(redis_server: RedisServer, limits: TenantLimits, moves: list[Any]) -> None:
    async def run() -> None:
        redis = Redis.from_url(redis_server.url)
        try:
            await Frozen(redis).compare(limits, moves)
        finally:
            await redis.aclose()

    asyncio.run(run())


class Frozen:
    """RedisLimits on a clock that goes on only when it is told to: its scripts read a list in place of TIME."""

    def __init__(self, redis: "Redis") -> None:
        self._redis = redis
        self._clock = Clock()

    async def compare(self, limits: TenantLimits, moves: list[Any]) -> None:
        await compare(await self.store(), limits, moves, self.wait)

    async def wait(self, us: int) -> None:
        self._clock.now += us
        await self._set()

    async def store(self) -> RedisLimits:
        store = RedisLimits(self._redis)
        for script in (store._reserve, store._settle, store._cancel, store._renew):
            text = script.script if isinstance(script.script, str) else script.script.decode()
            assert text.count("redis.call('TIME')") == 1
            replaced = text.replace("redis.call('TIME')", "redis.call('LRANGE', 'time', 0, 1)")
            script.__init__(self._redis, replaced)  # type: ignore[misc]
        await self._set()
        return store

    async def _set(self) -> None:
        await self._redis.delete("time")
        await self._redis.rpush("time", *divmod(self._clock.now, 1_000_000))  # type: ignore[misc]


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator["Redis"]:
    redis = Redis.from_url(redis_server.url)
    yield redis
    await redis.aclose()


def memory() -> tuple[LimitStore, Callable[[int], Awaitable[None]]]:
    clock = Clock()

    async def wait(us: int) -> None:
        clock.now += us

    return MemoryLimits(clock), wait


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_streams_end_with_their_lease(redis: "Redis", kind: str) -> None:
    frozen = Frozen(redis)
    store, wait = memory() if kind == "memory" else (await frozen.store(), frozen.wait)
    tenant, limits = f"tenant-{next(names)}", TenantLimits(max_streams=10)

    async def fits(id: str, streams: int) -> bool:
        return (await store.reserve(tenant, limits, id, 1, streams)).refused is None

    assert await fits("a", 7)
    assert await fits("b", 2)
    assert not await fits("c", 2)
    await wait(int(LEASE_S * 0.7e6))
    await store.renew(tenant, ["b"])
    await wait(int(LEASE_S * 0.7e6))
    assert not await fits("c", 9)
    assert await fits("c", 8)
    assert not await fits("d", 1)
    await store.settle(tenant, limits, "b", 0)
    assert not await fits("d", 3)
    assert await fits("d", 2)


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_a_reservation_outlives_the_period_of_its_budget(redis: "Redis", kind: str) -> None:
    store = memory()[0] if kind == "memory" else RedisLimits(redis)
    tenant, old, new = f"tenant-{next(names)}", *(TenantLimits(budget=100, period=f"2026-11-{day}") for day in (27, 28))
    assert (await store.reserve(tenant, old, "a", 60)).refused is None
    assert (await store.reserve(tenant, new, "b", 60)).refused is None
    for unused in (50, 50):
        await store.settle(tenant, old, "a", unused)
        assert (await store.reserve(tenant, new, "c", 41)).refused == "budget"
    await store.settle(tenant, new, "b", 20)
    assert (await store.reserve(tenant, new, "c", 61)).refused == "budget"
    assert (await store.reserve(tenant, new, "c", 60)).refused is None


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_a_gateway_that_could_not_renew_a_reservation_for_long_settles_it(redis: "Redis", kind: str) -> None:
    frozen = Frozen(redis)
    store, wait = memory() if kind == "memory" else (await frozen.store(), frozen.wait)
    tenant, limits = f"tenant-{next(names)}", TenantLimits(max_streams=3, budget=100, period=EVER)
    for id, streams in (("a", 2), ("b", 1)):
        assert (await store.reserve(tenant, limits, id, 40, streams)).refused is None
    await wait(int(LEASE_S * 2e6))
    assert (await store.reserve(tenant, limits, "c", 10, 3)).refused is None
    await store.settle(tenant, limits, "c", 10)
    await store.settle(tenant, limits, "b", 30)
    await store.renew(tenant, ["a", "b"])
    assert (await store.reserve(tenant, limits, "d", 51, 1)).refused == "budget"
    assert (await store.reserve(tenant, limits, "d", 50, 2)).refused == "streams"
    assert (await store.reserve(tenant, limits, "d", 50, 1)).refused is None


async def test_gateways_of_an_older_version_share_the_streams(redis: "Redis") -> None:
    """Such a gateway knows only the set of reservations, and ends leases there alone."""
    store, tenant, limits = RedisLimits(redis), f"tenant-{next(names)}", TenantLimits(max_streams=10)
    streams = f"baton:{{{tenant}}}:streams"
    await redis.zadd(streams, {"of-an-older-one": 2 * START})
    assert (await store.reserve(tenant, limits, "a", 1, 8)).refused is None
    assert (await store.reserve(tenant, limits, "b", 1, 2)).refused == "streams"
    assert await redis.zcard(streams) == 2
    await redis.zrem(streams, "a")
    assert (await store.reserve(tenant, limits, "b", 1, 9)).refused is None


async def test_a_budget_for_ever_is_never_forgotten(redis: "Redis") -> None:
    store, tenant = RedisLimits(redis), f"tenant-{next(names)}"
    key = f"baton:{{{tenant}}}:limits"
    for period, kept_for in (("2026-11", range(39 * 86_400, 41 * 86_400)), (EVER, [-1])):
        limits = TenantLimits(budget=100, period=period)
        await store.reserve(tenant, limits, f"a-{period}", 60)
        assert await redis.ttl(key) in kept_for
        await store.settle(tenant, limits, f"a-{period}", 0)
        assert await redis.ttl(key) in kept_for
    assert (await store.reserve(tenant, limits, "b", 41)).refused == "budget"


@pytest.mark.parametrize("late", [False, True])
async def test_a_cancelled_reservation_takes_nothing_whenever_it_arrives(redis: "Redis", late: bool) -> None:
    store, tenant = RedisLimits(redis), f"tenant-{next(names)}"
    limits = TenantLimits(tokens_per_minute=1_000_000, max_streams=3, budget=100, period=EVER)
    for step in ("cancel", "reserve") if late else ("reserve", "cancel"):
        if step == "reserve":
            assert (await store.reserve(tenant, limits, "a", 100, 3)).refused is None
        else:
            for _ in range(2):
                await store.cancel(tenant, limits, "a", 100)
    assert (await store.reserve(tenant, limits, "b", 100, 3)).refused is None
