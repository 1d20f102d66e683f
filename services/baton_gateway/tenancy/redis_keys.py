"""Reads the keys that `baton keys` has put into Redis."""

import logging

import msgspec
from redis.asyncio import Redis

from .keys import Key

log = logging.getLogger(__name__)

REDIS_KEYS = "baton:keys"
KEYS_AT_A_TIME = 1000
_MOST_BYTES = 16_384  # of one entry
_UNREAD = object()


def read_key(id: bytes, value: bytes) -> Key | None:
    """Read an entry; None if it is no usable key. Anybody with access to Redis may have written it."""
    if len(value) > _MOST_BYTES:
        return None
    try:
        key = msgspec.json.decode(value, type=Key)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    # A key that is stored under the id of another key would replace that one.
    return key if key.id.encode() == id else None


class RedisKeys:
    """The keys of all tenants by their public part, as of the last read of Redis."""

    def __init__(self, redis: "Redis") -> None:
        self._redis = redis
        self._version: object = _UNREAD
        self._keys: dict[str, Key] = {}
        self.unusable = 0  # entries that are left out

    @property
    def read(self) -> bool:
        """Whether Redis has been read at all."""
        return self._version is not _UNREAD

    def get(self, id: str) -> Key | None:
        return self._keys.get(id)

    async def follow(self) -> None:
        """Read the keys if they have changed. Raises redis.RedisError; the keys then stay as they were."""
        version = await self._redis.get(f"{REDIS_KEYS}:version")
        if version == self._version:
            return
        found: dict[str, Key] = {}
        unusable: set[bytes] = set()
        # The keys are read in parts, so that neither Redis nor this event loop is blocked for long.
        async for id, value in self._redis.hscan_iter(REDIS_KEYS, count=KEYS_AT_A_TIME):
            key = read_key(id, value)
            if key is None:
                unusable.add(id)
            else:
                found[key.id] = key
        self._keys, self._version, self.unusable = found, version, len(unusable)
        if unusable:
            log.error(
                "entries of baton:keys in Redis cannot be used as keys",
                extra={"event": "keys_unusable", "entries": len(unusable)},
            )
