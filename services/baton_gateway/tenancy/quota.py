"""Holds tenants to their limits: what a request may need is reserved before anything is done for it."""

import asyncio
import logging
import math
import time
import uuid
from collections import Counter
from typing import Literal

import msgspec
from redis.exceptions import RedisError

from ..concurrency.background import keep_running
from ..errors import ApiError, overloaded
from .keys import utc_now
from .limits.memory import MemoryLimits
from .limits.redis_store import RedisLimits
from .limits.store import LEASE_S, Decision, LimitStore, Standing, TenantLimits
from .tenants import Identity

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_MOST_OWED = 100_000  # settlements that wait for Redis; each takes about half a kilobyte

RedisLost = Literal["local", "refuse"]


class Reservation(msgspec.Struct):
    """Of one request. used: tokens to charge in place of those that pods report, where no pod takes part."""

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
    """What remains to be said to a tenant that has used up its requests per minute. Times of the monotonic clock."""

    limit: int  # requests per minute when the store refused
    until: float  # when the next request may be allowed
    reset_at: float  # when all of the limit is there again


class _Owed(msgspec.Struct):
    """A reservation that Redis has still to be told the end of. unused: tokens to give back.

    cancel: whether it is not known that it was made.
    """

    tenant: str
    limits: TenantLimits
    unused: int
    cancel: bool


class Quota:
    """Reserves in a Redis that gateways share, or in this process when there is none or it is lost."""

    def __init__(self, shared: RedisLimits | None, redis_lost: RedisLost = "local") -> None:
        """redis_lost: while Redis cannot be reached, count in this process alone, or refuse all requests."""
        self._shared = shared
        self._redis_lost = redis_lost
        self._local = MemoryLimits()
        self._lost = False
        self._retry_at = 0.0  # when a lost Redis is asked again
        self._live: dict[str, Reservation] = {}
        self._refusals: dict[str, _Refusal] = {}  # by tenant
        self._owed: dict[str, _Owed] = {}  # by reservation
        self._settling: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = keep_running("limits", self._keep)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*self._settling)
        if self._shared is not None:
            await self._pay(self._shared)
            await self._shared.close()

    def in_flight(self) -> Counter[str]:
        """Return the number of requests being answered, by tenant."""
        return Counter(reservation.tenant for reservation in self._live.values())

    def check(self, identity: Identity) -> None:
        """Raise ApiError 429 while it is known that no request of this tenant can be allowed.

        Costs next to nothing, so that it can be called before a request's body is read. Requests only leak from their
        bucket, so no gateway can allow one before the time that the store has told.
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
        """Raises ApiError 429 when a limit does not allow it, 503 when nobody can say."""
        limits, id = identity.tenant.limits(utc_now()), uuid.uuid4().hex
        # Before the store is asked: what is remembered of its answer must end no later than what it means.
        asked_at = time.monotonic()
        store, decision = await self._decide(identity.name, limits, id, tokens, streams)
        if decision.refused:
            self._remember(identity.name, decision, asked_at)
            raise _refused(decision, identity, tokens, streams)
        reservation = Reservation(id, identity.name, limits, tokens, store, decision)
        self._live[id] = reservation
        return reservation

    def settle(self, reservation: Reservation, used: int) -> None:
        """End a reservation, of which so many tokens were used, in the background."""
        if self._live.pop(reservation.id, None) is not None:
            task = asyncio.create_task(
                self._settle(reservation, used if reservation.used is None else reservation.used)
            )
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def _decide(
        self, tenant: str, limits: TenantLimits, id: str, tokens: int, streams: int
    ) -> tuple[LimitStore, Decision]:
        # While it is lost, one request in a while finds out whether it is back, and the others do not wait for that.
        if self._shared is not None and (not self._lost or time.monotonic() >= self._retry_at):
            try:
                decision = await self._shared.reserve(tenant, limits, id, tokens, streams)
            except (RedisError, OSError) as error:
                self._owe(id, _Owed(tenant, limits, tokens, cancel=True))
                self._note(lost=True, why=str(error))
            except asyncio.CancelledError:
                self._owe(id, _Owed(tenant, limits, tokens, cancel=True))
                raise
            else:
                self._note(lost=False)
                return self._shared, decision
        if self._lost and self._redis_lost == "refuse":
            raise overloaded("Limits cannot be checked now.")
        return self._local, await self._local.reserve(tenant, limits, id, tokens, streams)

    def _remember(self, tenant: str, decision: Decision, asked_at: float) -> None:
        if decision.refused == "requests" and decision.requests is not None:
            standing = decision.requests
            self._refusals[tenant] = _Refusal(
                standing.limit, asked_at + decision.retry_after_s, asked_at + standing.reset_s
            )

    async def _settle(self, reservation: Reservation, used: int) -> None:
        unused = reservation.tokens - used
        try:
            await reservation.store.settle(reservation.tenant, reservation.limits, reservation.id, unused)
        except (RedisError, OSError) as error:
            self._owe(reservation.id, _Owed(reservation.tenant, reservation.limits, unused, cancel=False))
            self._note(lost=True, why=str(error))

    def _owe(self, id: str, owed: _Owed) -> None:
        """Remember to settle a reservation when Redis is back. The oldest is given up when there are too many: its
        stream ends with its lease, and only a budget stays short of its tokens."""
        self._owed[id] = owed
        if len(self._owed) > _MOST_OWED:
            del self._owed[next(iter(self._owed))]

    async def _keep(self) -> None:
        """Renew leases, and settle what could not be settled while Redis was lost."""
        renewed_at = time.monotonic()
        while True:
            await asyncio.sleep(_RETRY_S)
            if self._shared is not None:
                await self._pay(self._shared)
            if time.monotonic() - renewed_at >= LEASE_S / 3:
                renewed_at = time.monotonic()
                await self._renew()

    async def _pay(self, shared: RedisLimits) -> None:
        while self._owed:
            id, owed = next(iter(self._owed.items()))
            # Both may be repeated, as when their answer was lost.
            end = shared.cancel if owed.cancel else shared.settle
            try:
                await end(owed.tenant, owed.limits, id, owed.unused)
            except (RedisError, OSError) as error:
                self._note(lost=True, why=str(error))
                return
            self._owed.pop(id, None)
            self._note(lost=False)

    async def _renew(self) -> None:
        by_tenant: dict[tuple[str, int], list[Reservation]] = {}
        for reservation in self._live.values():
            by_tenant.setdefault((reservation.tenant, id(reservation.store)), []).append(reservation)
        for (tenant, _), reservations in by_tenant.items():
            try:
                await reservations[0].store.renew(tenant, [reservation.id for reservation in reservations])
            except (RedisError, OSError) as error:
                self._note(lost=True, why=str(error))

    def _note(self, lost: bool, why: str = "") -> None:
        """Log it when Redis is lost and when it is back, not every time that it is asked."""
        self._retry_at = time.monotonic() + _RETRY_S
        if lost and not self._lost:
            instead = "limits are counted here alone" if self._redis_lost == "local" else "requests are refused"
            log.error("Redis is lost, %s: %s", instead, why, extra={"event": "redis_lost"})
        elif self._lost and not lost:
            log.info("Redis is back", extra={"event": "redis_back"})
        if self._lost != lost:
            self._refusals.clear()  # the other store has its own say
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
    """Return a time as OpenAI's headers have it: 17ms, 1s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, seconds = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
