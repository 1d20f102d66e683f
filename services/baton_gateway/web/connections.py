"""The connections of clients, whose number is bounded."""

import logging
import resource
import time
from typing import Protocol

log = logging.getLogger(__name__)

# An idle connection takes some 20 KiB of memory. A gateway streams far fewer answers than this at a time.
MOST_CONNECTIONS = 16_384
# File descriptors that connections of clients never take: those of pods, Redis, Kubernetes and files.
_RESERVED_FILES = 512
_LOGGED_EVERY_S = 60.0


class Connection(Protocol):
    def drop(self) -> None:
        """Close the connection, on which no request is being answered."""


class Connections:
    """All connections of clients. When there are too many, the one that has waited longest for a request is closed.

    Without this, a client that opens connections and sends nothing could take all file descriptors of the process, and
    other clients, and pods, would get none. A connection on which a request is being answered is never closed.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._all: set[Connection] = set()
        # Those without a request that is being answered, the longest waiting first. A dict keeps its order.
        self._waiting: dict[Connection, None] = {}
        self._logged_at = -_LOGGED_EVERY_S

    def add(self, connection: Connection) -> bool:
        """Add a new connection, which waits for its first request. Return False if there is no room for it."""
        if len(self._all) >= self._most:
            now = time.monotonic()
            if now >= self._logged_at + _LOGGED_EVERY_S:
                self._logged_at = now
                log.warning("too many connections", extra={"event": "too_many_connections", "most": self._most})
            if not self._waiting:
                return False
            longest = next(iter(self._waiting))
            self.remove(longest)
            longest.drop()
        self._all.add(connection)
        self._waiting[connection] = None
        return True

    def serve(self, connection: Connection) -> None:
        """Note that a request of a connection is being answered."""
        self._waiting.pop(connection, None)

    def wait(self, connection: Connection) -> None:
        """Note that a request has been answered, and that the connection waits for the next one."""
        if connection in self._all:
            self._waiting[connection] = None

    def remove(self, connection: Connection) -> None:
        self._all.discard(connection)
        self._waiting.pop(connection, None)


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """Return how many connections clients may have, which leaves file descriptors for all else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(soft - _RESERVED_FILES, soft // 2))
