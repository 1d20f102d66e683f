"""Static API keys."""

import hashlib
import hmac
from collections.abc import Sequence

from pydantic import SecretStr
from starlette.requests import Request

from baton_gateway.errors import invalid_api_key


class Authenticator:
    """Lets requests pass that carry one of the keys; all of them when there are no keys."""

    def __init__(self, keys: Sequence[SecretStr]) -> None:
        self._digests = [_digest(key.get_secret_value()) for key in keys]

    async def __call__(self, request: Request) -> None:
        """Raise ApiError 401 unless the request has a valid `Authorization: Bearer` header."""
        if not self._digests:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip())
        # Digests have one length and every key is compared, so the time taken tells nothing.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise invalid_api_key(given=bool(key.strip()))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
