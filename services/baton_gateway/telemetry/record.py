"""What is noted of one HTTP request for its log line and the metrics. Nothing of its content."""

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
# Where the server's own `send` is: what follows the headers of a stream concerns no layer between.
SEND_BODY = "baton.send_body"


@dataclass(slots=True)
class RequestRecord:
    """Times are of the monotonic clock, in seconds."""

    request_id: str
    session: str = ""
    route: str = "unmatched"
    model: str | None = None
    pool: str | None = None
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    queued_s: float | None = None  # how long it waited for its turn
    routed_s: float = 0.0  # how long choosing pods and sending it there took
    tokenized_s: float = 0.0  # what of its preparing was tokenizing
    prepared: float | None = None  # when it was known what to ask of pods
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
    client: Client = field(default_factory=Client)  # of the work that is done in threads
    reservation: Reservation | None = None
    status: int = 0
    error: str | None = None
    traceparent: str = ""  # as the caller has sent it
    trace_id: str | None = None
    end_trace: Callable[[], None] | None = None

    @property
    def large_bytes(self) -> int:
        """The size of a body that is large; 0 of one that is dealt with in little time, whatever it holds."""
        return self.body_bytes if self.body_bytes > SMALL_BODY_BYTES else 0

    @contextmanager
    def tokenizing(self) -> Iterator[None]:
        """Note how long what is done within takes."""
        began = time.monotonic()
        yield
        self.tokenized_s += time.monotonic() - began

    def ttft_parts(self) -> dict[str, float]:
        """Return what the time to the first token is made of; `delivery` is all that nobody has measured."""
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
