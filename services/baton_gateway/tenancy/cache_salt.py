"""Which tenants share what their requests leave in the prefix caches of pods."""

import hashlib

from .tenants import DEFAULT_TENANT, Identity

_BYTES = 16


def cache_salt(identity: Identity | None) -> bytes:
    """Return the salt of the cache scope of a request: that of the tenant's group, or else the tenant's own.

    Every gateway derives the same salts, and pods learn no names. A tenant never has the salt of a group, whatever the
    two are called. Requests that need no key and those of static keys are all of one tenant, which has no salt.
    """
    if identity is None:
        return b""
    if identity.tenant.cache_group:
        return _digest(b"group", identity.tenant.cache_group)
    return b"" if identity.name == DEFAULT_TENANT else _digest(b"tenant", identity.name)


def _digest(kind: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode(errors="surrogatepass"), person=kind, digest_size=_BYTES).digest()
