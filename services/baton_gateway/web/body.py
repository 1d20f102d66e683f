"""Reads and validates request bodies."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from ..bounds import MAX_JSON_CONTAINERS, MAX_JSON_STRINGS, MAX_JSON_VALUES
from ..errors import ApiError, bad_request, from_validation, overloaded
from ..json_size import JsonSize, json_size, member_beyond
from ..telemetry.record import SMALL_BODY_BYTES

M = TypeVar("M", bound=BaseModel)

MAX_LENGTH_DIGITS = 19
MAX_ARRIVING = 32  # most bytes of unfinished bodies of one tenant, as a multiple of the largest body
MOST = JsonSize(containers=MAX_JSON_CONTAINERS, strings=MAX_JSON_STRINGS, values=MAX_JSON_VALUES)


class BodyReader:
    """Reads bodies. Limits count a request only once its body is complete, so this class bounds unfinished ones."""

    def __init__(self, limit: int, timeout_s: float, most_unfinished: int) -> None:
        """limit: largest body in bytes. timeout_s: seconds in which one body must arrive. most_unfinished: bodies of
        one tenant. Their connections count as in use, so that one tenant could otherwise take all connections."""
        self._limit = limit
        self._timeout_s = timeout_s
        self._most_unfinished = most_unfinished
        self._arriving: Counter[str] = Counter()  # bytes of unfinished bodies, by tenant
        self._unfinished: Counter[str] = Counter()  # number of unfinished bodies, by tenant

    async def read(self, request: Request, tenant: str) -> bytes:
        """Read a body. Raises ApiError: 413 or 408 beyond the limits, 503 when the tenant has too much unfinished."""
        declared = declared_length(request.scope["headers"])
        if declared is not None and declared > self._limit:
            raise _too_large(self._limit)
        if self._unfinished[tenant] >= self._most_unfinished:
            raise overloaded("Too many bodies arrive at the same time. Try again later.")
        body = bytearray()
        self._unfinished[tenant] += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                async for chunk in request.stream():
                    body += chunk
                    self._arriving[tenant] += len(chunk)
                    if len(body) > self._limit:
                        raise _too_large(self._limit)
                    if self._arriving[tenant] > MAX_ARRIVING * self._limit:
                        raise overloaded("Too many large bodies arrive at the same time. Try again later.")
        except TimeoutError:
            raise ApiError(
                408, "The body did not arrive in time.", code="request_timeout", headers={"connection": "close"}
            ) from None
        except ClientDisconnect:
            raise ApiError(400, "The body ended early.", headers={"connection": "close"}) from None
        finally:
            self._unfinished[tenant] -= 1
            self._arriving[tenant] -= len(body)
            if not self._unfinished[tenant]:
                del self._unfinished[tenant], self._arriving[tenant]
        return bytes(body)


def declared_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """Return the body's length as the headers of an ASGI scope declare it, None if they do not."""
    value = next((value for name, value in headers if name == b"content-length"), b"")
    # Python refuses to parse a number with thousands of digits.
    return int(value[:MAX_LENGTH_DIGITS]) if value.isdigit() else None


def parse_body(body: bytes, model: type[M]) -> M:
    """Validate a JSON body. Raises ApiError 400 naming the field at fault.

    Parsing blocks the interpreter, even in a thread. So the parts of a large body are counted first, and a body with
    too many of them is refused.
    """
    if len(body) > SMALL_BODY_BYTES:
        _check_size(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None


def _check_size(body: bytes) -> None:
    if (too_much := json_size(body, MOST.strings).exceeds(MOST)) is not None:
        member = member_beyond(body, MOST)
        where = "The body" if member is None else f"With '{member}' the body"
        raise bad_request(f"{where} has more than {too_much}.", member, "request_too_large")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is larger than {limit} bytes.", code="request_too_large")
