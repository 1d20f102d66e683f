"""The limits of a tenant, and the interface of the stores that count its usage.

Requests and tokens have a leaky bucket each (the generic cell rate algorithm of the ATM Forum's Traffic Management
4.0). A bucket holds one minute's limit and leaks this amount in a minute. Time is counted in microseconds, and one
request or token as MINUTE_US, so that all stores compute with whole numbers and get exactly the same results.
"""

from typing import Literal, Protocol

import msgspec

MINUTE_US = 60_000_000
# Beyond this the products would not be exact in Redis, whose numbers are doubles.
MOST_PER_MINUTE = 100_000_000

# The period of a budget that is never reset. Its usage is kept for ever.
EVER = "ever"

# too_large, too_many: the request alone exceeds the limit of tokens, or of streams.
Refusal = Literal["requests", "tokens", "streams", "budget", "too_large", "too_many"]
REFUSALS: tuple[Refusal, ...] = ("requests", "tokens", "streams", "budget", "too_large", "too_many")


class TenantLimits(msgspec.Struct, frozen=True):
    """The limits of a tenant; 0 = no limit.

    max_streams: sequences that are generated at the same time; a request has one for each prompt and choice.
    budget: tokens in a period; None = no limit. period: its name; a new name resets the usage.
    """

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_streams: int = 0
    budget: int | None = None
    period: str = ""


class Standing(msgspec.Struct, frozen=True):
    """The state of one limit. remaining: usable now. reset_s: seconds until the whole limit is usable again."""

    limit: int
    remaining: int
    reset_s: float


class Decision(msgspec.Struct, frozen=True):
    """The answer to a reservation.

    refused: the limit that does not allow it; None if it was made. retry_after_s: time after which it would be allowed
    if no other request came; 0 = never.
    """

    refused: Refusal | None
    retry_after_s: float
    requests: Standing | None
    tokens: Standing | None


class LimitStore(Protocol):
    """Counts the usage of tenants. Every call is atomic."""

    async def reserve(
        self, tenant: str, limits: TenantLimits, reservation: str, tokens: int, streams: int = 1
    ) -> Decision:
        """Reserve one request, its streams and its tokens, or nothing at all.

        A reservation that is open already is granted again and reserves nothing, so that a call may be repeated.
        """

    async def settle(self, tenant: str, limits: TenantLimits, reservation: str, unused: int) -> None:
        """End a reservation and give back its unused tokens; a negative number takes more.

        limits: those of the call that reserved. If another period has begun since then, its budget does not change.
        Later calls for the same reservation change nothing.
        """

    async def renew(self, tenant: str, reservations: list[str]) -> None:
        """Count the streams of reservations. They do not count while their gateway has not renewed them for LEASE_S.

        A gateway may have lost the store for longer than that, so such a reservation can be renewed or settled later.
        """

    async def close(self) -> None: ...


LEASE_S = 60.0
SETTLED_WITHIN_S = 86_400  # after the end of its lease, since no request runs for longer


def decision(limits: TenantLimits, code: int, wait_us: int, requests_held: int, tokens_held: int) -> Decision:
    """code: 0, or the number of the refusal in REFUSALS, from 1. *_held: the content of the buckets, in their units."""
    return Decision(
        REFUSALS[code - 1] if code else None,
        wait_us / 1e6,
        _standing(limits.requests_per_minute, requests_held),
        _standing(limits.tokens_per_minute, tokens_held),
    )


def _standing(limit: int, held: int) -> Standing | None:
    if not limit:
        return None
    return Standing(limit, max((limit * MINUTE_US - held) // MINUTE_US, 0), held / limit / 1e6)
