"""The first step of every endpoint that uses a model: find the model and reserve quota for the request."""

from ..fleet.catalog import Model
from ..requests.bodies import DetokenizeRequest, GenerationRequest, TokenizeRequest
from ..requests.token_estimate import expected_tokens, num_sequences
from ..telemetry.record import RequestRecord
from .services import Services


async def admit(
    services: Services, body: GenerationRequest | TokenizeRequest | DetokenizeRequest, record: RequestRecord
) -> Model:
    """Reserve quota for a request, and return its model. Raises ApiError when the model or the quota is refused."""
    model = services.catalog.find(body.model, record.identity)
    record.model = model.name
    assert record.identity is not None
    sequences = num_sequences(body, services.settings.max_sequences_per_request)
    record.reservation = await services.quota.reserve(record.identity, expected_tokens(body), sequences)
    if not isinstance(body, GenerationRequest):
        record.reservation.used = record.reservation.tokens
    return model
