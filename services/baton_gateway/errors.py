"""The error format of the API, and the functions that create errors in this format."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

CLIENT_CLOSED_REQUEST = 499


class ApiError(Exception):
    """An answer in OpenAI's error format.

    param: the request field at fault. code: a fixed identifier that programs can compare.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def context_length_exceeded(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unknown_model(name: str) -> ApiError:
    return ApiError(404, f"The model {name[:100]!r} does not exist.", param="model", code="model_not_found")


def model_not_allowed(name: str) -> ApiError:
    message = f"This key may not use the model {name[:100]!r}."
    return ApiError(403, message, type="permission_error", param="model", code="model_not_allowed")


def invalid_api_key(given: bool) -> ApiError:
    message = "Incorrect API key provided." if given else "No API key provided: send 'Authorization: Bearer KEY'."
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def overloaded(message: str, retry_after_s: int = 1) -> ApiError:
    return ApiError(
        503,
        message,
        type="service_unavailable_error",
        code="server_is_overloaded",
        headers={"retry-after": str(retry_after_s)},
    )


def no_decode_pod() -> ApiError:
    return overloaded("No decode pod is available now.")


def client_gone() -> ApiError:
    """The client has gone and does not read this error. The log shows its status, 499 as in nginx."""
    return ApiError(CLIENT_CLOSED_REQUEST, "The client closed its connection.", code="client_gone")


def timed_out() -> ApiError:
    return ApiError(504, "The request took too long.", type="server_error", code="request_timeout")


def internal_error() -> ApiError:
    return ApiError(500, "The server failed on this request.", type="server_error", code="internal_error")


def from_validation(error: ValidationError, above: Sequence[Any] = ()) -> ApiError:
    """Report the first error that pydantic found, with the path of the field as `param`.

    above: the location of the validated value in the body.
    """
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, message = first["type"], first["msg"]
    if kind == "json_invalid":
        return bad_request(f"The body is not valid JSON: {message.removeprefix('Invalid JSON: ')}.")
    location = (*above, *first["loc"])
    if not location:
        return bad_request("The body must be a JSON object.")
    param = field_path(location)
    if kind == "missing":
        return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    return bad_request(f"Invalid value for '{param}': {message.removeprefix('Value error, ')}.", param)


def field_path(location: Iterable[Any]) -> str:
    """Write a pydantic location in the notation of the API: `messages[0].role`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":  # marks an invalid key of a mapping; the key itself is in the path already
            path += f".{part}" if path else str(part)
    return path
