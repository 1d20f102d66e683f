"""The requests that this pod serves, from the gateway's message to the end of their last choice."""

from collections.abc import Iterator

import msgspec

from baton_engine.sequence import FinishReason
from baton_proto import serving_pb2 as pb
from baton_worker.convert import failure_delta
from baton_worker.request_metrics import RequestTimes
from baton_worker.request_span import RequestSpan

from .handover import Handover
from .stream import GatewayStream


class LiveRequest(msgspec.Struct):
    """Owns the measurements of a request and, until its KV has arrived, its hand-over."""

    id: int  # the engine's id of it
    submit: pb.Submit
    stream: GatewayStream
    times: RequestTimes
    span: RequestSpan | None
    choices: set[int]  # still running
    cancelled: set[int]  # of these, the choices that end with their next token
    prefills: list[str]  # addresses of the prefill pods that have not been tried
    handover: Handover | None = None  # the open one
    first_tokens_at: float | None = None  # when they came from a prefill pod, by the event loop's clock

    @property
    def num_tokens(self) -> int:
        """The tokens of its prompt and its continuation."""
        return len(self.submit.prompt_token_ids) + len(self.submit.continuation.token_ids)

    @property
    def awaits_kv(self) -> bool:
        """Whether its KV is to come from a prefill pod, even if it is not ordered yet."""
        return self.handover is not None or bool(self.prefills)

    def fail(self, code: pb.Failure.Code, message: str, param: str = "") -> None:
        self.stream.put([failure_delta(self.submit.handle, code, message, param)])

    def measure(self, delta: pb.Delta, by: str) -> None:
        """Record a delta in the metrics. by: the kind of pod that computed the prompt."""
        if delta.HasField("prompt"):
            prompt = delta.prompt
            self.times.prompt(prompt.cached_tokens, prompt.queued_seconds, prompt.prefill_seconds, by)
            if by == "decode" and self.span is not None:
                self.span.prefilled(prompt.queued_seconds, prompt.prefill_seconds)
        if delta.token_ids:
            self.times.tokens(delta.choice, len(delta.token_ids))

    def close_handover(self, verdict: str) -> None:
        """Close the hand-over if one is open. verdict: as in Handover.close."""
        if self.handover is not None:
            self.handover.close(verdict)
            self.handover = None


class LiveRequests:
    """Owns all live requests, by the engine's ids. Each gateway's stream has the ids of its own requests."""

    def __init__(self) -> None:
        self._requests: dict[int, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._requests.values())

    def get(self, id: int) -> LiveRequest | None:
        return self._requests.get(id)

    def add(self, request: LiveRequest) -> None:
        self._requests[request.id] = request
        request.stream.requests[request.submit.handle] = request.id
        request.stream.open_tokens += request.num_tokens

    def note_finish(self, request: LiveRequest, choice: int, reason: int) -> None:
        """Record a choice's finish reason, which may be NONE. The end of the last choice ends the request."""
        if reason != FinishReason.NONE:
            request.choices.discard(choice)
            if not request.choices:
                self.end(request, FinishReason(reason).name.lower())

    def end(self, request: LiveRequest, reason: str) -> None:
        """Remove a request, and cancel its hand-over if one is open. reason: as in RequestTimes.end."""
        request.close_handover("cancel")
        request.times.end(reason)
        if request.span is not None:
            request.span.end(reason)
        del self._requests[request.id]
        request.stream.open_tokens -= request.num_tokens
        request.stream.requests.pop(request.submit.handle, None)
