"""Enforces the limits of tenants: the tokens that a request may need are reserved before it is processed."""

import asyncio
import logging
import math
import time
import uuid
from collections import Counter
from typing import Literal

import msgspec
from redis.exceptions import RedisError

from ..concurrency.background import keep_running, stop_running
from ..errors import ApiError, overloaded
from .keys import utc_now
from .limits.memory import MemoryLimits
from .limits.redis_store import RedisLimits
from .limits.store import LEASE_S, Decision, LimitStore, Standing, TenantLimits
from .tenants import Identity

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_MOST_UNSETTLED = 100_000  # reservations that may wait for Redis to be settled; each takes about half a kilobyte

# What a call to a lost Redis raises. The last three are for replies that no Redis sends, but a broken proxy may.
_LOST = (RedisError, OSError, ValueError, TypeError, IndexError)

RedisLost = Literal["local", "refuse"]


class Reservation(msgspec.Struct):
    """The reservation of a request. used: tokens to charge for a request that no pod serves; None = as pods report."""

    id: str
    tenant: str
    limits: TenantLimits
    tokens: int
    store: LimitStore
    decision: Decision
    used: int | None = None

    def headers(self) -> list[tuple[bytes, bytes]]:
        return limit_headers(self.decision)


class _Refusal(msgspec.Struct):
    """A remembered 429 of a tenant that has used up its requests per minute. Times are of the monotonic clock."""

    limit: int  # requests per minute when the store refused
    until: float  # the earliest time at which a request can be allowed
    reset_at: float  # when the bucket is empty and the full limit available again


class _Unsettled(msgspec.Struct):
    """A reservation that has ended, but is not settled in Redis yet. unused: tokens to give back.

    cancel: the reservation may not exist, because Redis never confirmed it.
    """

    tenant: str
    limits: TenantLimits
    unused: int
    cancel: bool


class Quota:
    """Keeps reservations in the Redis that gateways share, or in this process if there is no Redis or it is lost."""

    def __init__(self, shared: RedisLimits | None, redis_lost: RedisLost = "local") -> None:
        """redis_lost: while Redis cannot be reached, count in this process alone, or refuse all requests."""
        self._shared = shared
        self._redis_lost = redis_lost
        self._local = MemoryLimits()
        self._lost = False
        self._retry_at = 0.0  # when a lost Redis is tried again
        self._live: dict[str, Reservation] = {}
        self._refusals: dict[str, _Refusal] = {}  # by tenant
        self._unsettled: dict[str, _Unsettled] = {}  # by reservation
        self._settling: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = keep_running("limits", self._renew_and_settle)

    async def stop(self) -> None:
        if self._task is not None:
            await stop_running(self._task)
        await asyncio.gather(*self._settling)
        if self._shared is not None:
            await self._settle_outstanding(self._shared)
            await self._shared.close()

    def in_flight(self) -> Counter[str]:
        """Return the number of requests being answered, by tenant."""
        return Counter(reservation.tenant for reservation in self._live.values())

    def check(self, identity: Identity) -> None:
        """Raise ApiError 429 while an earlier refusal shows that no request of this tenant can be allowed.

        It is cheap enough to be called before a request's body is read. A bucket drains at a fixed rate, so no gateway
        can allow a request earlier than the store has predicted.
        """
        refusal = self._refusals.get(identity.name)
        if refusal is None:
            return
        now = time.monotonic()
        if now >= refusal.until or refusal.limit != identity.tenant.requests_per_minute:
            del self._refusals[identity.name]
            return
        standing = Standing(refusal.limit, 0, max(refusal.reset_at - now, 0.0))
        raise _refused(Decision("requests", refusal.until - now, standing, None), identity, 0, 1)

    async def reserve(self, identity: Identity, tokens: int, streams: int = 1) -> Reservation:
        """Reserve a request, its tokens and its streams.

        Raises ApiError 429 when a limit refuses them, 503 when Redis is lost and `redis_lost` is "refuse".
        """
        limits, id = identity.tenant.limits(utc_now()), uuid.uuid4().hex
        # Taken before the call, so that a remembered refusal never outlasts the one in the store.
        started = time.monotonic()
        store, decision = await self._decide(identity.name, limits, id, tokens, streams)
        if decision.refused:
            self._remember(identity.name, decision, started)
            raise _refused(decision, identity, tokens, streams)
        reservation = Reservation(id, identity.name, limits, tokens, store, decision)
        self._live[id] = reservation
        return reservation

    def settle(self, reservation: Reservation, used: int) -> None:
        """End a reservation in the background. used: tokens that the request used."""
        if self._live.pop(reservation.id, None) is not None:
            task = asyncio.create_task(
                self._settle(reservation, used if reservation.used is None else reservation.used)
            )
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def _decide(
        self, tenant: str, limits: TenantLimits, id: str, tokens: int, streams: int
    ) -> tuple[LimitStore, Decision]:
        # While Redis is lost, one request per _RETRY_S tries it again. The others do not wait for that.
        if self._shared is not None and (not self._lost or time.monotonic() >= self._retry_at):
            self._retry_at = time.monotonic() + _RETRY_S
            try:
                decision = await self._shared.reserve(tenant, limits, id, tokens, streams)
            except _LOST as error:
                self._settle_later(id, _Unsettled(tenant, limits, tokens, cancel=True))
                self._note(lost=True, why=str(error))
            except asyncio.CancelledError:
                self._settle_later(id, _Unsettled(tenant, limits, tokens, cancel=True))
                raise
            else:
                self._note(lost=False)
                return self._shared, decision
        if self._lost and self._redis_lost == "refuse":
            raise overloaded("Limits cannot be checked now.")
        return self._local, await self._local.reserve(tenant, limits, id, tokens, streams)

    def _remember(self, tenant: str, decision: Decision, started: float) -> None:
        if decision.refused == "requests" and decision.requests is not None:
            standing = decision.requests
            self._refusals[tenant] = _Refusal(
                standing.limit, started + decision.retry_after_s, started + standing.reset_s
            )

    async def _settle(self, reservation: Reservation, used: int) -> None:
        unused = reservation.tokens - used
        try:
            await reservation.store.settle(reservation.tenant, reservation.limits, reservation.id, unused)
        except _LOST as error:
            self._settle_later(reservation.id, _Unsettled(reservation.tenant, reservation.limits, unused, cancel=False))
            self._note(lost=True, why=str(error))

    def _settle_later(self, id: str, unsettled: _Unsettled) -> None:
        """Remember to settle a reservation when Redis is back. Beyond _MOST_UNSETTLED the oldest is dropped: the lease
        of its streams expires, and only a budget does not get its unused tokens back."""
        self._unsettled[id] = unsettled
        if len(self._unsettled) > _MOST_UNSETTLED:
            del self._unsettled[next(iter(self._unsettled))]

    async def _renew_and_settle(self) -> None:
        """Renew leases, and settle the reservations that could not be settled while Redis was lost."""
        renewed_at = time.monotonic()
        while True:
            await asyncio.sleep(_RETRY_S)
            if self._shared is not None:
                await self._settle_outstanding(self._shared)
            if time.monotonic() - renewed_at >= LEASE_S / 3:
                renewed_at = time.monotonic()
                await self._renew()

    async def _settle_outstanding(self, shared: RedisLimits) -> None:
        while self._unsettled:
            id, unsettled = next(iter(self._unsettled.items()))
            # Both calls are idempotent, so they may be repeated when a response was lost.
            end = shared.cancel if unsettled.cancel else shared.settle
            try:
                await end(unsettled.tenant, unsettled.limits, id, unsettled.unused)
            except _LOST as error:
                self._note(lost=True, why=str(error))
                return
            self._unsettled.pop(id, None)
            self._note(lost=False)

    async def _renew(self) -> None:
        by_tenant: dict[tuple[str, int], list[Reservation]] = {}
        for reservation in self._live.values():
            by_tenant.setdefault((reservation.tenant, id(reservation.store)), []).append(reservation)
        for (tenant, _), reservations in by_tenant.items():
            try:
                await reservations[0].store.renew(tenant, [reservation.id for reservation in reservations])
            except _LOST as error:
                self._note(lost=True, why=str(error))

    def _note(self, lost: bool, why: str = "") -> None:
        """Record whether a call to Redis failed. Only a change is logged."""
        self._retry_at = time.monotonic() + _RETRY_S
        if lost and not self._lost:
            instead = "limits are counted here alone" if self._redis_lost == "local" else "requests are refused"
            log.error("Redis is lost, %s: %s", instead, why, extra={"event": "redis_lost"})
        elif self._lost and not lost:
            log.info("Redis is back", extra={"event": "redis_back"})
        if self._lost != lost:
            self._refusals.clear()  # they came from the other store, whose buckets differ
        self._lost = lost


def _refused(decision: Decision, identity: Identity, tokens: int, streams: int) -> ApiError:
    tenant = identity.tenant
    texts = {
        "requests": f"Rate limit reached: {tenant.requests_per_minute} requests per minute.",
        "tokens": f"Rate limit reached: {tenant.tokens_per_minute} tokens per minute; {tokens} were asked for.",
        "streams": f"Rate limit reached: {tenant.max_streams} sequences at the same time; {streams} were asked for.",
        "budget": f"The budget of {tenant.budget_tokens} tokens per {tenant.budget_period} is used up.",
        "too_large": f"{tokens} tokens are more than the limit of {tenant.tokens_per_minute} per minute.",
        "too_many": f"{streams} sequences are more than the limit of {tenant.max_streams} at the same time.",
    }
    assert decision.refused is not None
    headers = {name.decode(): value.decode() for name, value in limit_headers(decision)}
    if decision.retry_after_s:
        headers["retry-after-ms"] = str(math.ceil(decision.retry_after_s * 1000))
        headers["retry-after"] = str(max(math.ceil(decision.retry_after_s), int(_RETRY_S)))
    else:
        headers["x-should-retry"] = "false"
    if decision.refused == "budget":
        kind = code = "insufficient_quota"
    else:
        kind, code = "tokens" if decision.refused in ("tokens", "too_large") else "requests", "rate_limit_exceeded"
    return ApiError(429, texts[decision.refused], type=kind, code=code, headers=headers)


def limit_headers(decision: Decision) -> list[tuple[bytes, bytes]]:
    """Return the x-ratelimit headers of a decision, as OpenAI sends them."""
    headers: list[tuple[bytes, bytes]] = []
    for name, standing in ((b"requests", decision.requests), (b"tokens", decision.tokens)):
        if standing is not None:
            headers += _standing_headers(name, standing)
    return headers


def _standing_headers(name: bytes, standing: Standing) -> list[tuple[bytes, bytes]]:
    values = {b"limit": b"%d" % standing.limit, b"remaining": b"%d" % standing.remaining}
    values[b"reset"] = duration(standing.reset_s).encode()
    return [(b"x-ratelimit-%b-%b" % (what, name), value) for what, value in values.items()]


def duration(seconds: float) -> str:
    """Format a time as in OpenAI's headers: 17ms, 1s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, seconds = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
