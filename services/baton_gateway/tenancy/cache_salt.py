"""Decides which tenants share cached prefixes on the pods."""

import hashlib

from .tenants import DEFAULT_TENANT, Identity

_BYTES = 16


def cache_salt(identity: Identity | None) -> bytes:
    """Return the salt of the cache scope of a request: that of the tenant's group, or else the tenant's own.

    Every gateway derives the same salts, and pods do not learn the names of tenants. A tenant and a group of the same
    name have different salts. Requests without a key and requests with a static key belong to the tenant "default",
    which has no salt.
    """
    if identity is None:
        return b""
    if identity.tenant.cache_group:
        return _digest(b"group", identity.tenant.cache_group)
    return b"" if identity.name == DEFAULT_TENANT else _digest(b"tenant", identity.name)


def _digest(kind: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode(errors="surrogatepass"), person=kind, digest_size=_BYTES).digest()
