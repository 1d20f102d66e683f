"""Limits counted in Redis, so that several gateways hold them together."""

from typing import Any

from redis.asyncio import Redis

from .store import LEASE_S, MINUTE_US, Decision, Limits, decision

# What memory.py does, on the clock of Redis. A tenant's two keys hash to one slot of a cluster.
_PREPARE = """
local limits, streams = KEYS[1], KEYS[2]
local rpm, tpm, most = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local budget, period = tonumber(ARGV[4]), ARGV[5]
local minute = %(minute)d
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local kept = redis.call('HMGET', limits, 'requests', 'tokens', 'at', 'period', 'used')
local elapsed = math.max(now - tonumber(kept[3] or now), 0)
local requests = math.max(tonumber(kept[1] or 0) - elapsed * rpm, 0)
local tokens = math.max(tonumber(kept[2] or 0) - elapsed * tpm, 0)
local used = 0
if kept[4] == period then used = tonumber(kept[5]) end
redis.call('ZREMRANGEBYSCORE', streams, '-inf', now)
local function keep()
  local text = function(number) return string.format('%%.0f', number) end
  redis.call('HSET', limits, 'requests', text(requests), 'tokens', text(tokens), 'at', text(now), 'period', period,
             'used', text(used))
  redis.call('EXPIRE', limits, %(keep_s)d)
  redis.call('EXPIRE', streams, %(keep_s)d)
end
"""
_RESERVE = """
local asked, id, lease = tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local code, wait = 0, 0
if tpm > 0 and asked > tpm then
  code = 5
elseif budget >= 0 and used + asked > budget then
  code = 4
elseif most > 0 and redis.call('ZCARD', streams) >= most then
  code, wait = 3, 1000000
elseif rpm > 0 and requests + minute > rpm * minute then
  code, wait = 1, math.ceil((requests + minute - rpm * minute) / rpm)
elseif tpm > 0 and tokens + asked * minute > tpm * minute then
  code, wait = 2, math.ceil((tokens + asked * minute - tpm * minute) / tpm)
else
  if rpm > 0 then requests = requests + minute end
  if tpm > 0 then tokens = tokens + asked * minute end
  used = used + asked
  redis.call('ZADD', streams, now + lease, id)
end
keep()
return {code, wait, requests, tokens}
"""
_SETTLE = """
if redis.call('ZREM', streams, ARGV[7]) == 1 then
  local unused = tonumber(ARGV[6])
  if tpm > 0 then tokens = math.max(tokens - unused * minute, 0) end
  used = math.max(used - unused, 0)
end
keep()
"""
_RENEW = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
for index = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', now + ARGV[1], ARGV[index]) end
"""
# Longer than a month. A budget without a period starts over when its tenant has asked for nothing for this long.
_KEEP_S = 40 * 86_400


# A request waits no longer for Redis; what comes after that is the setting for its loss.
_TIMEOUT_S = 0.5


def connect(url: str) -> "Redis":
    """Return a client that gives up soon."""
    return Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)


class RedisLimits:
    """A LimitStore. Its calls raise redis.RedisError when Redis cannot be reached."""

    def __init__(self, redis: "Redis") -> None:
        prepare = _PREPARE % {"minute": MINUTE_US, "keep_s": _KEEP_S}
        self._redis = redis
        self._reserve = redis.register_script(prepare + _RESERVE)
        self._settle = redis.register_script(prepare + _SETTLE)
        self._renew = redis.register_script(_RENEW)

    async def reserve(self, tenant: str, limits: Limits, reservation: str, tokens: int) -> Decision:
        given = [*_arguments(limits), tokens, reservation, int(LEASE_S * 1e6)]
        return decision(limits, *await self._reserve(_keys(tenant), given))

    async def settle(self, tenant: str, limits: Limits, reservation: str, unused: int) -> None:
        await self._settle(_keys(tenant), [*_arguments(limits), unused, reservation])

    async def renew(self, tenant: str, reservations: list[str]) -> None:
        if reservations:
            await self._renew([_keys(tenant)[1]], [int(LEASE_S * 1e6), *reservations])

    async def close(self) -> None:
        await self._redis.aclose()


def _keys(tenant: str) -> list[str]:
    return [f"baton:{{{tenant}}}:limits", f"baton:{{{tenant}}}:streams"]


def _arguments(limits: Limits) -> list[Any]:
    budget = -1 if limits.budget is None else limits.budget
    return [limits.requests_per_minute, limits.tokens_per_minute, limits.max_streams, budget, limits.period]
