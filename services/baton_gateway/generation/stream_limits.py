"""The limits of one generation in the gateway."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Times in seconds.

    max_unread_tokens: a generation ends when more of its tokens wait to be read. max_lost_pods: it fails when more pods
    were lost under one of its choices, since the request may be what kills them. queue_timeout_s: of waiting for its
    turn. resume_timeout_s: of waiting for a decode pod once it had one, all such waits of a choice together.
    """

    max_unread_tokens: int
    max_lost_pods: int
    queue_timeout_s: float
    resume_timeout_s: float
