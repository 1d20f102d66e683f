"""Bounds the memory of a tenant's answers: those that the gateway keeps until their end, and unread streams."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton_proto import serving_pb2 as pb

from ..bounds import MAX_KEPT_ANSWERS, MAX_KEPT_BYTES
from ..errors import bad_request, overloaded

# Measured, including the JSON of the answer.
_TOKEN_BYTES = 100
_LOGPROBS_BYTES = 700  # of a token with log probabilities
_ALTERNATIVE_BYTES = 60


@dataclass(eq=False)
class TenantMemory:
    """The bytes of one tenant's answers."""

    kept: int = 0
    unread: int = 0


@dataclass(slots=True)
class AnswerMemory:
    """The memory of one answer. It counts for the tenant until `free`.

    keeps: the gateway keeps the answer until its end. unread: bytes that arrived while the stream's reader was busy.
    """

    _tenant: TenantMemory
    keeps: bool
    _kept: int = 0
    unread: int = 0

    def keep(self, tokens: int, logprobs: Sequence[pb.TokenLogprobs], copies: float = 1) -> None:
        """Count tokens that are kept until the end. copies: how often the answer has their log probabilities.

        Raises ApiError: 400 when the answer is too large, 503 when the tenant's answers together are.
        """
        self.keep_bytes(_size(tokens, logprobs, copies))
        if self._kept > MAX_KEPT_BYTES:
            message = "The answer is too long to be kept until its end: stream it, or ask for less at once."
            raise bad_request(message, "stream", "answer_too_large")

    def keep_bytes(self, size: int) -> None:
        """Count bytes that are kept until the end. Raises ApiError 503 when the tenant's answers are too large."""
        self._kept += size
        self._tenant.kept += size
        if self._tenant.kept > MAX_KEPT_ANSWERS * MAX_KEPT_BYTES:
            raise overloaded("Too many long answers are kept until their end at the same time. Try again later.")

    def hold(self, size: int) -> bool:
        """Count unread bytes; a negative size releases them. Return whether kept answers leave too little for them."""
        self.unread += size
        self._tenant.unread += size
        return self._tenant.kept + self._tenant.unread > MAX_KEPT_ANSWERS * MAX_KEPT_BYTES

    def free(self) -> None:
        self.hold(-self.unread)
        self._tenant.kept -= self._kept
        self._kept = 0


def size_of(delta: pb.Delta) -> int:
    # Log probabilities of a prompt arrive in one message, and so take half as much memory.
    return _size(len(delta.token_ids), delta.logprobs, 1) + _size(0, delta.prompt.logprobs, 0.5)


def _size(tokens: int, logprobs: Sequence[pb.TokenLogprobs], copies: float) -> int:
    # The first token of a prompt has no alternatives.
    each = _LOGPROBS_BYTES + _ALTERNATIVE_BYTES * len(logprobs[-1].top_token_ids) if logprobs else 0
    return tokens * _TOKEN_BYTES + int(len(logprobs) * each * copies)
