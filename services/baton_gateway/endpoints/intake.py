"""The steps that every endpoint takes with a request: find its model, reserve what it may need, choose its pool."""

from ..errors import overloaded
from ..fleet.catalog import Model, Pool
from ..requests.bodies import DetokenizeRequest, GenerationRequest, TokenizeRequest
from ..requests.token_estimate import expected_tokens, num_sequences
from ..telemetry.record import RequestRecord
from .services import Services


async def admit(
    services: Services, body: GenerationRequest | TokenizeRequest | DetokenizeRequest, record: RequestRecord
) -> Model:
    """Reserve what a request may need, and return its model. Raises ApiError when it may not have one of them."""
    model = find_model(services, body.model, record)
    assert record.identity is not None
    sequences = num_sequences(body, services.settings.max_sequences_per_request)
    record.reservation = await services.quota.reserve(record.identity, expected_tokens(body), sequences)
    if not isinstance(body, GenerationRequest):
        record.reservation.used = record.reservation.tokens
    return model


def find_model(services: Services, name: str | None, record: RequestRecord) -> Model:
    """Return a model. Raises ApiError when there is none of that name, or the key of the request may not use it."""
    model = services.catalog.find(name, record.identity)
    record.model = model.name
    return model


def choose_pool(services: Services, model: Model, record: RequestRecord, prompt_tokens: int) -> Pool:
    """Return the pool for a request. Raises ApiError 503 when nothing new is taken."""
    if services.phase.refusing:
        raise overloaded("The server is shutting down.")
    pool = model.pool(record.identity, prompt_tokens)
    record.pool = pool.spec.name
    return pool
