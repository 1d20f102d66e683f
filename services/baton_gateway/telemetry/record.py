"""The record of one HTTP request for its log line and the metrics. It holds none of the request's content."""

import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..concurrency.turns import Client
from ..tenancy.quota import Reservation
from ..tenancy.tenants import Identity

WELL_FORMED_ID = re.compile(r"[A-Za-z0-9._\-]{1,128}")
SCOPE_KEY = "baton.record"
SMALL_BODY_BYTES = 32_768
# The key of the server's own `send` in an ASGI scope. Events of a stream are sent with it, bypassing all middleware.
SEND_BODY = "baton.send_body"


@dataclass(slots=True)
class RequestRecord:
    """Times are in seconds on the monotonic clock."""

    request_id: str
    session: str = ""
    route: str = "unmatched"
    model: str | None = None
    pool: str | None = None
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    queued_s: float | None = None  # how long it waited for admission
    routed_s: float = 0.0  # how long it took to choose pods and to send the request to them
    tokenized_s: float = 0.0  # the part of its preparation that was tokenizing
    prepared: float | None = None  # when its messages to pods were complete
    prefill_queued_s: float = 0.0  # how long the first prompt waited on the pod that computed it
    prefill_s: float = 0.0
    prefills: Counter[str] = field(default_factory=Counter)  # prompts by the kind of pod that computed them
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    retries: int = 0
    resumes: int = 0
    identity: Identity | None = None
    body_bytes: int = 0
    client: Client = field(default_factory=Client)  # the client for whom threads process this request
    reservation: Reservation | None = None
    status: int = 0
    error: str | None = None
    traceparent: str = ""  # as the caller has sent it
    trace_id: str | None = None
    end_trace: Callable[[], None] | None = None

    @property
    def large_bytes(self) -> int:
        """The size of a large body. 0 for a small one, which is processed quickly whatever it holds."""
        return self.body_bytes if self.body_bytes > SMALL_BODY_BYTES else 0

    @contextmanager
    def tokenizing(self) -> Iterator[None]:
        """Add the time that the body of the `with` statement takes to `tokenized_s`."""
        began = time.monotonic()
        yield
        self.tokenized_s += time.monotonic() - began

    def ttft_parts(self) -> dict[str, float]:
        """Return the parts of the time to the first token; `delivery` is the rest that no other part covers."""
        if self.first_token is None or self.prepared is None:
            return {}
        parts = {
            "prepare": self.prepared - self.started - self.tokenized_s,
            "tokenize": self.tokenized_s,
            "gateway_queue": self.queued_s or 0.0,
            "route": self.routed_s,
            "prefill_queue": self.prefill_queued_s,
            "prefill": self.prefill_s,
        }
        return {**parts, "delivery": max(self.first_token - self.started - sum(parts.values()), 0.0)}


def new_request_id(given: str | None) -> str:
    """Return the caller's id if it is well formed, else a new one."""
    if given is not None and WELL_FORMED_ID.fullmatch(given):
        return given
    return uuid.uuid4().hex
