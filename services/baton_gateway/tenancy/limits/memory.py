"""Limits counted in this process: for a single gateway, or while Redis is lost."""

import time
from collections.abc import Callable

import msgspec

from .store import LEASE_S, MINUTE_US, SETTLED_WITHIN_S, Decision, TenantLimits, decision


class _Bucket(msgspec.Struct):
    held: int = 0
    at: int = 0

    def leak(self, rate: int, now: int) -> None:
        # If the clock was set back, nothing leaks in this step.
        self.held = max(self.held - max(now - self.at, 0) * rate, 0)
        self.at = now


class _Lease(msgspec.Struct):
    """The lease of the streams of one reservation."""

    end: int  # in microseconds; each renewal moves it
    streams: int


class _Use(msgspec.Struct):
    """The usage of one tenant."""

    requests: _Bucket = msgspec.field(default_factory=_Bucket)
    tokens: _Bucket = msgspec.field(default_factory=_Bucket)
    open: dict[str, _Lease] = {}  # by reservation, including leases that have ended
    period: str = ""  # of the last reservation
    used: int = 0  # tokens in the period


class MemoryLimits:
    """A LimitStore in this process."""

    def __init__(self, clock: Callable[[], int] = lambda: time.time_ns() // 1000) -> None:
        """clock: microseconds."""
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    async def reserve(
        self, tenant: str, limits: TenantLimits, reservation: str, tokens: int, streams: int = 1
    ) -> Decision:
        use, now = self._leaked(tenant, limits)
        requests_held, tokens_held = use.requests.held, use.tokens.held
        rpm, tpm = limits.requests_per_minute, limits.tokens_per_minute
        max_streams, code, wait = limits.max_streams, 0, 0
        if use.period != limits.period:
            use.period, use.used = limits.period, 0
        if reservation in use.open:
            pass
        elif tpm and tokens > tpm:
            code = 5
        elif max_streams and streams > max_streams:
            code = 6
        elif limits.budget is not None and use.used + tokens > limits.budget:
            code = 4
        elif max_streams and streams + sum(each.streams for each in use.open.values() if each.end > now) > max_streams:
            code, wait = 3, 1_000_000
        elif rpm and requests_held + MINUTE_US > rpm * MINUTE_US:
            code, wait = 1, -(-(requests_held + MINUTE_US - rpm * MINUTE_US) // rpm)
        elif tpm and tokens_held + tokens * MINUTE_US > tpm * MINUTE_US:
            code, wait = 2, -(-(tokens_held + tokens * MINUTE_US - tpm * MINUTE_US) // tpm)
        else:
            use.requests.held += MINUTE_US if rpm else 0
            use.tokens.held += tokens * MINUTE_US if tpm else 0
            use.used += tokens
            use.open[reservation] = _Lease(now + int(LEASE_S * 1e6), streams)
        return decision(limits, code, wait, use.requests.held, use.tokens.held)

    async def settle(self, tenant: str, limits: TenantLimits, reservation: str, unused: int) -> None:
        use, _ = self._leaked(tenant, limits)
        if use.open.pop(reservation, None) is None:
            return
        if limits.tokens_per_minute:
            use.tokens.held = max(use.tokens.held - unused * MINUTE_US, 0)
        if use.period == limits.period:
            use.used = max(use.used - unused, 0)

    async def renew(self, tenant: str, reservations: list[str]) -> None:
        use = self._uses.get(tenant)
        for reservation in reservations:
            if use is not None and reservation in use.open:
                use.open[reservation].end = self._clock() + int(LEASE_S * 1e6)

    async def close(self) -> None:
        self._uses.clear()

    def _leaked(self, tenant: str, limits: TenantLimits) -> tuple[_Use, int]:
        """Return the usage of a tenant after leaking, and the time now."""
        use, now = self._uses.setdefault(tenant, _Use()), self._clock()
        use.requests.leak(limits.requests_per_minute, now)
        use.tokens.leak(limits.tokens_per_minute, now)
        forgotten = now - int(SETTLED_WITHIN_S * 1e6)
        for reservation in [reservation for reservation, lease in use.open.items() if lease.end <= forgotten]:
            del use.open[reservation]
        return use, now
