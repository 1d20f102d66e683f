"""The addresses of prefill pods to which a decode pod may link. A gateway cannot add to them."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Iterable

import msgspec

log = logging.getLogger(__name__)

# When a peer names an unknown address, all names are resolved again, but not within _LEAST_INTERVAL_S of the last time.
# They are resolved again after _MOST_INTERVAL_S in any case.
_LEAST_INTERVAL_S = 1.0
_MOST_INTERVAL_S = 30.0

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Entry(msgspec.Struct, frozen=True):
    """A network, or a name, which also allows all addresses that it resolves to. port: the only port; 0 = any."""

    network: _Network | None
    name: str
    port: int


def parse_entry(text: str) -> Entry:
    """Parse a network, an address or a name, with or without :port; IPv6 in brackets. Raises ValueError."""
    host, port = text.strip(), ""
    if host.startswith("["):
        host, _, rest = host[1:].partition("]")
        port = rest.removeprefix(":")
    elif ":" in host:
        host, _, port = host.partition(":")
    if not host or not (port == "" or (port.isdigit() and 0 < int(port) <= 65_535)):
        raise ValueError(f"{text!r} is not a network, address or name with or without :port")
    try:
        network: _Network | None = ipaddress.ip_network(host, strict=False)
    except ValueError:
        network = None
        if "/" in host or ":" in host:
            raise ValueError(f"{text!r} is not a valid network") from None
    return Entry(network, host.lower(), int(port or 0))


class AllowedPrefills:
    """The allowed entries. `follow` keeps the addresses of the names among them current."""

    def __init__(self, entries: Iterable[Entry], own: str) -> None:
        """own: the address at which this pod itself listens, host:port, to which it never links."""
        self._entries = list(entries)
        self._own = own
        self._names = sorted({entry.name for entry in self._entries if entry.network is None})
        self._resolved: dict[str, frozenset[_Ip]] = {}
        self._unknown = asyncio.Event()

    def allow(self, address: str) -> bool:
        """Whether an address, host:port, is that of a prefill pod. This call resolves no names."""
        host, _, port = address.rpartition(":")
        if address != self._own and any(self._meets(entry, host, int(port)) for entry in self._entries):
            return True
        self._unknown.set()
        return False

    async def follow(self) -> None:
        """Keep the addresses of the names current, until cancelled."""
        while self._names:
            await asyncio.gather(*(self._resolve(name) for name in self._names))
            await asyncio.sleep(_LEAST_INTERVAL_S)
            self._unknown.clear()
            try:
                await asyncio.wait_for(self._unknown.wait(), _MOST_INTERVAL_S)
            except TimeoutError:
                continue

    def _meets(self, entry: Entry, host: str, port: int) -> bool:
        if entry.port not in (0, port):
            return False
        if entry.network is None and host.lower() == entry.name:
            return True
        try:
            ip = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        return ip in (self._resolved.get(entry.name, ()) if entry.network is None else entry.network)

    async def _resolve(self, name: str) -> None:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError as error:
            log.debug("%s does not resolve to an address: %s", name, error)
            # Without prefill pods the name does not exist. Its old addresses may be those of other pods by now.
            self._resolved.pop(name, None)
            return
        self._resolved[name] = frozenset(ipaddress.ip_address(address[0]) for *_, address in found)
