"""The HTTP application: routes and what turns errors into answers."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..answers.shapes import encoded_list
from ..concurrency.turns import Client
from ..endpoints.chat import chat_completion
from ..endpoints.completions import completion
from ..endpoints.responses import as_chat, response
from ..errors import ApiError, bad_request, overloaded
from ..fleet.catalog import Model
from ..gateway import Gateway
from ..models.conversation import read_conversation
from ..requests.bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from ..requests.response_body import ResponseRequest
from ..telemetry.record import SCOPE_KEY, RequestRecord
from ..tenancy.quota import expected_tokens, num_sequences
from .auth import Authenticator
from .body import parse_body, read_body
from .edge import Edge

BODIES = (ChatCompletionRequest, CompletionRequest, ResponseRequest, TokenizeRequest, DetokenizeRequest)
SCHEMA_REF = "#/components/schemas/{model}"

M = TypeVar("M", bound=BaseModel)


def create_app(gateway: Gateway) -> FastAPI:
    """Build the application around a gateway, whose pods it watches while it runs."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        gateway.start()
        yield
        await gateway.stop()

    app = FastAPI(
        title="Baton",
        summary="OpenAI-compatible API",
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url="/openapi.json" if gateway.settings.docs else None,  # without it /docs and /redoc are off, too
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.include_router(_api_routes(gateway), dependencies=[Depends(Authenticator(gateway.tenants))])
    app.include_router(_probe_routes(gateway))
    app.add_middleware(
        Edge, metrics=gateway.metrics, quota=gateway.quota, session_header=gateway.settings.session_header
    )
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    _document_bodies(app)
    return app


def _api_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()
    settings = gateway.settings
    created = int(time.time())

    async def read(request: Request, kind: type[M]) -> M:
        record = _record(request)
        assert record.identity is not None
        gateway.quota.check(record.identity)
        body = await read_body(request, settings.max_body_bytes, settings.body_timeout_s)
        record.body_bytes = len(body)
        record.client = Client(record.identity.name, record.identity.tenant.weight, request.receive)
        return await gateway.turns.run(partial(parse_body, body, kind), record.large_bytes, record.client)

    async def admit(record: RequestRecord, body: GenerationRequest | TokenizeRequest | DetokenizeRequest) -> Model:
        model = gateway.find(body.model, record)
        assert record.identity is not None
        sequences = num_sequences(body, settings.max_sequences_per_request)
        record.reservation = await gateway.quota.reserve(record.identity, expected_tokens(body), sequences)
        if not isinstance(body, GenerationRequest):
            record.reservation.used = record.reservation.tokens
        return model

    def card(model: Model, record: RequestRecord) -> dict[str, Any] | None:
        """Describe a model; None when no pod serves it, as whoever sees it may use it."""
        length = None if gateway.refusing else model.max_model_len(record.identity)
        if length is None:
            return None
        return {
            "id": model.name,
            "object": "model",
            "created": created,
            "owned_by": "baton",
            "max_model_len": length,
        }

    @router.post("/v1/chat/completions", openapi_extra=_body_of(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        body, record = await read(request, ChatCompletionRequest), _record(request)
        return await chat_completion(gateway, await admit(record, body), body, record)

    @router.post("/v1/completions", openapi_extra=_body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        body, record = await read(request, CompletionRequest), _record(request)
        return await completion(gateway, await admit(record, body), body, record)

    @router.post("/v1/responses", openapi_extra=_body_of(ResponseRequest))
    async def responses(request: Request) -> Response:
        body, record = await read(request, ResponseRequest), _record(request)
        chat = await gateway.turns.run(partial(as_chat, body), record.large_bytes, record.client)
        return await response(gateway, await admit(record, chat), body, chat, record)

    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        record = _record(request)
        mine = [model for model in gateway.catalog if model.open_to(record.identity)]
        cards = [found for model in mine if (found := card(model, record)) is not None]
        if mine and not cards:
            raise overloaded("No model is served now.")
        return JSONResponse({"object": "list", "data": cards})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str, request: Request) -> Response:
        record = _record(request)
        found = card(gateway.find(name, record), record)
        if found is None:
            raise overloaded("The model is not served now.")
        return JSONResponse(found)

    @router.post("/tokenize", openapi_extra=_body_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = await read(request, TokenizeRequest)
        record = _record(request)
        return await _tokenize(gateway, await admit(record, body), body, record)

    @router.post("/detokenize", openapi_extra=_body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await read(request, DetokenizeRequest)
        record = _record(request)
        tokenizer = (await admit(record, body)).served.tokenizer

        def decode() -> bytes:
            return msgspec.json.encode({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

        return _json(await gateway.turns.run(decode, len(body.tokens), record.client))

    return router


def _probe_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    @router.get("/live")
    async def live() -> Response:
        return Response()

    @router.get("/ready")
    async def ready() -> Response:
        return Response(status_code=200 if gateway.ready else 503)

    return router


async def _tokenize(gateway: Gateway, model: Model, body: TokenizeRequest, record: RequestRecord) -> Response:
    served, max_model_len = model.served, model.max_model_len(record.identity)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give either 'prompt' or 'messages'.", "prompt")

    def tokens() -> list[int]:
        if body.messages is not None:
            return served.chat_tokens(read_conversation(body, body.messages))
        return served.tokenizer.encode_now(body.prompt or "", body.add_special_tokens is not False)

    def answer() -> tuple[bytes, int]:
        found = tokens()
        parts = [b'{"count":%d,"max_model_len":%b,"tokens":' % (len(found), msgspec.json.encode(max_model_len))]
        parts += encoded_list(found)
        parts.append(b',"token_strs":')
        parts += encoded_list(map(served.tokenizer.token_text, found)) if body.return_token_strs else (b"null",)
        return b"".join([*parts, b"}"]), len(found)

    content, count = await gateway.turns.run(answer, record.body_bytes, record.client)
    if record.reservation is not None:
        record.reservation.used = count
    return _json(content)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


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

    def openapi() -> dict[str, Any]:
        schema = plain()
        _, definitions = models_json_schema([(body, "validation") for body in BODIES], ref_template=SCHEMA_REF)
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
