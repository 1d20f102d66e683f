"""The first step of every endpoint that works with a model: find it, and reserve what the request may need."""

from ..fleet.catalog import Model
from ..requests.bodies import DetokenizeRequest, GenerationRequest, TokenizeRequest
from ..requests.token_estimate import expected_tokens, num_sequences
from ..telemetry.record import RequestRecord
from .services import Services


async def admit(
    services: Services, body: GenerationRequest | TokenizeRequest | DetokenizeRequest, record: RequestRecord
) -> Model:
    """Reserve what a request may need, and return its model. Raises ApiError when it may not have one of them."""
    model = services.catalog.find(body.model, record.identity)
    record.model = model.name
    assert record.identity is not None
    sequences = num_sequences(body, services.settings.max_sequences_per_request)
    record.reservation = await services.quota.reserve(record.identity, expected_tokens(body), sequences)
    if not isinstance(body, GenerationRequest):
        record.reservation.used = record.reservation.tokens
    return model
