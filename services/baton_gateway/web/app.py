"""The HTTP application: its routes, and the handlers that turn errors into answers."""

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import cache, partial
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..concurrency.turns import Client
from ..endpoints.chat import chat_completion
from ..endpoints.completions import completion
from ..endpoints.model_cards import describe_model, describe_models
from ..endpoints.responses import response
from ..endpoints.services import Services
from ..endpoints.tokenize import to_text, to_tokens
from ..errors import ApiError
from ..requests.bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from ..requests.response_body import ResponseRequest
from ..telemetry.record import SCOPE_KEY, RequestRecord
from .auth import Authenticator
from .body import BodyReader, parse_body
from .connections import most_connections
from .edge import Edge

BODIES = (ChatCompletionRequest, CompletionRequest, ResponseRequest, TokenizeRequest, DetokenizeRequest)
UNFINISHED_SHARE = 8  # unfinished bodies of one tenant may take one of so many connections
SCHEMA_REF = "#/components/schemas/{model}"

M = TypeVar("M", bound=BaseModel)


def create_app(services: Services, running: Callable[[], AbstractAsyncContextManager[None]]) -> FastAPI:
    """Build the application. running: a context that is entered while the application runs."""
    app = FastAPI(
        title="Baton",
        summary="OpenAI-compatible API",
        lifespan=lambda _app: running(),
        redirect_slashes=False,
        openapi_url="/openapi.json" if services.settings.docs else None,  # without it /docs and /redoc are off, too
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.include_router(_api_routes(services), dependencies=[Depends(Authenticator(services.tenants))])
    app.include_router(_probe_routes(services))
    app.add_middleware(
        Edge, metrics=services.metrics, quota=services.quota, session_header=services.settings.session_header
    )
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    _document_bodies(app)
    return app


def _api_routes(services: Services) -> APIRouter:
    router = APIRouter()
    unfinished = most_connections() // UNFINISHED_SHARE
    bodies = BodyReader(services.settings.max_body_bytes, services.settings.body_timeout_s, unfinished)
    created = int(time.time())

    async def read(request: Request, kind: type[M]) -> M:
        record = _record(request)
        assert record.identity is not None
        services.quota.check(record.identity)
        body = await bodies.read(request, record.identity.name)
        record.body_bytes = len(body)
        record.client = Client(record.identity.name, record.identity.tenant.weight, request.receive)
        return await services.turns.run(partial(parse_body, body, kind), record.large_bytes, record.client)

    @router.post("/v1/chat/completions", openapi_extra=_body_of(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        return await chat_completion(services, await read(request, ChatCompletionRequest), _record(request))

    @router.post("/v1/completions", openapi_extra=_body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await completion(services, await read(request, CompletionRequest), _record(request))

    @router.post("/v1/responses", openapi_extra=_body_of(ResponseRequest))
    async def responses(request: Request) -> Response:
        return await response(services, await read(request, ResponseRequest), _record(request))

    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        return describe_models(services, created, _record(request))

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str, request: Request) -> Response:
        return describe_model(services, name, created, _record(request))

    @router.post("/tokenize", openapi_extra=_body_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        return await to_tokens(services, await read(request, TokenizeRequest), _record(request))

    @router.post("/detokenize", openapi_extra=_body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        return await to_text(services, await read(request, DetokenizeRequest), _record(request))

    return router


def _probe_routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    @router.get("/live")
    async def live() -> Response:
        return Response()

    @router.get("/ready")
    async def ready() -> Response:
        return Response(status_code=200 if services.ready else 503)

    return router


def _record(request: Request) -> RequestRecord:
    record: RequestRecord = request.scope[SCOPE_KEY]
    return record


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    _record(request).error = error.code or error.type
    return error.response()


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: "There is no such path.", 405: "This path does not take this method."}
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).response()


def _body_of(model: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": SCHEMA_REF.format(model=model.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def _document_bodies(app: FastAPI) -> None:
    """Put the request bodies into the API description: endpoints read them by themselves, so FastAPI sees none."""
    plain = app.openapi

    @cache  # it takes tens of milliseconds in the event loop, and clients need no key
    def openapi() -> dict[str, Any]:
        schema = plain()
        _, definitions = models_json_schema([(body, "validation") for body in BODIES], ref_template=SCHEMA_REF)
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
