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

from .errors import ApiError, overloaded
from .keys import utc_now
from .limits.memory import MemoryLimits
from .limits.store import LEASE_S, Decision, Limits, LimitStore, Standing
from .protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from .tenants import Identity

log = logging.getLogger(__name__)

# What a token is, in bytes of text, before it is known: what is left over is given back.
_BYTES_PER_TOKEN = 4
_MESSAGE_TOKENS = 4  # around each message
_OUTPUT_TOKENS = 1024  # of a chat that asks for no number
_COMPLETION_TOKENS = 16  # of a completion that asks for none, as OpenAI has it
_RETRY_S = 1.0

RedisLost = Literal["local", "refuse"]


class Reservation(msgspec.Struct):
    """Of one request."""

    id: str
    tenant: str
    limits: Limits
    tokens: int
    store: LimitStore
    decision: Decision

    def headers(self) -> list[tuple[bytes, bytes]]:
        return limit_headers(self.decision)


class Quota:
    """Reserves in a store that gateways share, or in this process when there is none or it is lost."""

    def __init__(self, shared: LimitStore | None, redis_lost: RedisLost = "local") -> None:
        """redis_lost: count here alone meanwhile, or refuse all requests."""
        self._shared = shared
        self._redis_lost = redis_lost
        self._local = MemoryLimits()
        self._lost = False
        self._retry_at = 0.0  # when a lost Redis is asked again
        self._live: dict[str, Reservation] = {}
        self._settling: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._renew())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*self._settling)
        if self._shared is not None:
            await self._shared.close()

    def in_flight(self) -> Counter[str]:
        """Return the number of requests being answered, by tenant."""
        return Counter(reservation.tenant for reservation in self._live.values())

    async def reserve(self, identity: Identity, tokens: int) -> Reservation:
        """Raises ApiError 429 when a limit does not allow it, 503 when nobody can say."""
        limits, id = identity.tenant.limits(utc_now()), uuid.uuid4().hex
        store, decision = await self._decide(identity.name, limits, id, tokens)
        if decision.refused:
            raise _refused(decision, identity, tokens)
        reservation = Reservation(id, identity.name, limits, tokens, store, decision)
        self._live[id] = reservation
        return reservation

    def settle(self, reservation: Reservation, used: int) -> None:
        """End a reservation, of which so many tokens were used, in the background."""
        if self._live.pop(reservation.id, None) is not None:
            task = asyncio.create_task(self._settle(reservation, used))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def _decide(self, tenant: str, limits: Limits, id: str, tokens: int) -> tuple[LimitStore, Decision]:
        # While it is lost, one request in a while finds out whether it is back, and the others do not wait for that.
        if self._shared is not None and (not self._lost or time.monotonic() >= self._retry_at):
            try:
                decision = await self._shared.reserve(tenant, limits, id, tokens)
            except (RedisError, OSError) as error:
                self._note(lost=True, why=str(error))
            else:
                self._note(lost=False)
                return self._shared, decision
        if self._lost and self._redis_lost == "refuse":
            raise overloaded("Limits cannot be checked now.")
        return self._local, await self._local.reserve(tenant, limits, id, tokens)

    async def _settle(self, reservation: Reservation, used: int) -> None:
        try:
            await reservation.store.settle(
                reservation.tenant, reservation.limits, reservation.id, reservation.tokens - used
            )
        except (RedisError, OSError) as error:
            # What was reserved leaks away by itself; only a budget stays short of it.
            self._note(lost=True, why=str(error))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
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
        self._lost = lost


def expected_tokens(body: GenerationRequest) -> int:
    """Return how many tokens a request may need, prompt and output, as far as that can be told before tokenizing."""
    if isinstance(body, CompletionRequest):
        sizes = [_text_tokens(prompt) if isinstance(prompt, str) else len(prompt) for prompt in body.prompt]
        output = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        return sum(sizes) + output * body.choices * len(sizes)
    assert isinstance(body, ChatCompletionRequest)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    prompt = sum(_text_tokens(message.content or "") + _MESSAGE_TOKENS for message in body.messages)
    return prompt + (_OUTPUT_TOKENS if asked is None else asked) * body.choices


def _text_tokens(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN + 1


def _refused(decision: Decision, identity: Identity, tokens: int) -> ApiError:
    tenant = identity.tenant
    texts = {
        "requests": f"Rate limit reached: {tenant.requests_per_minute} requests per minute.",
        "tokens": f"Rate limit reached: {tenant.tokens_per_minute} tokens per minute; {tokens} were asked for.",
        "streams": f"Rate limit reached: {tenant.max_streams} requests at the same time.",
        "budget": f"The budget of {tenant.budget_tokens} tokens per {tenant.budget_period} is used up.",
        "too_large": f"{tokens} tokens are more than the limit of {tenant.tokens_per_minute} per minute.",
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
