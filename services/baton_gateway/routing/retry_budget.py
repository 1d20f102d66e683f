"""Limits how many retries a gateway may send."""

from collections.abc import Callable

WINDOW_S = 10


class RetryBudget:
    """Keeps retries a small share of the requests, so that they cannot multiply an overload.

    In any WINDOW_S seconds, retries may be `share` of the prompts that were sent to pods, and `per_s` a second on top,
    so that a gateway with few requests can retry as well. Two kinds of retry take from it:

    - a prompt that a serving pod refused before its first token. When the budget is spent, the request ends with 503
      and Retry-After;
    - a request that leaves a pod because no token came in time. When the budget is spent, it stays and waits there.

    A request whose pod was lost or shuts down takes nothing from it: the gateway has accepted that request, so
    `ResumeQueue` sends it again at a bounded pace.
    """

    def __init__(self, share: float, per_s: float, clock: Callable[[], float]) -> None:
        """clock: returns monotonic seconds."""
        self._share = share
        self._per_s = per_s
        self._clock = clock
        self._requests = [0] * WINDOW_S  # by second, modulo the window
        self._retries = [0] * WINDOW_S
        self._second = int(clock())

    def note_request(self) -> None:
        """Count a prompt that is sent to a pod for the first time."""
        self._advance()
        self._requests[self._second % WINDOW_S] += 1

    def take(self) -> bool:
        """Count a retry and return True; return False when the budget is spent."""
        self._advance()
        if sum(self._retries) + 1 > self._per_s * WINDOW_S + self._share * sum(self._requests):
            return False
        self._retries[self._second % WINDOW_S] += 1
        return True

    def _advance(self) -> None:
        now = int(self._clock())
        for second in range(max(self._second, now - WINDOW_S) + 1, now + 1):
            self._requests[second % WINDOW_S] = self._retries[second % WINDOW_S] = 0
        self._second = max(self._second, now)
