"""Limits counted in Redis, which all gateways share."""

from typing import Any

from redis.asyncio import Redis

from .store import EVER, LEASE_S, MINUTE_US, SETTLED_WITHIN_S, Decision, TenantLimits, decision

# The algorithm is that of memory.py, on the clock of Redis. All keys of a tenant hash to one slot of a cluster.
#
# streams: the open reservations, by the end of their lease, which may be over. wide: the number of streams of each
# reservation that has more than one. A gateway of an older version knows only `streams`: it counts each reservation as
# one stream, and ends leases without touching `wide`. So an entry of `wide` counts only while its reservation is in
# `streams`.
# cancelled: reservations that must not be made any more, by the time at which the entry can be deleted.
_PREPARE = """
local limits, streams, wide, cancelled = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local rpm, tpm, max_streams = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local budget, period = tonumber(ARGV[4]), ARGV[5]
local minute = %(minute)d
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local kept = redis.call('HMGET', limits, 'requests', 'tokens', 'at', 'period', 'used')
local elapsed = math.max(now - tonumber(kept[3] or now), 0)
local requests = math.max(tonumber(kept[1] or 0) - elapsed * rpm, 0)
local tokens = math.max(tonumber(kept[2] or 0) - elapsed * tpm, 0)
local current, used = kept[4] or period, tonumber(kept[5] or 0)
for _, ended in ipairs(redis.call('ZRANGEBYSCORE', streams, '-inf', now - %(settled_within_s)d * 1000000)) do
  redis.call('ZREM', streams, ended)
  redis.call('HDEL', wide, ended)
end
local function settle(id, unused)
  redis.call('HDEL', wide, id)
  if redis.call('ZREM', streams, id) == 0 then return false end
  if tpm > 0 then tokens = math.max(tokens - unused * minute, 0) end
  if current == period then used = math.max(used - unused, 0) end
  return true
end
local function keep()
  local text = function(number) return string.format('%%.0f', number) end
  redis.call('HSET', limits, 'requests', text(requests), 'tokens', text(tokens), 'at', text(now), 'period', current,
             'used', text(used))
  if current == '%(ever)s' then
    redis.call('PERSIST', limits)
  else
    redis.call('EXPIRE', limits, %(keep_s)d)
  end
  redis.call('EXPIRE', streams, %(keep_s)d)
  redis.call('EXPIRE', wide, %(keep_s)d)
end
"""
_RESERVE = """
local asked, id, lease, wanted = tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9])
local function open_now()
  local count = redis.call('ZCOUNT', streams, '(' .. string.format('%.0f', now), '+inf')
  local several = redis.call('HGETALL', wide)
  for index = 1, #several, 2 do
    local lease_end = redis.call('ZSCORE', streams, several[index])
    if not lease_end then
      redis.call('HDEL', wide, several[index])
    elseif tonumber(lease_end) > now then
      count = count + several[index + 1] - 1
    end
  end
  return count
end
local code, wait = 0, 0
if current ~= period then current, used = period, 0 end
if redis.call('ZSCORE', streams, id) or redis.call('ZSCORE', cancelled, id) then
  code = 0
elseif tpm > 0 and asked > tpm then
  code = 5
elseif max_streams > 0 and wanted > max_streams then
  code = 6
elseif budget >= 0 and used + asked > budget then
  code = 4
elseif max_streams > 0 and open_now() + wanted > max_streams then
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
  if wanted > 1 then redis.call('HSET', wide, id, wanted) end
end
keep()
return {code, wait, requests, tokens}
"""
_SETTLE = """
settle(ARGV[7], tonumber(ARGV[6]))
keep()
"""
_CANCEL = """
redis.call('ZREMRANGEBYSCORE', cancelled, '-inf', now)
if not settle(ARGV[7], tonumber(ARGV[6])) then
  redis.call('ZADD', cancelled, now + %(late_s)d * 1000000, ARGV[7])
  redis.call('EXPIRE', cancelled, %(late_s)d)
end
keep()
"""
_RENEW = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
for index = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', now + ARGV[1], ARGV[index]) end
"""
_KEEP_S = 40 * 86_400  # longer than the longest budget period
_LATE_S = 600  # longer than a network keeps delivering a command whose sender has given up

# A request waits this long for Redis. After that, Redis counts as lost, and the setting redis_lost applies.
_TIMEOUT_S = 0.5


def connect(url: str) -> "Redis":
    """Return a client whose calls fail after _TIMEOUT_S."""
    return Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)


class RedisLimits:
    """A LimitStore. Its calls raise redis.RedisError when Redis cannot be reached."""

    def __init__(self, redis: "Redis") -> None:
        values = {"minute": MINUTE_US, "keep_s": _KEEP_S, "ever": EVER, "settled_within_s": SETTLED_WITHIN_S}
        prepare = _PREPARE % values
        self._redis = redis
        self._reserve = redis.register_script(prepare + _RESERVE)
        self._settle = redis.register_script(prepare + _SETTLE)
        self._cancel = redis.register_script(prepare + _CANCEL % {"late_s": _LATE_S})
        self._renew = redis.register_script(_RENEW)

    async def reserve(
        self, tenant: str, limits: TenantLimits, reservation: str, tokens: int, streams: int = 1
    ) -> Decision:
        given = [*_arguments(limits), tokens, reservation, int(LEASE_S * 1e6), streams]
        return decision(limits, *await self._reserve(_keys(tenant), given))

    async def settle(self, tenant: str, limits: TenantLimits, reservation: str, unused: int) -> None:
        await self._settle(_keys(tenant), [*_arguments(limits), unused, reservation])

    async def cancel(self, tenant: str, limits: TenantLimits, reservation: str, tokens: int) -> None:
        """Give back the streams and tokens of a reservation whose outcome never became known.

        Redis may have made the reservation. If its command has yet to arrive there, Redis will not make it. The request
        still counts towards the requests per minute. This may be called again.
        """
        await self._cancel(_keys(tenant), [*_arguments(limits), tokens, reservation])

    async def renew(self, tenant: str, reservations: list[str]) -> None:
        if reservations:
            await self._renew([_keys(tenant)[1]], [int(LEASE_S * 1e6), *reservations])

    async def close(self) -> None:
        await self._redis.aclose()


def _keys(tenant: str) -> list[str]:
    return [f"baton:{{{tenant}}}:{name}" for name in ("limits", "streams", "wide", "cancelled")]


def _arguments(limits: TenantLimits) -> list[Any]:
    budget = -1 if limits.budget is None else limits.budget
    return [limits.requests_per_minute, limits.tokens_per_minute, limits.max_streams, budget, limits.period]
