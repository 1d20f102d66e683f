"""The stores in which `baton keys` keeps keys: a file of tenants, or Redis."""

import os
from abc import ABC, abstractmethod
from pathlib import Path

import msgspec
from redis import Redis

from .keys import Key
from .redis_keys import KEYS_AT_A_TIME, REDIS_KEYS, read_key
from .tenants import TenantsError, TenantsFile, known_tenants, read_tenants


class KeyBook(ABC):
    """A store of keys. Running gateways apply a change within a second after their file system or Redis shows it."""

    @abstractmethod
    def all(self) -> list[Key]: ...

    @abstractmethod
    def put(self, key: Key) -> None:
        """Add a key, or replace the key with the same id. Raises TenantsError."""

    @abstractmethod
    def remove(self, id: str) -> bool:
        """Delete a key; return whether it existed."""


class FileKeys(KeyBook):
    """Keys in a file of tenants. Each change rewrites the file, and its comments are lost."""

    def __init__(self, path: Path) -> None:
        """Raises TenantsError."""
        self._path = path
        self._file = read_tenants(path) if path.exists() else TenantsFile()

    def all(self) -> list[Key]:
        return self._file.keys

    def put(self, key: Key) -> None:
        if key.tenant not in self._file.tenants:
            raise TenantsError(f"{self._path} has no tenant {key.tenant!r}: add it there first")
        self._file.keys = [*(other for other in self._file.keys if other.id != key.id), key]
        self._write()

    def remove(self, id: str) -> bool:
        kept = [key for key in self._file.keys if key.id != id]
        found = len(kept) < len(self._file.keys)
        self._file.keys = kept
        if found:
            self._write()
        return found

    def _write(self) -> None:
        # The file is replaced as a whole, so that no reader sees a part of it, and keeps its permissions.
        other = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        mode = self._path.stat().st_mode & 0o777 if self._path.exists() else 0o600
        with os.fdopen(os.open(other, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(msgspec.yaml.encode(self._file))
        other.replace(self._path)


class RedisKeys(KeyBook):
    """Keys in Redis. Their tenants are defined in the gateways' file."""

    def __init__(self, redis: "Redis", tenants: Path | None = None) -> None:
        """tenants: the file of tenants that the gateways have; None when they have none. Raises TenantsError."""
        self._redis = redis
        self._tenants = known_tenants(read_tenants(tenants) if tenants is not None else None)
        self._path = tenants

    def all(self) -> list[Key]:
        """Return the usable keys. Like the gateways, this ignores entries that cannot be read."""
        kept = self._redis.hscan_iter(REDIS_KEYS, count=KEYS_AT_A_TIME)
        return [key for id, value in kept if (key := read_key(id, value)) is not None]

    def put(self, key: Key) -> None:
        if key.tenant not in self._tenants:
            if self._path is not None:
                raise TenantsError(f"{self._path} has no tenant {key.tenant!r}: add it there first")
            raise TenantsError(
                f"cannot check whether there is a tenant {key.tenant!r}, and gateways refuse keys of unknown tenants: "
                f"name the gateways' file of tenants with --file"
            )
        with self._redis.pipeline() as pipeline:
            pipeline.hset(REDIS_KEYS, key.id, msgspec.json.encode(key))
            pipeline.incr(f"{REDIS_KEYS}:version")
            pipeline.execute()

    def remove(self, id: str) -> bool:
        with self._redis.pipeline() as pipeline:
            pipeline.hdel(REDIS_KEYS, id)
            pipeline.incr(f"{REDIS_KEYS}:version")
            removed, _ = pipeline.execute()
        return bool(removed)
