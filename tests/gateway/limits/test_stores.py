"""Both stores of limits against one model, which remembers everything and computes with fractions."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from baton_gateway.limits.memory import MemoryLimits
from baton_gateway.limits.redis_store import RedisLimits
from baton_gateway.limits.store import Decision, Limits, LimitStore

from .conftest import RedisServer

names = itertools.count()
START = 1_700_000_000_000_000


class Model:
    """One tenant, by the book: a bucket that leaks all the time."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held = {"requests": Fraction(0), "tokens": Fraction(0)}
        self.open: dict[str, int] = {}
        self.used = 0

    def advance(self, us: int) -> None:
        for name, rate in self._rates().items():
            self.held[name] = max(self.held[name] - Fraction(max(us, 0) * rate, 60_000_000), Fraction(0))

    def reserve(self, id: str, tokens: int) -> str | None:
        limits, rates = self.limits, self._rates()
        if rates["tokens"] and tokens > rates["tokens"]:
            return "too_large"
        if limits.budget is not None and self.used + tokens > limits.budget:
            return "budget"
        if limits.max_streams and len(self.open) >= limits.max_streams:
            return "streams"
        for name, cost in (("requests", 1), ("tokens", tokens)):
            if rates[name] and self.held[name] + cost > rates[name]:
                return name
        for name, cost in (("requests", 1), ("tokens", tokens)):
            self.held[name] += cost if rates[name] else 0
        self.used += tokens
        self.open[id] = tokens
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
    Limits,
    requests_per_minute=st.sampled_from([0, 1, 3, 7, 60]),
    tokens_per_minute=st.sampled_from([0, 10, 97, 1_000, 99_999_999]),
    max_streams=st.sampled_from([0, 0, 2]),
    budget=st.sampled_from([None, None, 300]),
    period=st.just("2026-11"),
)
moves_of = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(0, 120)),
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


async def compare(store: LimitStore, limits: Limits, moves: list[Any], wait: Callable[[int], Awaitable[None]]) -> None:
    model, tenant = Model(limits), f"tenant-{next(names)}"
    ids: list[str] = []
    since = 0  # the last time that the store looked at its clock
    for move in moves:
        if move[0] != "wait":
            model.advance(since)
            since = 0
        match move:
            case ("reserve", tokens):
                ids.append(f"r{len(ids)}")
                refused = model.reserve(ids[-1], tokens)
                assert_as_the_model(model, refused, await store.reserve(tenant, limits, ids[-1], tokens))
            case ("settle", which, unused):
                id = ids[which % len(ids)] if ids else "none"
                model.settle(id, unused)
                await store.settle(tenant, limits, id, unused)
            case ("wait", us):
                await wait(us)
                since += us


@settings(max_examples=300, deadline=None)
@given(limits=limits_of, moves=moves_of)
def test_memory(limits: Limits, moves: list[Any]) -> None:
    clock = Clock()

    async def wait(us: int) -> None:
        clock.now += us

    asyncio.run(compare(MemoryLimits(clock), limits, moves, wait))


@settings(max_examples=150, deadline=None)
@given(limits=limits_of, moves=moves_of)
def test_redis(redis_server: RedisServer, limits: Limits, moves: list[Any]) -> None:
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

    async def compare(self, limits: Limits, moves: list[Any]) -> None:
        store = RedisLimits(self._redis)
        for script in (store._reserve, store._settle, store._renew):
            text = script.script if isinstance(script.script, str) else script.script.decode()
            assert text.count("redis.call('TIME')") == 1
            replaced = text.replace("redis.call('TIME')", "redis.call('LRANGE', 'time', 0, 1)")
            script.__init__(self._redis, replaced)  # type: ignore[misc]
        await self._set()

        async def wait(us: int) -> None:
            self._clock.now += us
            await self._set()

        await compare(store, limits, moves, wait)

    async def _set(self) -> None:
        await self._redis.delete("time")
        await self._redis.rpush("time", *divmod(self._clock.now, 1_000_000))  # type: ignore[misc]
