"""Limits of a tenant, and what a store of their use answers.

Requests and tokens leak from a bucket each (the generic cell rate algorithm of the ATM Forum's Traffic Management 4.0,
in its leaky-bucket form), as much in a minute as the limit, which is also what the bucket holds. Time is counted in
microseconds and one request, or token, as MINUTE_US: all stores compute with whole numbers and agree to the last one.
"""

from typing import Literal, Protocol

import msgspec

MINUTE_US = 60_000_000
# Beyond this the products would not be exact in Redis, whose numbers are doubles.
MOST_PER_MINUTE = 100_000_000

# The period of a budget that never begins anew: what was used of it is kept for good.
EVER = "ever"

# too_large, too_many: a request that alone is more than the limit on tokens, or on streams.
Refusal = Literal["requests", "tokens", "streams", "budget", "too_large", "too_many"]
REFUSALS: tuple[Refusal, ...] = ("requests", "tokens", "streams", "budget", "too_large", "too_many")


class TenantLimits(msgspec.Struct, frozen=True):
    """What a tenant may use; 0 = any amount.

    max_streams: sequences that are generated at the same time; a request has one for each prompt and choice.
    budget: tokens in a period, which is named so that the next one is another; None = any amount.
    """

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_streams: int = 0
    budget: int | None = None
    period: str = ""


class Standing(msgspec.Struct, frozen=True):
    """Of one limit: what is left of it now, and in how many seconds all of it will be."""

    limit: int
    remaining: int
    reset_s: float


class Decision(msgspec.Struct, frozen=True):
    """refused: which limit does not allow a request, None if it was reserved. retry_after_s: when it may, if nothing
    else comes; 0 = never."""

    refused: Refusal | None
    retry_after_s: float
    requests: Standing | None
    tokens: Standing | None


class LimitStore(Protocol):
    """Counts what tenants use. Every call is one step that no other call comes between."""

    async def reserve(
        self, tenant: str, limits: TenantLimits, reservation: str, tokens: int, streams: int = 1
    ) -> Decision:
        """Take one request, so many streams and so many tokens, or nothing at all.

        A reservation that is open already is granted again and takes nothing, so that a call may be repeated.
        """

    async def settle(self, tenant: str, limits: TenantLimits, reservation: str, unused: int) -> None:
        """End a reservation and give back what was not used of its tokens; a negative number takes more. Once: later
        calls change nothing."""

    async def renew(self, tenant: str, reservations: list[str]) -> None:
        """Keep the streams of reservations open, which otherwise end when their gateway is silent for LEASE_S."""

    async def close(self) -> None: ...


LEASE_S = 60.0


def decision(limits: TenantLimits, code: int, wait_us: int, requests_held: int, tokens_held: int) -> Decision:
    """code: 0, or the number of the refusal among REFUSALS, from 1. held: what is in the buckets, in their units."""
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
