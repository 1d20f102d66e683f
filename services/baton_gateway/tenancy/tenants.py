"""Reads tenants and their keys from a file or a mounted Secret, and further keys from Redis."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from ..concurrency.background import keep_running, stop_running
from .keys import Key, digest, key_id, utc_now
from .limits.store import EVER, MOST_PER_MINUTE, TenantLimits
from .redis_keys import RedisKeys

log = logging.getLogger(__name__)

DEFAULT_TENANT = "default"
_POLL_S = 0.5

_PerMinute = Annotated[int, msgspec.Meta(ge=0, le=MOST_PER_MINUTE)]


class Tenant(msgspec.Struct, forbid_unknown_fields=True):
    """A tenant's limits; 0 = no limit. max_streams: sequences at the same time. weight: its share of turns in queues.

    priority: lower is more urgent. models: empty = all. cache_group: tenants of one group share prefix
    caches, so each can find out which prompts the others have sent; empty = this tenant shares with no other.
    """

    requests_per_minute: _PerMinute = 0
    tokens_per_minute: _PerMinute = 0
    max_streams: Annotated[int, msgspec.Meta(ge=0)] = 0
    budget_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None
    budget_period: Literal["day", "month", "ever"] = "month"
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = 0
    models: list[str] = []
    cache_group: str = ""

    def limits(self, now: datetime) -> TenantLimits:
        periods = {"day": f"{now:%Y-%m-%d}", "month": f"{now:%Y-%m}", "ever": EVER}
        return TenantLimits(
            self.requests_per_minute,
            self.tokens_per_minute,
            self.max_streams,
            self.budget_tokens,
            periods[self.budget_period],
        )


class TenantsFile(msgspec.Struct, forbid_unknown_fields=True):
    """The content of the tenants file, which is YAML or JSON."""

    tenants: dict[str, Tenant] = {}
    keys: list[Key] = []


class TenantsError(ValueError):
    """The tenants file cannot be used; the message names the place and the reason."""


def read_tenants(path: Path) -> TenantsFile:
    """Read a tenants file. Raises TenantsError."""
    try:
        # Decoding and converting are two steps, because times are strings in JSON but may be timestamps in YAML.
        content = msgspec.convert(msgspec.yaml.decode(path.read_bytes()) or {}, TenantsFile)
    except OSError as error:
        raise TenantsError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise TenantsError(f"{path}: {error}") from None
    for key in content.keys:
        if key.tenant not in content.tenants:
            raise TenantsError(f"{path}: key {key.id} belongs to tenant {key.tenant!r}, which the file does not define")
    return content


def known_tenants(file: TenantsFile | None) -> Mapping[str, Tenant]:
    """Return the tenants that keys may belong to: those of the file, or only "default" without a file."""
    return file.tenants if file is not None else {DEFAULT_TENANT: Tenant()}


class Identity(msgspec.Struct, frozen=True):
    """The tenant of a request. models: those it may use; empty = all. key: the key's public id; None if static."""

    name: str
    tenant: Tenant
    models: tuple[str, ...] = ()
    key: str | None = None

    def may_use(self, model: str) -> bool:
        return not self.models or model in self.models


class Tenants:
    """Authenticates keys. Once started, it applies changes of the file and of Redis within a second."""

    def __init__(self, path: Path | None, static_keys: Sequence[str] = (), redis: "Redis | None" = None) -> None:
        """static_keys: keys of the tenant "default", which need no entry in the file. Raises TenantsError."""
        self._path = path
        self._redis_keys = RedisKeys(redis) if redis is not None else None
        self.redis_up: bool | None = None if redis is None else True
        self._file: TenantsFile | None = None
        self._signature: tuple[int, ...] | None = None
        self._static = [Key("", digest(key), DEFAULT_TENANT) for key in static_keys]
        self._keys: dict[str, Key] = {}
        self._current_at = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        if path is not None:
            self._signature = _signature(path)
            self._file = read_tenants(path)
            self._index(self._file)

    @property
    def open(self) -> bool:
        """Whether requests need no key, because no source of keys is configured."""
        return not (self._static or self._path or self._redis_keys is not None)

    @property
    def complete(self) -> bool:
        """Whether all keys have been read once, so that a key that is not found is invalid."""
        return self._redis_keys is None or self._redis_keys.read

    @property
    def age_s(self) -> float:
        """Seconds since the sources were last read or found unchanged. A key revoked since may still be accepted."""
        return time.monotonic() - self._current_at

    @property
    def unusable_keys(self) -> int | None:
        """Entries in Redis that cannot be used as keys; None without Redis."""
        return None if self._redis_keys is None else self._redis_keys.unusable

    @property
    def known(self) -> Mapping[str, Tenant]:
        """The tenants of the file, by name."""
        return self._file.tenants if self._file is not None else {}

    def anyone(self) -> Identity:
        """Return the identity of requests without a key, if none is needed, and of static keys."""
        return Identity(DEFAULT_TENANT, self.known.get(DEFAULT_TENANT) or Tenant())

    def identify(self, text: str) -> Identity | None:
        """Return the identity of a key; None if the key is invalid."""
        # Every static key is compared, so that the time taken reveals nothing about them.
        matches = [key.fits(text) for key in self._static]
        if any(matches):
            return self.anyone()
        id = key_id(text)
        key = self._find(id) if id else None
        if key is None or not key.fits(text) or key.expired(utc_now()):
            return None
        tenant = known_tenants(self._file).get(key.tenant)
        if tenant is None:
            # The tenant was removed from the file, so its limits and models are unknown.
            return None
        models = [model for model in key.models or tenant.models if not tenant.models or model in tenant.models]
        if key.models and not models:
            return None
        return Identity(key.tenant, tenant, tuple(models), key.id)

    def start(self) -> None:
        self._task = keep_running("tenants", self._follow)

    async def stop(self) -> None:
        if self._task is not None:
            await stop_running(self._task)

    def _find(self, id: str) -> Key | None:
        return self._keys.get(id) or (self._redis_keys.get(id) if self._redis_keys is not None else None)

    def _index(self, file: TenantsFile) -> None:
        self._keys = {key.id: key for key in file.keys}

    async def _follow(self) -> None:
        while True:
            if self._path is not None:
                await self._reload(self._path)
            if self._redis_keys is None or await self._follow_redis(self._redis_keys):
                self._current_at = time.monotonic()
            await asyncio.sleep(_POLL_S)

    async def _follow_redis(self, keys: RedisKeys) -> bool:
        """Read the keys in Redis. Return whether Redis answered."""
        try:
            await keys.follow()
        except (RedisError, OSError) as error:
            if self.redis_up:
                log.warning("keys cannot be read from Redis: %s", error, extra={"event": "redis_lost"})
            self.redis_up = False
            return False
        self.redis_up = True
        return True

    async def _reload(self, path: Path) -> None:
        """Read the file again if it has changed. Keep the current tenants if the new file cannot be used."""
        signature = _signature(path)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            # In a thread, because a file of thousands of keys takes a third of a second.
            self._file = await asyncio.to_thread(read_tenants, path)
        except TenantsError as error:
            log.error(
                "the new tenants file is not used, the tenants stay as they were: %s",
                error,
                extra={"event": "tenants_refused"},
            )
            return
        self._index(self._file)
        log.info("tenants read", extra={"event": "tenants_read", "tenants": len(self._file.tenants)})


def _signature(path: Path) -> tuple[int, ...] | None:
    """Return inode, time and size of the file, with links resolved; they change when it is replaced or written."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
