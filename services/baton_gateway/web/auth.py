"""Authentication of requests."""

from starlette.requests import Request

from ..errors import invalid_api_key, overloaded
from ..telemetry.record import SCOPE_KEY, RequestRecord
from ..tenancy.tenants import Tenants


class Authenticator:
    """Finds the identity of each request from its key. Without any configured keys, every request passes."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    async def __call__(self, request: Request) -> None:
        """Put the identity into the record of the request.

        Raises ApiError 401 unless the request has a valid `Authorization: Bearer` header, 503 while keys are not known.
        """
        record: RequestRecord = request.scope[SCOPE_KEY]
        if self._tenants.open:
            record.identity = self._tenants.anyone()
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        identity = self._tenants.identify(key.strip())
        if scheme.lower() == "bearer" and key.strip() and identity is None and not self._tenants.complete:
            raise overloaded("The key cannot be checked yet.")
        if scheme.lower() != "bearer" or identity is None:
            raise invalid_api_key(given=bool(key.strip()))
        record.identity = identity
