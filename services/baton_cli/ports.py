"""Network addresses of a local Baton: the public one, and loopback ports for the workers."""

import asyncio
import contextlib
import errno
import random
import socket
from collections import deque
from typing import NamedTuple

from baton_cli.errors import UserError

LOOPBACK = "127.0.0.1"
# These ports are below the range that common systems use for outgoing connections. So a worker's port stays free while
# the worker restarts.
_WORKER_PORTS = range(20_000, 32_768)
# Sockets that reserve the latest allocated ports. While they are bound, the system gives these ports to no other
# process. The intended server can still listen, because both the servers and these sockets set SO_REUSEADDR.
_reserved: deque[socket.socket] = deque(maxlen=256)


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def reachable(self) -> "Address":
        """The address for clients on this machine. A wildcard host is replaced, because it is no valid destination."""
        return Address({"0.0.0.0": LOOPBACK, "": LOOPBACK, "::": "::1"}.get(self.host, self.host), self.port)

    async def answers_ready(self) -> bool:
        """Whether GET /ready answers 200 within a second."""
        try:
            async with asyncio.timeout(1.0):
                return await self._ready_status() == b"200"
        except (OSError, TimeoutError):
            return False

    async def _ready_status(self) -> bytes:
        reader, writer = await asyncio.open_connection(*self.reachable)
        try:
            writer.write(f"GET /ready HTTP/1.1\r\nHost: {self.reachable}\r\nConnection: close\r\n\r\n".encode())
            status_line = (await reader.readline()).split()
            return status_line[1] if len(status_line) > 1 else b""
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def check_usable(address: Address) -> None:
    """Raise UserError unless a server can listen on the address now."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Servers set this option too. Without it, a predecessor's connections in TIME_WAIT would block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        raise UserError(_reason(address, error)) from None


def _reason(address: Address, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {address.port} on {address.host} is taken: stop what listens there, or choose another --port"
    if error.errno == errno.EACCES:
        return f"port {address.port} needs privileges: choose a --port above 1023"
    return f"cannot listen on {address}: {error.strerror}"


def free_loopback_ports(count: int) -> list[int]:
    """Return distinct free ports, none of which an earlier call has returned recently."""
    free: list[int] = []
    for port in random.sample(_WORKER_PORTS, len(_WORKER_PORTS)):
        if len(free) == count:
            break
        with contextlib.suppress(OSError):
            _reserved.append(_reserve(port))
            free.append(port)
    return free


def _reserve(port: int) -> socket.socket:
    """Return a socket that is bound to a free port. Raises OSError when the port is not free."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # gRPC servers listen with SO_REUSEPORT. This socket does not set it, so binding to their ports fails.
        held.bind((LOOPBACK, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        held.close()
        raise
    return held
