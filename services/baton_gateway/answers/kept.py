"""Bounds the memory of answers that the gateway keeps until their end."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton_proto import serving_pb2 as pb

from ..bounds import MAX_KEPT_ANSWERS, MAX_KEPT_BYTES
from ..errors import bad_request, overloaded

# Measured, including the JSON of the answer.
_TOKEN_BYTES = 100
_LOGPROBS_BYTES = 700  # of a token with log probabilities
_ALTERNATIVE_BYTES = 60


@dataclass(slots=True)
class KeptAnswer:
    """The memory of one answer. It counts for the tenant until `free`."""

    _tenants: Counter[str]  # bytes by tenant, shared by all answers
    _tenant: str
    _bytes: int = 0

    def add(self, tokens: int, logprobs: Sequence[pb.TokenLogprobs], copies: float = 1) -> None:
        """Count tokens. copies: how often the answer has their log probabilities.

        Raises ApiError: 400 when the answer is too large, 503 when the tenant's answers together are.
        """
        size = tokens * _TOKEN_BYTES
        if logprobs:
            # The first token of a prompt has no alternatives.
            each = _LOGPROBS_BYTES + _ALTERNATIVE_BYTES * len(logprobs[-1].top_token_ids)
            size += int(len(logprobs) * each * copies)
        self._bytes += size
        self._tenants[self._tenant] += size
        if self._bytes > MAX_KEPT_BYTES:
            raise bad_request(
                "The answer is too long to be kept until its end: stream it, or ask for less at once.",
                "stream",
                "answer_too_large",
            )
        if self._tenants[self._tenant] > MAX_KEPT_ANSWERS * MAX_KEPT_BYTES:
            raise overloaded("Too many long answers are kept until their end at the same time. Try again later.")

    def free(self) -> None:
        self._tenants[self._tenant] -= self._bytes
        if not self._tenants[self._tenant]:
            del self._tenants[self._tenant]
        self._bytes = 0
