"""GET /v1/models: the models that a key may use."""

from typing import Any

from starlette.responses import JSONResponse, Response

from ..errors import overloaded
from ..fleet.catalog import Model
from ..telemetry.record import RequestRecord
from .services import Services


def describe_models(services: Services, created: int, record: RequestRecord) -> Response:
    """Describe the models that the key may use. created: when the gateway started, in seconds since 1970.

    Raises ApiError 503 when no model is served.
    """
    mine = [model for model in services.catalog if model.open_to(record.identity)]
    cards = [found for model in mine if (found := _card(services, model, created, record)) is not None]
    if mine and not cards:
        raise overloaded("No model is served now.")
    return JSONResponse({"object": "list", "data": cards})


def describe_model(services: Services, name: str, created: int, record: RequestRecord) -> Response:
    """Describe one model. Raises ApiError when no model has that name, or it is not served."""
    model = services.catalog.find(name, record.identity)
    record.model = model.name
    found = _card(services, model, created, record)
    if found is None:
        raise overloaded("The model is not served now.")
    return JSONResponse(found)


def _card(services: Services, model: Model, created: int, record: RequestRecord) -> dict[str, Any] | None:
    """Describe a model. Return None when no pod serves it for the identity of the request."""
    length = None if services.catalog.refusing else model.max_model_len(record.identity)
    if length is None:
        return None
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "baton",
        "max_model_len": length,
    }
