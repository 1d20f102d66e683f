"""Where `baton keys` writes what is kept of keys: a file of tenants, or Redis."""

import os
from abc import ABC, abstractmethod
from pathlib import Path

import msgspec
from redis import Redis

from .keys import Key
from .tenants import REDIS_KEYS, TenantsError, TenantsFile, read_tenants


class KeyBook(ABC):
    """Each call is seen by running gateways within a second, if their file system shows it to them by then."""

    @abstractmethod
    def all(self) -> list[Key]: ...

    @abstractmethod
    def put(self, key: Key) -> None:
        """Add a key, or replace the one of its id. Raises TenantsError."""

    @abstractmethod
    def remove(self, id: str) -> bool:
        """Forget a key; return whether there was one."""


class FileKeys(KeyBook):
    """Keys in a file of tenants, which is written anew; comments in it are lost."""

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
        # Whole or not at all, and readable by nobody who could not read it before.
        other = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        mode = self._path.stat().st_mode & 0o777 if self._path.exists() else 0o600
        with os.fdopen(os.open(other, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(msgspec.yaml.encode(self._file))
        other.replace(self._path)


class RedisKeys(KeyBook):
    def __init__(self, redis: "Redis") -> None:
        self._redis = redis

    def all(self) -> list[Key]:
        kept: dict[bytes, bytes] = self._redis.hgetall(REDIS_KEYS)  # type: ignore[assignment]
        return [msgspec.json.decode(value, type=Key) for value in kept.values()]

    def put(self, key: Key) -> None:
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
