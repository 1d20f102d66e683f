"""API keys: how they are made and checked. Only a hash of a key is stored."""

import hashlib
import hmac
import secrets
from datetime import UTC, datetime
from typing import Annotated

import msgspec

_PREFIX = "bt"
_SECRET_BYTES = 24
MOST_DAYS = 36_500


class Key(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The stored record of a key.

    id: its public part, for logs and for revoking it. models: empty = all models of its tenant. days: the validity
    requested when the key was made; after a rotation `expires` no longer shows it.
    """

    id: str
    hash: str  # SHA-256 of the whole key, in hex; a key has 192 random bits, too many to guess
    tenant: str
    expires: datetime | None = None
    models: list[str] = []
    days: Annotated[float, msgspec.Meta(ge=0, le=MOST_DAYS)] | None = None

    def __post_init__(self) -> None:
        if self.expires is not None and self.expires.tzinfo is None:
            raise ValueError(f"the expiry of key {self.id[:20]!r} has no time zone")

    def fits(self, text: str) -> bool:
        """Whether this text is the key. The time it takes does not depend on how much of the text is right."""
        return hmac.compare_digest(digest(text).encode(), self.hash.encode())

    def expired(self, now: datetime) -> bool:
        return self.expires is not None and now >= self.expires


def make_key(
    tenant: str, expires: datetime | None = None, models: list[str] | None = None, days: float | None = None
) -> tuple[str, Key]:
    """Return a new key, to be shown once, and its record, to be stored."""
    id = secrets.token_hex(4)
    text = f"{_PREFIX}-{id}-{secrets.token_urlsafe(_SECRET_BYTES)}"
    return text, Key(id, digest(text), tenant, expires, models or [], days)


def key_id(text: str) -> str | None:
    """Return the public part of a text that may be a key; None if the text is not one."""
    parts = text.split("-", 2)
    return parts[1] if len(parts) == 3 and parts[0] == _PREFIX else None


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def utc_now() -> datetime:
    return datetime.now(UTC)
