"""The limits of one generation in the gateway."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Times in seconds.

    max_unread_tokens: a generation fails when more of its tokens wait to be read. max_lost_pods: it fails when one of
    its choices has lost more pods than this, since the request itself may be crashing them. queue_timeout_s: longest
    wait for admission. resume_timeout_s: longest wait of a choice for another decode pod, all its waits together.
    """

    max_unread_tokens: int
    max_lost_pods: int
    queue_timeout_s: float
    resume_timeout_s: float
